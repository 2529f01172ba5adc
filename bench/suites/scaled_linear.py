"""``scaled_linear`` on fp8 operands against ``torch._scaled_mm`` with the same scales, and cuBLAS in bf16.

The operands are quantised beforehand, as weights are for inference; they have one scale each, or one for each row.
``torch._scaled_mm`` accumulates like our product (``use_fast_accum=True``). The plain product in bf16 shows the gain of
fp8; it is the only peer of a dry run without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import KINDS, SHORT, grid
from ...kernels.scaled_linear import Quantized, quantize, scaled_linear
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs, check_outputs
from ..harness.problem import Problem, problems
from ..harness.timing import Timing, compare, input_sets

TARGETS = {"against torch._scaled_mm, 4096 tokens and up": 1 / 1.03, "against cuBLAS in bf16, 4096 tokens and up": 1.0}
SCALED_MM, BF16 = TARGETS.values()

LARGE = 4096  # tokens from which the targets count
SCALINGS = ("tensor", "row")


@dataclass(frozen=True)
class Operands:
    """x [T, D] and the stacked weights [F, D]: quantised, and the originals."""

    x: Quantized
    weight: Quantized
    plain_x: torch.Tensor
    plain_weight: torch.Tensor


def chosen(settings: Settings) -> list[Problem]:
    if settings.dry:
        return problems((problem.DRY["up"],), settings)
    return problems(SHORT["linear_act"] if settings.short else grid(KINDS), settings)


def operands(found: Problem, settings: Settings, scaling: str, seed: int = 0) -> Operands:
    plain = found.operands(settings.device, seed)
    x, weight = plain.x.detach(), plain.packed
    x_fp8, weight_fp8 = (quantize(t, scaling=scaling, impl=settings.impl) for t in (x, weight))
    return Operands(x_fp8, weight_fp8, x, weight)


def plan(settings: Settings) -> list[Measurement]:
    rows = []
    for found in chosen(settings):
        large = found.projection.T >= LARGE
        for scaling in SCALINGS:
            if settings.cuda:
                rows.append(_row(settings, found, scaling, "torch._scaled_mm", SCALED_MM if large else None, _stock))
            rows.append(_row(settings, found, scaling, "cuBLAS x @ w.T in bf16", BF16 if large else None, _plain))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for found in chosen(settings):
        if found.name in names:
            for scaling in SCALINGS:
                each = operands(found, settings, scaling)
                exact = partial(_exact, each)
                ours = {"y": _ours(each, found.dtype, settings.impl)}
                for verdict in check_outputs(ours, low=partial(_rounded, each, found.dtype), oracle=exact):
                    yield found.name, verdict


def warm(settings: Settings, name: str) -> None:
    for found in chosen(settings):
        if found.name == name:
            for scaling in SCALINGS:
                _ours(operands(found, settings, scaling), found.dtype, settings.impl)


def _row(
    settings: Settings,
    found: Problem,
    scaling: str,
    peer_name: str,
    target: float | None,
    peer: Callable[[Operands], object],
) -> Measurement:
    # One byte for each element of the operands.
    taken = (found.input_bytes + found.weight_bytes) // found.dtype.itemsize

    def run() -> tuple[Timing, Timing]:
        sets = [
            operands(found, settings, scaling, seed)
            for seed in range(input_sets(taken + found.output_bytes, settings.device))
        ]
        return compare(
            [partial(_ours, each, found.dtype, settings.impl) for each in sets],
            [partial(peer, each) for each in sets],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    work = Work(found.flops, taken + found.output_bytes)
    return Measurement(found.name, f"scales by {scaling}, us", peer_name, target, run, work=work, bf16=False)


def _ours(operands: Operands, dtype: torch.dtype, impl: str) -> torch.Tensor:
    x, weight = operands.x, operands.weight
    return scaled_linear(x.values, weight.values, x.scale, weight.scale, out_dtype=dtype, impl=impl)


def _stock(operands: Operands) -> torch.Tensor:
    x, weight = operands.x, operands.weight
    scale = weight.scale.t() if weight.scale.dim() else weight.scale
    return torch._scaled_mm(
        x.values, weight.values.t(), x.scale, scale, out_dtype=operands.plain_x.dtype, use_fast_accum=True
    )


def _plain(operands: Operands) -> torch.Tensor:
    return operands.plain_x @ operands.plain_weight.t()


def _exact(operands: Operands) -> Outputs:
    """The product of the values that the operands represent, in fp64."""
    x, weight = (t.values.double() * t.scale for t in (operands.x, operands.weight))
    return {"y": x @ weight.t()}


def _rounded(operands: Operands, dtype: torch.dtype) -> Outputs:
    return {"y": _ours(operands, dtype, "reference")}


BENCHMARK = Benchmark(
    name="scaled_linear",
    summary="scaled_linear: fp8 operands with scales in the epilogue, against torch._scaled_mm and cuBLAS in bf16",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("scaled_linear",),
    sources=("bench/harness/problem.py", "kernels/dev/shapes.py"),
    devices=("cuda",),
)
