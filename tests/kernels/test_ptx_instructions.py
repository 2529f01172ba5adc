"""The emulator of PTX, instruction by instruction within a thread, against the PTX ISA restated in Python's numbers.

Section numbers are those of the PTX ISA 8.7. What the ISA leaves open (an integer's quotient by zero, NaN's payload)
is not asserted.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from ptx_text import (
    EDGES,
    FEW,
    HALVES,
    LONGS,
    WORDS,
    addresses,
    batch,
    columns,
    compared,
    kernel,
    per_thread,
    signed,
)

from shardfuse.kernels.dev.ptx.launch import run


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# (text, the operands' types, the result's type, its meaning for integers of those types); a and b are registers
INTEGER: list[tuple[str, str, str, Callable[..., int]]] = [
    ("add.s16 $d, $a, -7", "s16", "s16", lambda a: a - 7),
    ("add.s32 $d, $a, $b", "s32 s32", "s32", operator.add),
    ("add.s32 $d, $a, 2147483647", "s32", "s32", lambda a: a + 2**31 - 1),
    ("add.s32 $d, $a, -2147483648", "s32", "s32", lambda a: a - 2**31),
    ("add.s64 $d, $a, $b", "s64 s64", "s64", operator.add),
    ("add.s64 $d, $a, -8", "s64", "s64", lambda a: a - 8),
    ("sub.s16 $d, $a, $b", "s16 s16", "s16", operator.sub),
    ("sub.s32 $d, $a, $b", "s32 s32", "s32", operator.sub),
    ("sub.s32 $d, 31, $a", "s32", "s32", lambda a: 31 - a),
    ("sub.s64 $d, $a, $b", "s64 s64", "s64", operator.sub),
    ("sub.u64 $d, $a, $b", "u64 u64", "u64", operator.sub),
    ("mul.lo.s16 $d, $a, 41", "s16", "s16", lambda a: a * 41),
    ("mul.lo.s32 $d, $a, $b", "s32 s32", "s32", operator.mul),
    ("mul.lo.s32 $d, $a, -1030", "s32", "s32", lambda a: a * -1030),
    ("mul.lo.s64 $d, $a, $b", "s64 s64", "s64", operator.mul),
    ("mul.lo.s64 $d, $a, 6148914691236517206", "s64", "s64", lambda a: a * 6148914691236517206),
    ("mul.hi.s32 $d, $a, $b", "s32 s32", "s32", lambda a, b: a * b >> 32),
    ("mul.hi.s32 $d, $a, -423447479", "s32", "s32", lambda a: a * -423447479 >> 32),
    ("mul.hi.u32 $d, $a, $b", "u32 u32", "u32", lambda a, b: a * b >> 32),
    ("mul.hi.u32 $d, $a, -1431655765", "u32", "u32", lambda a: a * (2**32 - 1431655765) >> 32),
    ("mul.hi.u16 $d, $a, -13107", "u16", "u16", lambda a: a * (2**16 - 13107) >> 16),
    ("mul.wide.s32 $d, $a, $b", "s32 s32", "s64", operator.mul),
    ("mul.wide.s32 $d, $a, -4", "s32", "s64", lambda a: a * -4),
    ("mul.wide.u32 $d, $a, 12", "u32", "u64", lambda a: a * 12),
    ("mad.lo.s32 $d, $a, $b, $c", "s32 s32 s32", "s32", lambda a, b, c: a * b + c),
    ("mad.lo.s32 $d, $a, 129, $b", "s32 s32", "s32", lambda a, b: a * 129 + b),
    ("mad.lo.s64 $d, $a, $b, $c", "s64 s64 s64", "s64", lambda a, b, c: a * b + c),
    ("mad.lo.s64 $d, $a, 24, $b", "s64 s64", "s64", lambda a, b: a * 24 + b),
    ("mad.wide.s32 $d, $a, $b, $c", "s32 s32 s64", "s64", lambda a, b, c: a * b + c),
    ("mad.wide.s32 $d, $a, 2, $b", "s32 s64", "s64", lambda a, b: a * 2 + b),
    ("mad.wide.u32 $d, $a, $b, $c", "u32 u32 u64", "u64", lambda a, b, c: a * b + c),
    ("mad.wide.u32 $d, $a, 2, $b", "u32 u64", "u64", lambda a, b: a * 2 + b),
    ("neg.s32 $d, $a", "s32", "s32", operator.neg),
    ("min.s32 $d, $a, $b", "s32 s32", "s32", min),
    ("min.s32 $d, $a, -2", "s32", "s32", lambda a: min(a, -2)),
    ("min.u32 $d, $a, 2", "u32", "u32", lambda a: min(a, 2)),
    ("min.relu.s32 $d, $a, $b", "s32 s32", "s32", lambda a, b: max(0, min(a, b))),
    ("max.s32 $d, $a, $b", "s32 s32", "s32", max),
    ("max.s32 $d, $a, 0", "s32", "s32", lambda a: max(a, 0)),
    ("max.s64 $d, $a, $b", "s64 s64", "s64", max),
    ("max.u32 $d, $a, 1", "u32", "u32", lambda a: max(a, 1)),
    ("and.b16 $d, $a, $b", "u16 u16", "u16", operator.and_),
    ("and.b16 $d, $a, 255", "u16", "u16", lambda a: a & 255),
    ("and.b32 $d, $a, -16", "u32", "u32", lambda a: a & -16),
    ("and.b64 $d, $a, 4294967295", "u64", "u64", lambda a: a & (2**32 - 1)),
    ("or.b16 $d, $a, $b", "u16 u16", "u16", operator.or_),
    ("or.b16 $d, $a, -32768", "u16", "u16", lambda a: a | 2**15),
    ("or.b32 $d, $a, $b", "u32 u32", "u32", operator.or_),
    ("or.b32 $d, $a, 2139095040", "u32", "u32", lambda a: a | 2139095040),
    ("or.b64 $d, $a, $b", "u64 u64", "u64", operator.or_),
    ("or.b64 $d, $a, 4611686293372403712", "u64", "u64", lambda a: a | 4611686293372403712),
    ("xor.b32 $d, $a, $b", "u32 u32", "u32", operator.xor),
    ("xor.b32 $d, $a, -1", "u32", "u32", lambda a: ~a),
    ("not.b32 $d, $a", "u32", "u32", operator.invert),
    ("cvt.s64.s32 $d, $a", "s32", "s64", lambda a: a),
    ("cvt.u64.u32 $d, $a", "u32", "u64", lambda a: a),
    ("cvt.u64.u16 $d, $a", "u16", "u64", lambda a: a),
    ("cvt.u32.u16 $d, $a", "u16", "u32", lambda a: a),
    ("cvt.u16.u32 $d, $a", "u32", "u16", lambda a: a),
    ("cvt.u32.u64 $d, $a", "u64", "u32", lambda a: a),
    ("cvt.s64.s32 $d, $a", "u64", "s64", lambda a: signed(a, 32)),  # a wider register: its low part
]


def interpreted(row: Sequence[int], kinds: Sequence[str]) -> list[int]:
    return [signed(bits, int(kind[1:])) if kind[0] == "s" else bits for bits, kind in zip(row, kinds)]


@pytest.mark.parametrize(("text", "operands", "result", "meaning"), INTEGER, ids=[f"{t}: {k}" for t, k, *_ in INTEGER])
def test_integer_arithmetic(text, operands, result, meaning):
    kinds = operands.split()
    rows = batch(kinds)
    width = int(result[1:])
    (found,) = per_thread(f"{text};", f"d:u{width // 8}", **columns(rows, kinds))
    expected = [meaning(*interpreted(row, kinds)) & (2**width - 1) for row in rows]
    assert found.tolist() == expected


def remainder(a: int, b: int) -> int:
    return a - b * truncated(a, b)


@pytest.mark.parametrize("name", ["div.s32", "div.u32", "div.s64", "rem.s32", "rem.u32"])
def test_quotients_round_towards_zero(name):
    """Two registers, and an immediate; lanes that divide by zero, or the least by -1, may hold anything."""
    kind = name[4:]
    bits = int(kind[1:])
    rows = batch([kind, kind])
    (found,) = per_thread(f"{name} $d, $a, $b;", f"d:u{bits // 8}", **columns(rows, [kind, kind]))
    meaning = truncated if name.startswith("div") else remainder
    checked = 0
    for row, got in zip(rows, found.tolist()):
        a, b = interpreted(row, [kind, kind])
        if b != 0 and (a, b) != (-(2 ** (bits - 1)), -1):
            assert got == meaning(a, b) & (2**bits - 1), (a, b)
            checked += 1
    assert checked > len(rows) * 3 // 4
    (found,) = per_thread(f"{name} $d, $a, 7;", f"d:u{bits // 8}", a=columns(rows, [kind, kind])["a"])
    assert found.tolist() == [meaning(interpreted(row, [kind])[0], 7) & (2**bits - 1) for row in rows]


def test_abs_s32():
    values = [each for each in WORDS if each != 2**31]
    (found,) = per_thread("abs.s32 $d, $a;", "d:u4", a=np.array(values, "u4"))
    assert found.tolist() == [abs(signed(each, 32)) for each in values]


@pytest.mark.parametrize(
    "form", ["shl.b16", "shl.b32", "shl.b64", "shr.b32", *(f"shr.{k}{n}" for n in (16, 32, 64) for k in "us")]
)
def test_shifts_clamp_the_amount_at_the_width(form):
    """9.7.8.8 and 9: amounts above the width are the width; shr.s fills with the sign, the others with zeros."""
    bits = int(form[5:])
    amounts = [0, 1, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 2**31, 2**32 - 1]
    rows = list(itertools.product(EDGES[bits], amounts))

    def shifted(a: int, by: int) -> int:
        value = signed(a, bits) if form[4] == "s" else a
        return (value << min(by, bits) if form.startswith("shl") else value >> min(by, bits)) & (2**bits - 1)

    inputs = columns(rows, [f"u{bits}", "u32"])
    (found,) = per_thread(f"{form} $d, $a, $b;", f"d:u{bits // 8}", **inputs)
    assert found.tolist() == [shifted(*row) for row in rows]
    for amount in (1, bits - 1):
        (found,) = per_thread(f"{form} $d, $a, {amount};", f"d:u{bits // 8}", a=np.array(EDGES[bits], f"u{bits // 8}"))
        assert found.tolist() == [shifted(each, amount) for each in EDGES[bits]]


@pytest.mark.parametrize("form", ["bfe.u32", "bfe.s32", "bfe.s64", "bfe.u64"])
def test_bit_field_extract(form):
    """9.7.1.19: bits at or above the field's end repeat its sign, or the register's sign where the field passes it."""
    bits = int(form[5:])
    places = [0, 1, 2, 3, 4, 5, 7, 14, 20, 23, 30, 31, 32, 33, 63, 64, 255, 256, 259]
    rows = list(itertools.product(FEW[bits], places, places))

    def field(a: int, position: int, length: int) -> int:
        position, length = position & 255, length & 255
        filling = 0
        if form[4] == "s" and length:
            filling = a >> min(position + length - 1, bits - 1) & 1
        taken = [a >> (position + i) & 1 if i < length and position + i < bits else filling for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(taken))

    (found,) = per_thread(f"{form} $d, $a, $b, $c;", f"d:u{bits // 8}", **columns(rows, [f"u{bits}", "u32", "u32"]))
    assert found.tolist() == [field(*row) for row in rows]
    for position, length in ((4, 14), (2, 1), (23, 8), (31, 1)):
        a = np.array(EDGES[bits], f"u{bits // 8}")
        (found,) = per_thread(f"{form} $d, $a, {position}, {length};", f"d:u{bits // 8}", a=a)
        assert found.tolist() == [field(each, position, length) for each in EDGES[bits]]


def permuted(a: int, b: int, selector: int) -> int:
    """9.7.9.7: each nibble of the selector takes a byte of {b, a}; its upper bit spreads that byte's sign."""
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    taken = []
    for n in range(4):
        nibble = selector >> 4 * n & 15
        byte = source[nibble & 7]
        taken.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(taken), "little")


