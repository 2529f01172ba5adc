"""Partitions a model into pipeline stages so that the slowest rank has as little work as possible.

A model is a list of parts (embedding, each block, norm and head), a stage is a run of consecutive parts, and a rank has
one stage or several. With one stage per rank, dynamic programming finds the best partition; with several, a local
search moves one part at a time from any stage to any other until nothing improves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...kernels.runtime.names import expected

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..documents import Documents

LAYOUTS = ("loop", "v")


class Part(NamedTuple):
    """A piece of a model that no stage boundary cuts, and its cost relative to the others, in any unit."""

    name: str
    cost: float


class Divisible(Protocol):
    """A model that can be cut into stages."""

    training: bool

    def pipeline_parts(self, length: int | None = None) -> list[Part]:
        """The parts in order, each with its cost for a token in a sequence of ``length``."""

    def keep(self, parts: Iterable[int]) -> None:
        """Drop all parts except ``parts``, whose names do not change."""

    def stage(self, parts: range) -> nn.Module:
        """A module of the consecutive ``parts``, which shares the model's submodules and names.

        It takes the output of the previous stage (the first one: tokens [B, S]) and the keywords ``targets`` [B, S],
        ``positions`` [B, S], ``batch_size`` (B), ``scale`` and ``draws`` (see :meth:`draws`), and ``documents`` (see
        :meth:`documents`) where rows hold several. The last one returns the sum of the losses times ``scale``, [1].
        """

    def tied_parameters(self) -> list[str]:
        """The names of parameters that the first and the last part share."""

    def check_batch(self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """ValueError for a batch that the model could not process, the same on every rank."""

    def documents(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Documents | None:
        """The documents of a batch [B, S] that :meth:`check_batch` accepts, which stages then get to keep apart; None
        where no row holds several, or stages find them by themselves. ValueError, the same on every rank, if the model
        cannot keep documents apart."""

    def boundary(self, batch: int, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, on meta, that a stage sends to the next for [batch, length] tokens."""

    def draws(self, device: torch.device) -> Any:
        """The random state of a step, drawn alike by all ranks; None for a model without randomness."""


def owners(stages: int, ranks: int, layout: str = "loop") -> list[int]:
    """The rank of each stage. ``"loop"`` cycles through the ranks, ``"v"`` turns back at the last and the first one.

    Raises ValueError for another layout, or a number of stages that does not divide by the ranks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: {expected(layout, LAYOUTS)}")
    if ranks < 1 or stages < 1 or stages % ranks:
        raise ValueError(f"{stages} stages over {ranks} pipeline ranks: expected the same number on each, at least one")
    found = []
    for stage in range(stages):
        turn, place = divmod(stage, ranks)
        found.append(ranks - 1 - place if layout == "v" and turn % 2 else place)
    return found


def balanced(costs: Sequence[float], stages: int, *, layout: str = "loop", ranks: int | None = None) -> list[range]:
    """The parts of each of ``stages`` stages, such that the slowest rank costs as little as possible.

    ``costs`` belong to the model's parts in order; every stage gets at least one part. ``ranks`` defaults to one for
    each stage. Of equally good partitions it returns the one with the most even ranks.

    Raises ValueError for fewer parts than stages, or costs that are negative or not finite.
    """
    ranks = stages if ranks is None else ranks
    owner = owners(stages, ranks, layout)
    if len(costs) < stages:
        raise ValueError(
            f"a model of {len(costs)} parts cannot be cut into {stages} pipeline stages: use fewer ranks, a schedule "
            "with fewer stages on each, or a deeper model"
        )
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"costs={list(costs)}: expected numbers of at least 0, all in one unit")
    sums = [0.0, *accumulate(costs)]
    borders = _one_stage_each(sums, stages)
    if stages > ranks:
        borders = _descended(borders, sums, owner)
    return [range(start, stop) for start, stop in pairwise(borders)]


def loads(
    costs: Sequence[float], ranges: Sequence[range], layout: str = "loop", ranks: int | None = None
) -> list[float]:
    """The total cost of each rank's stages."""
    owner = owners(len(ranges), len(ranges) if ranks is None else ranks, layout)
    found = [0.0] * (max(owner) + 1)
    for rank, parts in zip(owner, ranges):
        found[rank] += sum(costs[part] for part in parts)
    return found


