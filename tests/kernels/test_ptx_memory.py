"""The emulator of PTX in memory: loads and stores, asynchronous copies, tensor maps, and the faults that it reports.

Section numbers are those of the PTX ISA 8.7.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from ptx_copies import COLUMNS, ELEMENTS, REGION, ROWS, TALL, arriving, tensor_arrays, tensor_map, waiting
from ptx_text import FENCED, LANES, PREFIX, addresses, kernel, launched, moved, of_lane, swizzled, words

from shardfuse.kernels.dev import stub_cuda
from shardfuse.kernels.dev.ptx.launch import run

random.seed(22)

LOADS = [
    "b8 rs",
    "b8 r",
    "b16 rs",
    "b16 r",
    "b32 r",
    "b32 rd",
    "s32 rd",
    "b64 rd",
    "v2.b8 rs",
    "v2.b16 rs",
    "v4.b16 rs",
]
LOADS = [f"ld.shared.{each}" for each in [*LOADS, "v2.b32 r", "v4.b32 r", "v2.b64 rd"]]
LOADS += [f"ld.global.{each}" for each in ("b8 rs", "b16 rs", "b32 r", "b64 rd", "v2.b32 r", "v4.b32 r")]
LOADS += [f"ld.{each}" for each in ("volatile.global.b32 r", "volatile.global.v4.b32 r", "acquire.sys.global.b32 r")]
LOADS += [f"ld.global.L1::evict_{e}.L2::cache_hint.{k}" for e in ("first", "last") for k in ("b16 rs", "v4.b32 r")]
STORES = [
    "b8 rs",
    "b16 rs",
    "b32 r",
    "b64 rd",
    "v2.b8 rs",
    "v4.b8 rs",
    "v2.b16 rs",
    "v4.b16 rs",
    "v2.b32 r",
    "v4.b32 r",
]
STORES = [f"st.shared.{each}" for each in [*STORES, "v2.b64 rd"]]
STORES += [
    f"st.shared::cta.{each}" for each in ("b16 rs", "b32 r", "b64 rd", "v2.b16 rs", "v2.b32 r", "v4.b16 rs", "v4.b32 r")
]
STORES += [f"st.global.{each}" for each in ("b8 rs", "b16 rs", "b32 r", "v2.b32 r", "v4.b32 r")]
SLOT = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, 32; add.s64 %rd0, %rd0, %rd10; add.s64 %rd1, %rd1, %rd10;"
SLOT += "mov.b32 %r2, global_smem; mad.lo.s32 %r3, %r1, 32, %r2;"


def shape(case: str) -> tuple[str, str, int, int]:
    """Instruction, register, elements and bytes of each."""
    form, register = case.split()
    count = 2 if ".v2." in form else 4 if ".v4." in form else 1
    return form, register, count, int(form.split(".")[-1][1:]) // 8


def place(form: str, offset: int) -> str:
    return f"[%r3+{offset}]".replace("+0", "") if "shared" in form else f"[ %rd0 + {offset} ]"


def vector(form: str, register: str, count: int, first: int) -> str:
    names = ", ".join(f"%{register}{first + n}" for n in range(count))
    return f"{{ {names} }}" if count > 1 or "global" in form else names


@pytest.mark.parametrize("case", LOADS)
def test_loads(case):
    """Into a wider register .b8, .b16 and .b32 are extended by zeros, .s32 by its sign (9.4.1)."""
    form, register, count, size = shape(case)
    width = {"rs": 16, "r": 32, "rd": 64}[register]
    offsets = [0, 16] if count * size > 8 else [0, 8, 24]
    kept = form.split(".")[2].replace("L1::", "") if "cache_hint" in form else "evict_first"
    body = [addresses(2), SLOT, f"createpolicy.fractional.L2::{kept}.b64 %rd9, 1.0;"]
    body += ["mul.wide.u32 %rd10, %r1, 64; add.s64 %rd1, %rd1, %rd10;"]  # 12 results of 8 bytes for each thread
    for n in range(0, 32, 16):
        body += [f"ld.global.v4.b32 {{ %r20, %r21, %r22, %r23 }}, [ %rd0 + {n} ];"]
        body += [f"st.shared.v4.b32 [%r3+{n}], {{%r20, %r21, %r22, %r23}};"]
    hint = ", %rd9" if "cache_hint" in form else ""
    for k, offset in enumerate(offsets):
        body.append(f"{form} {vector(form, register, count, 30)}, {place(form, offset)}{hint};")
        for n in range(count):
            body.append(
                {"rd": f"mov.b64 %rd20, %rd{30 + n};"}.get(register, f"cvt.u64.u{width} %rd20, %{register}{30 + n};")
            )
            body += [
                "mov.b64 {%r10, %r11}, %rd20;",
                f"st.global.v2.b32 [ %rd1 + {8 * (k * 4 + n)} ], {{ %r10, %r11 }};",
            ]
    source, found = np.frombuffer(random.randbytes(32 * 32), "u4").copy(), np.zeros((32, 12), "u8")
    assert run(kernel("\n".join(body), ["ptr", "ptr"]), source, found, shared=1024) == []
    for thread in range(32):
        slot = source.tobytes()[32 * thread : 32 * thread + 32]
        for k, offset in enumerate(offsets):
            for n in range(count):
                taken = slot[offset + n * size : offset + (n + 1) * size]
                wish = int.from_bytes(taken, "little", signed=".s32" in form) & (2**width - 1)
                assert found[thread, 4 * k + n] == wish, (thread, offset, n)


@pytest.mark.parametrize("case", STORES)
def test_stores(case):
    """Only the bytes of the element's type change, in the lanes whose guard holds."""
    form, register, count, size = shape(case)
    width = {"rs": 2, "r": 4, "rd": 8}[register]
    body = [addresses(2), SLOT, "and.b32 %r4, %r1, 3; setp.ne.b32 %p1, %r4, 1;"]
    body += ["ld.global.b32 { %r10 }, [ %rd1 + 0 ];"]
    for n in range(count):
        kinds = {
            "rs": ["cvt.u16.u32 %rs30, %r10;"],
            "r": ["mov.b32 %r30, %r10;"],
            "rd": ["mov.b64 %rd30, {%r10, %r10};"],
        }
        body += [f"mad.lo.s32 %r10, %r10, -1640531527, {n};", kinds[register][0].replace("30,", f"{30 + n},")]
    body += [
        "mov.b32 %r20, -1;",
        "st.shared.v4.b32 [%r3], {%r20, %r20, %r20, %r20};",
        "st.shared.v4.b32 [%r3+16], {%r20, %r20, %r20, %r20};",
    ]
    body += [f"@%p1 {form} {place(form, 16)}, {vector(form, register, count, 30)};"]
    body += [f"{form} {place(form, 0)}, {vector(form, register, count, 30)};"]
    if "shared" in form:
        for n in (0, 16):
            body += [f"ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r3+{n}];"]
            body += [f"st.global.v4.b32 [ %rd0 + {n} ], {{ %r20, %r21, %r22, %r23 }};"]
    found = np.full((32, 32), 255, "u1")
    seeds = np.frombuffer(random.randbytes(32 * 32), "u4").copy()
    assert run(kernel("\n".join(body), ["ptr", "ptr"]), found, seeds, shared=1024) == []
    for thread in range(32):
        value, expected = int(seeds[8 * thread]), bytearray(b"\xff" * 32)
        for n in range(count):
            value = (value * -1640531527 + n) % 2**32
            bits = (value | value << 32).to_bytes(8, "little")[:width][:size]
            for start in (0,) if thread % 4 == 1 else (0, 16):
                expected[start + n * size : start + (n + 1) * size] = bits
        assert found[thread].tobytes() == bytes(expected), thread