PERMUTATIONS = [("$a, $b", s) for s in ("0x5410U", "0x7632", "0x3340U", "0x73U", "0xba98", "0x8421", "0xf7c6")]
PERMUTATIONS += [("$a, 0", "0x7770U"), ("$a, 0", "0x7773U"), ("$a, 0x43", "0x4140"), ("$a, 0x43", "0x4342")]


@pytest.mark.parametrize(("operands", "selector"), [*PERMUTATIONS, ("$a, $b", "$c")])
def test_prmt(operands, selector):
    rows = list(itertools.product([0x84037F80, 0x017E80FF, 0xF1E2D3C4], [0x7F81FE02, 0x90A1B2C3], range(0, 65536, 37)))
    rows = rows if selector == "$c" else [*rows[::100], *batch(["u32", "u32", "u32"])]
    (found,) = per_thread(f"prmt.b32 $d, {operands}, {selector};", "d:u4", **columns(rows, ["u32"] * 3))
    fixed = None if selector == "$c" else int(selector.rstrip("U"), 16)
    other = int(operands[4:], 0) if "$b" not in operands else None
    assert found.tolist() == [
        permuted(a, b if other is None else other, c if fixed is None else fixed) for a, b, c in rows
    ]


@pytest.mark.parametrize("table", [0xEA, 0x96, 0xE8, 0x1B, 0x80, 0xFE, 0x00, 0xF0, 0xCC, 0xAA])
def test_lop3(table):
    """9.7.8.6: bit i of the result is bit 4 a_i + 2 b_i + c_i of the table."""
    rows = [(0x0F0F5533, 0x33335555, 0x00FF00FF), *batch(["u32", "u32", "u32"])[::5]]

    def looked_up(a: int, b: int, c: int) -> int:
        return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))

    (found,) = per_thread(f"lop3.b32 $d, $a, $b, $c, {table:#x};", "d:u4", **columns(rows, ["u32"] * 3))
    assert found.tolist() == [looked_up(*row) for row in rows]
    text = f"lop3.b32 $d, $a, 0x007f007f, 0xc300c300, {table:#x};"
    (found,) = per_thread(text, "d:u4", a=columns(rows, ["u32"] * 3)["a"])
    assert found.tolist() == [looked_up(row[0], 0x007F007F, 0xC300C300) for row in rows]


