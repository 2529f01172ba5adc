"""Latencies of served requests: when their tokens came, and the percentiles that rows compare."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from .timing import Timing


@dataclass
class Times:
    """Of one load, in seconds: from a request's sending to its first token, between tokens, and of all together."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: float = 0.0
    texts: list[str] = field(default_factory=list)  # of the requests, in their order

    @classmethod
    def of(cls, began: float, arrivals: Sequence[Sequence[float]]) -> Times:
        """The times of requests that were all sent at ``began``, by when each one's tokens came."""
        return cls(
            [tokens[0] - began for tokens in arrivals],
            [later - earlier for tokens in arrivals for earlier, later in pairwise(tokens)],
            max(tokens[-1] for tokens in arrivals) - began,
        )


Figure = Callable[[Sequence[Times]], float]  # of the loads of all rounds, in seconds


def percentile(share: float, pick: Callable[[Times], Sequence[float]], loads: Sequence[Times]) -> float:
    """The value below which that ``share`` of all values lies."""
    values = sorted(value for times in loads for value in pick(times))
    return values[min(len(values) - 1, int(share * len(values)))]


def whole(loads: Sequence[Times]) -> float:
    """The median over the loads of the time until the last request has ended."""
    return statistics.median(times.whole for times in loads)


def percentiles() -> dict[str, Figure]:
    """By the row's metric, the median and the 99th percentile of both latencies."""
    picks: dict[str, Callable[[Times], Sequence[float]]] = {
        "first token": lambda times: times.first,
        "token to token": lambda times: times.between,
    }
    return {
        f"{name}, percentile {share * 100:.0f}, us": partial(percentile, share, pick)
        for name, pick in picks.items()
        for share in (0.5, 0.99)
    }


def timing(figure: Figure, loads: Sequence[Times]) -> Timing:
    """The figure in microseconds, over all rounds together, and how far the odd and the even rounds differ."""
    halves = [figure(loads[0::2]), figure(loads[1::2] or loads)]
    return Timing(figure(loads) * 1e6, abs(halves[0] / halves[1] - 1))
