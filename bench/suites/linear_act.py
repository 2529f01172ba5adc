"""``linear_act`` against the stock GEMM, eager torch, cuBLASLt's fused epilogue and torch.compile.

On a GPU the forward pass saves the tensors that backward needs, as in training; peers that cannot (the plain GEMM, the
fused epilogue) run without gradients, which favours them. Up to three weights on one x are one launch of ours, one
plain GEMM of their packed widths, or as many eager calls. On a CPU ``auto`` is plain torch, so the rows measure the
cost of our dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import KINDS, SHORT, Projection, grid, projection
from ...kernels.linear import linear_act
from ...kernels.runtime.cost import PASSES
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs
from ..harness.problem import Operands, Problem, eager, lazily_compiled, plain_gemm, problems, row, stock_linear
from ..harness.timing import Timing, compare_host

TARGETS = {
    "forward against the plain cuBLAS GEMM, 4096 tokens and up": 1 / 1.03,
    "forward against every other peer": 1.0,
    "host time per call against the stock call plus 10 us": 1.0,
    "CPU, against the stock torch calls": 0.97,
}
PLAIN, OTHERS, HOST, CPU = TARGETS.values()

FORWARD = "forward, us"
HOST_BUDGET_US = 10.0
LARGE = 4096  # tokens from which the epilogue must cost nothing
AUTOTUNED = 2  # of a short run's shapes: the compiled peer searches for most of a minute on each
FUSED = ("gelu_tanh", "relu")  # the activations of torch._addmm_activation

IN_FP32 = Problem(projection("llama3-8b", "up", 1, 8192), torch.float32)
ON_CPU = tuple(Projection("cpu", "up", 1, T, D, (4 * D,), "gelu_tanh") for T, D in ((64, 256), (512, 1024)))


def chosen(settings: Settings) -> list[Problem]:
    if settings.dry:
        return problems((problem.DRY["up"], problem.DRY["qkv"]), settings)
    if settings.cuda:
        return problems(SHORT["linear_act"] if settings.short else grid(KINDS), settings)
    return problems(ON_CPU, settings)


def plan(settings: Settings) -> list[Measurement]:
    found = chosen(settings)
    if not settings.cuda and not settings.dry:
        return [measurement for each in found for measurement in _cpu_rows(settings, each)]
    rows = [_row(settings, each, "cuBLAS x @ w.T", _gemm_target(each), plain_gemm) for each in found]
    for each in found:
        stock = partial(eager, activation=each.projection.activation)
        rows.append(_row(settings, each, "eager", OTHERS, stock, extra=_eager_passes(each)))
        if _has_fused(each.projection):
            rows.append(_row(settings, each, "torch._addmm_activation", OTHERS, partial(_fused, problem=each)))
    if settings.cuda and not settings.dry:
        rows.append(_fp32_row(settings))
    rows.append(_host_row(settings, min(found, key=lambda each: (not _saves(each), each.projection.T))))
    for each in () if settings.dry else found[:AUTOTUNED] if settings.short else found:
        rows.append(_row(settings, each, "torch.compile, max-autotune", OTHERS, _compiled(each), slow=True))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    yield from problem.verdicts(settings, chosen(settings), names, _outputs)
    yield from problem.verdicts(settings, [IN_FP32], names, _kernels_outputs)


def warm(settings: Settings, name: str) -> None:
    problem.warm(settings, chosen(settings), name, _outputs)
    problem.warm(settings, [IN_FP32], name, _kernels_outputs)


def _outputs(problem: Problem, operands: Operands, impl: str) -> Outputs:
    """The outputs and gradients of forward and backward."""
    ys = _ours(operands, problem.projection.activation, impl)
    leaves = operands.leaves
    grads = torch.autograd.grad(ys, list(leaves.values()), operands.dys)
    return {f"y{i}": y.detach() for i, y in enumerate(ys)} | dict(zip(leaves, grads))


def _kernels_outputs(problem: Problem, operands: Operands, impl: str) -> Outputs:
    """Of the kernel by name: in fp32 "auto" may take stock torch, and torch would be compared with itself."""
    return _outputs(problem, operands, "triton" if impl == "auto" else impl)


def _gemm_target(problem: Problem) -> float | None:
    return PLAIN if problem.projection.T >= LARGE else None


def _saves(problem: Problem) -> bool:
    """Whether backward needs the pre-activation."""
    return problem.projection.activation != "identity"


def _eager_passes(problem: Problem) -> int:
    """Bytes of the passes of eager's activation."""
    return PASSES["forward"] * problem.output_bytes if _saves(problem) else 0


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
    writes = problem.output_bytes * (2 if _saves(problem) else 1)
    work = Work(problem.flops, problem.input_bytes + problem.weight_bytes + writes, extra)
    ours = partial(_ours, activation=problem.projection.activation, impl=settings.impl)
    return row(settings, problem, FORWARD, ours, peer_name, peer, target, work=work, slow=slow)