# --- Floating point

# --- Predicates and selections

WHOLE = [
    "eq.b16 -1",
    "ne.b16 0",
    "eq.b32 1",
    "ne.b32 -1",
    "eq.b64",
    "ne.b64 0",
    "ge.s32 -1",
    "gt.s32 -2147483648",
    "le.s32",
]
WHOLE += ["lt.s32 1", "gt.s64 -1", "lt.s64 32", "ge.u32", "gt.u32 128", "lt.u32 -8", "lt.u64 4294967296"]


@pytest.mark.parametrize("case", WHOLE)
def test_comparisons_of_integers(case):
    """Two registers, and an immediate: .u32 takes -8 as 2^32 - 8."""
    form, _, immediate = case.partition(" ")
    name, kind = form.split(".")
    bits = int(kind[1:])
    rows = batch([kind, kind])
    inputs = columns(rows, [kind, kind])
    meaning = lambda *row: compared(name, *interpreted([each & (2**bits - 1) for each in row], [kind, kind]))
    (found,) = per_thread(f"setp.{form} $d, $a, $b;", "d:b", **inputs)
    assert found.tolist() == [meaning(*row) for row in rows]
    if immediate:
        (found,) = per_thread(f"setp.{form} $d, $a, {immediate};", "d:b", a=inputs["a"])
        assert found.tolist() == [meaning(row[0], int(immediate)) for row in rows]


