"""What a quantised cache holds, as numbers that a product takes: every code exactly, in few instructions.

What turns a tile of values into a product's operand moves 16 bits at a time, and single bytes one by one. So values
are read in pairs of neighbouring columns, and told apart in registers: on NVIDIA's chips four codes at once, by PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.fp8_bits import e4m3_bits_to_fp16

# $2 holds two pairs, one in each half; $0 gets what is in even places, $1 what is in odd ones.
# fp16 to bf16 in one step would be a slow instruction.
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b16 first, second, e0, o0, e1, o1;
    .reg .b32 x, y;
    .reg .f32 f0, g0, f1, g1;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 x, first;
    cvt.rn.f16x2.e4m3x2 y, second;
    mov.b32 {e0, o0}, x;
    mov.b32 {e1, o1}, y;
    cvt.f32.f16 f0, e0;
    cvt.f32.f16 g0, o0;
    cvt.f32.f16 f1, e1;
    cvt.f32.f16 g1, o1;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, g1, g0;
}""")
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 first, second;
    .reg .b32 x, y;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 x, first;
    cvt.rn.f16x2.e4m3x2 y, second;
    prmt.b32 $0, x, y, 0x5410;
    prmt.b32 $1, x, y, 0x7632;
}""")


def _int8_to(format: str, large: str, minus: str, one: str) -> str:
    """Whole numbers whose unit is a number's last place: the lower seven bits make ``large`` + n, from which the sign
    bit, as it stands in ``minus``, takes ``large`` or 128 more."""
    return f"""{{
    .reg .b32 x, m, c, n, d, u;
    mov.b32 u, 0x{one * 2};
    shr.b32 x, $2, 8;
    lop3.b32 m, $2, 0x007f007f, 0x{large * 2}, 0xea;
    lop3.b32 c, $2, 0x00800080, 0x{minus * 2}, 0xea;
    lop3.b32 n, x, 0x007f007f, 0x{large * 2}, 0xea;
    lop3.b32 d, x, 0x00800080, 0x{minus * 2}, 0xea;
    fma.rn.{format} $0, m, u, c;
    fma.rn.{format} $1, n, u, d;
}}"""


INT8_TO_BF16 = tl.constexpr(_int8_to("bf16x2", large="4300", minus="c300", one="3f80"))  # 128
INT8_TO_FP16 = tl.constexpr(_int8_to("f16x2", large="6400", minus="e400", one="3c00"))  # 1024


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """Stored keys or values in DTYPE; bytes are e4m3's bits, on chips that cannot convert them."""
    if x.dtype == tl.uint8:
        x = e4m3_bits_to_fp16(x)
    elif x.dtype == tl.int8:
        x = x.to(tl.float32)  # the interpreter does not know the way from whole numbers to bf16
    elif x.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def widen_pairs(x, CODE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Pairs of stored values, x int16, in DTYPE: (those in even places, those in odd ones). CODE is one's dtype."""
    if PTX and tl.float8e4nv == CODE and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [x], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    elif PTX and tl.float8e4nv == CODE and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(E4M3_TO_FP16, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)
    elif PTX and tl.int8 == CODE and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [x], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    elif PTX and tl.int8 == CODE and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        even, odd = x.to(tl.int8), (x >> 8).to(tl.int8)
        return widen(even.to(CODE, bitcast=True), DTYPE), widen(odd.to(CODE, bitcast=True), DTYPE)
