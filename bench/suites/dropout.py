"""``dropout`` with the residual sum after it, against a copy of as many bytes, eager and torch.compile.

It is memory-bound: forward reads x (and the residual) and writes y, backward reads and writes a gradient; torch also
writes a mask, and reads it again. On a CPU its masks, computed by torch's integer arithmetic, cost more than torch's
own. They make a run on one process equal a run on many; the CPU row shows their cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.registry import Case, op
from ...kernels.dropout import dropout
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import check_case
from ..harness.stock import compiled
from ..harness.timing import Timing, compare, input_sets

TARGETS = {
    "against a copy of the same bytes": 0.90,
    "against every other peer": 1.0,
}
COPY, PEERS = TARGETS.values()
FORWARD, BOTH = "forward, us", "forward + backward, us"
DRY = ("r9-c40-fp32-p0.1-residual", "r5-c33-bf16-p0.5")

Inputs = dict[str, Any]
Side = Callable[[Inputs], torch.Tensor]


def _cases(settings: Settings) -> list[Case]:
    cases = op("dropout").cases
    if settings.dry:
        return [case for case in cases if case.name in DRY]
    tag = "bench-cpu" if not settings.cuda else "short" if settings.short else "bench"
    return [case for case in cases if tag in case.tags]


def _bytes(case: Case, metric: str) -> int:
    """Bytes of x, y and the residual; in backward of the two gradients (the residual's is y's)."""
    passes = (3 if case.options["residual"] else 2) + (2 if metric == BOTH else 0)
    return passes * case.sizes["R"] * case.sizes["C"] * case.dtype.itemsize


def plan(settings: Settings) -> list[Measurement]:
    cases, row = _cases(settings), partial(_row, settings)
    if not settings.cuda and not settings.dry:
        return [row(case, metric, "eager", partial(_eager, case), None) for metric in (FORWARD, BOTH) for case in cases]
    rows = [row(case, FORWARD, "copy of the bytes", None, COPY) for case in cases]
    rows += [row(case, metric, "eager", partial(_eager, case), PEERS) for metric in (FORWARD, BOTH) for case in cases]
    for case in () if settings.dry else cases:
        rows += [row(case, metric, "torch.compile", _compiled(case), PEERS, slow=True) for metric in (FORWARD, BOTH)]
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for case in _cases(settings):
        if case.name in names:
            for verdict in check_case(op("dropout"), case, settings.device, settings.impl):
                yield case.name, verdict


def warm(settings: Settings, name: str) -> None:
    for case in _cases(settings):
        if case.name == name:
            _trained(partial(_ours, case, settings.impl), op("dropout").make_inputs(case, settings.device, 0))


def _row(
    settings: Settings,
    case: Case,
    metric: str,
    peer_name: str,
    peer: Side | None,
    target: float | None,
    *,
    slow: bool = False,
) -> Measurement:
    """A row against ``peer``, forward or forward and backward; None: against the copy."""

    def run() -> tuple[Timing, Timing]:
        ours: Callable[..., Any] = partial(_ours, case, settings.impl)
        theirs: Callable[..., Any] = peer or _copy
        if metric == BOTH:
            ours, theirs = partial(_trained, ours), partial(_trained, theirs)
        count = input_sets(_bytes(case, FORWARD), settings.device)
        sets = [op("dropout").make_inputs(case, settings.device, seed) for seed in range(count)]
        for each in sets:
            source = torch.empty(_bytes(case, metric) // 2, dtype=torch.uint8, device=settings.device).random_()
            each["copied"] = source, torch.empty_like(source)
        with torch.set_grad_enabled(metric == BOTH):
            return compare(
                [partial(ours, each) for each in sets],
                [partial(theirs, each) for each in sets],
                settings.device,
                seconds=settings.seconds,
                dry=settings.dry,
            )

    return Measurement(case.name, metric, peer_name, target, run, slow=slow, work=Work(0, _bytes(case, metric)))


def _trained(call: Side, inputs: Inputs) -> object:
    leaves = [inputs["x"]] + ([] if inputs["residual"] is None else [inputs["residual"]])
    return torch.autograd.grad(call(inputs), leaves, inputs["dy"])


def _ours(case: Case, impl: str, inputs: Inputs) -> torch.Tensor:
    return dropout(inputs["x"], case.options["p"], inputs["rng_key"], residual=inputs["residual"], impl=impl)


# --- peers ------------------------------------------------------------------------------------------------------------


def _copy(inputs: Inputs) -> torch.Tensor:
    source, target = inputs["copied"]
    return target.copy_(source)


def _stock(x: torch.Tensor, residual: torch.Tensor | None, p: float) -> torch.Tensor:
    y = F.dropout(x, p)
    return y if residual is None else y + residual


def _eager(case: Case, inputs: Inputs) -> torch.Tensor:
    return _stock(inputs["x"], inputs["residual"], case.options["p"])


def _compiled(case: Case) -> Side:
    """:func:`_stock` through torch.compile, compiled at its first use."""

    @cache
    def made() -> Callable[..., torch.Tensor]:
        return compiled(_stock)

    return lambda inputs: made()(inputs["x"], inputs["residual"], case.options["p"])


BENCHMARK = Benchmark(
    name="dropout",
    summary="dropout and the residual sum after it, against a copy of the bytes, eager and torch.compile",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("dropout",),
    sources=("bench/harness/stock.py",),
)
