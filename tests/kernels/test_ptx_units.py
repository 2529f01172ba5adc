"""The emulator of PTX across lanes and with its asynchronous units, against layouts and rules written out from the ISA.

Section numbers are those of the PTX ISA 8.7. Products are of small whole numbers, so that no order of sums matters.
"""

from __future__ import annotations

import itertools
import math
import random
import re

import numpy as np
import pytest
from ptx_text import (
    BF16,
    CODES,
    F16,
    F32,
    FENCED,
    FORMATS,
    LANES,
    Tile,
    a_place,
    add,
    assert_numbers,
    b_place,
    d_place,
    encoded,
    launched,
    moved,
    of_lane,
    per_thread,
    signed,
    vectors,
    words,
)

random.seed(21)
# --- Lanes of a warp


def shuffled(mode: str, values: list[int], b: list[int], c: int) -> list[int]:
    """9.7.9.6: c holds a limit in bits 0 to 4, and in bits 8 to 12 those of the lane that name its segment."""
    found, segment = [], c >> 8 & 31
    for lane in LANES:
        by, last = b[lane] & 31, (lane & segment) | (c & 31 & ~segment)
        if mode == "up":
            source = lane - by if lane - by >= last else lane
        else:
            sources = {"bfly": lane ^ by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}
            source = sources[mode]
            source = source if source <= last else lane
        found.append(values[source])
    return found


SHUFFLES = [("bfly", str(n), 31) for n in (1, 2, 4, 8, 16)] + [("up", str(n), 0) for n in (1, 2, 4, 8, 16)]
SHUFFLES += [
    ("idx", "0", 31),
    ("idx", "$b", 31),
    ("bfly", "1", 0x181F),
    ("up", "3", 0x1800),
    ("down", "9", 31),
    ("down", "3", 0x181F),
    ("idx", "5", 0x181F),
]


@pytest.mark.parametrize(("mode", "by", "c"), SHUFFLES)
def test_shuffles(mode, by, c):
    values, other = words(64), words(64)
    other[:32] = 31 - np.arange(32)
    (found,) = per_thread(f"shfl.sync.{mode}.b32 $d, $a, {by}, {c}, -1;", "d:u4", threads=32, a=values, b=other)
    for warp in (slice(0, 32), slice(32, 64)):
        b = other[warp].tolist() if by == "$b" else [int(by)] * 32
        assert found[warp].tolist() == shuffled(mode, values[warp].tolist(), b, c)


@pytest.mark.parametrize("name", ["add", "max"])
def test_redux(name):
    """9.7.13.12: over the lanes of the mask, here all of one warp, and of the next two halves apart."""
    values = words(64)
    masks = np.array([0xFFFFFFFF] * 32 + [0xFFFF] * 16 + [0xFFFF0000] * 16, "u4")
    body = "mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 63; setp.lt.u32 %p1, %r1, 48; mov.b32 $d, 0;"
    body += f"@%p1 redux.sync.{name}.s32 $d, $a, $b; @!%p1 redux.sync.{name}.s32 $d, $a, $b;"
    (found,) = per_thread(body, "d:u4", threads=64, a=values, b=masks)
    for group in (slice(0, 32), slice(32, 48), slice(48, 64)):
        numbers = [signed(each, 32) for each in values[group].tolist()]
        total = (sum(numbers) if name == "add" else max(numbers)) & 0xFFFFFFFF
        assert found[group].tolist() == [total] * len(numbers)


def test_elect_chooses_one_lane():
    (chosen,) = per_thread("elect.sync %r1|$d, -1;", "d:b", threads=32, a=words(96))
    assert chosen.reshape(3, 32).sum(1).tolist() == [1, 1, 1]


def test_elect_names_the_lane():
    leader, chosen = per_thread("elect.sync $d|$e, -1;", "d:u4 e:b", threads=32, a=words(96))
    assert leader.tolist() == [int(np.flatnonzero(warp)[0]) for warp in chosen.reshape(3, 32) for _ in LANES]


