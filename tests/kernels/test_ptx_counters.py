"""Counters of the emulator of PTX, on kernels of a few instructions whose figures follow by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from ptx_copies import REGION, arriving, tensor_arrays, tensor_map, waiting
from ptx_text import FENCED, PREFIX, addresses, kernel, moved

from shardfuse.kernels.dev.ptx import assembled, counted
from shardfuse.kernels.dev.ptx.launch import Result, execute
from shardfuse.kernels.dev.ptx.memory import Allocation
from shardfuse.kernels.dev.ptx.parse import Instruction, parse
from shardfuse.kernels.dev.ptx.program import Program
from shardfuse.kernels.dev.ptx.settings import Settings

FOUR = "{%r3, %r4, %r5, %r6}"
SHARED = 16384  # bytes
MATRICES = {  # of eight rows of 16 bytes each
    "ldmatrix": f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {FOUR}, [%r21];",
    "stmatrix": f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r21], {FOUR};",
}


def launched(
    body: str, *, threads: int = 32, blocks: int = 1, offset: int = 0, count: bool = True, target: str = "sm_90a"
) -> Result:
    """Of a kernel with two arrays of 8192 numbers, which begin ``offset`` bytes into storages of their own."""
    program = Program(parse(kernel(addresses(2) + PREFIX + body, ["ptr"] * 2, threads=threads, target=target)))
    arrays = [np.zeros(8192 + 64, np.float32) for _ in range(2)]
    allocations = [
        Allocation(each.ctypes.data + offset, 4 * 8192, name, each.ctypes.data, 4)
        for each, name in zip(arrays, ("in", "out"))
    ]
    parameters = [each.address for each in allocations]
    result = execute(program, (blocks, 1, 1), parameters, allocations, SHARED, Settings(count=count))
    assert not [report for report in result.reports if "never written" not in report]
    return result


def summary(body: str, **options: object) -> counted.Summary:
    counters = launched(body, **options).counters  # type: ignore[arg-type]
    assert counters is not None
    return counted.summary(counters)


def copy(stride: int, offset: int = 0, vector: int = 1) -> str:
    """Each lane copies ``vector`` words, ``stride`` times as many words behind the lane before it."""
    values, kind = ("{%r3}", "b32") if vector == 1 else (FOUR, "v4.b32")
    return f"""
    mul.wide.u32 %rd10, %r0, {4 * stride * vector}; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;
    ld.global.{kind} {values}, [%rd11+{offset}]; st.global.{kind} [%rd12+{offset}], {values};"""


def shared(access: str, pitch: int, wide: str = "%r3") -> str:
    """An access of each lane, ``pitch`` bytes behind the lane before it."""
    operands = f"{wide}, [%r21]" if access.startswith("ld") else f"[%r21], {wide}"
    return f"mad.lo.s32 %r21, %r0, {pitch}, %r1; {access} {operands};"


def matrices(name: str, pitch: int, *, swizzled: bool = False) -> str:
    """Lane t names row t % 8 of matrix t / 8, whose rows lie ``pitch`` bytes apart and 16 bytes behind the last's."""
    turn = "xor.b32 %r24, %r22, %r23;" if swizzled else "mov.b32 %r24, %r23;"
    return f"""
    and.b32 %r22, %r0, 7; shr.u32 %r23, %r0, 3; {turn} shl.b32 %r24, %r24, 4;
    mad.lo.s32 %r21, %r22, {pitch}, %r24; add.s32 %r21, %r21, %r1; {MATRICES[name]}"""


@dataclass(frozen=True)
class Probe:
    body: str
    figures: dict[str, int]  # of the last access to memory
    why: str


