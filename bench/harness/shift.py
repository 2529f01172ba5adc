"""Whether one set of times is shifted against another, and by what factor: the verdict of ``bench compare``.

The times of both sides come from rounds that run each side once, in random order. Slow changes of the machine's speed,
which affect both sides alike, are removed with a running median over neighbouring rounds. Then
- the Mann-Whitney U test says whether the two distributions differ, in the normal approximation with the correction for
  ties (Mann and Whitney, doi:10.1214/aoms/1177730491; Hollander, Wolfe and Chicken, Nonparametric Statistical Methods,
  3rd ed., section 4.1);
- the Hodges-Lehmann estimator, the median of all differences of log times, says by how much, with the interval of
  Moses between two of these differences in their order (the same, sections 4.2 and 4.3).
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

SIGNIFICANCE = 0.001  # of the U test; with LEAST, at most 1 % of comparisons of a version with itself are "different"
LEAST = 0.01  # a smaller relative difference is noise: memory's alignment alone makes one
ROUNDS = 40  # find a difference of 5 % in 95 % of comparisons under the noise that tests/bench/test_compare.py makes
MIN_ROUNDS = 10  # below, the normal approximation does not hold at this significance
WINDOW = 4  # rounds before and after one, whose median is the machine's speed at it
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class Shift:
    """B against A: ``ratio`` is A's time over B's, so above 1 B is faster; ``between`` its interval of 95 %.

    ``p`` is the U test's; None if no samples were at hand. ``verdict``: "faster", "slower" or "noise".
    """

    ratio: float
    between: tuple[float, float]
    p: float | None

    @property
    def verdict(self) -> str:
        low, high = self.between
        apart = low > 1 or high < 1
        if not apart or abs(math.log(self.ratio)) < math.log1p(LEAST):
            return "noise"
        if self.p is not None and self.p > SIGNIFICANCE:
            return "noise"
        return "faster" if self.ratio > 1 else "slower"


def balanced_order(rounds: int, generator: random.Random) -> list[tuple[int, int]]:
    """The order of the sides in each round, random, with each side first in half of the rounds (at most one more)."""
    order = [(0, 1) if number % 2 else (1, 0) for number in range(rounds)]
    generator.shuffle(order)
    return order


def compare_times(a: Sequence[float], b: Sequence[float]) -> Shift:
    """The shift between the times of A and B, round by round; ValueError for fewer than ``MIN_ROUNDS`` rounds."""
    if len(a) != len(b) or len(a) < MIN_ROUNDS:
        raise ValueError(f"{len(a)} and {len(b)} samples: expected as many of both sides, at least {MIN_ROUNDS}")
    if min(*a, *b) <= 0:
        raise ValueError("a sample of no length at all: time more calls in each")
    logs_a, logs_b = _without_drift([math.log(x) for x in a], [math.log(x) for x in b])
    log_ratio, low, high = hodges_lehmann(logs_b, logs_a)
    return Shift(math.exp(log_ratio), (math.exp(low), math.exp(high)), mann_whitney(logs_a, logs_b))


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p-value of the U test, by the normal approximation with corrections for ties and continuity."""
    n, m = len(a), len(b)
    ordered = sorted((*a, *b))
    # Twice the mid-rank of x among all, counted from 1.
    ranks = sum(bisect.bisect_left(ordered, x) + bisect.bisect_right(ordered, x) + 1 for x in a) / 2
    tied = sum(t**3 - t for t in Counter(ordered).values())
    variance = n * m / 12 * (n + m + 1 - tied / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return 1.0  # all are equal
    distance = max(abs(ranks - n * (n + 1) / 2 - n * m / 2) - 0.5, 0.0)
    return 2 * _NORMAL.cdf(-distance / math.sqrt(variance))


def hodges_lehmann(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """How far ``b`` lies above ``a`` as (estimate, low, high): median and order statistics of all differences."""
    n, m = len(a), len(b)
    differences = sorted(y - x for x in a for y in b)
    spread = _NORMAL.inv_cdf((1 + confidence) / 2) * math.sqrt(n * m * (n + m + 1) / 12)
    aside = max(math.floor(n * m / 2 - spread), 0)
    return statistics.median(differences), differences[aside], differences[-1 - aside]


def _without_drift(a: list[float], b: list[float]) -> tuple[list[float], list[float]]:
    rounds = range(len(a))
    windows = [slice(max(0, number - WINDOW), number + WINDOW + 1) for number in rounds]
    speeds = [statistics.median((*a[window], *b[window])) for window in windows]
    return [a[number] - speeds[number] for number in rounds], [b[number] - speeds[number] for number in rounds]