def test_barriers_order_shared_memory():
    """Through bar.sync a value passes between warps, through bar.warp.sync between lanes."""
    body = (
        of_lane(0, 4)
        + """
        ld.global.b32 { %r3 }, [ %rd10 + 0 ]; mad.lo.s32 %r4, %r0, 4, %r1; st.shared.b32 [%r4], %r3;
        bar.sync 0;
        sub.s32 %r5, 127, %r0; mad.lo.s32 %r5, %r5, 4, %r1; ld.shared.b32 %r6, [%r5];
        bar.sync 0;
        st.shared.b32 [%r4], %r6;
        bar.warp.sync -1;
        xor.b32 %r7, %r0, 1; mad.lo.s32 %r7, %r7, 4, %r1; ld.shared.b32 %r8, [%r7];
    """
        + of_lane(1, 4)
        + "st.global.b32 [ %rd10 + 0 ], { %r8 };"
    )
    given, found = words(128), np.zeros(128, "u4")
    assert launched(body, given, found, threads=128, shared=512) == []
    assert found.tolist() == [given[127 - (n ^ 1)] for n in range(128)]


ADD, EXCHANGE = "atom.global.gpu.acq_rel.add.u32", "atom.global.sys.release.exch.b32"


def test_atomic_addition():
    """Each lane sees another sum of those before it, and a sum wraps at 2^32; lanes whose guard fails add nothing."""
    body = (
        of_lane(1, 8)
        + f"""
        and.b32 %r3, %r0, 3; setp.ne.b32 %p1, %r3, 0; mov.b32 %r4, -7; mov.b32 %r5, 2147483647;
        @%p1 {ADD} %r4, [ %rd0 + 4 ], %r5;
        mov.u32 %r6, %ctaid.x; mul.wide.u32 %rd11, %r6, 512; add.s64 %rd10, %rd10, %rd11;
        st.global.b32 [ %rd10 + 0 ], {{ %r4 }};
    """
    )
    total, seen = np.array([5, 0xFFFFFFF0, 9], "u4"), np.zeros((2, 64, 2), "u4")
    assert launched(body, total, seen, threads=64, blocks=2) == []
    steps = [(0xFFFFFFF0 + n * 0x7FFFFFFF) % 2**32 for n in range(97)]
    assert total.tolist() == [5, steps[96], 9]
    adders = np.arange(64) % 4 != 0
    assert sorted(seen[:, adders, 0].flatten().tolist()) == sorted(steps[:96])
    assert (seen[:, ~adders, 0] == 2**32 - 7).all()


@pytest.mark.parametrize("form", [EXCHANGE, "atom.acq_rel.gpu.global.exch.b32", "atom.release.sys.global.exch.b32"])
def test_atomic_exchange(form):
    """What was there and what the lanes brought is what they saw and what is left."""
    body = of_lane(1, 4) + f"add.s32 %r3, %r0, 100; {form} %r4, [%rd0+4], %r3; st.global.b32 [ %rd10 + 0 ], {{ %r4 }};"
    place, seen = np.array([1, 2, 3], "u4"), np.zeros(64, "u4")
    assert launched(body, place, seen, threads=64) == []
    assert sorted([*seen.tolist(), int(place[1])]) == [2, *range(100, 164)]
    assert place[[0, 2]].tolist() == [1, 3]


SUMS = ["f32", "v2.f32", "v4.f32", "noftz.f16", "noftz.v8.f16", "noftz.bf16", "noftz.v4.bf16"]
SUMS += ["noftz.f16x2", "noftz.v4.f16x2", "noftz.bf16x2", "noftz.v2.bf16x2"]