def _fp32_row(settings: Settings) -> Measurement:
    activation = IN_FP32.projection.activation
    ours = partial(_ours, activation=activation, impl="triton")
    work = Work(IN_FP32.flops, IN_FP32.input_bytes + IN_FP32.weight_bytes + 2 * IN_FP32.output_bytes)
    found = row(settings, IN_FP32, FORWARD, ours, "cuBLAS x @ w.T in IEEE fp32", plain_gemm, None, work=work)
    return replace(found, bf16=False)


def _host_row(settings: Settings, problem: Problem) -> Measurement:
    activation = problem.projection.activation

    def run() -> tuple[Timing, Timing]:
        operands = problem.operands(settings.device)
        ours, stock = compare_host(
            partial(_ours, operands, activation, settings.impl),
            partial(eager, operands, activation),
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )
        return ours, Timing(stock.value + HOST_BUDGET_US, stock.noise)

    return Measurement(problem.name, "host time, us", f"eager plus {HOST_BUDGET_US:.0f} us", HOST, run)


def _cpu_rows(settings: Settings, problem: Problem) -> Iterator[Measurement]:
    activation = problem.projection.activation
    ours = partial(_ours, activation=activation, impl=settings.impl)
    stock = partial(eager, activation=activation)
    peer_name = "F.linear and the activation"
    yield row(settings, problem, FORWARD, ours, peer_name, stock, CPU)
    both_ways = (partial(_forward_backward, side) for side in (ours, stock))
    yield row(settings, problem, "forward + backward, us", next(both_ways), peer_name, next(both_ways), CPU)


def _forward_backward(side: Callable[[Operands], tuple[torch.Tensor, ...]], operands: Operands) -> object:
    return torch.autograd.grad(side(operands), list(operands.leaves.values()), operands.dys)


def _ours(operands: Operands, activation: str, impl: str) -> tuple[torch.Tensor, ...]:
    if len(operands.weights) == 1:
        return (linear_act(operands.x, operands.weights[0], operands.biases[0], activation=activation, impl=impl),)
    return linear_act(operands.x, operands.weights, operands.biases, activation=activation, impl=impl)


def _has_fused(found: Projection) -> bool:
    return found.activation in FUSED and found.bias and len(found.widths) == 1


@torch.no_grad()
def _fused(operands: Operands, problem: Problem) -> torch.Tensor:
    gelu = problem.projection.activation == "gelu_tanh"
    (bias,) = operands.biases
    assert bias is not None
    return torch._addmm_activation(bias, operands.x, operands.packed.T, use_gelu=gelu)


def _compiled(problem: Problem) -> Callable[[Operands], object]:
    """The eager calls, compiled without CUDA graphs, which would copy every operand at every call."""
    stock = partial(stock_linear, activation=problem.projection.activation)
    call = lazily_compiled(stock, mode="max-autotune-no-cudagraphs")
    return lambda operands: call(operands.x, operands.weights, operands.biases)


BENCHMARK = Benchmark(
    name="linear_act",
    summary="linear_act: GEMMs with bias and activation in their epilogue, and what a call costs on the host",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act",),
    sources=("bench/harness/problem.py", "bench/harness/stock.py", "kernels/dev/shapes.py", "kernels/runtime/cost.py"),
)