def test_addresses_in_shared_memory_by_name():
    body = (
        addresses(1)
        + """
        mov.b32 %r1, 305419896; mov.b64 %rd1, -2; mov.b32 %r2, global_smem; mov.b32 %r9, 77;
        mov.u32 %r7, %tid.x; setp.eq.b32 %p1, %r7, 0;
        @%p1 st.shared.b32 [%r2], %r1;
        @%p1 st.shared.b32 [%r2+4], %r9;
        @%p1 st.shared.b64 [ %r2 + 8 ], %rd1;
        bar.sync 0;
        ld.shared.b32 %r3, [global_smem]; ld.shared.s32 %rd2, [global_smem+8]; ld.shared.b64 %rd3, [global_smem];
        ld.shared.b32 %r4, [global_smem+12]; mov.b64 {%r5, %r6}, %rd2; mov.b64 {_, %r8}, %rd3;
        mul.wide.u32 %rd4, %r7, 20; add.s64 %rd0, %rd0, %rd4;
        st.global.b32 [ %rd0 + 0 ], { %r3 }; st.global.b32 [ %rd0 + 4 ], { %r4 }; st.global.b32 [ %rd0 + 8 ], { %r5 };
        st.global.b32 [ %rd0 + 12 ], { %r6 }; st.global.b32 [ %rd0 + 16 ], { %r8 };
    """
    )
    found = np.zeros((32, 5), "u4")
    assert run(kernel(body, ["ptr"]), found, shared=16) == []
    assert found.tolist() == [[305419896, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 77]] * 32


