"""The cost of a pipeline stage's passes, for :mod:`timeline`, modelled for a chip.

The model covers a decoder block's products (``kernels/runtime/cost.py``, in the configurations that would run) and its
causal attention, 2 T S N H FLOPs at the chip's dense peak: half of the full 4. Attention's backward takes 2.5 times its
forward, with five products instead of two (Dao, "FlashAttention-2", arXiv:2307.08691), none of them for weights: so the
gradient of the input costs more than those of the weights, and zero-bubble schedules keep some bubbles. The model
ignores norms, communication and overlap.
"""

from __future__ import annotations

import functools

from ...kernels.dev import shapes
from ...kernels.linear.config import pick_config
from ...kernels.linear.gemm import Gemm
from ...kernels.runtime import cost
from ...kernels.runtime.chips import CHIPS
from ...kernels.runtime.dtype_names import BF16
from ...kernels.runtime.names import expected
from .timeline import Costs

ATTENTION_BACKWARD = 2.5


def modelled(model: str, tokens: int, *, length: int, tp: int = 1, arch: str = "sm_90") -> Costs:
    """Microseconds of one block of ``model`` for a micro-batch of ``tokens`` in sequences of ``length``, in bf16.

    ``model`` is one of ``kernels/dev/shapes.py``, over ``tp`` ranks; ``arch`` a chip of ``kernels/runtime/chips.py``.
    Raises ValueError for an unknown model or chip, and for sizes that do not divide.
    """
    if model not in shapes.MODELS:
        raise ValueError(f"model={model!r}: {expected(model, shapes.MODELS)}")
    if arch not in CHIPS:
        raise ValueError(f"target={arch!r}: {expected(arch, CHIPS)}")
    if tokens < 1 or length < 1 or tokens % length:
        raise ValueError(f"tokens={tokens} are not a whole number of sequences of length={length}")
    sizes = shapes.MODELS[model]
    if tp < 1 or sizes.N % tp or sizes.K % tp or sizes.F % tp:
        raise ValueError(f"tp={tp}: {model} has {sizes.N} heads and {sizes.K} KV heads, which do not divide by it")
    kinds = ("qkv", "o", shapes.GATE_UP if sizes.gated else "up", "down")
    products = [shapes.projection(model, kind, tp, tokens) for kind in kinds]

    def total(layout: str) -> float:
        return sum(product_us(arch, layout, tokens, each.F, each.D) for each in products)

    flops = 2 * tokens * length * (sizes.N // tp) * sizes.H
    attention = flops / CHIPS[arch].flops["bf16"] * 1e6
    return Costs(total("nt") + attention, total("nn") + ATTENTION_BACKWARD * attention, total("tn"))


@functools.lru_cache(16384)
def product_us(arch: str, layout: str, T: int, F: int, D: int) -> float:
    """The chip model's time in bf16 of x @ W^T ("nt"), dz @ W ("nn") or dz^T @ x ("tn") of x [T, D] and W [F, D]."""
    M, N, K = {"nt": (T, F, D), "nn": (T, D, F), "tn": (F, D, T)}[layout]
    gemm = Gemm(layout, M, N, K, BF16, BF16)
    return cost.predict(CHIPS[arch], gemm, pick_config(arch, gemm)).time_us
