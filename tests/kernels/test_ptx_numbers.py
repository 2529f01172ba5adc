"""The emulator of PTX, floating-point instructions within a thread, against the PTX ISA restated in exact fractions.

Section numbers are those of the PTX ISA 8.7. NaN's payload, which the ISA leaves open, is not asserted.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from ptx_text import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    INFINITY,
    LARGEST,
    SINGLES,
    WORDS,
    Format,
    Value,
    add,
    assert_numbers,
    columns,
    compared,
    divide,
    multiply,
    multiply_add,
    per_thread,
    rows_of,
    signed,
    square_root,
    subtract,
)

# Rounding a * b, or a * b + c to 24 or 53 bits first, gives other results for these.
TWICE = {
    F32: [
        (0x3F800800, 0x3F800800, 0x21800000),
        (0x3F800800, 0x3F800800, 0xA1800000),
        (0x3F800001, 0x3F800001, 0xBF800002),
    ],
    BF16: [(0x3F88, 0x3F88, 0x0D80), (0x3F88, 0x3F88, 0x8D80), (0x3F88, 0x3F88, 0x3080), (0x3F81, 0x3F81, 0xBF82)],
}


def test_the_inputs_tell_two_roundings_from_one():
    for form, rows in TWICE.items():
        triples = [form.decoded(row) for row in rows]
        once = [form.encode(multiply_add(a, b, c)) for a, b, c in triples]
        assert once != [form.encode(add(form.decode(form.encode(multiply(a, b))), c)) for a, b, c in triples]
        assert once != [form.encode(a * b + c) for a, b, c in triples]  # 53 bits, then the format's
    assert once != [BF16.encode(F32.decode(F32.encode(multiply_add(a, b, c)))) for a, b, c in triples]


ARITHMETIC: list[tuple[str, int, Callable[..., Value]]] = [
    ("add.f32 $d, $a, $b", 2, add),
    ("add.f32 $d, $a, 0fBF800000", 1, lambda a: add(a, -1.0)),
    ("sub.f32 $d, $a, $b", 2, subtract),
    ("mul.f32 $d, $a, $b", 2, multiply),
    ("mul.f32 $d, $a, 0f3FB8AA3B", 1, lambda a: multiply(a, F32.decode(0x3FB8AA3B))),
    ("mul.f32 $d, $a, 0fFF800000", 1, lambda a: multiply(a, -math.inf)),
    ("fma.rn.f32 $d, $a, $b, $c", 3, multiply_add),
    ("fma.rn.f32 $d, $a, $b, 0f3F000000", 2, lambda a, b: multiply_add(a, b, 0.5)),
    ("fma.rn.f32 $d, $a, 0f3FB8AA3B, $b", 2, lambda a, b: multiply_add(a, F32.decode(0x3FB8AA3B), b)),
    ("fma.rn.f32 $d, $a, 0f3FB8AA3B, 0fC2FC0000", 1, lambda a: multiply_add(a, F32.decode(0x3FB8AA3B), -126.0)),
    ("fma.rn.ftz.f32 $d, $a, $b, $c", 3, multiply_add),
    ("neg.f32 $d, $a", 1, operator.neg),
    ("abs.f32 $d, $a", 1, abs),
    ("abs.ftz.f32 $d, $a", 1, abs),
    ("div.rn.f32 $d, $a, $b", 2, divide),
    ("sqrt.rn.f32 $d, $a", 1, square_root),
]


@pytest.mark.parametrize(("text", "count", "meaning"), ARITHMETIC, ids=[text for text, *_ in ARITHMETIC])
def test_single_precision_is_rounded_once(text, count, meaning):
    """9.7.3: to the nearest, ties to even; subnormal numbers are kept, but by .ftz, which keeps their sign alone."""
    flush = ".ftz" in text
    rows = rows_of(F32, count) + (TWICE[F32] if count == 3 else [])
    expected = []
    for row in list(rows):
        values = [F32.flushed(each) if flush else each for each in F32.decoded(row)]
        exactly = meaning(*values)
        if flush and 0 < abs(exactly) < 2.0**-126 and F32.encode(exactly) & 0x00800000:
            rows.remove(row)  # whether what rounds up to the least normal number is flushed is not stated
        else:
            expected.append(F32.encode(exactly, flush=flush))
    inputs = columns(rows, ["u32"] * count)
    (found,) = per_thread(f"{text};", "d:u4", **inputs)
    assert_numbers(F32, found, expected, *inputs.values())


PACKED: list[tuple[str, int, Format, Callable[..., Value]]] = [
    ("add.bf16x2 $d, $a, $b", 2, BF16, add),
    ("sub.bf16x2 $d, $a, $b", 2, BF16, subtract),
    ("fma.rn.bf16x2 $d, $a, $b, $c", 3, BF16, multiply_add),
    ("abs.bf16x2 $d, $a", 1, BF16, abs),
    ("mul.bf16x2 $d, $a, $b", 2, BF16, multiply),
    ("add.f16x2 $d, $a, $b", 2, F16, add),
    ("mul.f16x2 $d, $a, $b", 2, F16, multiply),
    ("fma.rn.f16x2 $d, $a, $b, $c", 3, F16, multiply_add),
]


@pytest.mark.parametrize(("text", "count", "form", "meaning"), PACKED, ids=[text for text, *_ in PACKED])
def test_packed_halves_are_rounded_once(text, count, form, meaning):
    """9.7.4: both halves of a register apart, each result rounded to the format once, subnormal numbers kept."""
    rows = rows_of(form, count) + (TWICE.get(form, []) if count == 3 else [])
    inputs = columns([[x | y << 16 for x, y in zip(low, high)] for low, high in zip(rows, rows[::-1])], ["u32"] * count)
    (found,) = per_thread(f"{text};", "d:u4", **inputs)
    expected = [form.encode(meaning(*form.decoded(row))) for row in rows]
    assert_numbers(form, found & 0xFFFF, expected, *inputs.values())
    assert_numbers(form, found >> 16, expected[::-1], *inputs.values())


def test_abs_bf16():
    codes = np.arange(0, 65536, 5, np.uint16)
    (found,) = per_thread("abs.bf16 $d, $a;", "d:u2", a=codes)
    assert_numbers(BF16, found, [each & 0x7FFF for each in codes.tolist()], codes)


def largest(a: float, b: float) -> float:
    """9.7.3.12: of a number and NaN the number; -0 is below +0."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return max(a, b, key=lambda x: (x, math.copysign(1.0, x)))