@pytest.mark.parametrize("form", SUMS)
def test_atomic_sums_of_floating_point_numbers(form):
    """9.7.13.5: each element by itself, rounded once; fp32's subnormal numbers are zeros, 16-bit ones are kept."""
    name = form.split(".")[-1]
    format_ = {"f32": F32, "f16": F16, "bf16": BF16}[name.removesuffix("x2")]
    vector = re.search(r"v(\d)", form)
    registers, size = int(vector[1]) if vector else 1, 4 if name == "f32" or name.endswith("x2") else 2
    width, kind = registers * size, {2: "rs", 4: "r"}[size]
    codes = [each for each in CODES[format_] if math.isfinite(format_.decode(each))]
    codes += [each ^ random.getrandbits(4) for each in codes if 0 < abs(format_.decode(each)) < 1e30]
    numbers = lambda count: np.array(random.choices(codes, k=count), f"u{format_.width // 8}")
    elements = width * 8 // format_.width
    given, places = numbers(128 * elements).reshape(128, -1), numbers(61 * elements).reshape(61, -1)
    expected_seen, expected = np.zeros_like(given), places.copy()
    for lane in range(128):
        for k in range(elements if lane % 8 != 5 else 0):
            expected_seen[lane, k] = expected[lane % 61, k]
            pair = [format_.decode(int(each)) for each in (expected[lane % 61, k], given[lane, k])]
            pair = [format_.flushed(each) for each in pair] if format_ is F32 else pair
            expected[lane % 61, k] = format_.encode(add(*pair), flush=format_ is F32)
    lists = ["{" + ", ".join(f"%{kind}{first + n}" for n in range(registers)) + "}" for first in (10, 30)]
    into, source = lists if registers > 1 else ("%" + kind + "10", "%" + kind + "30")
    body = of_lane(0, width) + "rem.u32 %r3, %r0, 61; and.b32 %r4, %r0, 7; setp.ne.b32 %p1, %r4, 5;"
    body += "".join(f"ld.global.b{8 * size} %{kind}{30 + n}, [%rd10+{size * n}];" for n in range(registers))
    body += "".join(f"mov.b{8 * size} %{kind}{10 + n}, 0;" for n in range(registers)) + of_lane(2, width)
    body += f"mul.wide.u32 %rd11, %r3, {width}; add.s64 %rd11, %rd11, %rd1;"
    body += f"@%p1 atom.global.gpu.acq_rel.add.{form} {into}, [%rd11+0], {source};"
    body += "".join(f"st.global.b{8 * size} [%rd10+{size * n}], %{kind}{10 + n};" for n in range(registers))
    seen, found = np.zeros_like(given), places.copy()
    assert launched(body, given, found, seen, threads=128) == []
    assert_numbers(format_, found.flatten(), expected.flatten().tolist())
    assert_numbers(format_, seen.flatten(), expected_seen.flatten().tolist())


def test_atomic_sums_of_doubles_and_reductions():
    given, total, single = np.array([random.gauss(0, 1) for _ in LANES]), np.zeros(1), np.zeros(4, "f4")
    body = of_lane(0, 8) + "ld.global.b64 %rd5, [%rd10]; atom.global.gpu.relaxed.add.f64 %rd6, [%rd1], %rd5;"
    body += "red.global.gpu.relaxed.add.f32 [%rd2+4], 0f3F800000;"
    assert launched(body, given, total, single) == []
    assert total[0] == sum(given.tolist())
    assert single.tolist() == [0, 32, 0, 0]


def test_a_vector_of_atomic_sums_is_aligned_as_a_whole():
    body = "mov.b32 %r3, 0; red.global.gpu.relaxed.add.v2.f32 [%rd0+4], {%r3, %r3};"
    [report] = launched(body, np.zeros(5, "u8"))
    assert report.startswith("misaligned atomic: "), report


# --- Matrices of eight rows in shared memory


def row_and_column(lane: int, half: int, trans: str) -> tuple[int, int]:
    """Of the element in a half of a lane's register: row lane / 4, or column lane / 4 if transposed."""
    place = lane // 4, 2 * (lane % 4) + half
    return place[::-1] if trans else place


def matrix_rows(count: int) -> tuple[np.ndarray, list[int]]:
    """Addresses for the lanes and the rows of 8 elements there; lanes that name no matrix's row point far away."""
    rows = random.sample(range(63), 32)
    return np.array([16 * row if lane < 8 * count else 1 << 20 for lane, row in enumerate(rows)], "u4"), rows


@pytest.mark.parametrize("place", ["[%r9]", "[%r9+16]"])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans, place):
    """Lane 8 i + r names row r of matrix i, whose elements go to register i of all lanes."""
    names = ", ".join(f"%r{20 + n}" for n in range(count))
    body = moved(1024, False, 0, 32) + "bar.sync 0;" + of_lane(1, 4)
    body += "ld.global.b32 { %r9 }, [ %rd10 + 0 ]; add.s32 %r9, %r9, %r1;"
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, {place};" + of_lane(2, 16)
    body += "".join(f"st.global.b32 [ %rd10 + {4 * n} ], {{ %r{20 + n} }};" for n in range(count))
    image, found, (where, rows) = np.arange(512, dtype=np.uint16) * 77, np.zeros((32, 8), "u2"), matrix_rows(count)
    assert launched(body, image, where, found, shared=1024) == []
    for lane, matrix, half in itertools.product(LANES, range(count), range(2)):
        (row, column), below = row_and_column(lane, half, trans), int("+16" in place)
        assert found[lane, 2 * matrix + half] == image[8 * (rows[8 * matrix + row] + below) + column]


