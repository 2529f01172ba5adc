"""PTX kernels around a few instructions, and the number formats that they compute in, from their definitions."""

from __future__ import annotations

import itertools
import math
import operator
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from shardfuse.kernels.dev.ptx.launch import run

_random = random.Random(20)
Value = float | Fraction  # a float for zeros, infinities and NaN, which a Fraction cannot tell apart
_CLASSES = {"b": "p", "u1": "rs", "u2": "rs", "u4": "r", "u8": "rd"}  # numpy's kind and size -> the register's name


def kernel(body: str, parameters: Sequence[str], *, threads: int = 32, target: str = "sm_90a") -> str:
    """A kernel ``k`` with parameters of these types (``ptr`` for an address) and registers enough for ``body``."""
    types = {"ptr": ".u64 .ptr .global .align 1"}
    declared = ",\n".join(f"\t.param {types.get(kind, '.' + kind)} k_param_{n}" for n, kind in enumerate(parameters))
    return f"""
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
{declared}
)
.reqntid {threads}
{{
\t.reg .pred %p<64>;
\t.reg .b16 %rs<64>;
\t.reg .b32 %r<400>;
\t.reg .b64 %rd<64>;
{body}
\tret;
}}
"""


def addresses(count: int, first: int = 0) -> str:
    """%rd0, %rd1, ... <- the parameters that are addresses."""
    return "\n".join(f"ld.param.b64 %rd{n}, [k_param_{n}];" for n in range(first, first + count))