# --- Asynchronous copies


@pytest.mark.parametrize("form", ["ca 4", "ca 8", "cg 16"])
def test_cp_async(form):
    """9.7.9.25.3: zeros follow the source's bytes; nothing is read for none of them, or where the guard fails."""
    cache, size = form.split()
    given, sizes, found = words(128), np.array([n % (int(size) + 1) for n in LANES], "u4"), np.zeros((32, 16), "u1")
    body = f"""
        mov.b32 %r3, -1; mad.lo.s32 %r8, %r0, 16, %r1; st.shared.v4.b32 [%r8], {{%r3, %r3, %r3, %r3}}; bar.sync 0;
        {of_lane(1, 4)} ld.global.b32 {{ %r9 }}, [ %rd10 + 0 ]; and.b32 %r4, %r0, 7; setp.ne.b32 %p1, %r4, 5;
        {of_lane(0, 16)} setp.ne.b32 %p2, %r9, 0; and.pred %p2, %p2, %p1; selp.b64 %rd10, %rd10, 16, %p2;
        @%p1 cp.async.{cache}.shared.global [ %r8 + 0 ], [ %rd10 + 0 ], {int(size):#x}, %r9;
        cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    """
    assert launched(body + moved(512, True, 2, 32), given, sizes, found, shared=512) == []
    for lane in LANES:
        copied = given.tobytes()[16 * lane : 16 * lane + int(sizes[lane])].ljust(int(size), b"\0")
        assert found[lane].tobytes() == (b"" if lane % 8 == 5 else copied).ljust(16, b"\xff"), lane


@pytest.mark.parametrize("space", ["shared::cta", "shared"])
def test_mbarrier_phases(space):
    """9.7.13.15: a phase ends with its last arrival; a wait for a parity ends once the phase of that parity is over.

    Three lanes of a warp pass values to another warp, five times through the same place, and arrive at one barrier;
    the other warp arrives at a second one once it has read. Waiting there for parity 1 at first holds at once.
    """
    body = "setp.eq.b32 %p1, %r0, 0; setp.eq.b32 %p3, %r0, 32; add.s32 %r4, %r1, 8; mad.lo.s32 %r8, %r0, 4, %r1;"
    body += "setp.lt.u32 %p2, %r0, 4; setp.ne.b32 %p4, %r0, 1; and.pred %p2, %p2, %p4;"  # lanes 0, 2 and 3
    body += "@%p1 mbarrier.init.shared::cta.b64 [%r1], 3; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.sync 0;"
    body += "setp.lt.u32 %p5, %r0, 32; @!%p5 bra TAKE;"
    for phase in range(5):
        body += waiting(1 - phase % 2, space, "%r4") + f"add.s32 %r3, %r0, {10 * phase};"
        body += "@%p2 st.shared.b32 [%r8+64], %r3;" + arriving("%p2", 0, space)
    body += "bra.uni LEAVE; TAKE: " + of_lane(0, 20)
    for phase in range(5):
        body += waiting(phase % 2, space) + "ld.shared.b32 %r5, [%r1+64]; ld.shared.v2.b32 {%r6, %r7}, [%r1+72];"
        body += "add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r7; bar.warp.sync -1;" + arriving("%p3", 0, space, "%r4")
        body += f"st.global.b32 [ %rd10 + {4 * phase} ], {{ %r5 }};"
    body += "LEAVE: bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r1];"
    sums = np.zeros((64, 5), "u4")
    assert launched(body, sums, threads=64, shared=512) == []
    assert sums[32:].tolist() == [[5 + 30 * phase for phase in range(5)]] * 32


