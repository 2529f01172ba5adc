"""The timeline of a pipeline schedule: every pass of every rank, in the order in which torch runs them.

A pass is F, a micro-batch's forward through one stage; B, its backward; or, in the schedules that split it, I, the
gradient of the stage's input, and later W, those of its weights. The order is torch's (``orders.py``). A pass starts
when its rank is free and its input has arrived: for F from the previous stage, for B and I from the next one. Sending
takes no time. Two passes that torch runs as one (DualPipeV) send when both are done.

A rank is idle when it runs no pass between the first and the last pass of the step on any rank, because the step ends
with an optimizer step on all ranks. The idle share is relative to that time. :func:`closed_form` computes it from P
ranks, v stages on each, M micro-batches, and F, I, W, the seconds of one pass over all v stages of a rank, with B = I +
W. The share is b / (b + M (F + B)), where b, the bubble, is

    naive                 M (P - 1) (F + B)             one rank works at a time
    gpipe, 1f1b           (P - 1) (F + B)               Narayanan et al. (arXiv:2104.04473), section 2.2
    interleaved_1f1b      (P - 1) (F + B) / v           the same
    interleaved_zb        (P - 1) (F + I - W) / v       Qi et al. (arXiv:2401.10241), table 1 (ZB-H1), over v stages
    zbv                   (P - 1) max(I, 2 (I - W)) / v
    dualpipev             (P - 1) (F + 2 I - W) / v     DeepSeek's DualPipe, its table of bubbles, in these letters

Qi et al. call ZBV free of bubbles where F = I = W: they count each rank from its own first pass to its own last. In a
whole step the last rank waits until a micro-batch has passed P - 1 stages. For unequal passes no source is known: there
zbv's formula is fitted to the simulation and is no independent check of it.

The formulas hold where the pipeline is full and only its two ends are idle; elsewhere there is none:

    interleaved_1f1b      M a multiple of P
    interleaved_zb        M a multiple of P, W <= F and W <= I
    zbv                   M >= 2 P, F <= I and W <= I
    dualpipev             M >= 2 P, W <= F <= I
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .orders import KINDS, Todo, order
from .schedules import find


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage. Times are in the costs' unit, from the step's start."""

    start: float
    end: float
    kind: str  # "F", "B", "I" or "W"
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Costs:
    """The cost of a micro-batch in one stage: seconds, or any other unit.

    ``backward`` is the gradient of the stage's input, ``weight`` those of its weights; a backward that is not split
    takes both. ``held`` is the memory kept from I to W, as a share of what forward kept. Raises ValueError unless all
    are numbers of at least 0, and at least one pass takes time.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    held: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "held"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a cost of at least 0")
        if not self.step:
            raise ValueError("forward, backward and weight all cost 0: one of them has to take time")

    @property
    def step(self) -> float:
        """The time of all passes of a micro-batch."""
        return self.forward + self.backward + self.weight

    def of(self, kind: str) -> float:
        """The time of a pass of ``kind``."""
        if kind == "F":
            return self.forward
        if kind == "W":
            return self.weight
        return self.backward + (self.weight if kind == "B" else 0.0)

    def scaled(self, factor: float) -> Costs:
        """These costs in another unit of time."""
        return replace(
            self, forward=factor * self.forward, backward=factor * self.backward, weight=factor * self.weight
        )

    def recomputed(self) -> Costs:
        """These costs if backward first runs forward again: GPipe's re-materialisation (arXiv:1811.06965)."""
        return replace(self, backward=self.backward + self.forward)


@dataclass(frozen=True)
class Timeline:
    """One step of one schedule; made by :func:`simulate`."""

    schedule: str
    microbatches: int
    stages_per_rank: int
    passes: tuple[tuple[Pass, ...], ...]  # each rank's passes, in order
    peak_activations: tuple[float, ...]  # each rank's peak of memory kept for backward: see simulate

    @property
    def end(self) -> float:
        """When the last pass of the step ends."""
        return max(passes[-1].end for passes in self.passes)

    @property
    def idle(self) -> tuple[float, ...]:
        """Each rank's idle share of the step, from 0 to 1."""
        return tuple(1 - sum(one.end - one.start for one in passes) / self.end for passes in self.passes)

    @property
    def idle_share(self) -> float:
        """The idle share of all ranks together."""
        return sum(self.idle) / len(self.idle)