PROBES = {
    # A warp's copy of 32 words of 4 bytes: 128 bytes are named.
    "stride 1": Probe(copy(1), {"sectors": 4, "lines": 1, "used": 128, "requests": 1}, "128 / 32 sectors"),
    "stride 2": Probe(copy(2), {"sectors": 8, "lines": 2, "used": 128}, "256 bytes from first to last"),
    "stride 3": Probe(copy(3), {"sectors": 12, "lines": 3, "used": 128}, "384 bytes, no sector between is free"),
    "stride 32": Probe(copy(32), {"sectors": 32, "lines": 32, "used": 128}, "a line of 128 bytes for each lane"),
    "4 bytes off": Probe(copy(1, 4), {"sectors": 5, "lines": 2, "used": 128}, "bytes 4 to 131"),
    "16 bytes a lane": Probe(copy(1, 0, 4), {"sectors": 16, "lines": 4, "used": 512}, "512 / 32"),
    "16 bytes a lane, stride 2": Probe(copy(2, 0, 4), {"sectors": 32, "used": 512}, "half of each sector"),
    "one place": Probe(copy(0), {"sectors": 1, "used": 4, "asked": 128}, "a broadcast"),
    # Shared memory: word w lies in bank w % 32.
    "st.shared.b32": Probe(shared("st.shared.b32", 4), {"wavefronts": 1, "needed": 1}, "a bank for each lane"),
    "a column of 32 x 32": Probe(shared("st.shared.b32", 128), {"wavefronts": 32, "needed": 1}, "all in bank 0"),
    "a column of 32 x 33": Probe(shared("st.shared.b32", 132), {"wavefronts": 1, "needed": 1}, "33 i % 32 = i"),
    "st.shared.b32, stride 2": Probe(shared("st.shared.b32", 8), {"wavefronts": 2, "needed": 1}, "16 banks"),
    "st.shared.b32, stride 6": Probe(shared("st.shared.b32", 24), {"wavefronts": 2, "needed": 1}, "gcd(6, 32) = 2"),
    "ld.shared.b32, one word": Probe(shared("ld.shared.b32", 0), {"wavefronts": 1, "needed": 1}, "a broadcast"),
    "ld.shared.b16": Probe(shared("ld.shared.b16", 2, "%rs1"), {"wavefronts": 1, "needed": 1}, "16 words"),
    "ld.shared.b16, 64 bytes": Probe(
        shared("ld.shared.b16", 64, "%rs1"), {"wavefronts": 16, "needed": 1}, "word 16 i: banks 0 and 16, 16 words each"
    ),
    "ld.shared.b16, 66 bytes": Probe(
        shared("ld.shared.b16", 66, "%rs1"), {"wavefronts": 1, "needed": 1}, "bank 16 i + i / 2: another for each lane"
    ),
    "st.shared.v2": Probe(shared("st.shared.v2.b32", 8, "{%r3, %r4}"), {"wavefronts": 2, "needed": 2}, "half warps"),
    "st.shared.v2, stride 2": Probe(
        shared("st.shared.v2.b32", 16, "{%r3, %r4}"), {"wavefronts": 4, "needed": 2}, "16 lanes over 64 words, twice"
    ),
    "st.shared.v4": Probe(shared("st.shared.v4.b32", 16, FOUR), {"wavefronts": 4, "needed": 4}, "quarter warps"),
    "st.shared.v4, 128 bytes": Probe(
        shared("st.shared.v4.b32", 128, FOUR), {"wavefronts": 32, "needed": 4}, "each lane in banks 0 to 3"
    ),
    "st.shared.v4, 144 bytes": Probe(
        shared("st.shared.v4.b32", 144, FOUR), {"wavefronts": 4, "needed": 4}, "lane i from bank 4 i on"
    ),
    "st.shared.v4, stride 2": Probe(
        shared("st.shared.v4.b32", 32, FOUR), {"wavefronts": 8, "needed": 4}, "8 lanes over 64 words"
    ),
    "ld.shared.v4, one place": Probe(
        shared("ld.shared.v4.b32", 0, FOUR), {"wavefronts": 2, "needed": 2}, "pairs of lanes: half warps"
    ),
    "st.shared.v4, one place": Probe(
        shared("st.shared.v4.b32", 0, FOUR), {"wavefronts": 4, "needed": 4}, "stores are not served in pairs"
    ),
    "ldmatrix, rows of 128 bytes": Probe(matrices("ldmatrix", 128), {"wavefronts": 32, "needed": 4}, "4 x 8 rows"),
    "ldmatrix, rows of 144 bytes": Probe(matrices("ldmatrix", 144), {"wavefronts": 4, "needed": 4}, "row i: bank 4 i"),
    "ldmatrix, swizzled": Probe(
        matrices("ldmatrix", 128, swizzled=True), {"wavefronts": 4, "needed": 4}, "part p of row i lies at p ^ i"
    ),
    "stmatrix, rows of 128 bytes": Probe(matrices("stmatrix", 128), {"wavefronts": 32, "needed": 4}, "4 x 8 rows"),
    "atom.add on one word": Probe(
        "atom.global.add.u32 %r3, [%rd0], 1;",
        {"requests": 1, "collisions": 31, "sectors": 1},
        "31 lanes wait for another",
    ),
    "cp.async": Probe(
        "mad.lo.s32 %r21, %r0, 16, %r1; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10;"
        "cp.async.cg.shared.global [%r21], [%rd11], 0x10; cp.async.commit_group; cp.async.wait_group 0;",
        {"requests": 1, "sectors": 16, "wavefronts": 4, "used": 512},
        "512 / 32 of global, quarter warps of shared memory",
    ),
    "cp.async of half of each": Probe(
        "mad.lo.s32 %r21, %r0, 16, %r1; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10; mov.b32 %r9, 8;"
        "cp.async.cg.shared.global [%r21], [%rd11], 0x10, %r9; cp.async.commit_group; cp.async.wait_group 0;",
        {"requests": 1, "sectors": 16, "asked": 256, "wavefronts": 4},
        "8 of each lane's 16 bytes are read, all 16 are written",
    ),
    "of eight lanes": Probe(
        "setp.lt.u32 %p1, %r0, 8; mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10;"
        "@%p1 ld.global.b32 %r3, [%rd11];",
        {"requests": 1, "lanes": 8, "sectors": 1, "asked": 32},
        "8 x 4 bytes",
    ),
    "in a loop of ten": Probe(
        "mov.b32 %r3, 0; $again: add.s32 %r3, %r3, 1; ld.global.b32 %r4, [%rd0]; setp.lt.s32 %p1, %r3, 10;"
        "@%p1 bra $again;",
        {"requests": 10, "lanes": 320, "sectors": 10, "times": 10},
        "a sector each time",
    ),
}