def nan_or_largest(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else largest(a, b)


def smallest(a: float, b: float) -> float:
    return -largest(-a, -b)


EXTREMES = [
    ("max.f32", "$b", largest, None),
    ("max.f32", "0f00000000", largest, 0),
    ("max.f32", "0fFF800000", largest, 0xFF800000),
]
EXTREMES += [("max.NaN.f32", "0f80000000", nan_or_largest, 1 << 31), ("max.NaN.f32", "$b", nan_or_largest, None)]
EXTREMES += [
    ("min.f32", "$b", smallest, None),
    ("min.f32", "0f42FE0000", smallest, 0x42FE0000),
    ("min.f32", "0f80000000", smallest, 1 << 31),
]


@pytest.mark.parametrize(("form", "operand", "meaning", "fixed"), EXTREMES, ids=[f"{f} {o}" for f, o, *_ in EXTREMES])
def test_min_and_max(form, operand, meaning, fixed):
    rows = [(a, b if fixed is None else fixed) for a, b in rows_of(F32, 2)]
    inputs = columns(rows, ["u32", "u32"])
    (found,) = per_thread(f"{form} $d, $a, {operand};", "d:u4", **inputs)
    expected = [F32.encode(meaning(*F32.decoded(row))) for row in rows]
    assert_numbers(F32, found, expected, *inputs.values())
    if ".NaN" in form:
        assert {got for got, wish in zip(found.tolist(), expected) if wish == F32.nan} == {F32.nan}  # the canonical one


@pytest.mark.parametrize(
    ("form", "meaning"),
    [("min.xorsign.abs.f32", smallest), ("max.xorsign.abs.f32", largest), ("max.NaN.xorsign.abs.f32", nan_or_largest)],
)
def test_min_and_max_of_magnitudes(form, meaning):
    """9.7.3.11: a number gets both signs' exclusive or, that of NaN included."""
    rows = rows_of(F32, 2)
    inputs = columns(rows, ["u32", "u32"])
    (found,) = per_thread(f"{form} $d, $a, $b;", "d:u4", **inputs)
    sizes = [F32.encode(meaning(*map(abs, F32.decoded(row)))) for row in rows]
    expected = [size if size == F32.nan else size | ((a ^ b) & 1 << 31) for size, (a, b) in zip(sizes, rows)]
    assert_numbers(F32, found, expected, *inputs.values())


@pytest.mark.parametrize("operand", ["$c", "0f3F800000"])
def test_max_of_three(operand):
    rows = rows_of(F32, 3)[::7] if operand == "$c" else [(a, b, 0x3F800000) for a, b in rows_of(F32, 2)]
    inputs = columns(rows, ["u32"] * 3)
    (found,) = per_thread(f"max.f32 $d, $a, $b, {operand};", "d:u4", **inputs)
    expected = [F32.encode(largest(largest(a, b), c)) for a, b, c in map(F32.decoded, rows)]
    assert_numbers(F32, found, expected, *inputs.values())


DOUBLES = [0.0, 5e-324, 1.0, 1.0 + 2.0**-52, 0.1, 3e300, math.inf, math.nan]
DOUBLES += [-each for each in DOUBLES]
DOUBLE: list[tuple[str, Callable[[float, float], float]]] = [
    ("add.rn.f64", lambda a, b: a + b),
    ("sub.f64", lambda a, b: a - b),
    ("mul.rn.f64", lambda a, b: a * b),
    ("div.rn.f64", lambda a, b: float(np.divide(a, b))),
    ("max.f64", largest),
    ("min.f64", smallest),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("form", "meaning"), DOUBLE, ids=[form for form, _ in DOUBLE])
def test_double_precision(form, meaning):
    """9.7.3: Python's own numbers are these."""
    rows = [(np.float64(a), np.float64(b)) for a in DOUBLES for b in DOUBLES]
    a, b = (np.array(each).view(np.uint64) for each in zip(*rows))
    (found,) = per_thread(f"{form} $d, $a, $b;", "d:u8", a=a, b=b)
    expected = np.array([meaning(*row) for row in rows])
    assert (np.isnan(expected) == np.isnan(found.view(np.float64))).all()
    there = ~np.isnan(expected)
    assert found[there].tolist() == expected[there].view(np.uint64).tolist()


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "geu", "neu", "nan"])
def test_comparisons_of_double_precision(name):
    rows = [(a, b) for a in DOUBLES for b in DOUBLES]
    a, b = (np.array(each).view(np.uint64) for each in zip(*rows))
    (found,) = per_thread(f"setp.{name}.f64 $d, $a, $b;", "d:b", a=a, b=b)
    assert found.tolist() == [compared(name, *row) for row in rows]