def test_mbarrier_try_wait_gives_up():
    """9.7.13.15.16: it may suspend a thread, but not for ever: while a phase lasts it turns false."""
    body = "setp.eq.b32 %p1, %r0, 0; mov.b32 %r3, 0; mov.b32 %r4, 0;"
    body += "@%p1 mbarrier.init.shared::cta.b64 [%r1], 4; bar.sync 0;"
    for _ in range(3):
        body += "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], %r3; selp.b32 %r5, 1, 0, %p2;"
        body += "or.b32 %r4, %r4, %r5; bar.sync 0;" + arriving("%p1")
    found = np.ones(64, "u4")
    body += of_lane(0, 4) + "st.global.b32 [ %rd10 + 0 ], { %r4 };"
    assert launched(body, found, threads=64, shared=64) == []
    assert found.tolist() == [0] * 64


READ_AT = [(0, 0), (5, 3), (-3, -2), (COLUMNS - 4, ROWS - 2), (COLUMNS - 9, -1), (COLUMNS, 0), (-130, 4)]
WRITTEN_AT = [(-3, -2), (COLUMNS - 4, ROWS - 2), (10, 12), (COLUMNS, 0), (0, -12)]  # boxes apart from each other
BOXES = [(0, 16), (0, 96), (1, 32), (2, 64), (3, 128)]  # swizzle, bytes of a row


def tensor_copies(kind: int, swizzle: int, span: int, corners: list[tuple[int, int]], copy: str) -> str:
    """Array 2 to shared memory, the map, and a copy for each corner; %r50 is a barrier beside the map."""
    body = moved(REGION * 8, False, 2) + FENCED + tensor_map(kind, span // np.dtype(ELEMENTS[kind]).itemsize, swizzle)
    body += "add.s32 %r50, %r1, 1024; @%p2 mbarrier.init.shared::cta.b64 [%r50], 1;"
    body += (
        "fence.mbarrier_init.release.cluster; bar.sync 0;"
        + arriving("%p2", TALL * span * len(corners), barrier="%r50")
        + "bar.sync 0;"
    )
    for n, (x, y) in enumerate(corners):
        body += f"mov.b32 %r10, {x}; mov.b32 %r11, {y}; add.s32 %r12, %r1, {REGION * (n + 1)}; @%p3 {copy};"
    return body


def tensor_loads(kind: int, swizzle: int, span: int, space: str = "shared::cta") -> str:
    copy = f"cp.async.bulk.tensor.2d.{space}.global.mbarrier::complete_tx::bytes [%r12], [%rd5, {{%r10, %r11}}], [%r50]"
    return tensor_copies(kind, swizzle, span, READ_AT, copy) + waiting(0, barrier="%r50") + moved(REGION * 8, True, 2)


def tensor_stores(kind: int, swizzle: int, span: int, wait: str) -> str:
    copy = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd5, {%r10, %r11}], [%r12]"
    return tensor_copies(kind, swizzle, span, WRITTEN_AT, copy) + f"cp.async.bulk.commit_group; {wait} 0;"


def each_box(usual: str, seldom: str) -> list:
    """Every kind of element with every box and the usual form, one kind with the other form too."""
    cases = [*itertools.product(ELEMENTS, BOXES, [usual]), *itertools.product([0xA], BOXES, [seldom])]
    return [pytest.param(*case, id=f"type {case[0]} swizzle {case[1][0]} of {case[1][1]} {case[2]}") for case in cases]


def boxed(kind: int, swizzle: int, span: int, corners: list[tuple[int, int]]) -> Iterator[tuple[int, int | None]]:
    """For each byte of each box where it lies in shared memory, and where in the matrix, if anywhere."""
    size = np.dtype(ELEMENTS[kind]).itemsize
    for n, (x, y) in enumerate(corners):
        for row, byte in itertools.product(range(TALL), range(span)):
            inside = 0 <= y + row < ROWS and 0 <= x + byte // size < COLUMNS
            at = REGION * (n + 1) + swizzled(row * span + byte, {0: 16, 1: 32, 2: 64, 3: 128}[swizzle])
            yield at, ((y + row) * 160 + x) * size + byte if inside else None