@pytest.mark.parametrize("name", PROBES)
def test_an_access(name: str):
    probe = PROBES[name]
    row = summary(probe.body).lines[-1]
    assert {field: row[field] for field in probe.figures} == probe.figures, probe.why


@pytest.mark.parametrize("offset", [0, 16, 64])
def test_a_storage_begins_at_a_multiple_of_256(offset: int):
    """A view 16 bytes into its storage touches a sector more, wherever the host's memory lies."""
    row = summary(copy(1), offset=offset).lines[-1]
    assert (row["sectors"], row["lines"]) == {0: (4, 1), 16: (5, 2), 64: (4, 2)}[offset]


def test_bytes_that_are_necessary_count_once():
    """Two blocks load the same 128 bytes twice each and store them once: 4 x 4 sectors, 2 x 4 by block, 4 once."""
    body = copy(1) + "ld.global.b32 %r4, [%rd11];"
    found = summary(body, blocks=2)
    assert found.asked == 2 * 3 * 128
    assert found.moved == 2 * 3 * 128
    assert found.by_block == 2 * (128 + 128)
    assert found.needed == 128 + 128
    assert found.ratios["moved"] == 3.0
    assert found.ratios["by_block"] == 2.0
    assert (found.touched, found.ratios["touched"]) == (128 + 128, 1.0)
    apart = summary(copy(2))  # of 256 bytes each second word
    assert (apart.needed, apart.touched, apart.ratios["touched"]) == (128 + 128, 256 + 256, 2.0)


def test_shares_are_of_the_worst_main_access():
    """Loads by strides 1 and 4: of the second's sectors a quarter is used. A request of one sector takes no fewer."""
    four = "\nmul.wide.u32 %rd13, %r0, 16; add.s64 %rd14, %rd0, %rd13; ld.global.b32 %r4, [%rd14];"
    found = summary(copy(1) + four + "\nld.global.b32 %r5, [%rd0];")
    assert found.loads == 0.25
    assert found.stores == 1.0
    assert summary(copy(1) + "\nld.global.b32 %r5, [%rd0];").loads == 1.0
    # Four copies take 64 sectors each way: 8 of 144 are more than a twentieth, 2 of 130 are not.
    wide = "".join(f"\n{copy(1, 512 * n, 4)}" for n in range(4))
    assert summary(wide + "\n" + copy(2)).loads == 0.5
    two = "\nsetp.lt.u32 %p1, %r0, 2; mul.wide.u32 %rd13, %r0, 64; add.s64 %rd14, %rd0, %rd13;"
    assert summary(wide + two + "@%p1 ld.global.b32 %r5, [%rd14];").loads == 1.0