def exponential(a: float) -> Value:
    return Fraction(2.0 ** min(a, 200.0)) if math.isfinite(a) else 2.0**a


def logarithm(a: float) -> Value:
    return math.nan if a < 0 else -math.inf if a == 0 else Fraction(math.log2(a)) if math.isfinite(a) else a


def reciprocal_root(a: float) -> Value:
    return math.nan if a < 0 else Fraction(1 / math.sqrt(a)) if a > 0 and math.isfinite(a) else divide(1.0, a)


def tangent(a: float) -> Value:
    return Fraction(math.tanh(a)) if a and math.isfinite(a) else math.tanh(a)


def sine(a: float) -> Value:
    return Fraction(math.sin(a)) if a and math.isfinite(a) else a if a == 0 else math.nan


def cosine(a: float) -> Value:
    return Fraction(math.cos(a)) if a and math.isfinite(a) else 1.0 if a == 0 else math.nan


Bound = Callable[[Fraction, float], Fraction]  # of the exact result and the operand: by how much a result may miss


def ulps(count: int) -> Bound:
    def bound(exactly: Fraction, _: float) -> Fraction:
        size = abs(exactly)
        power = size.numerator.bit_length() - size.denominator.bit_length()
        return count * Fraction(2) ** (max(-126, power - (size < Fraction(2) ** power)) - 23)

    return bound


