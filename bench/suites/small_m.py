"""``linear_act`` on the few tokens of a decoding step, without gradients, where reading the weights dominates.

It runs against the plain GEMM, eager torch and torch.compile; each row gives the share of a plain copy's bandwidth at
which the weights were read. The operands rotate over sets that exceed the cache together, like a model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import FEW_TOKENS, KINDS, SHORT, grid
from ...kernels.linear import linear_act
from ...kernels.runtime.cost import PASSES
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs
from ..harness.problem import Operands, Problem, eager, lazily_compiled, plain_gemm, problems, row, stock_linear

TARGETS = {"forward against every peer": 1.0}
(PEERS,) = TARGETS.values()

METRIC = "forward without gradients, us"
AUTOTUNED = 1  # of a short run's shapes


def chosen(settings: Settings) -> list[Problem]:
    if settings.dry:
        return problems((problem.DRY["few"],), settings)
    return problems(SHORT["small_m"] if settings.short else grid(KINDS, FEW_TOKENS), settings)


def plan(settings: Settings) -> list[Measurement]:
    found = chosen(settings)
    rows = [_row(settings, each, "cuBLAS x @ w.T", plain_gemm) for each in found]
    for each in found:
        stock = partial(_eager, activation=each.projection.activation)
        passes = 0 if each.projection.activation == "identity" else PASSES["forward"] * each.output_bytes
        rows.append(_row(settings, each, "eager", stock, extra=passes))
    for each in () if settings.dry else found[:AUTOTUNED] if settings.short else found:
        rows.append(_row(settings, each, "torch.compile, max-autotune", _compiled(each), slow=True))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    return problem.verdicts(settings, chosen(settings), names, _outputs)


def warm(settings: Settings, name: str) -> None:
    problem.warm(settings, chosen(settings), name, _outputs)


def _outputs(problem: Problem, operands: Operands, impl: str) -> Outputs:
    return {f"y{i}": y for i, y in enumerate(_ours(operands, problem.projection.activation, impl))}


def _row(
    settings: Settings,
    problem: Problem,
    peer_name: str,
    peer: Callable[[Operands], object],
    *,
    extra: int = 0,
    slow: bool = False,
) -> Measurement:
    work = Work(problem.flops, problem.input_bytes + problem.weight_bytes + problem.output_bytes, extra)
    ours = partial(_ours, activation=problem.projection.activation, impl=settings.impl)
    return row(settings, problem, METRIC, ours, peer_name, peer, PEERS, work=work, slow=slow)


@torch.no_grad()
def _ours(operands: Operands, activation: str, impl: str) -> tuple[torch.Tensor, ...]:
    return linear_act(operands.x, operands.weights, operands.biases, activation=activation, impl=impl)


@torch.no_grad()
def _eager(operands: Operands, activation: str) -> tuple[torch.Tensor, ...]:
    return eager(operands, activation)


def _compiled(problem: Problem) -> Callable[[Operands], object]:
    stock = partial(stock_linear, activation=problem.projection.activation)
    call = lazily_compiled(stock, mode="max-autotune-no-cudagraphs")

    @torch.no_grad()
    def run(operands: Operands) -> object:
        return call(operands.x, operands.weights, operands.biases)

    return run


BENCHMARK = Benchmark(
    name="small_m",
    summary="linear_act on 1 to 64 tokens, without gradients: weights streamed at the bandwidth of a copy",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act",),
    sources=("bench/harness/problem.py", "bench/harness/stock.py", "kernels/dev/shapes.py", "kernels/runtime/cost.py"),
    devices=("cuda",),
)
