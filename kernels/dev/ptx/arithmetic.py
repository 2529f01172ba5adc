"""Arithmetic of PTX within a thread: numpy over the bits of registers, each result rounded once.

Names and meanings follow NVIDIA's "PTX ISA", chapter "Instruction Set". Registers arrive as unsigned integers or as a
view of their type. Sums that need more than fp64 are rounded to odd there (Boldo and Melquiond, "Emulation of FMA and
correctly rounded sums", 2008): a later rounding to 50 bits or fewer then gives what rounding the exact sum would.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64
where = np.where

Array = Any  # an array over threads, or a scalar of the same type

# The largest error of an approximate instruction, relative unless it says otherwise: PTX ISA, each instruction's own
# section ("ex2": 2 ulp). Those of sin and cos hold between -2 pi and 2 pi.
ERRORS = {
    "ex2": 2.0**-22,
    "lg2": 2.0**-22.6,  # absolute between 0.5 and 2
    "rcp": 2.0**-23,
    "sqrt": 2.0**-23,
    "rsqrt": 2.0**-22.9,
    "tanh": 2.0**-11,
    "div": 2.0**-22,
    "sin": 2.0**-20.5,  # absolute
    "cos": 2.0**-20.5,  # absolute
}

_NAN = u4(0x7FFFFFFF).view(f4)  # the one that instructions make

# ------------------------------------------------------------------------------------------------------------ rounding


def odd_sum(x: Array, y: Array) -> Array:
    """x + y in fp64, rounded to odd."""
    total = np.asarray(x + y)
    back = total - x
    lost = (x - (total - back)) + (y - back)  # Knuth's exact error of a sum
    bits = total.view(u8)
    even = (lost != 0) & (bits & u8(1) == 0) & np.isfinite(total)
    return where(even, where((lost > 0) == (total > 0), bits + u8(1), bits - u8(1)), bits).view(f8)


def odd32(x: Array) -> Array:
    """fp64 to fp32, rounded to odd: for a second rounding, to 16 bits."""
    near = np.asarray(x, f8).astype(f4)
    bits = near.view(u4)
    exact = near.astype(f8)
    even = (exact != x) & (bits & u4(1) == 0) & np.isfinite(near)
    return where(even, where(np.abs(exact) < np.abs(x), bits + u4(1), bits - u4(1)), bits).view(f4)


def from_bf16(bits: Array) -> Array:
    return (np.asarray(bits).astype(u4) << u4(16)).view(f4)


def to_bf16(x: Array) -> Array:
    """fp32 or fp64 to the nearest, ties to even; NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(odd32(x) if x.dtype == f8 else x).view(u4)
    rounded = (bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)
    return where(np.isnan(x), u4(0x7FFF), rounded).astype(u2)


def to_half(x: Array, kind: str) -> Array:
    """The bits of x as "bf16" or "f16"."""
    x = x.astype(f4) if x.dtype == f2 else x
    return to_bf16(x) if kind == "bf16" else where(np.isnan(x), u2(0x7FFF), x.astype(f2).view(u2))


def truncated(x: Array) -> Array:
    """The bits of fp32 numbers as fp16, rounded towards zero: what is too large becomes the largest."""
    near = x.astype(f2)
    beyond = np.abs(near.astype(f4)) > np.abs(x)
    return where(np.isnan(x), u2(0x7FFF), near.view(u2) - beyond.astype(u2))


def from_half(bits: Array, kind: str) -> Array:
    return from_bf16(bits) if kind == "bf16" else bits.view(f2).astype(f4)


def halves(bits: Array, kind: str) -> tuple[Array, Array]:
    """The two 16-bit numbers of 32-bit registers as fp32, the lower first."""
    return from_half((bits & u4(0xFFFF)).astype(u2), kind), from_half((bits >> u4(16)).astype(u2), kind)


def joined(low: Array, high: Array) -> Array:
    """Two 16-bit values in one register."""
    return low.astype(u4) | (high.astype(u4) << u4(16))


def pair(low: Array, high: Array, kind: str) -> Array:
    return joined(to_half(low, kind), to_half(high, kind))


def flush(x: Array) -> Array:
    """.ftz: denormals of fp32 become zeros of their sign."""
    x = np.asarray(x)
    return where(np.abs(x) < f4(2.0**-126), np.copysign(f4(0), x), x)


