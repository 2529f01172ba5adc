"""``linear_act`` against the stock GEMM, eager torch, cuBLASLt's fused epilogue and torch.compile.

On a GPU the forward pass saves what backward needs, as training does; peers that cannot (the plain GEMM, the fused
epilogue) run without gradients and are the harder to beat for it. On a CPU ``auto`` is plain torch, and what is
measured is what our layer of dispatch costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels import registry
from ..kernels.accuracy import Verdict
from ..kernels.linear import apply_activation, linear_act
from ..kernels.registry import Case
from .benchmark import Benchmark, Measurement, Settings
from .gate import check_case
from .stock import compiled
from .timing import Timing, compare, compare_host, input_sets

OP = "linear_act"
TARGETS = {
    "forward against the plain cuBLAS GEMM, 4096 tokens and up": 1 / 1.03,
    "forward against every other peer": 1.0,
    "host time per call against the stock call plus 10 us": 1.0,
    "CPU, against the stock torch calls": 0.97,
}
PLAIN, OTHERS, HOST, CPU = TARGETS.values()

HOST_BUDGET_US = 10.0
LARGE = 4096  # tokens from which the epilogue must be free
AUTOTUNED = 6  # shapes on which the compiled peer searches: it takes most of a minute for each
DRY_CASES = 2

Inputs = dict[str, Any]
Side = Callable[[Inputs], torch.Tensor]


def cases(settings: Settings) -> list[Case]:
    """The op's own cases for this device; in a dry run the first small ones that have every operand."""
    spec = registry.op(OP)
    if settings.dry:
        return [case for case in spec.tagged("test") if _plain(case) and case.options["activation"] == "gelu_tanh"][
            :DRY_CASES
        ]
    if settings.cuda:
        return spec.tagged("short" if settings.short else "bench")
    return spec.tagged("bench-cpu")


def plan(settings: Settings) -> list[Measurement]:
    chosen = cases(settings)
    if not settings.cuda and not settings.dry:
        return [row for case in chosen for row in _cpu_rows(settings, case)]
    rows = [row for case in chosen for row in _forward_rows(settings, case)]
    rows.append(_host_row(settings, min(chosen, key=lambda case: case.sizes["T"])))
    for case in [] if settings.dry else chosen[:AUTOTUNED]:
        rows.append(_row(settings, case, "torch.compile, max-autotune", OTHERS, _compiled(case), slow=True))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    spec = registry.op(OP)
    for case in cases(settings):
        if case.name in names:
            for verdict in check_case(spec, case, settings.device, settings.impl):
                yield case.name, verdict


def warm(settings: Settings, name: str) -> None:
    spec = registry.op(OP)
    for case in cases(settings):
        if case.name == name:
            spec.run(spec.make_inputs(case, settings.device, 0), case, settings.impl)


def _plain(case: Case) -> bool:
    return case.options["weights"] == 1 and case.options["layout"] == "rows" and case.options["bias"]


def _forward_rows(settings: Settings, case: Case) -> Iterator[Measurement]:
    target = PLAIN if case.sizes["T"] >= LARGE else None
    yield _row(settings, case, "cuBLAS x @ w.T", target, _gemm)
    yield _row(settings, case, "eager", OTHERS, partial(_eager, case=case))
    if case.options["activation"] in ("gelu_tanh", "relu") and case.options["bias"]:
        yield _row(settings, case, "torch._addmm_activation", OTHERS, partial(_fused, case=case))


def _row(
    settings: Settings, case: Case, peer_name: str, target: float | None, peer: Side, *, slow: bool = False
) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        sets = _input_sets(settings, case)
        return compare(
            [partial(_ours, inputs, case, settings.impl) for inputs in sets],
            [partial(peer, inputs) for inputs in sets],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    return Measurement(case.name, "forward, us", peer_name, target, run, slow=slow)


def _host_row(settings: Settings, case: Case) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        inputs = registry.op(OP).make_inputs(case, settings.device, 0)
        ours, stock = compare_host(
            partial(_ours, inputs, case, settings.impl),
            partial(_eager, inputs, case),
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )
        return ours, Timing(stock.value + HOST_BUDGET_US, stock.noise)

    return Measurement(case.name, "host time, us", f"eager plus {HOST_BUDGET_US:.0f} us", HOST, run)


def _cpu_rows(settings: Settings, case: Case) -> Iterator[Measurement]:
    def run(step: Callable[[Side, Inputs], object]) -> tuple[Timing, Timing]:
        inputs = registry.op(OP).make_inputs(case, settings.device, 0)
        ours = partial(step, partial(_ours, case=case, impl=settings.impl), inputs)
        return compare(
            [ours], [partial(step, partial(_eager, case=case), inputs)], settings.device, seconds=settings.seconds
        )

    for metric, step in (("forward, us", _forward), ("forward + backward, us", _forward_backward)):
        yield Measurement(case.name, metric, "F.linear and the activation", CPU, partial(run, step))


def _forward(side: Side, inputs: Inputs) -> object:
    return side(inputs)


def _forward_backward(side: Side, inputs: Inputs) -> object:
    leaves = [inputs["x"], inputs["weights"][0], inputs["biases"][0]]
    return torch.autograd.grad(side(inputs), leaves, inputs["grads"][0])


def _input_sets(settings: Settings, case: Case) -> list[Inputs]:
    spec = registry.op(OP)
    first = spec.make_inputs(case, settings.device, 0)
    size = sum(t.nbytes for t in (first["x"], *first["weights"], *first["grads"]))
    return [first, *(spec.make_inputs(case, settings.device, i) for i in range(1, input_sets(size, settings.device)))]


def _ours(inputs: Inputs, case: Case, impl: str) -> torch.Tensor:
    activation = case.options["activation"]
    return linear_act(inputs["x"], inputs["weights"][0], inputs["biases"][0], activation=activation, impl=impl)


def _eager(inputs: Inputs, case: Case) -> torch.Tensor:
    return apply_activation(
        F.linear(inputs["x"], inputs["weights"][0], inputs["biases"][0]), case.options["activation"]
    )


@torch.no_grad()
def _gemm(inputs: Inputs) -> torch.Tensor:
    return inputs["x"] @ inputs["weights"][0].T


@torch.no_grad()
def _fused(inputs: Inputs, case: Case) -> torch.Tensor:
    gelu = case.options["activation"] == "gelu_tanh"
    return torch._addmm_activation(inputs["biases"][0], inputs["x"], inputs["weights"][0].T, use_gelu=gelu)


def _compiled(case: Case) -> Side:
    """The eager call, compiled at its first use. Without CUDA graphs: they would copy every operand at every call."""

    @cache
    def call() -> Side:
        return compiled(partial(_eager, case=case), mode="max-autotune-no-cudagraphs")

    return lambda inputs: call()(inputs)


BENCHMARK = Benchmark(
    name="linear_act",
    summary="linear_act: a GEMM with bias and activation in its epilogue, and what a call costs on the host",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=(OP,),
    sources=("bench/stock.py",),
)