def _one_stage_each(sums: list[float], stages: int) -> list[int]:
    """The borders with the lowest maximum over the stages, and among those with the lowest sum of squares."""
    limit = _lowest_maximum(sums, stages) * (1 + 1e-12)  # tolerates another order of summation
    n = len(sums) - 1
    # best[i]: the first i parts in as many stages as `last` has rows; a row gives the beginning of the last stage.
    best = [0.0] + [math.inf] * n
    last: list[list[int]] = []
    for stage in range(1, stages + 1):
        fresh, starts, least = [math.inf] * (n + 1), [stage - 1] * (n + 1), stage - 1
        for stop in range(stage, n - (stages - stage) + 1):
            while least < stop and sums[stop] - sums[least] > limit:
                least += 1
            for start in range(least, stop):
                load = sums[stop] - sums[start]
                value = best[start] + load * load
                if value < fresh[stop]:
                    fresh[stop], starts[stop] = value, start
        best = fresh
        last.append(starts)
    borders = [n]
    for starts in reversed(last):
        borders.append(starts[borders[-1]])
    return borders[::-1]


def _lowest_maximum(sums: list[float], stages: int) -> float:
    """The load of the fullest stage where that is as low as it can be.

    With the beginning of the last stage its load falls, and the load of the stages before it rises: the best beginning
    is where they meet, which moves only forward with the end.
    """
    n = len(sums) - 1
    best = sums  # of the first i parts in one stage
    for stage in range(2, stages + 1):
        fresh, start = [math.inf] * (n + 1), stage - 1
        for stop in range(stage, n - (stages - stage) + 1):
            while start + 1 < stop and best[start + 1] <= sums[stop] - sums[start + 1]:
                start += 1
            fresh[stop] = min(max(best[at], sums[stop] - sums[at]) for at in range(start, min(start + 2, stop)))
        best = fresh
    return best[n]


def _descended(borders: list[int], sums: list[float], owner: list[int]) -> list[int]:
    """A local search from ``borders``: move one part from a stage to another as long as that improves them."""
    while True:
        better = _neighbours(borders) or [borders]
        for measure in _MEASURES:  # in order of their weight: the later ones settle what is equal so far
            values = [measure(each, sums, owner) for each in better]
            least = min(values)
            better = [each for each, value in zip(better, values) if value == least]
        if _badness(better[0], sums, owner) >= _badness(borders, sums, owner):
            return borders
        borders = better[0]


def _neighbours(borders: list[int]) -> list[list[int]]:
    """Every run of inner borders moved by one part, to either side: one end gains a part, the other loses it."""
    found = []
    for first in range(1, len(borders) - 1):
        for last in range(first, len(borders) - 1):
            if borders[first - 1] < borders[first] - 1:
                found.append([*borders[:first], *(b - 1 for b in borders[first : last + 1]), *borders[last + 1 :]])
            if borders[last] + 1 < borders[last + 1]:
                found.append([*borders[:first], *(b + 1 for b in borders[first : last + 1]), *borders[last + 1 :]])
    return found


def _badness(borders: list[int], sums: list[float], owner: list[int]) -> tuple[float, ...]:
    return tuple(measure(borders, sums, owner) for measure in _MEASURES)


def _highest(borders: list[int], sums: list[float], owner: list[int]) -> float:
    return _rounded(max(_rank_loads(borders, sums, owner)))


def _uneven_ranks(borders: list[int], sums: list[float], owner: list[int]) -> float:
    return _rounded(sum(load * load for load in _rank_loads(borders, sums, owner)))


def _uneven_stages(borders: list[int], sums: list[float], owner: list[int]) -> float:
    loads = (sums[stop] - sums[start] for start, stop in pairwise(borders))
    return _rounded(sum(load * load for load in loads))


_MEASURES = (_highest, _uneven_ranks, _uneven_stages)


def _rank_loads(borders: list[int], sums: list[float], owner: list[int]) -> list[float]:
    ranks = [0.0] * (max(owner) + 1)
    for rank, (start, stop) in zip(owner, pairwise(borders)):
        ranks[rank] += sums[stop] - sums[start]
    return ranks


def _rounded(value: float) -> float:
    """Differences in the order of additions must not look like progress for ever."""
    return float(f"{value:.12g}")