def relative(power: float) -> Bound:
    return lambda exactly, _: abs(exactly) * Fraction(2.0**power)


def angle(_: Fraction, a: float) -> Fraction:
    """9.7.3.18 and 19: maximum absolute error in [-2 pi, 2 pi] 2^-20.5, in [-100 pi, 100 pi] 2^-14.7."""
    return Fraction(2.0**-20.5 if abs(a) <= 2 * math.pi else 2.0**-14.7)


def logarithmic(exactly: Fraction, a: float) -> Fraction:
    """9.7.3.20: in (0.5, 2) maximum absolute error 2^-22, outside it relative error 2^-22."""
    return Fraction(2) ** -22 * (1 if 0.5 < a < 2 else abs(exactly))


# Instruction, its bound as the ISA states it, the exact value with the ISA's special values.
APPROXIMATE: list[tuple[str, Bound, Callable[..., Value]]] = [
    ("ex2.approx.f32", ulps(2), exponential),  # 9.7.3.21: "2 ulp from correctly rounded result"
    ("ex2.approx.ftz.f32", ulps(2), exponential),
    (
        "rcp.approx.f32",
        ulps(1),
        lambda a: divide(1.0, a),
    ),  # 9.7.3.13: "The maximum ulp error is 1"
    ("rcp.approx.ftz.f32", ulps(1), lambda a: divide(1.0, a)),
    ("div.full.f32", ulps(2), divide),  # 9.7.3.8: "The maximum ulp error is 2 across the full range of inputs"
    ("sqrt.approx.f32", relative(-23), square_root),  # 9.7.3.15: "maximum relative error ... is 2^-23"
    ("rsqrt.approx.f32", relative(-22.9), reciprocal_root),  # 9.7.3.16: "maximum relative error ... is 2^-22.9"
    ("rsqrt.approx.ftz.f32", relative(-22.9), reciprocal_root),
    ("lg2.approx.f32", logarithmic, logarithm),
    ("lg2.approx.ftz.f32", logarithmic, logarithm),
    ("tanh.approx.f32", relative(-11), tangent),  # 9.7.3.22: "maximum relative error ... is 2^-11"
    ("sin.approx.f32", angle, sine),
    ("sin.approx.ftz.f32", angle, sine),
    ("cos.approx.f32", angle, cosine),
]


def near_enough(got: int, exactly: Value, slack: Fraction, flush: bool) -> bool:
    if isinstance(exactly, float):
        return got == F32.encode(exactly) or (math.isnan(exactly) and math.isnan(F32.decode(got)))
    result, zero = F32.decode(got), (1 << 31 if exactly < 0 else 0)
    if flush and abs(exactly) < Fraction(2) ** -126:
        return got == zero or (abs(exactly) + slack >= Fraction(2) ** -126 and got == zero | 0x00800000)
    if not math.isfinite(result):
        return got == zero | INFINITY and abs(exactly) + slack > Fraction(F32.decode(LARGEST))
    return abs(Fraction(result) - exactly) <= slack