# ---------------------------------------------------------------------------------------------------- floating point


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of fp32, rounded once: the product is exact in fp64."""
    x, y = a.astype(f8) * b, np.asarray(c).astype(f8)
    total = np.asarray(x + y)
    near = total.astype(f4)
    # Only where fp64 lies half way between two numbers of fp32, or these have fewer bits, did its rounding matter.
    doubtful = (total.view(u8) & u8(0x1FFFFFFF)) == u8(0x10000000)
    doubtful |= (np.abs(near) < f4(2.0**-126)) & (total != 0)
    if np.count_nonzero(doubtful):
        near[doubtful] = odd_sum(*(np.broadcast_to(each, total.shape)[doubtful] for each in (x, y)))
    return near


def half(operation: str, given: Sequence[Array], kind: str) -> Array:
    """The bits of add, sub, mul or fma of 16-bit numbers, widened to fp32: products are exact in fp64."""
    x, y, *z = (each.astype(f8) for each in given)
    if operation in ("mul", "fma"):
        return to_half(odd_sum(x * y, *z) if z else x * y, kind)
    return to_half(odd_sum(x, y if operation == "add" else -y), kind)


def packed(operation: str, given: Sequence[Array], kind: str) -> Array:
    """The same of two numbers in each register."""
    low, high = zip(*(halves(each, kind) for each in given))
    return joined(half(operation, low, kind), half(operation, high, kind))


def pairs(operation: str, given: Sequence[Array], *, ftz: bool) -> Array:
    """The same of two numbers of fp32 in each register of 64 bits."""
    x, y, *z = (flush(each.view(f4)) if ftz else each.view(f4) for each in given)
    result = fma(x, y, *z) if z else {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation](x, y)
    return (flush(result) if ftz else result).view(u8)


def minimum(a: Array, b: Array, *, nan: bool, largest: bool = False, magnitudes: bool = False) -> Array:
    """min or max; -0 is less than +0. NaN is passed on with ``nan``, and loses otherwise.

    ``magnitudes``: .xorsign.abs, of those, with the sign that a product would have.
    """
    if magnitudes:
        chosen = minimum(np.abs(a), np.abs(b), nan=nan, largest=largest)
        return where(~np.isnan(chosen) & (np.signbit(a) ^ np.signbit(b)), -chosen, chosen)
    first = where(np.signbit(a), b, a) if largest else where(np.signbit(a), a, b)
    chosen = where(a == b, first, where((a > b) == largest, a, b))
    chosen = where(np.isnan(a), b, where(np.isnan(b), a, chosen))
    return where(np.isnan(a) | np.isnan(b), _NAN, chosen) if nan else chosen


def approximate(operation: str, x: Array, end: int, *, ftz: bool = False) -> Array:
    """An approximate function of fp32: exact (``end`` 0), or as far off as the ISA allows, up (1) or down (-1)."""
    x = flush(x) if ftz else np.asarray(x)
    wide = x.astype(f8)
    functions: dict[str, Any] = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "rcp": lambda y: 1 / y,
        "sqrt": np.sqrt,
        "rsqrt": lambda y: 1 / np.sqrt(y),
        "tanh": np.tanh,
        "sin": np.sin,
        "cos": np.cos,
    }
    exact = functions[operation](wide)
    if end:
        absolute = operation in ("sin", "cos") or (operation == "lg2") & (wide > 0.5) & (wide < 2)
        off = end * ERRORS[operation] * where(absolute, 1.0, np.abs(exact))
        exact = where(np.isfinite(exact) & (exact != 0), exact + off, exact)
    result = exact.astype(f4)
    return flush(result) if ftz else result


def quotient(a: Array, b: Array, end: int, *, exact: bool) -> Array:
    """div.rn (``exact``), or div.full and div.approx with an error of up to 2 ulp."""
    if exact or not end:
        return a / b
    found = a.astype(f8) / b
    return where(np.isfinite(found), found + end * ERRORS["div"] * np.abs(found), found).astype(f4)


# ----------------------------------------------------------------------------------------------------------- integers


def divide(a: Array, b: Array) -> Array:
    """C's division, which rounds towards zero. Division by zero gives a number that the ISA leaves open."""
    b = where(b == 0, b.dtype.type(1), b)
    return a // b if a.dtype.kind == "u" else (a - np.fmod(a, b)) // b


def remainder(a: Array, b: Array) -> Array:
    return np.fmod(a, where(b == 0, b.dtype.type(1), b))


