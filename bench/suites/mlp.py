"""``ParallelMLP`` on one device, forward and backward, against the stock modules.

On a GPU each shape also gets its pass-count bound: the time of eager torch's passes over [T, F] beside its products
(bias, GeLU forward, GeLU backward) at this device's copy bandwidth, over the time of the plain products. Fusion cannot
gain more. The same run measures both, and the bytes that each level of recomputation keeps for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import MODELS
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.stock import training_step
from . import mlp_pair
from .mlp_pair import LEVELS, Pair, Shape, accumulating_row, bound_row, memory_row, step_row

TARGETS = {
    "forward + backward against torch.compile, 4096 tokens and up": 1.0,
    "share of the pass-count bound, 4096 tokens and up": 0.8,
    "forward + backward into fp32 gradients against eager, 4096 tokens, width 4096": 1.12,
    "activation memory against eager, where activations are recomputed and F >= 2 D": 1.5,
    "CPU, against the stock torch modules": 0.97,
}
COMPILED, BOUND, INTO_FP32, MEMORY, CPU = TARGETS.values()

CPU_SHAPES = (Shape(64, 256, 1024, torch.float32), Shape(512, 1024, 4096, torch.float32))
DRY_SHAPES = (Shape(8, 32, 64, torch.float32),)
SHORT_SHAPES = tuple(
    Shape(*sizes, torch.bfloat16)
    for sizes in ((4096, 4096, 16384), (8192, 8192, 4096), (16384, 4096, 4096), (1024, 4096, 16384))
)
# Megatron's feed-forward width of 4 D, whole and one rank's part of eight.
_WIDTHS = sorted({4096, 8192, *(model.D for model in MODELS.values() if not model.gated)})
GPU_SHAPES = tuple(
    dict.fromkeys(
        (
            *SHORT_SHAPES,
            *(
                Shape(T, D, 4 * D // R, torch.bfloat16)
                for D in _WIDTHS
                for R in (1, 8)
                for T in (64, 1024, 4096, 16384)
            ),
        )
    )
)
# The options of ParallelMLP in the rows below.
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"recompute": 1}, {"recompute": 2}, {"fuse_wgrad_accumulation": True})


def shapes(settings: Settings) -> tuple[Shape, ...]:
    if settings.dry:
        return DRY_SHAPES
    if settings.cuda:
        return SHORT_SHAPES if settings.short else GPU_SHAPES
    return CPU_SHAPES


def plan(settings: Settings) -> list[Measurement]:
    chosen = shapes(settings)
    on_cpu = not settings.cuda and not settings.dry
    if on_cpu:
        rows = [step_row(settings, shape, "nn.Linear, F.gelu, nn.Linear", CPU) for shape in chosen]
    else:
        rows = [step_row(settings, shape, "eager", None) for shape in chosen]
        rows += [accumulating_row(settings, shape, _into_fp32(shape)) for shape in chosen]
    if settings.cuda and not settings.dry:
        rows += [bound_row(settings, shape, BOUND if shape.large else None) for shape in chosen]
    for shape in chosen:
        rows += [memory_row(settings, shape, level, MEMORY if level else None) for level in LEVELS]
    if on_cpu:
        return rows
    for level in LEVELS[1:]:
        metric = f"forward + backward, recompute={level}, us"
        rows.append(step_row(settings, chosen[0], "eager", None, metric=metric, recompute=level))
    for shape in () if settings.dry else chosen:
        rows.append(step_row(settings, shape, "torch.compile", COMPILED if shape.large else None, compile=True))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    return mlp_pair.verdicts(settings, shapes(settings), names, VARIANTS)


def warm(settings: Settings, name: str) -> None:
    for shape in shapes(settings):
        if shape.name == name:
            for options in VARIANTS:
                pair = Pair.of(settings, shape, **options)
                mlp_pair.attach_buffers(pair.ours)
                training_step(pair.ours, pair.x, pair.grad)


def _into_fp32(shape: Shape) -> float | None:
    return INTO_FP32 if (shape.T, shape.D, shape.F) == (4096, 4096, 16384) else None


BENCHMARK = Benchmark(
    name="mlp",
    summary="ParallelMLP, forward and backward, on one device without a process group",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act", "dgrad_act", "wgrad_accumulate"),
    sources=("kernels/dev/shapes.py", *mlp_pair.SOURCES),
)