@pytest.mark.parametrize(("form", "bound", "meaning"), APPROXIMATE, ids=[form for form, *_ in APPROXIMATE])
def test_approximations_keep_their_bounds(form, bound, meaning):
    flush, count = ".ftz" in form, 2 if form.startswith("div") else 1
    rows = rows_of(F32, count)
    if count == 1:
        rows += [(F32.encode(random.uniform(-152, 130)),) for _ in range(600)]
        rows += [(F32.encode(float(each)),) for each in range(-152, 131)]
        rows += [(each,) for each in (0xC2FC0001, 0xC3150000, 0xC3150001, 0x42FFFFFF, 0x7E800000, 0x7E800002)]
    if bound is angle:  # beyond it "only best effort is provided"
        rows = [row for row in rows if not 100 * math.pi < abs(F32.decode(row[0])) < math.inf]
    inputs = columns(rows, ["u32"] * count)
    (found,) = per_thread(f"{form} $d, {'$a, $b' if count == 2 else '$a'};", "d:u4", **inputs)
    wrong = []
    for row, got in zip(rows, found.tolist()):
        values = [F32.flushed(each) if flush else each for each in F32.decoded(row)]
        exactly = meaning(*values)
        slack = bound(exactly, values[0]) if isinstance(exactly, Fraction) else Fraction(0)
        if not near_enough(got, exactly, slack, flush):
            wrong.append((*(hex(each) for each in row), hex(got)))
    assert not wrong, f"{len(wrong)} of {len(rows)}, first {wrong[:4]}"


# --- Conversions


