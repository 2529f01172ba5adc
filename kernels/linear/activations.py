"""Activation functions and their derivatives inside kernels, in fp32. ``reference.py`` names their sources."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _positive(z):
    """max(z, 0), and NaN of NaN as torch has it: an overflow must not vanish here."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gelu_tanh_gate(z):
    """0.5 * (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2/pi) * (z + 0.044715 z^3): one exponential instead of a tanh."""
    return tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))


@triton.jit
def act(z, ACTIVATION: tl.constexpr):
    """y = act(z)."""
    if ACTIVATION == "relu":
        return _positive(z)
    elif ACTIVATION == "squared_relu":
        return _positive(z) * _positive(z)
    elif ACTIVATION == "gelu_erf":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return z * _gelu_tanh_gate(z)
    elif ACTIVATION == "quick_gelu":
        return z * tl.sigmoid(1.702 * z)
    elif ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return z


@triton.jit
def act_grad(z, ACTIVATION: tl.constexpr):
    """act'(z)."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "squared_relu":
        return 2.0 * _positive(z)
    elif ACTIVATION == "gelu_erf":
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        gate = _gelu_tanh_gate(z)
        return gate + z * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif ACTIVATION == "quick_gelu":
        gate = tl.sigmoid(1.702 * z)
        return gate * (1.0 + 1.702 * z * (1.0 - gate))
    elif ACTIVATION == "silu":
        gate = tl.sigmoid(z)
        return gate * (1.0 + z * (1.0 - gate))
    else:
        tl.static_assert(ACTIVATION == "identity")
        return tl.full(z.shape, 1.0, tl.float32)
