"""Gated layers: ``gated_linear`` against one GEMM of the doubled width, a gated ``ParallelMLP`` against stock modules.

Forward saves the tensors that backward needs; the plain GEMM, which cannot, runs without gradients. Peers: eager torch,
torch.compile, and, if installed, Liger's kernel for activation and product after cuBLAS. The MLP's rows are forward and
backward, with the pass-count bound that ``mlp.py`` explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch.nn.functional import linear

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import GATE_UP, GATED_MODELS, SHORT, Projection, grid
from ...kernels.linear import apply_activation, gated_linear
from ...kernels.runtime.cost import PASSES
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs
from ..harness.problem import Operands, Problem, lazily_compiled, plain_gemm, problems, row
from ..harness.stock import StockGatedMLP, liger_multiply, training_step
from . import mlp_pair
from .mlp_pair import Pair, Shape, bound_row, memory_row, step_row

TARGETS = {
    "forward against one cuBLAS GEMM of the doubled width": 1 / 1.03,
    "forward against every other peer": 1.0,
    "MLP forward + backward against torch.compile and Liger, 4096 tokens and up": 1.0,
    "MLP, share of the pass-count bound, 4096 tokens and up": 0.8,
    "MLP, activation memory against eager, where activations are recomputed": 1.5,
    "CPU, against the stock torch calls": 0.97,
}
DOUBLED, OTHERS, MLP, BOUND, MEMORY, CPU = TARGETS.values()

FORWARD = "forward, us"
MIN_TOKENS = 256  # of the MLP's rows: training steps have more
AUTOTUNED = 1  # of a short run's shapes

ON_CPU = tuple(
    Projection("cpu", GATE_UP, 1, T, D, (F, F), "silu", bias=False) for T, D, F in ((64, 256, 704), (512, 1024, 2816))
)


def chosen(settings: Settings) -> list[Problem]:
    if settings.dry:
        return problems((problem.DRY[GATE_UP],), settings)
    if settings.cuda:
        return problems(SHORT["gated"] if settings.short else grid((GATE_UP,), models=GATED_MODELS), settings)
    return problems(ON_CPU, settings)


def shapes(settings: Settings) -> list[Shape]:
    """The MLPs of the projections that have enough tokens for training."""
    return [_mlp(each) for each in chosen(settings) if _trains(settings, each)]


def _mlp(problem: Problem) -> Shape:
    """The gated layer that begins with this projection, one rank's part."""
    projection = problem.projection
    F = projection.widths[0]
    return Shape(projection.T, projection.D, F, problem.dtype, gated=True, activation=projection.activation)


def _trains(settings: Settings, problem: Problem) -> bool:
    return problem.projection.T >= MIN_TOKENS or not settings.cuda


def plan(settings: Settings) -> list[Measurement]:
    found, mlps = chosen(settings), shapes(settings)
    if not settings.cuda and not settings.dry:
        return list(chain.from_iterable(_cpu_rows(settings, each, mlp) for each, mlp in zip(found, mlps)))
    timed = not settings.dry
    rows = [_row(settings, each, "cuBLAS, doubled width", DOUBLED, plain_gemm) for each in found]
    rows += [_row(settings, each, "eager", OTHERS, _eager(each), extra=_eager_passes(each)) for each in found]
    rows += [step_row(settings, mlp, "eager", None) for mlp in mlps]
    rows += [bound_row(settings, mlp, BOUND if mlp.large else None) for mlp in mlps if timed]
    rows += [memory_row(settings, mlp, 1, MEMORY) for mlp in mlps]
    rows += chain.from_iterable(_liger_rows(settings, each) for each in found if timed)
    rows += [step_row(settings, mlp, "torch.compile", _mlp_target(mlp), compile=True) for mlp in mlps if timed]
    for each in (found[:AUTOTUNED] if settings.short else found) if timed else ():
        rows.append(_row(settings, each, "torch.compile, max-autotune", OTHERS, _compiled(each), slow=True))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    yield from problem.verdicts(settings, chosen(settings), names, _outputs)
    yield from mlp_pair.verdicts(settings, shapes(settings), names, ({}, {"recompute": 1}))