@pytest.mark.parametrize("place", ["[%r9]", "[%r9+16]"])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans, place):
    names = ", ".join(f"%r{20 + n}" for n in range(count))
    body = moved(1024, False, 2, 32) + "bar.sync 0;" + of_lane(0, 16)
    body += "".join(f"ld.global.b32 {{ %r{20 + n} }}, [ %rd10 + {4 * n} ];" for n in range(count)) + of_lane(1, 4)
    body += "ld.global.b32 { %r9 }, [ %rd10 + 0 ]; add.s32 %r9, %r9, %r1;"
    body += f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {place}, {{{names}}}; bar.sync 0;"
    given, found, (where, rows) = words(128).view("u2").reshape(32, 8), words(256).view("u2"), matrix_rows(count)
    expected = found.copy()
    assert launched(body + moved(1024, True, 2, 32), given, where, found, shared=1024) == []
    for lane, matrix, half in itertools.product(LANES, range(count), range(2)):
        (row, column), below = row_and_column(lane, half, trans), int("+16" in place)
        expected[8 * (rows[8 * matrix + row] + below) + column] = given[lane, 2 * matrix + half]
    assert found.tolist() == expected.tolist()


# --- Tensor cores


def small(*shape: int) -> np.ndarray:
    """Numbers that every format holds, whose products' sums single precision holds."""
    picked = [random.choice([-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.5]) for _ in range(math.prod(shape))]
    return np.array(picked).reshape(shape)


MMA = [("m16n8k16", "bf16", "bf16"), ("m16n8k16", "f16", "f16"), ("m16n8k8", "tf32", "tf32")]
MMA += [("m16n8k32", "e4m3", "e4m3"), ("m16n8k32", "e5m2", "e4m3")]