def test_instructions_by_unit_and_element():
    """Each of 32 threads stores a number after two ex2, three fma and two conversions."""
    body = "mov.b32 %r3, 0; ex2.approx.ftz.f32 %r4, %r3; ex2.approx.f32 %r5, %r4; cvt.rn.bf16.f32 %rs1, %r5;"
    body += "fma.rn.f32 %r4, %r4, %r4, %r5; fma.rn.f32 %r4, %r4, %r4, %r5; fma.rn.f32 %r4, %r4, %r4, %r5;"
    body += "cvt.rzi.s32.f32 %r6, %r4; shfl.sync.bfly.b32 %r7, %r4, 1, 31, -1; setp.lt.s32 %p1, %r6, 3;"
    found = summary(body + copy(1))
    assert (found.per, found.elements) == ("output: out", 32)
    wanted = {"mufu": 2, "fp32": 3, "convert": 2, "shuffle": 1, "compare": 1}
    assert {unit: found.units[unit] for unit in wanted} == wanted
    assert found.ratios["mufu"] == 2.0
    assert sum(row["issued"] for row in found.by_source) == found.issued
    assert sum(row.get("mufu", 0) for row in found.by_source) == 2
    # of the prefix and, the copy's product and two sums
    assert found.units["integer"] == 1 + 3


@pytest.mark.parametrize(
    ("opcode", "units"),
    [
        ("ex2.approx.ftz.f32", {"mufu": 1}),
        ("ex2.approx.ftz.f16x2", {"mufu": 2}),
        ("sqrt.rn.f32", {"mufu": 1, "fp32": 8}),
        ("div.full.f32", {"mufu": 1, "fp32": 2}),
        ("fma.rn.f32", {"fp32": 1}),
        ("fma.rn.bf16x2", {"half": 1}),
        ("add.s64", {"integer": 1}),
        ("rem.s32", {"mufu": 1, "convert": 2, "integer": 14}),
        ("cvt.rn.bf16x2.f32", {"convert": 1}),
        ("cvt.u64.u32", {"integer": 1}),
        ("setp.lt.f32", {"compare": 1}),
        ("and.pred", {"move": 1}),
        ("neg.f32", {"move": 1}),
        ("mov.b32", {"move": 1}),
        ("redux.sync.max.s32", {"shuffle": 1}),
        ("ld.global.b32", {}),
    ],
)
def test_the_units_of_an_instruction(opcode: str, units: dict[str, int]):
    assert counted.units(Instruction(opcode, [], None, False, "", 0)) == units


# Where a box of 12 rows of 48 numbers of 16 bits begins in a matrix of 21 rows of 150, 320 bytes apart: its sectors.
BOXES = {
    (0, 0): (12 * 3, 12 * 96),  # bytes 0 to 95 of each row
    (8, 2): (12 * 4, 12 * 96),  # bytes 16 to 111
    (120, 15): (6 * 3, 6 * 60),  # bytes 240 to 299 of the last 6 rows: sectors 7, 8 and 9
    (150, 0): (0, 0),  # outside
}


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("corner", BOXES)
def test_a_tensor_copy(corner: tuple[int, int], loads: bool):
    body = moved(REGION * 2, False, 2) + FENCED + tensor_map(0xA, 48, 0) + "add.s32 %r50, %r1, 1024;"
    body += f"add.s32 %r12, %r1, 2048; mov.b32 %r10, {corner[0]}; mov.b32 %r11, {corner[1]};"
    if loads:
        body += "@%p2 mbarrier.init.shared::cta.b64 [%r50], 1;" + FENCED + arriving("%p2", 12 * 96, barrier="%r50")
        body += "bar.sync 0; @%p3 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
        body += " [%r12], [%rd5, {%r10, %r11}], [%r50];" + waiting(0, barrier="%r50")
    else:
        body += "@%p3 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd5, {%r10, %r11}], [%r12];"
        body += "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    arrays = tensor_arrays(0xA)
    allocations = [Allocation(each.ctypes.data, each.nbytes, str(n)) for n, each in enumerate(arrays)]
    program = Program(parse(kernel(addresses(3) + PREFIX + body, ["ptr"] * 3, threads=128)))
    parameters = [each.ctypes.data for each in arrays]
    result = execute(program, (1, 1, 1), parameters, allocations, REGION * 2, Settings(count=True))
    assert [report for report in result.reports if not report.startswith("note: ")] == []
    assert result.counters is not None
    found = counted.summary(result.counters)
    [row] = [each for each in found.lines if each["unit"] == ("TMA load" if loads else "TMA store")]
    assert (row["requests"], row["sectors"], row["used"]) == (1, *BOXES[corner])
    assert row["wavefronts"] == row["needed"] == 12 * 96 // 128
    assert row["on"] == ("0" if BOXES[corner][0] else "")
    places = result.counters.places
    matrix = next(n for n, each in enumerate(places.allocations) if each.name == "0")
    assert places.bytes("load" if loads else "store", matrix) == BOXES[corner][1]


