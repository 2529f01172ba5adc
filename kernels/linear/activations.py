"""Activation functions and their derivatives inside kernels, in fp32. ``reference.py`` names their sources.

The smooth ones are z times a gate between 0 and 1. With APPROX, which is for results of 16 bits on NVIDIA's chips, the
gate is made of approximate instructions alone. It keeps its relative accuracy where it is small, as 1 + tanh.approx
would not: the error of tanh.approx stays while the sum vanishes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _positive(z):
    """max(z, 0), and NaN of NaN as torch has it: an overflow must not vanish here."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp2(x):
    """2^x by one instruction, ex2.approx.ftz; results below 2^-126 are 0."""
    return tl.exp2(x)


@triton.jit
def _reciprocal(x):
    """1 / x by one instruction; 0 for x from 2^126 on."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(z, SLOPE: tl.constexpr, CUBIC: tl.constexpr, APPROX: tl.constexpr):
    """sigmoid(SLOPE * (z + CUBIC * z^3)), and 1 minus that."""
    if APPROX:
        SCALE: tl.constexpr = -1.4426950408889634 * SLOPE  # by log2(e)
        odds = _exp2(z * (SCALE + SCALE * CUBIC * (z * z)) if CUBIC is not None else SCALE * z)
        gate = _reciprocal(1.0 + odds)
        return gate, tl.minimum(odds, 2.0**127) * gate  # odds may be infinite, the gate is 0 then
    else:
        gate = tl.sigmoid(SLOPE * z * (1.0 + CUBIC * z * z) if CUBIC is not None else SLOPE * z)
        return gate, 1.0 - gate


@triton.jit
def _erf(x):
    """erf(x) by the two polynomials of CUDA's erff and to its bits, without the branches at which threads part."""
    square = x * x
    near = tl.fma(tl.fma(8.48349446e-05, square, -0.000821309164), square, 0.00521348882)
    near = tl.fma(tl.fma(near, square, -0.0268687736), square, 0.112840049)
    near = tl.fma(tl.fma(near, square, -0.376126647), square, 0.128379151)
    a = tl.abs(x)
    far = tl.fma(tl.fma(1.64258454e-05, a, -0.000468021055), a, 0.00526476419)
    far = tl.fma(tl.fma(far, a, -0.0343030766), a, 0.153293699)
    far = tl.fma(tl.fma(far, a, 0.916313052), a, 0.628299832)
    rest = 1.0 - _exp2(tl.fma(far, -a, -a))
    return tl.where(a < 1.00295997, tl.fma(near, x, x), tl.where(x < 0, -rest, rest))


@triton.jit
def _normal_cdf(z, APPROX: tl.constexpr):
    """Phi(z) of the standard normal distribution, and 1 minus that."""
    if APPROX:
        # log2(Phi(-a)) by its minimax polynomial of degree 5 on [0, 5], exact at 0: Phi(-a) to 2^-12.4 of itself there,
        # and too small beyond, by a quarter of 1e-15 at 8.
        a = tl.abs(z)
        power = -0.046850875 + a * (0.0054053124 + a * -0.000277861836)
        below = _exp2(-1.0 + a * (-1.14876997 + a * (-0.465769887 + a * power)))
        cdf = tl.where(z < 0, below, 1.0 - below)
    else:
        cdf = 0.5 * (1.0 + _erf(z * 0.7071067811865476))
    return cdf, 1.0 - cdf


@triton.jit
def _gate(z, ACTIVATION: tl.constexpr, APPROX: tl.constexpr):
    """act(z) / z, and 1 minus that."""
    if ACTIVATION == "gelu_erf":
        return _normal_cdf(z, APPROX)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2/pi) * (z + 0.044715 z^3): one exponential instead of a tanh.
        return _sigmoid(z, 1.5957691216057308, 0.044715, APPROX)
    elif ACTIVATION == "quick_gelu":
        return _sigmoid(z, 1.702, None, APPROX)
    else:
        tl.static_assert(ACTIVATION == "silu")
        return _sigmoid(z, 1.0, None, APPROX)


@triton.jit
def tied(z, acc, ACTIVATION: tl.constexpr, APPROX: tl.constexpr):
    """z itself, in the layout of ``acc`` where the activation has a gate.

    What is made of it for two results has one layout then: Triton computes a gate again in each layout that a store
    asks for, where converting a result is cheaper. An instruction with side effects is never repeated.
    """
    if APPROX and ACTIVATION != "relu" and ACTIVATION != "squared_relu":
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [z, acc], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return z


@triton.jit
def act(z, ACTIVATION: tl.constexpr, APPROX: tl.constexpr):
    """y = act(z)."""
    if ACTIVATION == "identity":
        return z
    elif ACTIVATION == "relu":
        return _positive(z)
    elif ACTIVATION == "squared_relu":
        return _positive(z) * _positive(z)
    else:
        return z * _gate(z, ACTIVATION, APPROX)[0]


@triton.jit
def act_grad(z, ACTIVATION: tl.constexpr, APPROX: tl.constexpr):
    """act'(z)."""
    if ACTIVATION == "identity":
        return tl.full(z.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "squared_relu":
        return 2.0 * _positive(z)
    else:
        gate, rest = _gate(z, ACTIVATION, APPROX)
        if ACTIVATION == "gelu_erf":
            density = _exp2(-0.7213475204444817 * z * z) if APPROX else tl.exp(-0.5 * z * z)
            return gate + z * 0.3989422804014327 * density
        slope = z * gate * rest  # first what may be small: nothing overflows where the result does not
        if ACTIVATION == "gelu_tanh":
            slope *= 1.5957691216057308 * (1.0 + 0.134145 * tl.minimum(z * z, 1024.0))
        elif ACTIVATION == "quick_gelu":
            slope *= 1.702
        return gate + slope