def between(form: Format) -> list[int]:
    """Single-precision bits of every number of a format, of the middle to the next one, and one step to either side."""
    step = max(1, 2**form.width // 3000)
    codes = [*range(0, form.largest, step), form.largest - 1]
    found = [*SINGLES, 0x47800000, 0x477FF000, 0x7F7F8000, 0x43E80000, 0x43E7FFFF, 0x47700000]
    for code in codes:
        low, high = form.decode(code), form.decode(code + 1)
        middle = F32.encode((Fraction(low) + Fraction(high)) / 2)
        found += [F32.encode(low), middle, middle + 1, max(middle, 1) - 1]
    return found + [each | 1 << 31 for each in found]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_narrowing_to_16_bits(name):
    form = {"f16": F16, "bf16": BF16}[name]
    codes = np.array(between(form), "u4")
    expected = [form.encode(each) for each in F32.decoded(codes)]
    single, pair = per_thread(
        f"cvt.rn.{name}.f32 $d, $a; cvt.rn.{name}x2.f32 $e, $b, $a;", "d:u2 e:u4", a=codes, b=codes[::-1]
    )
    assert_numbers(form, single, expected, codes)
    assert_numbers(form, pair & 0xFFFF, expected, codes)  # the second source below
    assert_numbers(form, pair >> 16, expected[::-1], codes[::-1])


def test_fp16_to_bf16():
    codes = np.arange(0, 65536, 7, np.uint16)
    (found,) = per_thread("cvt.rn.bf16.f16 $d, $a;", "d:u2", a=codes)
    assert_numbers(BF16, found, [BF16.encode(each) for each in F16.decoded(codes)], codes)


def test_narrowing_towards_zero():
    """9.7.9.21: .rz; of too large a number the largest is left, as in IEEE 754 (7.4)."""
    codes = np.array(between(F16), "u4")
    expected = []
    for value in F32.decoded(codes):
        nearest = F16.encode(value)
        expected.append(nearest - (abs(F16.decode(nearest)) > abs(value)))
    (found,) = per_thread("cvt.rz.f16.f32 $d, $a;", "d:u2", a=codes)
    assert_numbers(F16, found, expected, codes)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_narrowing_to_8_bits_saturates(name):
    """9.7.9.21: .satfinite takes what lies beyond the format, infinity too, to its largest number; NaN stays NaN."""
    form = {"e4m3": E4M3, "e5m2": E5M2}[name]
    codes = np.array(between(form), "u4")
    expected = [form.encode(each, saturate=True) for each in F32.decoded(codes)]
    (pair,) = per_thread(f"cvt.rn.satfinite.{name}x2.f32 $d, $b, $a;", "d:u2", a=codes, b=codes[::-1])
    assert_numbers(form, pair & 0xFF, expected, codes)
    assert_numbers(form, pair >> 8, expected[::-1], codes[::-1])


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_widening_is_exact(name):
    form = {"f16": F16, "bf16": BF16}[name]
    codes = np.arange(0, 65536, 7, np.uint16)
    (found,) = per_thread(f"cvt.f32.{name} $d, $a;", "d:u4", a=codes)
    assert_numbers(F32, found, [F32.encode(each) for each in form.decoded(codes)], codes)


def test_widening_of_e4m3_pairs():
    low = np.arange(256, dtype=np.uint16)
    (found,) = per_thread("cvt.rn.f16x2.e4m3x2 $d, $a;", "d:u4", a=low | low[::-1] << 8)
    expected = [F16.encode(each) for each in E4M3.decoded(low)]
    assert_numbers(F16, found & 0xFFFF, expected, low)
    assert_numbers(F16, found >> 16, expected[::-1], low[::-1])


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_integers_to_single_precision(kind):
    """Ties go to the even neighbour: from 2^24 on not every integer is a number."""
    values = [*WORDS, *(2**n + k for n in range(23, 32) for k in (-1, 0, 1, 2, 3, 2 ** (n - 24) if n > 23 else 5))]
    values += [0x01000001, 0x01000003, 0x7FFFFFBF, 0x7FFFFFC0, 0x80000040, 0xFFFFFF7F, 0xFFFFFF80]
    values += [random.getrandbits(32) for _ in range(300)]
    (found,) = per_thread(f"cvt.rn.f32.{kind} $d, $a;", "d:u4", a=np.array(values, "u4"))
    exact = [signed(each, 32) if kind == "s32" else each for each in values]
    assert found.tolist() == [F32.encode(Fraction(each) if each else 0.0) for each in exact]


def test_bytes_to_single_precision():
    body = "{ .reg .s8 s<4>; .reg .f32 f<4>; mov.b32 {s0, s1, s2, s3}, $a;"
    body += "".join(f"cvt.rn.f32.s8 f{n}, s{n}; mov.b32 ${'defg'[n]}, f{n};" for n in range(4)) + "}"
    words = np.array([n | (255 - n) << 8 | (n ^ 128) << 16 | (n * 7 & 255) << 24 for n in range(256)], "u4")
    found = per_thread(body, "d:u4 e:u4 f:u4 g:u4", a=words)
    for n in range(4):
        exact = [signed(word >> 8 * n & 255, 8) for word in words.tolist()]
        assert found[n].tolist() == [F32.encode(Fraction(each) if each else 0.0) for each in exact]


@pytest.mark.parametrize("bits", [16, 32])
def test_single_precision_to_integers(bits):
    """9.7.9.21: .rzi drops the fraction, what lies beyond the integers gives their least or largest, NaN gives 0."""
    edge = 2.0 ** (bits - 1)
    values = [0.0, 0.5, 0.99999994, 1.0, 1.5, 2.5, 77.9, edge - 1, edge - 0.5, edge, edge + 1, edge * 2, 1e30, math.inf]
    values += [random.uniform(0, edge * 1.1) for _ in range(100)]
    codes = SINGLES + [F32.encode(sign * each) for each in values for sign in (1, -1)]
    (found,) = per_thread(f"cvt.rzi.s{bits}.f32 $d, $a;", f"d:u{bits // 8}", a=np.array(codes, "u4"))
    expected = []
    for value in F32.decoded(codes):
        whole = 0 if math.isnan(value) else int(max(-edge, min(edge - 1, value)))
        expected.append(whole & (2**bits - 1))
    assert found.tolist() == expected


REAL = ["eq 0f00000000", "ne 0f00000000", "lt 0f3F800000", "le 0f80000000", "gt 0fFF800000", "ge 0f7FC00000"]
REAL += ["ltu 0f00000000", "leu 0f7F800000", "gtu", "geu", "equ 0f80000000", "neu 0f00000000", "num", "nan"]


@pytest.mark.parametrize("case", REAL)
def test_comparisons_of_single_precision(case):
    """Subnormal numbers are not zero, and -0 equals +0."""
    name, _, immediate = case.partition(" ")
    rows = rows_of(F32, 2)
    inputs = columns(rows, ["u32", "u32"])
    (found,) = per_thread(f"setp.{name}.f32 $d, $a, $b;", "d:b", **inputs)
    assert found.tolist() == [compared(name, *F32.decoded(row)) for row in rows]
    if immediate:
        (found,) = per_thread(f"setp.{name}.f32 $d, $a, {immediate};", "d:b", a=inputs["a"])
        other = F32.decode(int(immediate[2:], 16))
        assert found.tolist() == [compared(name, F32.decode(row[0]), other) for row in rows]


@pytest.mark.parametrize("name", ["lt", "le"])
def test_comparisons_of_bf16(name):
    """Two at once give the lower half's predicate first."""
    rows = rows_of(BF16, 2)
    expected = [compared(name, *BF16.decoded(row)) for row in rows]
    (found,) = per_thread(f"setp.{name}.bf16 $d, $a, $b;", "d:b", **columns(rows, ["u16", "u16"]))
    assert found.tolist() == expected
    both = [[x | y << 16 for x, y in zip(low, high)] for low, high in zip(rows, rows[::-1])]
    low, high = per_thread(f"setp.{name}.bf16x2 $d|$e, $a, $b;", "d:b e:b", **columns(both, ["u32", "u32"]))
    assert (low.tolist(), high.tolist()) == (expected, expected[::-1])


# --- Of Blackwell

SUMS = [("add", add), ("sub", subtract), ("fma", multiply_add)]


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize(("name", "function"), [*SUMS, ("mul", multiply)])
def test_pairs_of_single_precision(name, function, ftz):
    """9.7.3: two numbers of fp32 in 64 bits, each by itself."""
    count = 3 if name == "fma" else 2
    rows = random.sample(rows_of(F32, count), 400)
    pairs = [tuple(a | b << 32 for a, b in zip(*two)) for two in zip(rows, reversed(rows))]
    operands = columns(pairs, ["u64"] * count)
    names = ", ".join(f"${each}" for each in operands)
    (found,) = per_thread(f"{name}.rn{ftz}.f32x2 $d, {names};", "d:u8", **operands)
    for half, given in ((found & 0xFFFFFFFF, rows), (found >> np.uint64(32), rows[::-1])):
        values = [F32.decoded(row) for row in given]
        values = [[F32.flushed(each) for each in row] if ftz else row for row in values]
        assert_numbers(F32, half, [F32.encode(function(*row), flush=bool(ftz)) for row in values])


@pytest.mark.parametrize("form", ["f16", "bf16"])
@pytest.mark.parametrize(("name", "function"), SUMS)
def test_mixed_precision(name, function, form):
    """9.7.5: one 16-bit number, or two to multiply, and one of fp32."""
    half, count = {"f16": F16, "bf16": BF16}[form], 2 if name == "fma" else 1
    halves, singles = rows_of(half, 2), rows_of(F32, 1)
    rows = [(*random.choice(halves)[:count], *random.choice(singles)) for _ in range(500)]
    operands = columns(rows, ["u16"] * count + ["u32"])
    names = ", ".join(f"${each}" for each in operands)
    (found,) = per_thread(f"{name}.rn.f32.{form} $d, {names};", "d:u4", **operands)
    values = [[*half.decoded(row[:-1]), F32.decode(row[-1])] for row in rows]
    assert_numbers(F32, found, [F32.encode(function(*row)) for row in values])
