"""``rms_norm`` and ``layer_norm``, alone and with the residual sum before them, against a copy of as many bytes.

A norm is memory-bound: forward reads x (and the residual) and writes y (and the sum), backward reads the gradients and
the normalised tensor and writes one gradient. The target compares it with a copy that moves as many bytes; a copy of
all that forward and backward move is a bound for both. Peers: eager torch, torch.compile, and Liger's kernels if
installed. On a CPU the peers are ``F.rms_norm`` and ``F.layer_norm`` after the sum.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.registry import Case, op
from ...kernels.norm import layer_norm, rms_norm
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import check_case
from ..harness.stock import compiled
from ..harness.timing import Timing, compare, input_sets

TARGETS = {
    "against a copy of the same bytes, 4096 tokens x 4096 and wider": 0.95,
    "against a copy of the same bytes, smaller, 1024 tokens and up": 0.90,
    "against every other peer": 1.0,
    "CPU, against the stock torch calls": 0.97,
}
LARGE_COPY, COPY, PEERS, CPU = TARGETS.values()

OPS = ("rms_norm", "layer_norm")
FORWARD, BOTH = "forward, us", "forward + backward, us"
DRY = "t6-d48-fp32-layout_columns", "t6-d1000-bf16-residual_same"
COMPILED = 1  # of a short run's cases
FEW_TOKENS = 1024  # with fewer the launch dominates, and a share of the bandwidth is meaningless
LARGE = 4096  # tokens, and columns, from which on the launch no longer counts


@dataclass(frozen=True)
class Problem:
    """A norm on one case. Its name is the case of a benchmark."""

    op: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.op}-{self.case.name}"

    @property
    def fused(self) -> bool:
        """Whether there is a residual."""
        return self.case.options["residual"] is not None

    def bytes(self, metric: str) -> int:
        """Bytes that must be moved: x, y, with a residual also that and the sum; in backward dy, s, dx, with a residual
        also the sum's own gradient, since x and residual share one.
        """
        forward, backward = (4, 4) if self.fused else (2, 3)
        passes = forward + (backward if metric == BOTH else 0)
        return passes * self.case.sizes["T"] * self.case.sizes["D"] * self.case.dtype.itemsize


@dataclass(frozen=True)
class Operands:
    """Leaves x, residual (or None) [T, D] and parameters [D], and the gradients of the results."""

    problem: Problem
    x: torch.Tensor
    residual: torch.Tensor | None
    params: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, problem: Problem, device: torch.device, seed: int) -> Operands:
        drawn = op(problem.op).make_inputs(problem.case, device, seed)
        params = (drawn["weight"], drawn["bias"])[: 2 if problem.op == "layer_norm" else 1]
        grads = (drawn["dy"], drawn["ds"]) if problem.fused else (drawn["dy"],)
        return cls(problem, drawn["x"], drawn["residual"], params, grads)

    @property
    def eps(self) -> float:
        return float(self.problem.case.options["eps"])

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return (self.x, *(() if self.residual is None else (self.residual,)), *self.params)

    @cached_property
    def copied(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For each metric, source and target of a copy that moves as many bytes."""
        sizes = {metric: self.problem.bytes(metric) // 2 for metric in (FORWARD, BOTH)}
        sources = {name: torch.empty(size, dtype=torch.uint8, device=self.x.device) for name, size in sizes.items()}
        return {name: (source.random_(), torch.empty_like(source)) for name, source in sources.items()}


Side = Callable[[Operands], Any]


def problems(settings: Settings) -> list[Problem]:
    cases = op(OPS[0]).cases
    if settings.dry:
        found = [case for case in cases if case.name in DRY]
    else:
        tag = "bench-cpu" if not settings.cuda else "short" if settings.short else "bench"
        found = [case for case in cases if tag in case.tags]
    return [Problem(name, case) for case in found for name in OPS]


def plan(settings: Settings) -> list[Measurement]:
    found = problems(settings)
    row = partial(_row, settings)
    if not settings.cuda and not settings.dry:
        return [row(each, metric, "stock torch", _eager, CPU) for metric in (FORWARD, BOTH) for each in found]
    rows = [
        row(each, metric, "copy of the bytes", None, _copy_target(each)) for metric in (FORWARD, BOTH) for each in found
    ]
    rows += [row(each, metric, "eager", _eager, PEERS) for metric in (FORWARD, BOTH) for each in found]
    for each in () if settings.dry else found:
        liger = _liger(each)
        if liger is not None:
            rows += [row(each, metric, "Liger", liger, PEERS) for metric in (FORWARD, BOTH)]
    for each in () if settings.dry else found[:COMPILED] if settings.short else found:
        rows += [row(each, metric, "torch.compile", _compiled(), PEERS, slow=True) for metric in (FORWARD, BOTH)]
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for each in problems(settings):
        if each.name in names:
            for verdict in check_case(op(each.op), each.case, settings.device, settings.impl):
                yield each.name, verdict


def warm(settings: Settings, name: str) -> None:
    for each in problems(settings):
        if each.name == name:
            _trained(partial(_ours, impl=settings.impl), Operands.of(each, settings.device, 0))


def _copy_target(problem: Problem) -> float | None:
    T, D = problem.case.sizes["T"], problem.case.sizes["D"]
    if T < FEW_TOKENS:
        return None
    return LARGE_COPY if min(T, D) >= LARGE else COPY


def _row(
    settings: Settings,
    problem: Problem,
    metric: str,
    peer_name: str,
    peer: Side | None,
    target: float | None,
    *,
    slow: bool = False,
) -> Measurement:
    """A row against ``peer``, forward or forward and backward; None: against the copy."""

    def side(call: Side) -> Side:
        return partial(_trained, call) if metric == BOTH else call

    ours = side(partial(_ours, impl=settings.impl))
    theirs = partial(_copy, metric=metric) if peer is None else side(peer)

    def run() -> tuple[Timing, Timing]:
        count = input_sets(problem.bytes(FORWARD), settings.device)
        sets = [Operands.of(problem, settings.device, seed) for seed in range(count)]
        with torch.set_grad_enabled(metric == BOTH):
            return compare(
                [partial(ours, each) for each in sets],
                [partial(theirs, each) for each in sets],
                settings.device,
                seconds=settings.seconds,
                dry=settings.dry,
            )

    return Measurement(problem.name, metric, peer_name, target, run, slow=slow, work=Work(0, problem.bytes(metric)))


def _trained(call: Side, operands: Operands) -> object:
    """The results and the gradients of all operands."""
    return torch.autograd.grad(call(operands), operands.leaves, operands.grads)


def _ours(operands: Operands, *, impl: str) -> Any:
    norm: Any = layer_norm if operands.problem.op == "layer_norm" else rms_norm
    return norm(operands.x, *operands.params, residual=operands.residual, eps=operands.eps, impl=impl)


# --- peers ------------------------------------------------------------------------------------------------------------


def _copy(operands: Operands, metric: str) -> torch.Tensor:
    source, target = operands.copied[metric]
    return target.copy_(source)


def _eager(operands: Operands) -> Any:
    o = operands
    return _stock(o.problem.op, o.x, o.residual, o.params, o.eps)


def _stock(
    name: str, x: torch.Tensor, residual: torch.Tensor | None, params: tuple[torch.Tensor, ...], eps: float
) -> Any:
    s = x if residual is None else x + residual
    norm: Callable[..., torch.Tensor] = F.layer_norm if name == "layer_norm" else F.rms_norm
    y = norm(s, s.shape[-1:], *params, eps=eps)
    return y if residual is None else (y, s)


def _compiled() -> Side:
    """:func:`_eager` through torch.compile, compiled at its first use."""

    @cache
    def made() -> Callable[..., Any]:
        return compiled(_stock)

    def run(operands: Operands) -> Any:
        o = operands
        return made()(o.problem.op, o.x, o.residual, o.params, o.eps)

    return run


def _liger(problem: Problem) -> Side | None:
    """Liger's kernel, which computes in fp32 like torch's; None if it is not installed, or has no such norm."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    if problem.op == "layer_norm":
        if problem.fused:
            return None
        function = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return lambda o: function.apply(o.x, *o.params, o.eps)
    if problem.fused:
        function = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
        return lambda o: function.apply(o.x, o.residual, *o.params, o.eps, 0.0, "gemma", False)
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return lambda o: function.apply(o.x, *o.params, o.eps, 0.0, "gemma", False)


BENCHMARK = Benchmark(
    name="norm",
    summary="rms_norm and layer_norm, alone and after a residual sum, against a copy of the bytes, eager and others",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=OPS,
    sources=("bench/harness/stock.py",),
)
