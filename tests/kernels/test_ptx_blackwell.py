"""The emulator of PTX on Blackwell's instructions, against layouts and rules written out from the ISA.

Section numbers are those of the PTX ISA 9.0. Products are of small whole numbers, so that no order of sums matters.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from ptx_copies import waiting
from ptx_text import (
    BF16,
    F16,
    FENCED,
    FORMATS,
    LANES,
    PREFIX,
    Format,
    Tile,
    addresses,
    d_place,
    kernel,
    moved,
    of_lane,
    per_thread,
    signed,
    vectors,
    words,
)

from shardfuse.kernels.dev.ptx.launch import run
from shardfuse.kernels.dev.ptx.settings import Settings

random.seed(22)
LOAD, STORED = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"


def launched(body: str, *arrays: np.ndarray, shared: int = 1024, threads: int = 128, early: bool = False) -> list[str]:
    names = ["ptr"] * len(arrays)
    text = kernel(addresses(len(arrays)) + PREFIX + body, names, threads=threads, target="sm_100a")
    return run(text, *arrays, shared=shared, settings=Settings(early=early))


def allocated(count: int, at: int = 0) -> str:
    """%r60 <- the address of so many columns, by way of shared memory; %r61 <- that of the warp's lanes."""
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
    text = f"setp.lt.u32 %p1, %r0, 32; add.s32 %r62, %r1, {at}; @%p1 {alloc} [%r62], {count};"
    text += "bar.sync 0; ld.shared.b32 %r60, [%r62]; bar.sync 0;"
    text += "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    return text + "shr.u32 %r61, %r0, 5; and.b32 %r61, %r61, 3; shl.b32 %r61, %r61, 21; add.s32 %r61, %r61, %r60;"


def freed(count: int) -> str:
    return f"bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r60, {count};"


def access(name: str, shape: str, count: int, first: int = 100, at: str = "%r61", split: int = 16) -> str:
    """tcgen05.ld or .st of ``count`` registers from %r``first`` on."""
    registers = "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"
    half = f", {split}" if shape == "16x32bx2" else ""
    operands = f"{registers}, [{at}]{half}" if name == "ld" else f"[{at}]{half}, {registers}"
    return f"tcgen05.{name}.sync.aligned.{shape}.x{count // (4 if shape == '16x256b' else 1)}.b32 {operands};"


# --- Loads and stores