def shift_left(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return where(b >= bits, a.dtype.type(0), a << np.minimum(b, u4(bits - 1)).astype(a.dtype))


def shift_right(a: Array, b: Array) -> Array:
    """Of a signed number with its sign."""
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(b, u4(bits - 1)).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else where(b >= bits, a.dtype.type(0), shifted)


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of a product of 64-bit numbers, from halves of 32 bits."""
    x, y, low = a.view(u8), b.view(u8), u8(0xFFFFFFFF)
    x0, x1, y0, y1 = x & low, x >> u8(32), y & low, y >> u8(32)
    middle = x1 * y0 + ((x0 * y0) >> u8(32))
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> u8(32)) + (other >> u8(32))
    if a.dtype.kind == "i":
        high = (high - where(a < 0, y, u8(0)) - where(b < 0, x, u8(0))).view(i8)
    return high


def extract(a: Array, first: Array, length: Array, *, signed: bool) -> Array:
    """bfe of unsigned registers: ``length`` bits from bit ``first`` on. Of a signed field its last bit is repeated, and
    beyond the register its own.
    """
    bits, dtype = 8 * a.dtype.itemsize, a.dtype.type
    kept = np.minimum(np.broadcast_to(length & u4(255), a.shape), u4(bits))
    rest = np.minimum(bits - kept, bits - 1).astype(a.dtype)  # bits to push out at the top
    value = a.view({32: i4, 64: i8}[bits]) if signed else a
    field = shift_left(shift_right(value, first & u4(255)), rest)
    return where(kept == 0, dtype(0), (field >> rest.astype(field.dtype)).view(a.dtype))


def insert(a: Array, b: Array, first: Array, length: Array) -> Array:
    """bfi.b32: ``b`` with ``length`` bits from bit ``first`` on replaced by the lowest of ``a``."""
    first = np.minimum(first & u4(255), u4(32)).astype(u8)
    mask = ((u8(1) << np.minimum(length & u4(255), u4(32)).astype(u8)) - u8(1)) << first
    return ((b.astype(u8) & ~mask) | ((a.astype(u8) << first) & mask)).astype(u4)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 in its default mode: each nibble names a byte of {b, a}, or with its upper bit that byte's sign."""
    both = a.astype(u8) | (b.astype(u8) << u8(32))
    result = np.zeros(both.shape, u4)
    for i in range(4):
        nibble = (selector >> u4(4 * i)) & u4(15)
        byte = (both >> (u8(8) * (nibble & u4(7)).astype(u8))) & u8(255)
        sign = where(byte >> u8(7), u8(255), u8(0))
        result |= where(nibble >> u4(3), sign, byte).astype(u4) << u4(8 * i)
    return result


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3.b32: bit i of ``table`` is the result where a, b, c have the bits of i."""
    result = np.zeros(a.shape, u4)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


# -------------------------------------------------------------------------------------------------------- conversions

_ROUND = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def to_integer(x: Array, mode: str, dtype: Any) -> Array:
    """cvt of a floating-point number: rounded, then clamped; NaN becomes 0."""
    info = np.iinfo(dtype)
    rounded = _ROUND[mode](x.astype(f8))
    top = rounded >= float(info.max)  # fp64 holds no 2^63 - 1
    return where(top, info.max, where(np.isnan(x) | top, 0, np.maximum(rounded, info.min)).astype(dtype)).astype(dtype)


def integral(x: Array, mode: str) -> Array:
    return _ROUND[mode](x)


@functools.cache
def _decoded(kind: str) -> Array:
    """The value of each of the 256 codes of "e4m3" or "e5m2" (the OCP's "8-bit Floating Point Specification")."""
    exponents, mantissas = (4, 3) if kind == "e4m3" else (5, 2)
    bias = (1 << (exponents - 1)) - 1
    found = np.zeros(256, f4)
    for code in range(256):
        exponent, mantissa = code >> mantissas & ((1 << exponents) - 1), code & ((1 << mantissas) - 1)
        if exponent == (1 << exponents) - 1 and (kind == "e5m2" or mantissa == (1 << mantissas) - 1):
            value = float("nan") if kind == "e4m3" or mantissa else float("inf")
        elif exponent:
            value = (1 + mantissa / 2**mantissas) * 2.0 ** (exponent - bias)
        else:
            value = mantissa / 2**mantissas * 2.0 ** (1 - bias)
        found[code] = -value if code >> 7 else value
    return found


def from_fp8(codes: Array, kind: str) -> Array:
    return _decoded(kind)[codes]


def to_fp8(x: Array, kind: str) -> Array:
    """The codes of fp32 numbers, to the nearest, ties to even; .satfinite: too large ones become the largest."""
    finite = _decoded(kind)[: 0x7F if kind == "e4m3" else 0x7C].astype(f8)  # codes of one sign ascend with their values
    size = np.abs(x).astype(f8)
    above = np.searchsorted(finite, size).clip(1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    up = where(size - low == high - size, above % 2 == 0, size - low > high - size)
    code = where(np.isnan(x), 0x7F, above - 1 + up)
    return (code | (np.signbit(x) & ~np.isnan(x)).astype(i8) << 7).astype(u2)


def packed_fp8(high: Array, low: Array, kind: str) -> Array:
    return to_fp8(low, kind) | (to_fp8(high, kind) << u2(8))
