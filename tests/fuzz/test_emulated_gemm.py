"""Random products, compiled and emulated, each launch in a random candidate of the tuner, on views of all kinds."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import emulated
import pytest
from emulated import Trial
from fuzz import Fuzz

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.candidates import candidates
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.linear import plan
from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.linear.reference import ACTIVATIONS
from shardfuse.kernels.runtime.chips import converts_e4m3
from shardfuse.kernels.runtime.dtypes import BF16, E4M3, E5M2, FP16, FP32

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

FEW, MANY = (1, 3, 16, 17, 40, 64), (96, 128, 150, 200, 272)
DTYPES = (BF16, BF16, FP16, FP16, FP32)
GATES = ("silu", "gelu_tanh", "gelu_erf", "relu")
OPS = ("linear_act", "linear_act", "gated_linear", "dgrad_act", "dgrad_gated", "wgrad_accumulate")


def _drawn(draw: Random, arch: str) -> Trial:
    op = draw.choice((*OPS, "scaled_linear") if converts_e4m3(arch) else OPS)
    dtype = draw.choice(DTYPES)
    most = 128 if dtype == FP32 else 512  # fp32 products are single FMAs
    sizes = {
        "T": draw.choice(FEW if draw.random() < 0.4 else MANY),
        "D": draw.choice([n for n in (64, 100, 128, 160, 256, 333, 512) if n <= most]),
        "F": draw.choice([n for n in (64, 72, 128, 136, 200, 257, 384) if n <= most]),
    }
    case = Case("drawn", dtype, sizes, _options(op, draw))
    notes: list[str] = []
    return emulated.of_op(draw, registry.op(op), case, around=_any_candidates(draw, notes), notes=notes)


def _options(op: str, draw: Random) -> dict[str, Any]:
    """What a case of ``op`` may ask for."""
    yes = lambda: draw.random() < 0.5
    activation = draw.choice(list(ACTIVATIONS))
    if op == "linear_act":
        weights = draw.choice((1, 1, 2, 3))
        layout = draw.choice(("rows", "rows", "rows", "columns", "strided"))
        residual = weights == 1 and yes()
        return {"activation": activation, "bias": yes(), "weights": weights, "layout": layout, "residual": residual}
    if op == "gated_linear":
        return {"activation": draw.choice(GATES), "bias": yes()}
    if op == "dgrad_act":
        smooth = [name for name in ACTIVATIONS if name != "identity"]
        return {"activation": draw.choice(smooth), "recompute_act": yes()}
    if op == "dgrad_gated":
        return {"activation": draw.choice(GATES), "recompute_act": yes()}
    if op == "wgrad_accumulate":
        return {"bias": yes(), "fp32": yes()}
    kind = draw.choice(("product", "training"))
    scaling = draw.choice(("tensor", "row") if kind == "product" else ("tensor", "row", "delayed"))
    formats = draw.choice(((E4M3, E4M3), (E5M2, E4M3)))
    return {"activation": activation, "bias": yes(), "formats": formats, "kind": kind, "scaling": scaling}


def _any_candidates(draw: Random, notes: list[str]) -> contextlib.AbstractContextManager[None]:
    """Every product of a case runs in a configuration that the tuner would try for it."""
    chosen: dict[Gemm, GemmConfig] = {}

    def choose(arch: str, gemm: Gemm) -> GemmConfig:
        if gemm not in chosen:
            chosen[gemm] = draw.choice(candidates(arch, gemm))
            notes.append(f"{gemm} in {chosen[gemm]}, groups of {chosen[gemm].group_m}")
        return chosen[gemm]

    return emulated.choosing(plan, "pick_config", choose)


@emulated.needed
def test_products(fuzz: Fuzz):
    emulated.run(fuzz, _drawn)