def warm(settings: Settings, name: str) -> None:
    problem.warm(settings, chosen(settings), name, _outputs)
    for shape in shapes(settings):
        if shape.name == name:
            for level in (0, 1):
                pair = Pair.of(settings, shape, recompute=level)
                training_step(pair.ours, pair.x, pair.grad)


def _outputs(problem: Problem, operands: Operands, impl: str) -> Outputs:
    """The outputs and gradients of forward and backward."""
    h = _ours(operands, problem.projection.activation, impl)
    leaves = operands.leaves
    grads = torch.autograd.grad(h, list(leaves.values()), operands.dys[0])
    return {"h": h.detach()} | dict(zip(leaves, grads))


def _pass(problem: Problem) -> int:
    """Bytes of one pass over [T, F], F of one weight."""
    return problem.output_bytes // 2


def _eager_passes(problem: Problem) -> int:
    return PASSES["gated forward"] * _pass(problem)


def _row(
    settings: Settings,
    problem: Problem,
    peer_name: str,
    target: float | None,
    peer: Callable[[Operands], object],
    *,
    extra: int = 0,
    slow: bool = False,
) -> Measurement:
    written = 3 * _pass(problem)  # h, and for backward both factors before the activation
    work = Work(problem.flops, problem.input_bytes + problem.weight_bytes + written, extra)
    ours = partial(_ours, activation=problem.projection.activation, impl=settings.impl)
    return row(settings, problem, FORWARD, ours, peer_name, peer, target, work=work, slow=slow)


def _liger_rows(settings: Settings, problem: Problem) -> Iterator[Measurement]:
    """Rows against Liger; none if it is not installed."""
    projection = problem.projection
    multiply = liger_multiply(projection.activation)
    if multiply is None:
        return
    yield _row(settings, problem, "Liger after cuBLAS", OTHERS, partial(_stock, multiply=multiply))

    def with_liger(stock: torch.nn.Module) -> torch.nn.Module:
        module = StockGatedMLP(projection.D, projection.widths[0], projection.activation, multiply)
        module.to(settings.device, problem.dtype).load_state_dict(stock.state_dict())
        return module

    if _trains(settings, problem):
        mlp = _mlp(problem)
        yield step_row(settings, mlp, "Liger between cuBLAS GEMMs", _mlp_target(mlp), peer=with_liger)


def _mlp_target(mlp: Shape) -> float | None:
    return MLP if mlp.large else None


def _cpu_rows(settings: Settings, problem: Problem, mlp: Shape) -> Iterator[Measurement]:
    activation = problem.projection.activation
    ours = partial(_ours, activation=activation, impl=settings.impl)
    yield row(settings, problem, FORWARD, ours, "F.linear, F.silu and the product", _eager(problem), CPU)
    yield step_row(settings, mlp, "nn.Linear, F.silu, nn.Linear", CPU)
    yield memory_row(settings, mlp, 1, MEMORY)


def _ours(operands: Operands, activation: str, impl: str) -> torch.Tensor:
    return gated_linear(operands.x, *operands.weights, *operands.biases, activation=activation, impl=impl)


def _stock(operands: Operands, multiply: Callable[..., torch.Tensor]) -> torch.Tensor:
    gate, up = operands.weights
    return _stock_gated(operands.x, gate, up, multiply)


def _stock_gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, multiply: Callable[..., torch.Tensor]
) -> torch.Tensor:
    return multiply(linear(x, gate), linear(x, up))


def _stock_multiply(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return apply_activation(gate, activation) * up


def _eager(problem: Problem) -> Callable[[Operands], torch.Tensor]:
    return partial(_stock, multiply=partial(_stock_multiply, activation=problem.projection.activation))


def _compiled(problem: Problem) -> Callable[[Operands], object]:
    """Compiled without CUDA graphs, which would copy every operand at every call."""
    multiply = partial(_stock_multiply, activation=problem.projection.activation)
    call = lazily_compiled(partial(_stock_gated, multiply=multiply), mode="max-autotune-no-cudagraphs")
    return lambda operands: call(operands.x, *operands.weights)


BENCHMARK = Benchmark(
    name="gated",
    summary="gated_linear, both products and theirs in one launch, and the gated ParallelMLP",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("gated_linear", "dgrad_gated"),
    sources=("bench/harness/problem.py", "kernels/dev/shapes.py", *mlp_pair.SOURCES),
)