SELECTIONS = [
    ("b16", "$a, $b"),
    ("b16", "$a, -1"),
    ("b16", "1, $b"),
    ("b16", "0, 16256"),
    ("b32", "$a, $b"),
    ("b32", "$a, 0"),
]
SELECTIONS += [("b32", "-1, $b"), ("b32", "8, 64"), ("b64", "$a, $b"), ("b64", "$a, -1"), ("f32", "$a, $b")]
SELECTIONS += [("f32", "$a, 0fFF800000"), ("f32", "0f80000000, $b"), ("f32", "0f3F800000, 0f00000000")]


@pytest.mark.parametrize(("kind", "operands"), SELECTIONS, ids=[f"selp.{k} {o}" for k, o in SELECTIONS])
def test_selections_keep_every_bit(kind, operands):
    bits = int(kind[1:])
    rows = batch([f"u{bits}", f"u{bits}"])
    inputs = columns(rows, [f"u{bits}", f"u{bits}"])
    chosen = np.array([random.random() < 0.5 for _ in rows])
    (found,) = per_thread(f"selp.{kind} $d, {operands}, $c;", f"d:u{bits // 8}", **inputs, c=chosen)

    def value(operand: str, row: tuple[int, ...]) -> int:
        if operand[0] == "$":
            return row["ab".index(operand[1])]
        return (int(operand[2:], 16) if operand.startswith("0f") else int(operand)) & (2**bits - 1)

    first, second = operands.split(", ")
    assert found.tolist() == [value(first if c else second, row) for row, c in zip(rows, chosen.tolist())]