def test_a_product_counts_its_multiply_adds():
    four, two = "{%r10, %r11, %r12, %r13}", "{%r14, %r15}"
    body = f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {four}, {four}, {two}, {four};"
    found = summary(body + copy(1), target="sm_80")
    assert found.units["multiply-adds"] * found.elements == 16 * 8 * 16
    assert found.arch == "sm_80"
    assert found.bounds["products"] == 2  # 2048 of 1024 a cycle


def test_a_kernel_that_sums_up_counts_by_input():
    """Each lane loads four numbers, and one thread stores."""
    body = "mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10;" + f"ld.global.v4.b32 {FOUR}, [%rd11];"
    found = summary(body + "setp.eq.s32 %p1, %r0, 0; @%p1 st.global.b32 [%rd1], %r3;")
    assert (found.per, found.elements) == ("input: in", 128)


def test_barriers_and_divergence():
    """Of three warps the middle one parts, at thread 40; all meet at two barriers."""
    body = "bar.sync 0; bar.warp.sync 0xffffffff; setp.lt.u32 %p1, %r0, 40; @%p1 bra $less;"
    body += "add.s32 %r3, %r0, 1; $less: bar.sync 0;"
    found = summary(body, threads=96)
    assert found.barriers == 2.0
    assert found.parted == 1
    meetings = [(each["what"], each["warps"], each["parted"]) for each in found.control]
    assert meetings == [("barrier", 3, 0), ("branch", 3, 1), ("barrier", 3, 0)]
    counters = launched(body, threads=96).counters
    assert counters is not None
    start = next(n for n, i in enumerate(counters.program.kernel.code) if i.opcode == "add.s32")
    block = next(k for k, (first, _) in enumerate(counters.program.ranges) if first == start)
    assert counters.issues[block] == 2  # the second half of the middle warp, and the last
    assert counters.active[block] == 96 - 40


def test_conflicts_are_gated_in_loops():
    column = shared("st.shared.b32", 128)
    assert summary(column).conflicts is None
    looped = "mov.b32 %r3, 0; $again: add.s32 %r3, %r3, 1;" + column + shared("st.shared.b32", 4)
    found = summary(looped + "setp.lt.s32 %p1, %r3, 5; @%p1 bra $again;")
    assert found.conflicts == (32 + 1) / 2
    steady = found.loops[-1]
    assert (steady["times"], steady["wavefronts"], steady["needed"]) == (5.0, 33.0, 2.0)


def test_blocks_that_run_in_turn_count_as_those_side_by_side():
    body = "mov.u32 %r9, %ctaid.x; mad.lo.s32 %r0, %r9, 32, %r0;" + copy(1)
    found = [summary(body, blocks=blocks) for blocks in (2, 256)]
    assert [each.blocks for each in found] == [2, 256]
    assert found[1].issued == 128 * found[0].issued
    assert (found[1].needed, found[1].by_block, found[1].moved) == (2 * 32768, 256 * 256, 256 * 256)


def test_lines_name_ptx_and_source():
    text = kernel(addresses(2) + PREFIX, ["ptr"] * 2)
    at = '.file 1 "/k.py"\n.loc 1 7 3 // k.py:7:3 @[ k.py:20:5 ]\nld.global.b32 %r3, [%rd0];\n'
    at += ".loc 1 9 0 // standard.py:9:0 @[ k.py:21:5 ]\n"
    text = text.replace("\tret;", at + "ld.global.b32 %r4, [%rd0+4];\n\tret;")
    array = np.zeros(8, np.float32)
    result = execute(
        Program(parse(text)),
        (1, 1, 1),
        [array.ctypes.data] * 2,
        [Allocation(array.ctypes.data, 32, "x")],
        0,
        Settings(count=True),
    )
    assert result.counters is not None
    rows = counted.summary(result.counters).lines
    lines = text.split("\n")
    assert [row["source"] for row in rows] == ["k.py:7 @ k.py:20", "k.py:21"]
    assert ["%r3" in lines[rows[0]["ptx"] - 1], "%r4" in lines[rows[1]["ptx"] - 1]] == [True, True]