def per_thread(body: str, results: str, threads: int = 128, **inputs: np.ndarray) -> list[np.ndarray]:
    """Run ``body`` in one thread for each element of ``inputs``, named in it as $a, $b, ...: what it leaves in results.

    ``results`` names them with a type each, ``"d:u4 p:b"``: numpy's unsigned types, and b for a predicate. The body may
    use %p1 to %p9 and as many of the other registers.
    """
    wanted = dict(part.split(":") for part in results.split())
    count = len(next(iter(inputs.values())))
    blocks = -(-count // threads)
    arrays = []
    lines = [addresses(len(inputs) + len(wanted)).replace("%rd", "%rd2"), "mov.u32 %r30, %ctaid.x;"]
    lines += ["mov.u32 %r31, %tid.x;", f"mad.lo.s32 %r32, %r30, {threads}, %r31;"]
    names: dict[str, str] = {}
    stores = []
    operands: list[tuple[str, np.ndarray | str]] = [*inputs.items(), *wanted.items()]
    for n, (name, given) in enumerate(operands):
        kind = given if isinstance(given, str) else ("b" if given.dtype == bool else given.dtype.str[1:])
        names[name] = f"%{_CLASSES[kind]}{n + 50}"
        stored = np.dtype("u4" if kind == "b" else kind)
        arrays.append(np.zeros(blocks * threads, stored))
        lines.append(f"mad.wide.s32 %rd{n + 40}, %r32, {stored.itemsize}, %rd2{n};")
        there, register, bits = f"[ %rd{n + 40} + 0 ]", names[name], 8 * stored.itemsize
        if not isinstance(given, str):
            assert len(given) == count
            arrays[-1][:count], arrays[-1][count:] = given, given[0]
            loaded = f"%r{n + 50}" if kind == "b" else register
            lines.append(f"ld.global.b{bits} {{ {loaded} }}, {there};")
            if kind == "b":
                lines.append(f"setp.ne.b32 {register}, {loaded}, 0;")
        elif kind == "b":
            stores += [f"selp.b32 %r{n + 50}, 1, 0, {register};", f"st.global.b32 {there}, {{ %r{n + 50} }};"]
        elif kind == "u8":
            stores += [f"mov.b64 {{%r{n + 50}, %r{n + 80}}}, {register};"]
            stores += [f"st.global.v2.b32 {there}, {{ %r{n + 50}, %r{n + 80} }};"]
        else:
            stores.append(f"st.global.b{bits} {there}, {{ {register} }};")
    lines += [re.sub(r"\$(\w+)", lambda m: names[m[1]], body), *stores]
    text = kernel("\n".join(lines), ["ptr"] * len(arrays), threads=threads)
    assert run(text, *arrays, grid=(blocks, 1, 1)) == []
    return [each[:count] for each in arrays[len(inputs) :]]


LANES = range(32)
PREFIX = "mov.u32 %r0, %tid.x; mov.b32 %r1, global_smem; and.b32 %r2, %r0, 31;"


def launched(body: str, *arrays: np.ndarray, threads: int = 32, shared: int = 0, blocks: int = 1) -> list[str]:
    text = kernel(addresses(len(arrays)) + PREFIX + body, ["ptr"] * len(arrays), threads=threads)
    return run(text, *arrays, grid=(blocks, 1, 1), shared=shared)


def words(count: int) -> np.ndarray:
    return np.frombuffer(_random.randbytes(4 * count), "u4").copy()


def of_lane(pointer: int, stride: int, register: int = 10) -> str:
    """The address of this thread's element of an array."""
    return f"mul.wide.u32 %rd{register}, %r0, {stride}; add.s64 %rd{register}, %rd{register}, %rd{pointer};"


def moved(count: int, outwards: bool, pointer: int, threads: int = 128) -> str:
    """Copy ``count`` bytes from an array to the start of shared memory, or back."""
    text = of_lane(pointer, 16) + "mad.lo.s32 %r8, %r0, 16, %r1;"
    for n in range(0, count, 16 * threads):
        inner, outer = f"[%r8+{n}]", f"[ %rd10 + {n} ]"
        text += f"ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, {inner};" if outwards else ""
        text += f"st.global.v4.b32 {outer}, {{ %r3, %r4, %r5, %r6 }};" if outwards else ""
        text += "" if outwards else f"ld.global.v4.b32 {{ %r3, %r4, %r5, %r6 }}, {outer};"
        text += "" if outwards else f"st.shared.v4.b32 {inner}, {{%r3, %r4, %r5, %r6}};"
    return text


def vectors(instruction: str, first: int, count: int) -> str:
    """Registers from %r``first`` on to or from the addresses from %rd10 on, four at a time."""
    text = ""
    for i in range(0, count, 4):
        four, there = ", ".join(f"%r{first + i + j}" for j in range(4)), f"[ %rd10 + {4 * i} ]"
        text += f"ld.global.v4.b32 {{ {four} }}, {there};" if instruction == "ld" else ""
        text += f"st.global.v4.b32 {there}, {{ {four} }};" if instruction == "st" else ""
    return text


FENCED = "fence.proxy.async.shared::cta; bar.sync 0;"


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: a sign, exponent bits with a bias, mantissa bits; with subnormal numbers."""

    exponent: int
    mantissa: int
    nan: int
    infinite: bool = True  # else, as in e4m3, only the last code of either sign is no number

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def infinity(self) -> int:
        return (2**self.exponent - 1) << self.mantissa

    @property
    def largest(self) -> int:
        return self.infinity - 1 if self.infinite else 2 ** (self.width - 1) - 2

    def decode(self, bits: int) -> float:
        sign = -1.0 if bits >> (self.width - 1) else 1.0
        magnitude = bits & (2 ** (self.width - 1) - 1)
        if magnitude > self.largest:
            return sign * math.inf if self.infinite and magnitude == self.infinity else math.nan
        power, fraction = magnitude >> self.mantissa, magnitude & (2**self.mantissa - 1)
        if power == 0:
            return sign * math.ldexp(fraction, 1 - self.bias - self.mantissa)
        return sign * math.ldexp(fraction + 2**self.mantissa, power - self.bias - self.mantissa)

    def encode(self, value: Value, *, saturate: bool = False, flush: bool = False) -> int:
        """The nearest number, of two as near the one whose last bit is 0; with ``flush`` zero for a subnormal one."""
        if isinstance(value, float) and math.isnan(value):
            return self.nan
        negative = value < 0 if isinstance(value, Fraction) else math.copysign(1.0, value) < 0
        beyond = self.largest if saturate else self.infinity if self.infinite else self.nan
        if isinstance(value, float) and math.isinf(value):
            magnitude = beyond
        elif value == 0:
            magnitude = 0
        else:
            size = abs(Fraction(value))
            power = size.numerator.bit_length() - size.denominator.bit_length()
            power -= size < Fraction(2) ** power  # the power of two at or below
            power = max(power, 1 - self.bias)
            steps = round(size / Fraction(2) ** (power - self.mantissa))  # a Fraction's round() breaks ties to even
            magnitude = ((power + self.bias - 1) << self.mantissa) + steps
            magnitude = beyond if magnitude > self.largest else magnitude
            if flush and magnitude < 2**self.mantissa:
                magnitude = 0
        return magnitude | negative << (self.width - 1)

    def decoded(self, bits: Iterable[int]) -> list[float]:
        return [self.decode(int(each)) for each in bits]

    def flushed(self, value: float) -> float:
        """The value that .ftz takes for an input."""
        return math.copysign(0.0, value) if abs(value) < 2.0 ** (1 - self.bias) else value


F32 = Format(8, 23, 0x7FFFFFFF)
BF16 = Format(8, 7, 0x7FFF)
F16 = Format(5, 10, 0x7FFF)
E4M3 = Format(4, 3, 0x7F, infinite=False)
E5M2 = Format(5, 2, 0x7F)


def assert_numbers(form: Format, found: np.ndarray, expected: Sequence[int], *inputs: np.ndarray) -> None:
    """The same bits, or NaN for NaN whatever its payload."""
    wrong = []
    for n, (got, wish) in enumerate(zip(found.tolist(), expected, strict=True)):
        if got != wish and not (math.isnan(form.decode(got)) and math.isnan(form.decode(wish))):
            wrong.append((*(hex(int(each[n])) for each in inputs), "expected", hex(wish), "found", hex(got)))
    assert not wrong, f"{len(wrong)} of {len(expected)}, first {wrong[:4]}"


def multiply_add(a: float, b: float, c: float) -> Value:
    """a * b + c without rounding; doubles hold any product of two of the formats above, and so a zero's sign."""
    nearly = a * b + c
    if not all(map(math.isfinite, (a, b, c))):
        return nearly
    exactly = Fraction(a) * Fraction(b) + Fraction(c)
    return exactly if exactly else nearly


def add(a: float, b: float) -> Value:
    return multiply_add(a, 1.0, b)


def subtract(a: float, b: float) -> Value:
    return multiply_add(b, -1.0, a) if not math.isnan(b) else math.nan


def multiply(a: float, b: float) -> Value:
    nearly = a * b
    return Fraction(a) * Fraction(b) if math.isfinite(nearly) and nearly else nearly


def divide(a: float, b: float) -> Value:
    negative = math.copysign(1.0, a) * math.copysign(1.0, b) < 0
    if math.isnan(a) or math.isnan(b) or (a == 0 == b) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    if math.isinf(a) or b == 0:
        return -math.inf if negative else math.inf
    if math.isinf(b) or a == 0:
        return -0.0 if negative else 0.0
    return Fraction(a) / Fraction(b)


def square_root(a: float) -> Value:
    """With a bit below any format's last one, if the root is not a ratio: what rounds as the root does."""
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    size = Fraction(a)
    scaled = size.numerator * size.denominator << 200
    root = math.isqrt(scaled)
    return Fraction(2 * root + (root * root != scaled), size.denominator << 101)


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ne": lambda a, b: a < b or a > b,  # 9.7.6: false if either is NaN
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b,
}