def simulate(name: str, ranks: int, microbatches: int, costs: Costs | Sequence[Costs] = Costs()) -> Timeline:
    """One step of the schedule ``name`` over ``ranks`` pipeline ranks.

    ``costs`` are those of every stage, or one for each in order: ``ranks`` times the schedule's stages per rank. Peaks
    of activations are multiples of the memory that one micro-batch keeps for backward in all stages of a rank. Raises
    ValueError for an unknown schedule, and for numbers that it does not support.
    """
    per_rank = find(name).stages_per_rank
    stages = ranks * per_rank
    each = [costs] * stages if isinstance(costs, Costs) else list(costs)
    if len(each) != stages:
        raise ValueError(
            f"costs: {len(each)} were given, and {name} over {ranks} ranks has {stages} stages: pass one for each"
        )
    passes = _timed(order(name, ranks, microbatches), each)
    peaks = tuple(_peak(mine, each) / per_rank for mine in passes)
    return Timeline(name, microbatches, per_rank, tuple(map(tuple, passes)), peaks)


def _timed(orders: list[list[tuple[Todo, ...]]], costs: list[Costs]) -> list[list[Pass]]:
    """The times of all passes, each as early as its rank and its input allow."""
    takes = {kind: [each.of(kind) for each in costs] for kind in KINDS}
    # When the result of a micro-batch can be used: forward's, and the gradient of the input, which a whole backward
    # has first. By stage and micro-batch.
    forward: list[dict[int, float]] = [{} for _ in costs]
    backward: list[dict[int, float]] = [{} for _ in costs]
    passes: list[list[Pass]] = [[] for _ in orders]
    left = [list(reversed(mine)) for mine in orders]
    now, moved = [0.0] * len(orders), True
    while moved:
        moved = False
        for rank, mine in enumerate(left):
            while mine:
                ready = [_ready(*todo, forward, backward) for todo in mine[-1]]
                if None in ready:
                    break
                together, moved = mine.pop(), True
                for (kind, stage, microbatch), at in zip(together, ready):
                    start = max(now[rank], at or 0.0)
                    now[rank] = start + takes[kind][stage]
                    passes[rank].append(Pass(start, now[rank], kind, stage, microbatch))
                for kind, stage, microbatch in together:
                    if kind != "W":
                        (forward if kind == "F" else backward)[stage][microbatch] = now[rank]
    assert not any(left), "the schedule deadlocks"
    return passes


def _ready(
    kind: str, stage: int, microbatch: int, forward: list[dict[int, float]], backward: list[dict[int, float]]
) -> float | None:
    """When the input of a pass is there; None if that is not known yet."""
    if kind == "F":
        return forward[stage - 1].get(microbatch) if stage else 0.0
    if kind == "W":
        return backward[stage].get(microbatch)
    own = forward[stage].get(microbatch)
    if stage == len(forward) - 1 or own is None:
        return own
    behind = backward[stage + 1].get(microbatch)
    return None if behind is None else max(own, behind)


def _peak(passes: Sequence[Pass], costs: list[Costs]) -> float:
    """The most memory kept at a time, as a multiple of what one micro-batch leaves in one stage."""
    kept = peak = 0.0
    for one in passes:
        held = costs[one.stage].held
        kept += {"F": 1.0, "B": -1.0, "I": held - 1.0, "W": -held}[one.kind]
        peak = max(peak, kept)
    return peak


def closed_form(name: str, ranks: int, microbatches: int, costs: Costs = Costs()) -> float | None:
    """The idle share of the schedule by its formula, from 0 to 1, with equal costs of all stages: see the module.

    None if the formula does not hold.
    """
    v = find(name).stages_per_rank
    F, I, W = costs.forward, costs.backward, costs.weight  # noqa: E741 (of one stage: the formulas' F / v)
    bubbles = {
        "naive": microbatches * costs.step,
        "gpipe": costs.step,
        "1f1b": costs.step,
        "interleaved_1f1b": costs.step,
        "interleaved_zb": F + I - W,
        "zbv": max(I, 2 * (I - W)),
        "dualpipev": F + 2 * I - W,
    }
    if name not in bubbles:
        raise ValueError(f"{name}: no closed form of its idle share is known")
    holds = {
        "interleaved_1f1b": microbatches % ranks == 0,
        "interleaved_zb": microbatches % ranks == 0 and min(F, I) >= W,
        "zbv": microbatches >= 2 * ranks and max(F, W) <= I,
        "dualpipev": microbatches >= 2 * ranks and W <= F <= I,
    }
    if not holds.get(name, True):
        return None
    bubble = (ranks - 1) * bubbles[name]
    return bubble / (bubble + microbatches * v * costs.step)