@pytest.mark.parametrize(("kind", "box", "space"), each_box("shared::cta", "shared::cluster"))
def test_tensor_loads(kind, box, space):
    """9.7.9.27: what lies outside the matrix arrives as zeros, and counts among the barrier's bytes."""
    matrix, room, image = tensor_arrays(kind)
    expected, given = image.copy(), matrix.copy()
    for at, source in boxed(kind, *box, READ_AT):
        expected[at] = 0 if source is None else matrix[source]
    assert launched(tensor_loads(kind, *box, space), matrix, room, image, threads=128, shared=REGION * 8) == []
    assert np.array_equal(image[REGION:], expected[REGION:])
    assert np.array_equal(matrix, given)


def test_tensor_loads_see_what_a_fence_has_passed_on():
    matrix, room, image = tensor_arrays(0xA)
    body = of_lane(0, 4) + "st.global.b32 [ %rd10 + 0 ], { %r0 }; fence.proxy.async.global; bar.sync 0;"
    body += tensor_loads(0xA, 3, 128)
    assert launched(body, matrix, room, image, threads=128, shared=REGION * 8) == []
    assert matrix[:512].view("u4").tolist() == list(range(128))
    for at, source in boxed(0xA, 3, 128, READ_AT[:1]):
        assert image[at] == (0 if source is None else matrix[source])


@pytest.mark.parametrize(("kind", "box", "wait"), each_box("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group"))
def test_tensor_stores(kind, box, wait):
    """What lies outside the matrix is not written, in the rows' padding neither."""
    matrix, room, image = tensor_arrays(kind)
    expected = matrix.copy()
    for at, target in boxed(kind, *box, WRITTEN_AT):
        if target is not None:
            expected[target] = image[at]
    assert launched(tensor_stores(kind, *box, wait), matrix, room, image, threads=128, shared=REGION * 8) == []
    assert np.array_equal(matrix, expected)


@pytest.mark.parametrize(
    ("fence", "complete"),
    [
        (FENCED, True),
        ("bar.sync 0; @%p1 fence.proxy.async.shared::cta;", True),  # by the warp that issues, of what it knows
        ("bar.sync 0; @!%p1 fence.proxy.async.shared::cta; bar.sync 0;", True),  # by others, and it knows
        ("bar.sync 0; @!%p1 fence.proxy.async.shared::cta;", False),  # by others, of which it does not know
        ("@!%p1 fence.proxy.async.shared::cta; bar.sync 0;", False),  # by others, of their own writes
        ("@%p1 fence.proxy.async.shared::cta; bar.sync 0;", False),  # of its own writes
        ("bar.sync 0; fence.proxy.async.global;", False),
    ],
)
def test_a_proxy_fence_lies_between_a_write_and_an_asynchronous_read(fence, complete):
    """8.9.5 and 8.9.6: in causality order, by whichever thread."""
    body = moved(REGION * 2, False, 2) + FENCED + tensor_map(0xA, 48, 0) + "add.s32 %r12, %r1, 2048; mov.b32 %r10, 0;"
    body += f"mad.lo.s32 %r8, %r0, 4, %r12; st.shared.b32 [%r8], %r0; {fence}"
    body += "@%p3 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd5, {%r10, %r10}], [%r12];"
    body += "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    reports = launched(body, *tensor_arrays(0xA), threads=128, shared=REGION * 2)
    assert (reports == []) is complete
    assert complete or all("without a fence.proxy.async" in each for each in reports)


