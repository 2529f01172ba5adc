"""``ParallelMLP`` on one device, forward and backward, against the stock modules.

On a GPU each shape also gets its pass-count bound. Eager torch makes about six passes over [T, F] that fusion can take
out (bias, GeLU forward, GeLU backward; a read and a write each); what they cost at this device's copy bandwidth, over
what the six plain GEMMs cost, is all that can be gained. Both are measured in the same run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from ..kernels.accuracy import Verdict
from ..layers import ParallelMLP
from .benchmark import Benchmark, Measurement, Settings
from .gate import check_outputs, module_outputs
from .stock import StockMLP, compiled, training_step
from .timing import Timing, compare, copy_bandwidth, input_sets

TARGETS = {
    "forward + backward against torch.compile, 4096 tokens and up": 1.0,
    "share of the pass-count bound, 4096 tokens and up": 0.8,
    "activation memory against eager": 1.5,
    "CPU, against the stock torch modules": 0.97,
}
COMPILED, BOUND, MEMORY, CPU = TARGETS.values()

LARGE = 4096
PASSES = 6  # over [T, F], in the activation's element size


@dataclass(frozen=True)
class Shape:
    """T tokens through D -> F -> D."""

    T: int
    D: int
    F: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"t{self.T}-d{self.D}-f{self.F}-{str(self.dtype).removeprefix('torch.')}"


CPU_SHAPES = (Shape(64, 256, 1024, torch.float32), Shape(512, 1024, 4096, torch.float32))
DRY_SHAPES = (Shape(8, 32, 64, torch.float32),)
SHORT_SHAPES = tuple(
    Shape(*sizes, torch.bfloat16)
    for sizes in ((4096, 4096, 16384), (8192, 8192, 4096), (16384, 4096, 4096), (1024, 4096, 16384))
)
# Megatron's feed-forward of 4 D, whole and as one rank of eight holds it.
GPU_SHAPES = SHORT_SHAPES + tuple(
    shape
    for shape in (
        Shape(T, D, 4 * D // R, torch.bfloat16) for D in (4096, 8192) for R in (1, 8) for T in (64, 1024, 4096, 16384)
    )
    if shape not in SHORT_SHAPES
)


def shapes(settings: Settings) -> tuple[Shape, ...]:
    if settings.dry:
        return DRY_SHAPES
    if settings.cuda:
        return SHORT_SHAPES if settings.short else GPU_SHAPES
    return CPU_SHAPES


def plan(settings: Settings) -> list[Measurement]:
    chosen = shapes(settings)
    if not settings.cuda and not settings.dry:
        return [_row(settings, shape, "nn.Linear, F.gelu, nn.Linear", CPU, _eager) for shape in chosen]
    rows = [_row(settings, shape, "eager", None, _eager) for shape in chosen]
    if settings.dry:
        return rows
    for shape in chosen:
        rows += [_bound_row(settings, shape), _memory_row(settings, shape)]
    rows += [
        _row(settings, shape, "torch.compile", COMPILED if shape.T >= LARGE else None, compiled) for shape in chosen
    ]
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for shape in shapes(settings):
        if shape.name in names:
            yield from ((shape.name, verdict) for verdict in _verdicts(Pair.of(settings, shape)))


def _verdicts(pair: Pair) -> list[Verdict]:
    exact = copy.deepcopy(pair.stock).double()
    return check_outputs(
        module_outputs(pair.ours, pair.x, pair.grad),
        low=lambda: module_outputs(pair.stock, pair.x, pair.grad),
        oracle=lambda: module_outputs(exact, pair.x.double(), pair.grad.double()),
    )


def warm(settings: Settings, name: str) -> None:
    for shape in shapes(settings):
        if shape.name == name:
            pair = Pair.of(settings, shape)
            training_step(pair.ours, pair.x, pair.grad)


@dataclass(frozen=True)
class Pair:
    """Both modules with the same weights, and one input with its cotangent."""

    ours: ParallelMLP
    stock: StockMLP
    x: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, settings: Settings, shape: Shape, seed: int = 0) -> Pair:
        torch.manual_seed(seed)
        stock = StockMLP(shape.D, shape.F).to(settings.device, shape.dtype)
        ours = ParallelMLP(shape.D, shape.F, impl=settings.impl, dtype=shape.dtype, device=settings.device)
        ours.load_state_dict(stock.state_dict())
        x, grad = (torch.randn(shape.T, shape.D, device=settings.device, dtype=shape.dtype) for _ in range(2))
        return cls(ours, stock, x.requires_grad_(), grad)


def _eager(module: nn.Module) -> nn.Module:
    return module


def _row(
    settings: Settings,
    shape: Shape,
    peer_name: str,
    target: float | None,
    wrap: Callable[[nn.Module], Callable[..., torch.Tensor]],
) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        pairs = _pairs(settings, shape)
        return compare(
            [_step(pair.ours, pair) for pair in pairs],
            [_step(pair.stock, pair, wrap(pair.stock)) for pair in pairs],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    return Measurement(shape.name, "forward + backward, us", peer_name, target, run, slow=wrap is compiled)


def _pairs(settings: Settings, shape: Shape) -> list[Pair]:
    size = 2 * shape.D * shape.F * shape.dtype.itemsize
    return [Pair.of(settings, shape, seed) for seed in range(input_sets(size, settings.device))]


def _step(module: nn.Module, pair: Pair, call: Callable[..., torch.Tensor] | None = None) -> Callable[[], object]:
    return lambda: training_step(module, pair.x, pair.grad, call=call)


def _bound_row(settings: Settings, shape: Shape) -> Measurement:
    """The gain over eager as a share of the gain that the pass count allows."""

    def run() -> tuple[Timing, Timing]:
        pairs = _pairs(settings, shape)
        ours, eager = compare(
            [_step(pair.ours, pair) for pair in pairs],
            [_step(pair.stock, pair) for pair in pairs],
            settings.device,
            seconds=settings.seconds,
        )
        gemms = [_gemms(pair) for pair in pairs]
        gemm, _ = compare(gemms, gemms, settings.device, seconds=settings.seconds)
        passes_us = PASSES * shape.T * shape.F * shape.dtype.itemsize / _bandwidth(settings.device) * 1e6
        return Timing(eager.value / ours.value - 1, ours.noise), Timing(passes_us / gemm.value)

    target = BOUND if shape.T >= LARGE else None
    return Measurement(shape.name, "gain over eager", "pass-count bound", target, run, higher_is_better=True)


@torch.no_grad()
def _run_gemms(x: torch.Tensor, grad: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, h: torch.Tensor) -> None:
    """The six products of forward and backward, nothing else; ``h`` [T, F] stands for every hidden activation."""
    torch.mm(x, w1.T)  # [T, F]
    torch.mm(h, w2.T)  # [T, D]
    torch.mm(grad, w2)  # [T, F]
    torch.mm(grad.T, h)  # [D, F]
    torch.mm(h, w1)  # [T, D]
    torch.mm(h.T, x)  # [F, D]


def _gemms(pair: Pair) -> Callable[[], None]:
    h = torch.randn(len(pair.x), pair.stock.c_fc.out_features, device=pair.x.device, dtype=pair.x.dtype)
    return lambda: _run_gemms(pair.x, pair.grad, pair.stock.c_fc.weight, pair.stock.c_proj.weight, h)


@cache
def _bandwidth(device: torch.device) -> float:
    return copy_bandwidth(device)


def _memory_row(settings: Settings, shape: Shape) -> Measurement:
    """Bytes that stay allocated between forward and backward."""

    def kept(module: nn.Module, pair: Pair) -> Timing:
        training_step(module, pair.x, pair.grad)  # so that workspaces exist already
        before = torch.cuda.memory_allocated(settings.device)
        y = module(pair.x)
        return Timing(torch.cuda.memory_allocated(settings.device) - before - y.nbytes)

    def run() -> tuple[Timing, Timing]:
        pair = Pair.of(settings, shape)
        return kept(pair.ours, pair), kept(pair.stock, pair)

    return Measurement(shape.name, "bytes kept for backward", "eager", MEMORY, run)


BENCHMARK = Benchmark(
    name="mlp",
    summary="ParallelMLP, forward and backward, on one device without a process group",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act",),
    sources=(
        *("bench/stock.py", "layers/mlp.py", "layers/linear.py", "layers/module.py"),
        *("parallel/linear.py", "parallel/sharding.py"),
    ),
)