def compared(name: str, a: float, b: float) -> bool:
    if name not in COMPARISONS:  # ltu and the like: true if either is NaN
        return a != a or b != b or COMPARISONS[name[:-1]](a, b)
    return COMPARISONS[name](a, b)


# Inputs: edge cases of integers and of floating-point numbers, and others at random.
WORDS = [0, 1, 2, 3, 7, 31, 32, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000]
WORDS += [0x80000001, 0xFFFFFFF8, 0xFFFFFFFE, 0xFFFFFFFF, 0x5E89A3C1]
HALVES = [0, 1, 2, 7, 15, 0x7F, 0x80, 0xFF, 0x100, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFF0, 0xFFFE, 0xFFFF, 0x5EC1]
LONGS = [0, 1, 2, 3, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**32, 2**32 + 1, 2**62 + 3, 2**63 - 1, 2**63, 2**63 + 1]
LONGS += [2**64 - 2**31, 2**64 - 8, 2**64 - 1, 0x5E89A3C1D2F40B67]
FEW = {16: HALVES[::3], 32: [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x10001, 0x5E89A3C1, 0xFFFF8000], 64: LONGS[::2]}
EDGES = {8: list(range(256)), 16: HALVES, 32: WORDS, 64: LONGS}


def signed(value: int, bits: int) -> int:
    return (value & (2**bits - 1)) - ((value >> (bits - 1) & 1) << bits)


def batch(kinds: Sequence[str]) -> list[tuple[int, ...]]:
    """Bits for operands of these types: the product of their edge cases, and some at random."""
    widths = [int(kind[1:]) for kind in kinds]
    rows = list(itertools.product(*((EDGES if len(kinds) < 3 else FEW)[width] for width in widths)))
    return rows + [tuple(_random.getrandbits(width) for width in widths) for _ in range(100)]