def test_logic_of_predicates():
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    body = "and.pred $d, $a, $b; or.pred $e, $a, $b; not.pred $f, $a; mov.pred $g, $b; mov.pred $h, 0; mov.pred $i, -1;"
    found = per_thread(body, "d:b e:b f:b g:b h:b i:b", a=a, b=b)
    expected = [a & b, a | b, ~a, b, a & False, a | True]
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_guards_and_loops():
    """Each lane leaves the loop at its own time; guarded instructions leave the other lanes' registers alone."""
    body = """
        mov.b32 $d, 0; mov.b32 $e, 7; mov.b32 %r1, $a; setp.gt.s32 %p1, $a, 5;
        @%p1 mov.b32 $e, 1;
        @!%p1 add.s32 $e, $e, 100;
    AGAIN:
        setp.lt.s32 %p2, %r1, 1;
        @%p2 bra DONE;
        add.s32 $d, $d, %r1; add.s32 %r1, %r1, -1;
        and.b32 %r2, %r1, 1; setp.eq.b32 %p3, %r2, 0;
        @!%p3 bra ODD;
        add.s32 $d, $d, 1000;
    ODD:
        bra.uni AGAIN;
    DONE:
        mov.pred %p4, 0; mov.b64 %rd1, 0; mov.b32 %r3, 77;
        @%p4 ld.global.b32 { %r3 }, [ %rd1 + 0 ];
        @%p4 st.global.b32 [ %rd1 + 0 ], { %r3 };
        add.s32 $d, $d, %r3;
    """
    counts = [0, 1, 2, 3, 10, 31, 5, 6, 0xFFFFFFFF] + [n % 13 for n in range(200)]
    sums, marks = per_thread(body, "d:u4 e:u4", a=np.array(counts, "u4"))
    numbers = [signed(each, 32) for each in counts]
    assert marks.tolist() == [1 if each > 5 else 107 for each in numbers]
    for got, count in zip(sums.tolist(), numbers):
        assert got == 77 + sum(n + (1000 if (n - 1) % 2 == 0 else 0) for n in range(1, count + 1))


# --- Moves and memory

U2, U4, U8 = HALVES, WORDS, LONGS
MOVES: list[tuple[str, str, str, Callable[..., tuple[int, ...]]]] = [
    ("mov.b32 $d, {$a, $b}", "u16 u16", "d:u4", lambda a, b: (a | b << 16,)),
    ("mov.b32 {$d, $e}, $a", "u32", "d:u2 e:u2", lambda a: (a & 0xFFFF, a >> 16)),
    ("mov.b32 {_, $d}, $a", "u32", "d:u2", lambda a: (a >> 16,)),
    ("mov.b32 {$d, _}, $a", "u32", "d:u2", lambda a: (a & 0xFFFF,)),
    ("mov.b64 $d, {$a, $b}", "u32 u32", "d:u8", lambda a, b: (a | b << 32,)),
    ("mov.b64 {$d, $e}, $a", "u64", "d:u4 e:u4", lambda a: (a & 0xFFFFFFFF, a >> 32)),
    ("mov.b64 {_, $d}, $a", "u64", "d:u4", lambda a: (a >> 32,)),
    ("mov.b64 {$d, _}, $a", "u64", "d:u4", lambda a: (a & 0xFFFFFFFF,)),
    ("mov.b16 $d, $a; mov.u16 $e, -32768", "u16", "d:u2 e:u2", lambda a: (a, 0x8000)),
    ("mov.u16 $d, $a; mov.b16 $e, 16256", "u16", "d:u2 e:u2", lambda a: (a, 0x3F80)),
    ("mov.b32 $d, $a; mov.b32 $e, 0fFF800000", "u32", "d:u4 e:u4", lambda a: (a, 0xFF800000)),
    ("mov.u32 $d, $a; mov.b32 $e, -2147483648", "u32", "d:u4 e:u4", lambda a: (a, 0x80000000)),
    ("mov.u32 $d, 255; mov.b32 $e, 0x43004300", "u32", "d:u4 e:u4", lambda a: (255, 0x43004300)),
    ("mov.b64 $d, $a; mov.b64 $e, 4611686293372403712", "u64", "d:u8 e:u8", lambda a: (a, 4611686293372403712)),
    ("mov.u64 $d, -1; mov.b64 $e, 1", "u64", "d:u8 e:u8", lambda a: (2**64 - 1, 1)),
    ("cvta.global.u64 $d, $a", "u64", "d:u8", lambda a: (a,)),
]