def test_nothing_is_counted_unless_asked():
    assert launched(copy(1), count=False).counters is None


def test_counting_changes_no_result():
    body = "mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd1, %rd10; atom.global.add.u32 %r3, [%rd0], %r0;"
    body += "st.global.b32 [%rd11], %r3;"
    program = Program(parse(kernel(addresses(2) + PREFIX + body, ["ptr"] * 2)))
    found = []
    for count in (False, True):
        arrays = [np.zeros(64, "u4") for _ in range(2)]
        allocations = [Allocation(each.ctypes.data, each.nbytes, "") for each in arrays]
        parameters = [each.ctypes.data for each in arrays]
        result = execute(program, (1, 1, 1), parameters, allocations, 0, Settings(count=count))
        found.append((arrays[0].tolist(), arrays[1].tolist(), result.executed, result.reports))
    assert found[0] == found[1]


LISTING = """
        //## File "ptx", line 1
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        //## File "ptx", line {inside} inlined at "x", line 3
        /*0010*/              @!P0 IMAD.WIDE R2, R0, 0x4, R4 ;
        /*0020*/                   FFMA R3, R3, R3, R3 ;
        //## File "ptx", line {after}
        /*0030*/                   STG.E desc[UR4][R2.64], R3 ;
        /*0040*/                   NOP ;
"""


def test_machine_code_counts_by_its_line_of_ptx():
    """Two instructions come from a line that 8 of 32 threads of each of 2 warps run, and the store from one of all."""
    body = "\nsetp.lt.u32 %p1, %r2, 8; @!%p1 bra $rest;\nadd.s32 %r3, %r0, 1;"
    body += "\n$rest:\nmul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10;\nst.global.b32 [%rd11], %r0;"
    counters = launched(body, threads=64).counters
    assert counters is not None
    line = {i.opcode: i.line for i in counters.program.kernel.code}
    listed = assembled.read(LISTING.format(inside=line["add.s32"], after=line["st.global.b32"]))
    assert [opcode for _, opcode in listed] == ["LDC", "IMAD.WIDE", "FFMA", "STG.E", "NOP"]
    # What comes before the first line of PTX counts as that.
    assert assembled.by_unit(counters, listed) == {
        **{"issued": 2 + 2 * 2 + 2, "move": 64},
        **{"integer": 16, "fp32": 16, "global memory": 64},
    }


@pytest.mark.parametrize(
    ("opcode", "unit"),
    [
        ("MUFU.EX2", "mufu"),
        ("FADD.FTZ", "fp32"),
        ("FSETP.GT.AND", "compare"),
        ("HFMA2.BF16_V2", "half"),
        ("F2FP.BF16.F32.PACK_AB", "convert"),
        ("UIADD3", "integer"),
        ("LOP3.LUT", "integer"),
        ("UMOV", "move"),
        ("LDSM.16.MT88.4", "shared memory"),
        ("UTMALDG.2D", "global memory"),
        ("HGMMA.64x256x16.F32.BF16", "product"),
        ("LDL", "local memory"),
        ("BRA", "control"),
    ],
)
def test_the_unit_of_machine_code(opcode: str, unit: str):
    assert assembled.unit_of(opcode) == unit


def test_each_instruction_is_located_at_its_line():
    whole = kernel(addresses(2) + PREFIX + "\n.loc 1 7 3\nadd.s32 %r3, %r0, 1;", ["ptr"] * 2)
    lines = assembled.located(parse(whole)).split("\n")
    at = lines.index("add.s32 %r3, %r0, 1;")
    assert lines[at - 1] == f"\t.loc 1 {whole.split(chr(10)).index('add.s32 %r3, %r0, 1;') + 1} 0"
    assert ".loc 1 7 3" not in lines
    assert lines[lines.index(".address_size 64") + 1].startswith(".file 1")