def columns(rows: Sequence[Sequence[int]], kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """The operands a, b, c of each row as arrays of the register's width."""
    dtypes = [f"u{int(kind[1:]) // 8}" for kind in kinds]
    return {name: np.array(list(each), dtype) for name, each, dtype in zip("abc", zip(*rows), dtypes)}


TINY, NAN, INFINITY, LARGEST = 0x00000001, 0x7FC00000, 0x7F800000, 0x7F7FFFFF
SINGLES = [0, TINY, 0x007FFFFF, 0x00800000, 0x00800001, 0x33800000, 0x34000000, 0x3F000000, 0x3F7FFFFF, 0x3F800000]
SINGLES += [0x3F800001, 0x3FC00000, 0x40490FDB, 0x4B7FFFFF, 0x4B800000, 0x5F000000, LARGEST, INFINITY, NAN, 0x7F800001]
SINGLES += [each | 1 << 31 for each in SINGLES]
BRAINS = [0, 1, 0x7F, 0x80, 0x3B80, 0x3F80, 0x3F81, 0x3FC0, 0x4049, 0x4B00, 0x7F7F, 0x7F80, 0x7FC0]
BRAINS += [each | 1 << 15 for each in BRAINS]
SHORTS = [0, 1, 0x3FF, 0x400, 0x401, 0x1400, 0x3BFF, 0x3C00, 0x3C01, 0x3E00, 0x4248, 0x7BFF, 0x7C00, 0x7E00]
SHORTS += [each | 1 << 15 for each in SHORTS]
CODES = {F32: SINGLES, BF16: BRAINS, F16: SHORTS}


def rows_of(form: Format, count: int) -> list[tuple[int, ...]]:
    """Bits of ``count`` operands each: edge cases against each other, any bits, and bits near each other in size."""
    edges = CODES[form] if count < 3 else CODES[form][::2] + CODES[form][1::8]
    rows = list(itertools.product(edges, repeat=count))
    rows += [tuple(_random.getrandbits(form.width) for _ in range(count)) for _ in range(200)]
    one, spread = form.encode(1.0), 3 << form.mantissa
    near = lambda: one + _random.randint(-spread, spread) | _random.getrandbits(1) << (form.width - 1)
    return rows + [tuple(near() for _ in range(count)) for _ in range(400)]


# Matrices: fragments in registers, tiles in shared memory.
FORMATS = {"bf16": BF16, "f16": F16, "e4m3": E4M3, "e5m2": E5M2, "tf32": F32}


def encoded(values: np.ndarray, form: Format) -> np.ndarray:
    codes = [form.encode(each) for each in values.flatten().tolist()]
    return np.array(codes, f"u{form.width // 8}").reshape(values.shape)


def a_place(size: int, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i in a lane's fragment of A, 16 rows (9.7.14.5.7 to 10, and wgmma's of a warp)."""
    per = 4 // size  # elements of a register; every other register holds a row 8 below
    return lane // 4 + 8 * (i // per % 2), lane % 4 * per + i % per + 4 * per * (i // per // 2)


def b_place(size: int, lane: int, i: int) -> tuple[int, int]:
    """Likewise of B, 8 columns."""
    per = 4 // size
    return (lane % 4) * per + i % per + 4 * per * (i // per), lane // 4


def d_place(lane: int, i: int) -> tuple[int, int]:
    """Likewise of C and D, 16 rows and 8 columns at a time."""
    return lane // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def swizzled(at: int, span: int) -> int:
    """Rows of ``span`` bytes, their 16-byte parts permuted: address bits from 4 up are xored with those from 7 up."""
    return at ^ (at >> 7 & (span // 16 - 1)) << 4


class Tile:
    """Where a wgmma operand lies in shared memory by its descriptor: wgmma's canonical swizzled layouts.

    ``where`` names the dimension whose elements are contiguous, k or mn, and the bytes that are: 128, 64 or 32. Along k
    the tile is as wide as these; along mn it holds two steps of k.
    """

    def __init__(self, mn: int, form: Format, where: str):
        self.form, self.mn, self.size = form, mn, form.width // 8
        self.along, self.span = where.split()[0], int(where.split()[1])
        self.k = self.span // self.size if self.along == "k" else 2 * 16
        self.stride = 8 * self.span  # to the next 8 rows of mn, or of k
        self.leading = 16 if self.along == "k" else self.span * self.k  # mn: to the next elements beside the first
        self.step = 32 if self.along == "k" else 2 * self.stride  # by which an instruction's k moves the start
        self.bytes = -(-mn * self.k * self.size // 1024) * 1024

    def place(self, mn: int, k: int) -> int:
        if self.along == "k":
            return swizzled(mn * self.span + k * self.size, self.span)
        beside, within = divmod(mn * self.size, self.span)
        return swizzled(within + k * self.span + beside * self.leading, self.span)

    def image(self, values: np.ndarray) -> bytes:
        memory, codes = bytearray(self.bytes), encoded(values, self.form)
        for mn, k in itertools.product(range(self.mn), range(self.k)):
            at = self.place(mn, k)
            memory[at : at + self.size] = int(codes[mn, k]).to_bytes(self.size, "little")
        return bytes(memory)

    def descriptor(self, into: str, address: str) -> str:
        """%rd ``into`` <- the descriptor of the tile at shared address ``address``; uses %r9."""
        mode = {128: 1, 64: 2, 32: 3}[self.span]
        bits = signed(self.leading >> 4 << 16 | self.stride >> 4 << 32 | mode << 62, 64)
        return f"{address} bfe.u32 %r9, %r9, 4, 14; cvt.u64.u32 {into}, %r9; or.b64 {into}, {into}, {bits};"