def multiplied(shape: str, first: str, second: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The 16 x 8 result of one mma, its fragments placed element by element."""
    k, size = a.shape[1], FORMATS[first].width // 8
    codes_a, codes_b = encoded(a, FORMATS[first]), encoded(b, FORMATS[second])
    fragments_a, fragments_b = np.zeros((32, 16 // size), codes_a.dtype), np.zeros((32, 8 // size), codes_b.dtype)
    assert 16 // size * 32 == 16 * k
    fragments_c = np.zeros((32, 4), "f4")
    for lane in LANES:
        for i in range(16 // size):
            fragments_a[lane, i] = codes_a[a_place(size, lane, i)]
        for i in range(8 // size):
            fragments_b[lane, i] = codes_b[b_place(size, lane, i)]
        for i in range(4):
            fragments_c[lane, i] = c[d_place(lane, i)]
    body = of_lane(0, 16) + "ld.global.v4.b32 { %r10, %r11, %r12, %r13 }, [ %rd10 + 0 ];"
    body += of_lane(1, 8) + "ld.global.v2.b32 { %r14, %r15 }, [ %rd10 + 0 ];"
    body += of_lane(2, 16) + "ld.global.v4.b32 { %r16, %r17, %r18, %r19 }, [ %rd10 + 0 ];"
    body += f"mma.sync.aligned.{shape}.row.col.f32.{first}.{second}.f32 {{ %r16, %r17, %r18, %r19 }}, "
    body += "{ %r10, %r11, %r12, %r13 }, { %r14, %r15 }, { %r16, %r17, %r18, %r19 };"
    body += "st.global.v4.b32 [ %rd10 + 0 ], { %r16, %r17, %r18, %r19 };"
    assert launched(body, fragments_a, fragments_b, fragments_c) == []
    found = np.zeros((16, 8))
    for lane, i in itertools.product(LANES, range(4)):
        found[d_place(lane, i)] = fragments_c[lane, i]
    return found


@pytest.mark.parametrize(("shape", "first", "second"), MMA)
def test_mma(shape, first, second):
    k = int(shape.split("k")[1])
    a, b, c = small(16, k), small(k, 8), small(16, 8)
    found = multiplied(shape, first, second, a, b, c)
    for row, column in itertools.product(range(16), range(8)):
        assert found[row, column] == sum(a[row, i] * b[i, column] for i in range(k)) + c[row, column], (row, column)


@pytest.mark.parametrize(("shape", "first", "second"), MMA)
def test_mma_with_infinities_nan_and_subnormal_numbers(shape, first, second):
    k = int(shape.split("k")[1])
    a, b, c = small(16, k), np.ones((k, 8)), np.zeros((16, 8))
    a[1, 3] = math.nan
    if first != "e4m3":  # which has no infinity
        a[2, 5], a[3, 1], a[3, 2], a[4, 0] = math.inf, math.inf, -math.inf, -math.inf
        b[0, 2] = 0  # -inf * 0
    least = 2.0 ** (1 - FORMATS[first].bias - FORMATS[first].mantissa)
    if first != "tf32":
        a[5], a[5, 1] = 0, least  # a subnormal number of the format
    found = multiplied(shape, first, second, a, b, c)
    expected = np.zeros((16, 8))
    for row, column in itertools.product(range(16), range(8)):
        expected[row, column] = sum(float(a[row, i]) * float(b[i, column]) for i in range(k))
    assert np.array_equal(found, expected, equal_nan=True), np.argwhere(found != expected)


WAITED = "wgmma.wait_group.sync.aligned 0;"


def warp_group_product(
    n: int, first: str, second: str, a: Tile | None, b: Tile, scale: str, signs: str = "1, 1"
) -> str:
    """Array 1 <- A B + array 1, for each step of k; A from array 0 like B, or without a tile from array 2."""
    k, before = 256 // FORMATS[first].width, a.bytes if a else 0
    steps = min(tile.k for tile in (a, b) if tile) // k
    registers = ",".join(f"%r{100 + j}" for j in range(n // 2))
    body = moved(before + b.bytes, False, 0) + FENCED
    body += "" if a else of_lane(2, 16 * steps) + vectors("ld", 20, 4 * steps)
    body += of_lane(1, 2 * n) + vectors("ld", 100, n // 2)
    body += "setp.eq.b32 %p1, %r0, %r0; setp.ne.b32 %p2, %r0, %r0; wgmma.fence.sync.aligned;"
    for step in range(steps):
        source = "%rd12" if a else "{" + ",".join(f"%r{20 + 4 * step + j}" for j in range(4)) + "}"
        body += a.descriptor(source, f"add.s32 %r9, %r1, {a.step * step};") if a else ""
        body += b.descriptor("%rd13", f"add.s32 %r9, %r1, {before + b.step * step};")
        body += f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{first}.{second} {{{registers}}}, {source}, %rd13, "
        body += f"{scale if step == 0 else '%p1'}, {signs}"
        body += "".join(f", {int(tile.along == 'mn')}" for tile in (a, b) if tile and tile.size == 2) + ";"
    return body + "wgmma.commit_group.sync.aligned;" + WAITED + vectors("st", 100, n // 2)


# n, formats, where A lies (its contiguous dimension and span; or registers), where B lies, scale-d
WGMMA = [
    (16, "bf16", "bf16", "k 128", "k 128", "%p1"),
    (16, "bf16", "bf16", "mn 128", "k 128", "0"),
    (16, "f16", "f16", "k 64", "k 64", "%p1"),
    (16, "f16", "f16", "mn 32", "mn 32", "%p2"),
    (16, "e4m3", "e4m3", "k 128", "k 128", "%p1"),
    (16, "tf32", "tf32", "registers", "k 128", "%p1"),
    (16, "tf32", "tf32", "registers", "k 32", "0"),
    (32, "bf16", "bf16", "k 128", "mn 64", "%p1"),
    (32, "bf16", "bf16", "mn 64", "k 32", "%p1"),
    (32, "f16", "f16", "k 32", "k 64", "0"),
    (64, "bf16", "bf16", "mn 128", "mn 128", "%p1"),
    (64, "bf16", "bf16", "registers", "mn 128", "%p1"),
    (64, "f16", "f16", "registers", "mn 128", "0"),
    (64, "tf32", "tf32", "k 128", "k 128", "%p1"),
    (64, "tf32", "tf32", "registers", "k 64", "%p2"),
    (128, "bf16", "bf16", "mn 128", "mn 128", "0"),
    (128, "bf16", "bf16", "k 128", "mn 128", "%p1"),
    (128, "f16", "f16", "registers", "mn 64", "%p1"),
    (128, "e5m2", "e4m3", "k 128", "k 64", "0"),
    (128, "tf32", "tf32", "k 64", "k 32", "%p1"),
    (256, "bf16", "bf16", "k 128", "k 128", "%p1"),
    (256, "bf16", "bf16", "registers", "mn 128", "%p1"),
    (256, "f16", "f16", "mn 128", "mn 128", "%p1"),
    (256, "e4m3", "e4m3", "k 64", "k 32", "%p1"),
    (16, "f16", "f16", "k 128", "k 64", "0"),
    (32, "bf16", "bf16", "k 64", "k 128", "0"),
    (32, "f16", "f16", "k 128", "k 128", "%p1"),
    (64, "bf16", "bf16", "k 128", "k 128", "0"),
    (64, "f16", "f16", "k 128", "k 64", "%p1"),
    (64, "f16", "f16", "mn 128", "mn 64", "0"),
    (64, "tf32", "tf32", "registers", "k 128", "0"),
    (128, "bf16", "bf16", "registers", "mn 128", "%p1"),
    (128, "tf32", "tf32", "registers", "k 64", "%p1"),
    (256, "f16", "f16", "registers", "mn 128", "%p1"),
]


@pytest.mark.parametrize(("n", "first", "second", "left", "right", "scale"), WGMMA)
def test_wgmma(n, first, second, left, right, scale):
    """Scale-d false ignores what D held, NaN too. Steps of k move the start within a swizzled row, or to other rows."""
    tile_a = None if left == "registers" else Tile(64, FORMATS[first], left)
    tile_b, step = Tile(n, FORMATS[second], right), 256 // FORMATS[first].width
    k = min(tile.k for tile in (tile_a, tile_b) if tile)
    a, b, c = small(64, tile_a.k if tile_a else k), small(n, tile_b.k), small(64, n)
    c[:] = c if scale == "%p1" else math.nan
    image = np.frombuffer((tile_a.image(a) if tile_a else b"") + tile_b.image(b) + bytes(2048), "u1").copy()
    held = np.zeros((4, 32, n // 2), "f4")
    for warp, lane, i in np.ndindex(*held.shape):
        row, column = d_place(lane, i)
        held[warp, lane, i] = c[16 * warp + row, column]
    arrays = [image, held]
    if tile_a is None:
        codes = encoded(a, FORMATS[first])
        registers = np.zeros((4, 32, k // step, step // 2), codes.dtype)
        for warp, lane, s, i in np.ndindex(*registers.shape):
            row, column = a_place(codes.itemsize, lane, i)
            registers[warp, lane, s, i] = codes[16 * warp + row, column + step * s]
        arrays.append(registers)
    body = warp_group_product(n, first, second, tile_a, tile_b, scale)
    assert launched(body, *arrays, threads=128, shared=image.nbytes) == []
    expected = a[:, :k] @ b[:, :k].T + (c if scale == "%p1" else 0)
    for warp, lane, i in np.ndindex(*held.shape):
        row, column = d_place(lane, i)
        assert held[warp, lane, i] == expected[16 * warp + row, column], (warp, lane, i)


@pytest.mark.parametrize("without", [FENCED, "wgmma.fence.sync.aligned;", WAITED])
def test_what_orders_a_product_is_asked_for(without):
    """Operands behind a fence of the asynchronous proxy, registers behind wgmma.fence, results once waited for."""
    tiles = Tile(64, F16, "k 32"), Tile(16, F16, "k 32")
    body, count = warp_group_product(16, "f16", "f16", *tiles, "%p1"), tiles[0].bytes + tiles[1].bytes
    held, room = np.zeros((128, 8), "f4"), np.zeros(count + 2048, "u1")
    assert launched(body, room, held, threads=128, shared=room.nbytes) == []
    body = body.replace(without, "bar.sync 0;" if without == FENCED else "")
    assert launched(body, room, held, threads=128, shared=room.nbytes) != []


def test_registers_of_a_product_under_way_are_left_alone():
    """wgmma.wait_group: until then a product may read A's registers, and writing into them is undefined."""
    tile = Tile(16, F16, "k 32")
    body = warp_group_product(16, "f16", "f16", None, tile, "%p1")
    late = body.replace(WAITED, WAITED + "mov.b32 %r20, 0x3C003C00;")
    early = body.replace(WAITED, "mov.b32 %r20, 0x3C003C00;" + WAITED)
    held, registers, room = np.zeros((128, 8), "f4"), np.zeros((128, 4), "u4"), np.zeros(tile.bytes + 2048, "u1")
    assert launched(late, room, held, registers, threads=128, shared=room.nbytes) == []
    [report] = launched(early, room, held, registers, threads=128, shared=room.nbytes)
    assert report.startswith("registers with a wgmma's A are written before its wait"), report