@pytest.mark.parametrize(("text", "operands", "results", "meaning"), MOVES, ids=[text for text, *_ in MOVES])
def test_moves(text, operands, results, meaning):
    """The first of a vector of registers is the lower part (9.7.9.4)."""
    rows = batch(operands.split())
    found = per_thread(f"{text};", results, **columns(rows, operands.split()))
    assert list(zip(*(each.tolist() for each in found))) == [meaning(*row) for row in rows]


def test_parameters_and_places_in_the_grid():
    body = (
        addresses(1)
        + """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r4, %tid.x;
        mov.u32 %r5, %nctaid.x; mov.u32 %r6, %nctaid.y; mov.u32 %r7, %nctaid.z; ld.param.b32 %r8, [k_param_1];
        mad.lo.s32 %r9, %r3, %r6, %r2; mad.lo.s32 %r9, %r9, %r5, %r1; mad.lo.s32 %r9, %r9, 64, %r4;
        mad.wide.s32 %rd1, %r9, 64, %rd0;
        st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
        st.global.v4.b32 [ %rd1 + 16 ], { %r5, %r6, %r7, %r8 };
        ld.param.s32 %rd2, [k_param_1]; mov.b64 {%r10, %r11}, %rd2;
        ld.param.b64 %rd3, [k_param_2]; mov.b64 {%r12, %r13}, %rd3;
        st.global.v4.b32 [ %rd1 + 32 ], { %r10, %r11, %r12, %r13 };
        ld.param.b32 %r14, [k_param_3]; mov.u64 %rd4, %globaltimer; mov.u64 %rd5, %globaltimer;
        setp.lt.u64 %p1, %rd5, %rd4; selp.b32 %r15, 1, 0, %p1;
        st.global.v2.b32 [ %rd1 + 48 ], { %r14, %r15 };
    """
    )
    found = np.zeros((2, 2, 3, 64, 16), "u4")
    text = kernel(body, ["ptr", "u32", "u64", "f32"], threads=64)
    assert run(text, found, -5, 2**40 + 9, 1.5, grid=(3, 2, 2)) == []
    for z, y, x, t in itertools.product(range(2), range(2), range(3), range(64)):
        common = [3, 2, 2, 0xFFFFFFFB, 0xFFFFFFFB, 0xFFFFFFFF, 9, 2**8, 0x3FC00000, 0, 0, 0]
        assert found[z, y, x, t].tolist() == [x, y, z, t, *common]


def test_parameters_of_bytes():
    """Of fp16 numbers, and of structures; integers narrower than a register are extended by their sign."""
    body = addresses(1) + "ld.param.b16 %rs1, [k_param_1]; cvt.u32.u16 %r1, %rs1; ld.param.s16 %r2, [k_param_1];"
    body += "ld.param.v2.b32 {%r3, %r4}, [k_param_2+8]; st.global.v4.b32 [%rd0], {%r1, %r2, %r3, %r4};"
    text = kernel(body, ["ptr", "u16", "u64"]).replace("u16 k_param_1", "align 2 .b8 k_param_1[2]")
    text = text.replace("u64 k_param_2", "align 8 .b8 k_param_2[16]")
    found = np.zeros(4, "u4")
    assert run(text, found, 0xBC01, 7 << 96 | 5 << 64 | 3) == []
    assert found.tolist() == [0xBC01, 0xFFFFBC01, 5, 7]


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match=r"frobnicate\.b32"):
        run(kernel("frobnicate.b32 %r1, %r2;", []))