def cell(shape: str, lane: int, register: int, split: int = 16) -> tuple[int, int]:
    """9.7.16.2.3.1: row of the warp's lanes, and column, of a register."""
    if shape == "32x32b":
        return lane, register
    if shape == "16x32bx2":  # two accesses of 16 lanes
        return (lane % 16, register) if lane < 16 else (lane % 16 + (split >> 16), register + (split & 0xFFFF))
    row, column = d_place(lane, register % 4)  # four registers hold 8 columns
    return row, 8 * (register // 4) + column


SHAPES = [("32x32b", 32, 0), ("32x32b", 1, 0), ("16x256b", 16, 0), ("16x256b", 4, 0)]
SHAPES += [("16x32bx2", 16, 16), ("16x32bx2", 8, 16 << 16), ("16x32bx2", 4, 16 << 16 | 24)]


@pytest.mark.parametrize(("shape", "count", "split"), SHAPES)
def test_tensor_memory_is_loaded_by_shape(shape: str, count: int, split: int):
    given, found = words(128 * 32).reshape(128, 32), np.zeros((128, count), "u4")
    body = allocated(32) + of_lane(0, 128) + vectors("ld", 200, 32) + access("st", "32x32b", 32, 200) + STORED
    body += access("ld", shape, count, split=split) + LOAD + of_lane(1, 4 * count)
    body += "".join(f"st.global.b32 [%rd10+{4 * n}], %r{100 + n};" for n in range(count)) + freed(32)
    assert launched(body, given, found) == []
    for warp, lane, register in itertools.product(range(4), LANES, range(count)):
        row, column = cell(shape, lane, register, split)
        assert found[32 * warp + lane, register] == given[32 * warp + row, column], (warp, lane, register)


@pytest.mark.parametrize(("shape", "count", "split"), SHAPES)
def test_tensor_memory_is_stored_by_shape(shape: str, count: int, split: int):
    given, before = words(128 * count).reshape(128, count), words(128 * 32).reshape(128, 32)
    found, expected = np.zeros((128, 32), "u4"), before.copy()
    body = allocated(32) + of_lane(0, 128) + vectors("ld", 200, 32) + access("st", "32x32b", 32, 200) + STORED
    body += of_lane(1, 4 * count) + "".join(f"ld.global.b32 %r{100 + n}, [%rd10+{4 * n}];" for n in range(count))
    body += access("st", shape, count, split=split) + STORED + access("ld", "32x32b", 32, 200) + LOAD
    assert launched(body + of_lane(2, 128) + vectors("st", 200, 32) + freed(32), before, given, found) == []
    for warp, lane, register in itertools.product(range(4), LANES, range(count)):
        row, column = cell(shape, lane, register, split)
        expected[32 * warp + row, column] = given[32 * warp + lane, register]
    assert found.tolist() == expected.tolist()


# --- Products


class Plain(Tile):
    """Without a swizzle: matrices of 8 rows of 16 bytes, which lie beside each other along M or N."""

    def __init__(self, mn: int, form: Format, along: str):
        self.form, self.mn, self.size, self.along, self.span = form, mn, form.width // 8, along, 0
        self.k, per = 64 // self.size, 16 // self.size  # two steps
        matrices = mn // (8 if along == "k" else per)
        self.stride, self.leading = 128, 128 * matrices
        self.step = (2 if along == "k" else 32 // self.size // 8) * self.leading
        self.bytes = mn * self.k * self.size

    def place(self, mn: int, k: int) -> int:
        per = 16 // self.size
        if self.along == "k":
            return mn // 8 * self.stride + mn % 8 * 16 + k // per * self.leading + k % per * self.size
        return mn // per * self.stride + mn % per * self.size + k // 8 * self.leading + k % 8 * 16


def _tile(mn: int, form: Format, where: str) -> Tile:
    if where in ("k", "mn"):
        return Plain(mn, form, where)
    tile = Tile(mn, form, where)
    if tile.along == "mn":
        tile.step = 32 // tile.size // 8 * tile.stride  # a product's columns, in eights
    return tile


def descriptor(tile: Tile) -> int:
    """9.7.16.4: without the address; bits 46 to 48 are 0b001, and the mode is in the last three."""
    mode = {128: 2, 64: 4, 32: 6, 0: 0}[tile.span]
    return tile.leading >> 4 << 16 | tile.stride >> 4 << 32 | 1 << 46 | mode << 61


def instruction(m: int, n: int, kinds: tuple[str, str], turned: tuple[bool, bool], negated: tuple[int, int]) -> int:
    """9.7.16.4.2: the instruction descriptor of a product whose result is fp32."""
    codes = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}
    bits = 1 << 4 | codes[kinds[0]] << 7 | codes[kinds[1]] << 10 | negated[0] << 13 | negated[1] << 14
    return bits | turned[0] << 15 | turned[1] << 16 | n >> 3 << 17 | m >> 4 << 24


def encoded(values: np.ndarray, form: Format) -> np.ndarray:
    known = {value: form.encode(value) for value in set(values.flatten().tolist())}
    return np.array([known[each] for each in values.flatten().tolist()], f"u{form.width // 8}").reshape(values.shape)


def image(tile: Tile, values: np.ndarray) -> bytes:
    memory, codes = np.zeros(tile.bytes // tile.size, f"u{tile.size}"), encoded(values, tile.form)
    for mn, k in itertools.product(range(tile.mn), range(tile.k)):
        memory[tile.place(mn, k) // tile.size] = codes[mn, k]
    return memory.tobytes()


def small(*shape: int) -> np.ndarray:
    picked = random.choices([-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.5], k=math.prod(shape))
    return np.array(picked).reshape(shape)


DESCRIBED = "add.s32 %r9, %r1, {at}; bfe.u32 %r9, %r9, 4, 14; cvt.u64.u32 {into}, %r9; or.b64 {into}, {into}, {bits};"
BEGUN = "setp.eq.u32 %p2, %r0, 0; setp.eq.u32 %p4, %r0, %r0; @%p2 mbarrier.init.shared::cta.b64 [%r50], 1; bar.sync 0;"
COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r50];"
WAITED = waiting(0, barrier="%r50")
INVAL = "bar.sync 0; @%p2 mbarrier.inval.shared::cta.b64 [%r50];"


def product(
    m: int, n: int, kinds: tuple[str, str], a: Tile, b: Tile, adds: str, negated: tuple[int, int] = (0, 0)
) -> str:
    """Array 1 <- A B + array 1, step by step of k; A and B from array 0."""
    kind = {"tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4"}.get(kinds[0], "f16")
    shape, total = instruction(m, n, kinds, (a.along == "mn", b.along == "mn"), negated), a.bytes + b.bytes
    rows = "32x32b" if m == 128 else "16x256b"
    count, width = (n, min(n, 128)) if m == 128 else (n // 2, n // 2)
    body = moved(total, False, 0) + FENCED + allocated(max(32, n), total + 16)
    body += f"add.s32 %r50, %r1, {total};" + BEGUN + of_lane(1, 4 * count) + vectors("ld", 100, count)
    moves = [(100 + k, f"%r61 + {k}") for k in range(0, count, width)]
    body += "".join(access("st", rows, width, first, at) for first, at in moves) + STORED + "bar.sync 0;"
    body += f"mov.b32 %r63, {shape};"
    for step in range(min(a.k, b.k) * a.size // 32):
        body += DESCRIBED.format(at=a.step * step, into="%rd12", bits=signed(descriptor(a), 64))
        body += DESCRIBED.format(at=a.bytes + b.step * step, into="%rd13", bits=signed(descriptor(b), 64))
        predicate = adds if step == 0 else "%p4"
        body += f"@%p2 tcgen05.mma.cta_group::1.kind::{kind} [%r60 + 0], %rd12, %rd13, %r63, {predicate};"
    body += COMMIT + WAITED + "".join(access("ld", rows, width, first, at) for first, at in moves) + LOAD
    return body + of_lane(1, 4 * count) + vectors("st", 100, count) + INVAL + freed(max(32, n))


def place(m: int, thread: int, register: int) -> tuple[int, int]:
    """9.7.16.10.5, layouts D and F: 128 rows in as many lanes, 64 in the first 16 of each warp's 32."""
    if m == 128:
        return thread, register
    row, column = cell("16x256b", thread % 32, register)
    return thread // 32 * 16 + row, column


PRODUCTS = [
    (128, 32, ("bf16", "bf16"), "k 128", "k 128", "%p4"),
    (128, 16, ("f16", "f16"), "mn 128", "k 64", "%p4"),
    (128, 64, ("bf16", "bf16"), "k 32", "mn 128", "%p3"),
    (128, 256, ("f16", "f16"), "k 64", "k 32", "%p4"),
    (128, 32, ("f16", "f16"), "mn 64", "mn 32", "0"),
    (128, 16, ("tf32", "tf32"), "k 128", "k 128", "%p4"),
    (128, 32, ("tf32", "tf32"), "k 64", "k 32", "%p3"),
    (128, 32, ("e4m3", "e4m3"), "k 128", "k 128", "%p4"),
    (128, 32, ("e5m2", "e4m3"), "k 64", "k 128", "%p3"),
    (128, 32, ("e4m3", "e5m2"), "mn 128", "mn 32", "%p4"),
    (128, 32, ("bf16", "f16"), "k", "k", "%p4"),
    (128, 32, ("f16", "f16"), "mn", "mn", "%p4"),
    (64, 32, ("bf16", "bf16"), "k 128", "mn 64", "%p4"),
    (64, 24, ("f16", "f16"), "k 64", "k 128", "%p3"),
    (64, 16, ("e4m3", "e4m3"), "k 128", "k 32", "%p4"),
]


@pytest.mark.parametrize(("m", "n", "kinds", "left", "right", "adds"), PRODUCTS)
def test_products(m: int, n: int, kinds: tuple[str, str], left: str, right: str, adds: str):
    """Without enable-input-d what D held is ignored, NaN too. Steps of k move the start within a swizzled row."""
    tiles = _tile(m, FORMATS[kinds[0]], left), _tile(n, FORMATS[kinds[1]], right)
    a, b, c = small(m, tiles[0].k), small(n, tiles[1].k), small(m, n)
    c[:] = c if adds == "%p4" else math.nan
    steps = min(tiles[0].k, tiles[1].k)
    registers = n if m == 128 else n // 2
    room = np.frombuffer(image(tiles[0], a) + image(tiles[1], b) + bytes(2048), "u1").copy()
    held = np.zeros((128, registers), "f4")
    for thread, register in np.ndindex(*held.shape):
        held[thread, register] = c[place(m, thread, register)]
    body = "setp.ne.b32 %p3, %r0, %r0;" + product(m, n, kinds, *tiles, adds)
    assert launched(body, room, held, shared=room.nbytes) == []
    expected = a[:, :steps] @ b[:, :steps].T + (c if adds == "%p4" else 0)
    for thread, register in np.ndindex(*held.shape):
        assert held[thread, register] == expected[place(m, thread, register)], (thread, register)


@pytest.mark.parametrize("negated", [(1, 0), (0, 1), (1, 1)])
def test_a_product_of_negated_matrices(negated: tuple[int, int]):
    tiles = Tile(128, BF16, "k 32"), Tile(16, BF16, "k 32")
    a, b, held = small(128, 16), small(16, 16), np.zeros((128, 16), "f4")
    room = np.frombuffer(image(tiles[0], a) + image(tiles[1], b) + bytes(2048), "u1").copy()
    body = product(128, 16, ("bf16", "bf16"), *tiles, "0", negated)
    assert launched(body, room, held, shared=room.nbytes) == []
    assert held.tolist() == ((-1) ** sum(negated) * a @ b.T).tolist()


def test_a_product_with_a_in_tensor_memory():
    """Two 16-bit numbers of a row in each column: 9.7.16.10.4."""
    tile, a, b = Tile(16, F16, "k 32"), small(128, 16), small(16, 16)
    room, held = np.frombuffer(image(tile, b) + bytes(2048), "u1").copy(), np.zeros((128, 16), "f4")
    packed = encoded(a, F16).view("u4").copy()
    body = moved(tile.bytes, False, 0) + FENCED + allocated(32, tile.bytes + 16)
    body += f"add.s32 %r50, %r1, {tile.bytes};" + BEGUN + of_lane(1, 32) + vectors("ld", 100, 8)
    body += access("st", "32x32b", 8, at="%r61 + 16") + STORED + "bar.sync 0; add.s32 %r64, %r60, 16;"
    body += DESCRIBED.format(at=0, into="%rd13", bits=signed(descriptor(tile), 64))
    body += f"mov.b32 %r63, {instruction(128, 16, ('f16', 'f16'), (False, False), (0, 0))};"
    body += "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r60 + 0], [%r64 + 0], %rd13, %r63, 0;" + COMMIT + WAITED
    body += access("ld", "32x32b", 16) + LOAD + of_lane(2, 64) + vectors("st", 100, 16) + INVAL + freed(32)
    assert launched(body, room, packed, held, shared=room.nbytes) == []
    assert held.tolist() == (a @ b.T).tolist()


# --- What is reported

TILES = Tile(128, F16, "k 32"), Tile(16, F16, "k 32")
GOOD = product(128, 16, ("f16", "f16"), *TILES, "%p4")
SHAPE = instruction(128, 16, ("f16", "f16"), (False, False), (0, 0))
MMA = "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r60 + 0], %rd12, %rd13, %r63, %p4;"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r62], 32;"
DEALLOC = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r60, 32;"
READ = access("ld", "32x32b", 16, at="%r61 + 0")
WRITE = access("st", "32x32b", 16, at="%r61 + 0")
OTHER = DESCRIBED.format(at=0, into="%rd12", bits=signed(descriptor(TILES[0]), 64))


def _reports(body: str) -> list[str]:
    size = TILES[0].bytes + TILES[1].bytes + 2048
    return launched(body, np.zeros(size, "u1"), np.zeros((128, 16), "f4"), shared=size)


FAULTS = {
    "a missing wait": (WAITED, "", "read of tensor memory before the wait for what writes it"),
    "a wait of one warp": (WAITED, "@!%p1 bra $W;" + WAITED + "$W:", "race: read of tensor memory that another warp"),
    "a wait of another warp": (
        WAITED,
        "setp.ge.u32 %p5, %r0, 96; @!%p5 bra $W;" + WAITED + "$W: bar.warp.sync -1;",
        "race: read of tensor memory that another warp",
    ),
    "a missing wait for loads": (LOAD, "", "registers of a tcgen05.ld are touched before tcgen05.wait::ld"),
    "a late wait for loads": (
        LOAD + of_lane(1, 64),
        "add.s32 %r99, %r101, 1;" + LOAD + of_lane(1, 64),
        "registers of a tcgen05.ld are touched before tcgen05.wait::ld",
    ),
    "a missing wait for stores": (STORED, "", "read of tensor memory before the wait for what writes it"),
    "a missing barrier after stores": (STORED + "bar.sync 0;", STORED, "race: read of tensor memory that another warp"),
    "a missing dealloc": (DEALLOC, "", "tensor memory that is not deallocated when the block ends"),
    "a missing barrier before dealloc": (
        INVAL + "bar.sync 0;",
        "",
        "race: write over tensor memory that another warp reads",
    ),
    "a dealloc of other columns": (
        DEALLOC,
        DEALLOC.replace("32;", "64;"),
        "dealloc of what no tcgen05.alloc",
    ),
    "an alloc of odd columns": (ALLOC, ALLOC.replace("32;", "48;"), "a tcgen05.alloc of other than 32"),
    "an alloc that is too late": (
        DEALLOC,
        DEALLOC + "bar.sync 0; @%p1 " + ALLOC,
        "a tcgen05.alloc after tcgen05.relinquish_alloc_permit",
    ),
    "a missing fence": (FENCED, "bar.sync 0;", "an asynchronous unit reads what was written without a fence"),
    "an operand overwritten": (
        COMMIT,
        COMMIT + "@%p2 st.shared.b32 [%r1], %r0;",
        "shared write to what an operation under way still reads",
    ),
    "a result overwritten": (COMMIT, COMMIT + WRITE + STORED, "write to tensor memory before the wait"),
    "a result read": (COMMIT, COMMIT + READ + LOAD, "read of tensor memory before the wait"),
    "a load's source overwritten": (LOAD, WRITE + LOAD + STORED, "write to tensor memory that a load under way"),
    "a product by a warp": (MMA, MMA.replace("%p2", "%p1"), "write to tensor memory before the wait"),
    "another commit": (COMMIT, COMMIT * 2, "more arrivals at an mbarrier than it counts"),
    "lanes of another warp": (
        READ,
        READ.replace("[%r61 + 0]", "[%r60]"),
        "tcgen05.ld of lanes that its warp does not",
    ),
    "an address of each thread": (
        READ,
        "add.s32 %r61, %r61, %r2;" + READ,
        "tcgen05.ld with other addresses in some lanes of a warp",
    ),
    "columns of nobody": (READ, READ.replace("[%r61 + 0]", "[%r61 + -32]"), "outside the tensor memory of"),
    "columns that do not exist": (
        READ,
        READ.replace("[%r61 + 0]", "[%r61 + 32]"),
        "outside the tensor memory of",
    ),
    "a result in other lanes": (MMA, MMA.replace("[%r60 + 0]", "[%r60 + 1048576]"), "from another lane than its shape"),
    "too wide a shape": (f"%r63, {SHAPE};", f"%r63, {SHAPE | 64 << 14};", "outside the tensor memory of"),
    "a shape that is none": (f"%r63, {SHAPE};", f"%r63, {SHAPE | 1 << 24};", "a tcgen05.mma with the shape 144"),
    "a sparse product": (f"%r63, {SHAPE};", f"%r63, {SHAPE | 4};", "bits of the instruction descriptor set"),
    "formats that are none": (f"%r63, {SHAPE};", f"%r63, {SHAPE | 3 << 7};", "a tcgen05.mma with formats of A and B"),
    "wgmma's descriptor": (
        OTHER,
        OTHER.replace(str(signed(descriptor(TILES[0]), 64)), str(signed(descriptor(TILES[0]) ^ 1 << 46, 64))),
        "a matrix descriptor whose bits 46 to 48",
    ),
    "a descriptor that strides too far": (
        OTHER,
        OTHER.replace(str(signed(descriptor(TILES[0]), 64)), str(signed(descriptor(TILES[0]) | 0x70 << 32, 64))),
        "shared ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(fault: str):
    old, new, wanted = FAULTS[fault]
    assert GOOD.count(old) == 1, old
    try:
        reports = _reports(GOOD.replace(old, new))
    except RuntimeError as error:  # a deadlock, which says what was found
        reports = [str(error)]
    assert any(wanted in report for report in reports), reports


def test_moves_before_the_wait_take_values():
    """LLVM joins registers there, which ptxas only names: that is no more than a note, as long as no more is done."""
    early = GOOD.replace(LOAD, "mov.b64 %rd20, {%r100, %r101};" + LOAD + "mov.b64 {%r100, %r101}, %rd20;")
    size, found, expected = TILES[0].bytes + TILES[1].bytes + 2048, *np.arange(4096, dtype="f4").reshape(2, 128, 16)
    expected[:] = found
    [report] = launched(early, np.zeros(size, "u1"), found, shared=size)
    assert report.startswith("note: registers of a tcgen05.ld are moved before tcgen05.wait::ld"), report
    assert found.tolist() == expected.tolist()
    used = early.replace(LOAD, "add.s64 %rd20, %rd20, 1;" + LOAD)
    assert any("are touched before tcgen05.wait::ld" in report for report in _reports(used))


def test_what_was_never_written_is_poison():
    """Triton loads it ahead of a loop that does not run: a note; for a product it is a fault."""
    found = np.zeros((128, 4), "f4")
    body = allocated(32) + access("ld", "32x32b", 4) + LOAD + of_lane(0, 16) + vectors("st", 100, 4) + freed(32)
    [report] = launched(body, found)
    assert report.startswith("note: read of tensor memory that was never written"), report
    assert np.isnan(found).all()
    [report] = _reports(GOOD.replace(WRITE, ""))
    assert report.startswith("read of tensor memory that was never written"), report


@pytest.mark.parametrize("without", [COMMIT, MMA])
def test_a_wait_for_nothing(without: str):
    if without == COMMIT:
        with pytest.raises(RuntimeError, match="deadlock"):
            _reports(GOOD.replace(without, ""))
    else:  # a commit without products arrives at once
        assert _reports(GOOD.replace(without, "")) == []


def test_a_product_that_nobody_waits_for():
    reports = _reports(GOOD.replace(WAITED, "").replace(INVAL, ""))
    assert any(report.startswith("a tcgen05.commit that is never waited for") for report in reports)
    assert any(report.startswith("a tcgen05.mma that is never waited for") for report in reports)


def test_a_wait_that_one_warp_makes_is_passed_on_by_a_barrier():
    alone = "@!%p1 bra $W;" + WAITED + "$W: bar.sync 0;"
    assert _reports(GOOD.replace(WAITED, alone)) == []


def test_results_that_are_read_too_early_are_poison():
    size, found = TILES[0].bytes + TILES[1].bytes + 2048, np.zeros((128, 16), "f4")
    launched(GOOD.replace(WAITED, ""), np.zeros(size, "u1"), found, shared=size)
    assert np.isnan(found).all()


def test_an_operand_is_read_as_late_as_it_may_be():
    """What overwrites it before the wait reaches the result; not where copies land at once."""
    over = COMMIT + "mov.b32 %r3, 0x7E007E00; mad.lo.s32 %r8, %r0, 16, %r1;"
    over += "".join(f"st.shared.v4.b32 [%r8+{n}], {{%r3, %r3, %r3, %r3}};" for n in (0, 2048))
    for early in (False, True):
        found, size = np.zeros((128, 16), "f4"), TILES[0].bytes + TILES[1].bytes + 2048
        launched(GOOD.replace(COMMIT, over), np.zeros(size, "u1"), found, shared=size, early=early)
        assert np.isnan(found).all() == (not early)


def test_more_tensor_memory_than_there_is():
    body = "mov.b32 %r62, %r1;" + ALLOC.replace("32;", "512;") * 2
    with pytest.raises(RuntimeError, match=r"deadlock: .* 512 columns of tensor memory, 0 of which are free"):
        launched(body, threads=32)


def test_an_alloc_of_more_columns_than_before():
    body = "mov.b32 %r62, %r1;" + ALLOC + "ld.shared.b32 %r60, [%r62];" + ALLOC.replace("32;", "64;")
    body += "ld.shared.b32 %r64, [%r62]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r60, 32;"
    [report] = launched(body + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r64, 64;", threads=32)
    assert report.startswith("a tcgen05.alloc of more columns than one before it"), report


@pytest.mark.parametrize(
    "form",
    [
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r5}, [%r6]",
        "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r5}, [%r6]",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5}, [%r6]",
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32",
        "tcgen05.mma.cta_group::1.kind::i8 [%r5 + 0], %rd5, %rd6, %r6, %p1",
        "tcgen05.mma.cta_group::1.kind::f16 [%r5 + 0], %rd5, %rd6, %r6, {%r5, %r5, %r5, %r5}, %p1",
        "tcgen05.cp.cta_group::1.128x256b [%r5], %rd5",
        "add.rz.f32x2 %rd5, %rd6, %rd7",
        "add.rn.sat.f32.bf16 %r5, %rs5, %r6",
    ],
)
def test_forms_that_are_not_known_stop_it_by_name(form: str):
    with pytest.raises(NotImplementedError, match=form.split()[0]):
        launched(form + ";")


# --- Numbers


@pytest.mark.parametrize("more", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_redux_of_single_precision(name, more):
    """9.7.13.12: the least or largest of a warp, or of its magnitudes; NaN counts with .NaN alone."""
    rows = np.array([random.gauss(0, 1) for _ in range(128)], "f4")
    rows[[5, 40]] = [np.nan, -np.inf]
    rows[64:96] = np.nan
    body = f"mov.b32 $d, 0; redux.sync.{name}{more}.f32 $d, $a, -1;"
    (found,) = per_thread(body, "d:u4", threads=128, a=rows.view("u4"))
    for warp, given in enumerate(rows.reshape(4, 32)):
        given = np.abs(given) if "abs" in more else given
        kept = given if "NaN" in more else given[~np.isnan(given)]
        expected = float(getattr(np, name)(kept)) if len(kept) else math.nan
        assert np.array_equal(found.view("f4")[32 * warp : 32 * warp + 32], [expected] * 32, equal_nan=True)
