"""The products of backward with their fused epilogues, against the same in eager torch and compiled.

- dgrad of the layer after an activation, with that activation's gradient: dz = (dy @ W) * act'(z);
- wgrad with the bias gradient: dW = dz^T @ x, db = sum_T dz;
- wgrad added in place to an fp32 buffer, as training with accumulated gradients keeps them;
- ``linear_act``'s whole backward through autograd.

The plain products appear beside the first two, without a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import SHORT, TOKENS, grid
from ...kernels.linear import Product, functional, linear_act, linear_act_choice
from ...kernels.runtime.cost import PASSES, pass_bytes
from ...kernels.runtime.dispatch import Choice
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs
from ..harness.problem import Operands, Problem, eager, lazily_compiled, problems, row
from ..harness.timing import Timing, compare

TARGETS = {"every step of backward against eager and torch.compile": 1.0}
(PEERS,) = TARGETS.values()

MIN_TOKENS = 256  # training steps have more
DGRAD, WGRAD, INTO = "dgrad with act', us", "wgrad with bias gradient, us", "wgrad into fp32, us"
BACKWARD = "linear_act backward, us"


def chosen(settings: Settings) -> list[Problem]:
    if settings.dry:
        return problems((problem.DRY["up"],), settings)
    full = grid(("up",), [T for T in TOKENS if T >= MIN_TOKENS])
    return problems(SHORT["linear_backward"] if settings.short else full, settings)


def plan(settings: Settings) -> list[Measurement]:
    found = chosen(settings)
    rows = [measurement for each in found for measurement in _against_eager(settings, each)]
    for each in found:
        rows += [_row(settings, each, DGRAD, _ours_dgrad, "cuBLAS dy @ w", _plain_dgrad, None)]
        rows += [_row(settings, each, WGRAD, _ours_wgrad, "cuBLAS dz.T @ x", _plain_wgrad, None)]
    for each in () if settings.dry else found:
        rows += [_row(settings, each, DGRAD, _ours_dgrad, "torch.compile", _compiled_dgrad(each), PEERS, slow=True)]
        rows += [_row(settings, each, WGRAD, _ours_wgrad, "torch.compile", _compiled_wgrad(), PEERS, slow=True)]
    return rows


def _against_eager(settings: Settings, problem: Problem) -> Iterator[Measurement]:
    D, F, itemsize = problem.projection.D, problem.projection.F, problem.dtype.itemsize
    into = pass_bytes(0, 0, 0, itemsize=itemsize, accumulated=D * F)
    yield _row(settings, problem, INTO, _ours_into, "eager", _eager_into, PEERS, extra=into)
    dgrad = partial(_eager_dgrad, activation=problem.projection.activation)
    reads_and_writes = 3 * problem.output_bytes  # dh and z, dz
    yield _row(settings, problem, DGRAD, _ours_dgrad, "eager", dgrad, PEERS, extra=reads_and_writes)
    bias = problem.output_bytes  # its gradient reads dz
    yield _row(settings, problem, WGRAD, _ours_wgrad, "eager", _eager_wgrad, PEERS, extra=bias)
    yield _backward_row(settings, problem)


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    return problem.verdicts(settings, chosen(settings), names, _outputs)


def warm(settings: Settings, name: str) -> None:
    problem.warm(settings, chosen(settings), name, _outputs)


def _outputs(problem: Problem, operands: Operands, impl: str) -> Outputs:
    """The results of everything that a row times, once."""
    activation = problem.projection.activation
    choice = _choice(operands, impl)
    dw, db = _ours_wgrad(operands, activation, choice)
    for _ in range(2):  # an op that wrote instead of adding would give half
        _ours_into(operands, activation, choice)
    leaves = operands.leaves
    grads = torch.autograd.grad(_forward(operands, activation, impl), list(leaves.values()), operands.dys)
    return {
        "dgrad.dz": _ours_dgrad(operands, activation, choice),
        "wgrad.dw": dw,
        "wgrad.db": db,
        "into.dw": operands.buffers[0].clone(),
        **{f"backward.{name}": grad for name, grad in zip(leaves, grads)},
    }


def _choice(operands: Operands, impl: str) -> Choice:
    return linear_act_choice(operands.x.dtype, operands.x.device, impl)


def _row(
    settings: Settings,
    problem: Problem,
    metric: str,
    ours: Callable[[Operands, str, Choice], object],
    peer_name: str,
    peer: Callable[[Operands], object],
    target: float | None,
    *,
    extra: int = 0,
    slow: bool = False,
) -> Measurement:
    activation, impl = problem.projection.activation, settings.impl

    def side(operands: Operands) -> object:
        return ours(operands, activation, _choice(operands, impl))

    work = Work(problem.flops, _bytes(problem, metric), extra)
    return row(settings, problem, metric, side, peer_name, peer, target, work=work, slow=slow)


def _bytes(problem: Problem, metric: str) -> int:
    """Bytes of everything that a step reads and writes, once."""
    if metric == DGRAD:  # dy, w, z, dz
        return problem.input_bytes + problem.weight_bytes + 2 * problem.output_bytes
    written = problem.weight_bytes if metric == WGRAD else 2 * 4 * problem.projection.D * problem.projection.F
    return problem.output_bytes + problem.input_bytes + written  # dz, x, dw


def _backward_row(settings: Settings, problem: Problem) -> Measurement:
    """Autograd's backward alone: forward runs once, and its graph is kept."""
    activation = problem.projection.activation
    inputs = 2 * (problem.input_bytes + problem.weight_bytes)  # and their gradients

    def run() -> tuple[Timing, Timing]:
        sets = problem.operand_sets(settings.device)
        return compare(
            [_backward(operands, _forward(operands, activation, settings.impl)) for operands in sets],
            [_backward(operands, eager(operands, activation)) for operands in sets],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    work = Work(2 * problem.flops, inputs + 3 * problem.output_bytes, PASSES["backward"] * problem.output_bytes)
    return Measurement(problem.name, BACKWARD, "eager", PEERS, run, work=work)


def _backward(operands: Operands, ys: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    leaves = list(operands.leaves.values())
    return lambda: torch.autograd.grad(ys, leaves, operands.dys, retain_graph=True)


def _forward(operands: Operands, activation: str, impl: str) -> tuple[torch.Tensor, ...]:
    return linear_act(operands.x, operands.weights, operands.biases, activation=activation, impl=impl)


# --- ours: x stands for dy [T, D] in dgrad, whose weight [D, F] is the next layer's ----------------------------------


@torch.no_grad()
def _ours_dgrad(operands: Operands, activation: str, choice: Choice) -> torch.Tensor:
    (dz,) = Product.input_grad_act(operands.x, operands.after, operands.zs[:1], activation, choice).compute()
    return dz


@torch.no_grad()
def _ours_wgrad(operands: Operands, activation: str, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    (dw,), (db,) = functional.param_grads(operands.dys, operands.x, [True], [True], choice)
    assert dw is not None
    assert db is not None
    return dw, db


@torch.no_grad()
def _ours_into(operands: Operands, activation: str, choice: Choice) -> None:
    functional.param_grads(operands.dys, operands.x, [True], [False], choice, into=operands.buffers)


# --- peers ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _plain_dgrad(operands: Operands) -> torch.Tensor:
    return operands.x @ operands.after


@torch.no_grad()
def _plain_wgrad(operands: Operands) -> torch.Tensor:
    return operands.dys[0].T @ operands.x


@torch.no_grad()
def _eager_dgrad(operands: Operands, activation: str) -> torch.Tensor:
    return _stock_dgrad(operands.x, operands.after, operands.zs[0], activation)


@torch.no_grad()
def _eager_wgrad(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    return _stock_wgrad(operands.dys[0], operands.x)


@torch.no_grad()
def _eager_into(operands: Operands) -> torch.Tensor:
    return operands.buffers[0].add_(operands.dys[0].T @ operands.x)


def _stock_dgrad(dy: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    approximate = {"gelu_tanh": "tanh", "gelu_erf": "none"}[activation]
    return torch.ops.aten.gelu_backward(dy @ weight, z, approximate=approximate)


def _stock_wgrad(dz: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dz.T @ x, dz.sum(0)


def _compiled_dgrad(problem: Problem) -> Callable[[Operands], object]:
    call = lazily_compiled(partial(_stock_dgrad, activation=problem.projection.activation))

    @torch.no_grad()
    def run(operands: Operands) -> object:
        return call(operands.x, operands.after, operands.zs[0])

    return run


def _compiled_wgrad() -> Callable[[Operands], object]:
    call = lazily_compiled(_stock_wgrad)

    @torch.no_grad()
    def run(operands: Operands) -> object:
        return call(operands.dys[0], operands.x)

    return run


BENCHMARK = Benchmark(
    name="linear_backward",
    summary="backward's products with the activation's gradient, bias gradient and fp32 accumulation in epilogues",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act", "dgrad_act", "wgrad_accumulate"),
    sources=("bench/harness/problem.py", "bench/harness/stock.py", "kernels/dev/shapes.py", "kernels/runtime/cost.py"),
    devices=("cuda",),
)