# --- Descriptors that the host makes

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
)
NUMBERS = {0x0: 0, 0x6: 6, 0x7: 7, 0xA: 9}  # of the types in ELEMENTS for CUDA's driver
Encode = Callable[..., int]


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Encode:
    """cuTensorMapEncodeTiled of a matrix of two dimensions, innermost first; returns the driver's status."""
    library = ctypes.CDLL(str(stub_cuda.build(tmp_path_factory.mktemp("stub"))))

    def encoded(map_: np.ndarray, kind: int, address: int, sizes, pitch: int, box, swizzle: int = 0) -> int:
        longs, words_ = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
        where, of = ctypes.c_void_p(map_.ctypes.data), ctypes.c_void_p(address)
        rest = longs(*sizes), longs(pitch), words_(*box), words_(1, 1), 0, swizzle, 2, 0
        return int(library.cuTensorMapEncodeTiled(where, kind, 2, of, *rest))

    return encoded


@needs_gcc
@pytest.mark.parametrize(("kind", "box"), [(kind, BOXES[n]) for kind, n in zip([*ELEMENTS, 0xA], range(5))])
def test_tensor_loads_by_a_parameter(encode, kind, box):
    """A descriptor that is a parameter is named by its address."""
    swizzle, span = box
    matrix, room, image = tensor_arrays(kind)
    expected, size = image.copy(), np.dtype(ELEMENTS[kind]).itemsize
    for at, source in boxed(kind, *box, READ_AT):
        expected[at] = 0 if source is None else matrix[source]
    given, sizes = tensor_arrays(kind)[1], ((COLUMNS, ROWS), 160 * size, (span // size, TALL), swizzle)
    assert encode(given, NUMBERS[kind], matrix.ctypes.data, *sizes) == 0
    own, of_host = "cvta.global.u64 %rd5, %rd1;", "mov.b64 %rd7, k_param_3; cvta.param.u64 %rd5, %rd7;"
    body = tensor_loads(kind, *box)
    assert own in body
    text = kernel(addresses(3) + PREFIX + body.replace(own, of_host), ["ptr"] * 3 + ["u64"], threads=128)
    text = text.replace(".u64 k_param_3", ".align 64 .b8 k_param_3[128]")
    arrays = matrix, room, image, int.from_bytes(given.tobytes(), "little")
    assert run(text, *arrays, shared=REGION * 8) == []
    assert np.array_equal(image[REGION:], expected[REGION:])
    with pytest.raises(RuntimeError, match="read of a descriptor outside every allocation"):
        run(text.replace("%rd5, %rd7;", "%rd5, %rd7; add.s64 %rd5, %rd5, 64;"), *arrays, shared=REGION * 8)


@needs_gcc
def test_descriptors_have_the_numbers_of_the_isa_for_types_of_elements(encode):
    """CUDA's f64, bf16 and f32.ftz are 8, 9 and 10, those of 5.5.4 are 9, 10 and 8."""
    room, found = tensor_arrays(0)[1], []
    for kind in range(13):
        assert encode(room, kind, 0, (64, 4), 1024, (16, 4)) == 0
        found.append(int(room[12]))
    assert found == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12]


@needs_gcc
def test_a_descriptor_that_cuda_refuses_is_refused(encode):
    room = tensor_arrays(0)[1]
    good = {"address": 1 << 40, "sizes": (64, 4), "pitch": 128, "box": (32, 4), "swizzle": 2}
    wrong = [("address", 8), ("sizes", (64, 0)), ("pitch", 120), ("box", (32, 257)), ("box", (64, 4)), ("box", (4, 4))]
    assert encode(room, 6, **good) == 0
    assert [each for each in wrong if encode(room, 6, **good | dict([each])) == 0] == []
    assert encode(room[1:], 6, **good) != 0


# --- Faults: with what follows each body it is reported, without it not

PASSED = "mad.lo.s32 %r8, %r0, 4, %r1; st.shared.b32 [%r8], %r0; bar.sync 0; sub.s32 %r9, 63, %r0;"
PASSED += "mad.lo.s32 %r9, %r9, 4, %r1; ld.shared.b32 %r10, [%r9];" + of_lane(0, 4)
PASSED += "st.global.b32 [%rd10+0], %r10;"
BOUNDED = "setp.lt.u32 %p1, %r0, 60; mov.b32 %r3, 1;" + of_lane(0, 4)
STORED, LOADED = "@%p1 st.global.b32 [ %rd10 + 16 ], { %r3 };", "@%p1 ld.global.b32 { %r3 }, [ %rd10 + 16 ];"
COPIED = of_lane(0, 4) + "mad.lo.s32 %r8, %r0, 4, %r1; mov.b32 %r9, 4;"
COPIED += "cp.async.ca.shared.global [ %r8 + 0 ], [ %rd10 + 0 ], 0x4, %r9; cp.async.commit_group;"
READ = "ld.shared.b32 %r10, [%r8]; st.global.b32 [ %rd10 + 0 ], { %r10 };"
TAKEN, PUT = tensor_loads(0xA, 3, 128), tensor_stores(0xA, 3, 128, "cp.async.bulk.wait_group.read")
REUSED = "bar.sync 0; mov.b32 %r3, 0; @%p2 st.shared.b32 [%r1+4096], %r3;"

FAULTS: dict[str, tuple[str, str, str]] = {
    "a store past an array": (BOUNDED + STORED, "@%p1 st", "st"),
    "a load past an array": (BOUNDED + LOADED, "@%p1 ld", "ld"),
    "a load before an array": (BOUNDED + LOADED.replace("+ 16", "+ 0"), "+ 0", "+ -4"),
    "a race between warps": (PASSED, "bar.sync 0;", ""),
    "a read past shared memory": (PASSED, "ld.shared.b32 %r10, [%r9]", "ld.shared.b32 %r10, [%r9+16384]"),
    "a read of what was not written": (PASSED, "st.shared.b32 [%r8], %r0;", ""),
    "a copy not waited for": (COPIED + "cp.async.wait_group 0;" + READ, "cp.async.wait_group 0;", ""),
    "a copy in the newest group": (COPIED + "cp.async.wait_group 0;" + READ, "wait_group 0", "wait_group 1"),
    "a copy of another thread": (
        COPIED + "cp.async.wait_group 0; bar.sync 0; xor.b32 %r8, %r8, 128;" + READ,
        "bar.sync 0;",
        "",
    ),
    "a tensor load not waited for": (TAKEN, waiting(0, barrier="%r50"), ""),
    "a tensor store without a fence": (PUT, FENCED, "bar.sync 0;"),
    "a tensor store's source overwritten": (PUT + REUSED, "cp.async.bulk.wait_group.read 0;", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault):
    body, part, instead = FAULTS[fault]
    assert part in body

    def reports(text: str) -> list[str]:
        if "tensor" in fault:
            return launched(text, *tensor_arrays(0xA), threads=128, shared=REGION * 8)
        return launched(text, words(64), threads=64, shared=REGION * 8)

    assert reports(body) == []
    assert reports(instead.join(body.rsplit(part, 1))) != []


def test_a_tensor_load_is_named_by_its_own_instruction():
    """The first of two, whose place another warp writes, and for whose mbarrier no thread waits."""
    copy = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    body = moved(REGION * 2, False, 2) + FENCED + tensor_map(0xA, 32, 0) + "add.s32 %r50, %r1, 1024; mov.b32 %r10, 0;"
    body += "add.s32 %r51, %r50, 8; add.s32 %r12, %r1, 2048; add.s32 %r13, %r1, 3072; mov.b32 %r11, 12;"
    body += "".join(f"@%p2 mbarrier.init.shared::cta.b64 [{each}], 1;" for each in ("%r50", "%r51")) + FENCED
    body += "".join(arriving("%p2", 768, barrier=each) for each in ("%r50", "%r51"))
    body += "setp.eq.b32 %p4, %r0, 32; @%p4 st.global.b32 [%rd0], %r0;"
    body += f"@%p3 {copy} [%r12], [%rd5, {{%r10, %r10}}], [%r50]; @%p3 {copy} [%r13], [%rd5, {{%r10, %r11}}], [%r51];"
    ends = waiting(0, barrier="%r51")
    both = waiting(0, barrier="%r50") + ends.replace("waitLoop", "otherLoop")
    [race] = launched(body + both, *tensor_arrays(0xA), threads=128, shared=REGION * 2)
    assert race.startswith("race in global memory: read of what another warp wrote"), race
    assert "[%r12]" in race
    [never] = launched(body + ends, *tensor_arrays(0xA), threads=128, shared=REGION * 2)
    assert never.startswith("a tensor copy into shared memory that is never waited for"), never
    assert "[%r12]" in never
