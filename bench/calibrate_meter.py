"""Measures a node's links and the rates of its products and copies, which depend on no layer's shape.

    links     alpha and beta of all_gather, reduce_scatter and all_reduce, fitted to a few sizes
    products  their rate, that of a copy in memory and to a peer, and how fast a product runs under a collective

``calibrate`` writes them to a node's profile, and times the rows of that profile with the same :class:`Meter`.

A call has two times. The device's: several calls are queued between two events, behind a short spin, so that none waits
for the host. And the time with the host's part: a call is made, and its end awaited. On a CPU a call has ended when it
returns: there the first figure is that of calls in a row, and the second that of one. Links and rates are the device's;
``piece_s`` is the host's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..kernels.runtime.dtypes import short_name
from ..parallel.core import collectives
from ..parallel.core.mesh import Group
from ..parallel.overlap.link_model import GATHER, Call
from ..parallel.overlap.link_profile import COLLECTIVES, DEVICE, WITH_HOST, Link
from ..parallel.overlap.plan import OverlapPlan
from .calibrate_rig import SITE, Rig
from .harness.timing import Timing, compare_fixed, compare_queued, copy_bandwidth

MIN_ROUNDS, MAX_ROUNDS = 20, 500
QUEUED = 4  # calls in a row: few enough that a GPU's launch queue never fills, also with many pieces
SIZES = tuple(1 << power for power in (14, 17, 20, 23, 25))  # bytes of a collective
DRY_SIZES = (1 << 10, 1 << 12)
PIECES = 4  # of the small gather that measures a piece's cost on the host


@dataclass(frozen=True)
class Times:
    """The times of one call, in microseconds."""

    device: Timing
    with_host: Timing

    def by(self, clock: str) -> Timing:
        """The time by one of the profile's clocks."""
        return {DEVICE: self.device, WITH_HOST: self.with_host}[clock]


class Meter:
    """Measures together with all ranks of ``group``: its methods are collectives.

    ``seconds`` is the time for a comparison of two calls; a ``dry`` meter runs every call once, on tiny operands.
    """

    def __init__(self, group: Group, device: torch.device, dtype: torch.dtype, *, seconds: float, dry: bool) -> None:
        self.group, self.device, self.dtype = group, device, dtype
        self.seconds, self.dry = seconds, dry
        self._word = torch.zeros(1, device=device)

    def sizes(self) -> tuple[int, ...]:
        return DRY_SIZES if self.dry else SIZES

    def links(self) -> dict[str, Link]:
        return {name: self._link(name) for name in dict.fromkeys(COLLECTIVES.values())}

    def _link(self, name: str) -> Link:
        R = self.group.size
        rounds = 2 if name == "all_reduce" else 1
        points = []
        for size in self.sizes():
            rows = size // (R * 4 * 64) or 1
            x = torch.randn(rows if name == "all_gather" else rows * R, 64, device=self.device)
            whole = rows * R * 64 * 4
            call = partial(getattr(collectives, name), x, self.group, site=SITE)
            points.append((rounds * (R - 1) / R * whole, self._seconds_of(call)))
        start, per_byte = fit(points)
        return Link(0.0, start / (rounds * (R - 1)), 1 / per_byte)

    def rates(self, gemm_flops: Mapping[str, float]) -> dict[str, Any]:
        """Rates of products and copies; ``hides`` on a GPU only, since on a CPU both need the same cores."""
        on_gpu, dry = self.device.type == "cuda", self.dry
        size = 32 if dry else 4096 if on_gpu else 1024
        a, b = (torch.randn(size, size, dtype=self.dtype, device=self.device) for _ in range(2))
        product_s = self._seconds_of(lambda: a @ b)
        found: dict[str, Any] = {
            "gemm_flops": dict(gemm_flops) | {short_name(self.dtype): 2 * size**3 / product_s},
            "piece_s": self._piece_seconds(),
            "hides": self._hides(lambda: a @ b, product_s) if on_gpu else 0.0,
        }
        if not dry:
            found["memory_bytes_per_s"] = copy_bandwidth(self.device, size=1 << (30 if on_gpu else 26))
        return found

    def _piece_seconds(self) -> float:
        """The cost of a piece of a chunked operation, from a gather of a few numbers in many pieces."""
        call = Call(GATHER, self.group.size * PIECES, 16, 16, self.dtype, self.group.size)
        rig = Rig.of(call, self.group, self.device)
        timed = self._times_of(partial(rig.result, OverlapPlan("chunked", PIECES)))
        host = timed.device.value if timed.device.host is None else timed.device.host
        return host * 1e-6 / ((self.group.size - 1) * PIECES + 1)

    def _hides(self, product: Callable[[], Any], product_s: float) -> float:
        """The speed of products during an all-reduce, as a share of their speed alone."""
        x = torch.randn(self.sizes()[-1] // 4, device=self.device)
        collective_s = self._seconds_of(lambda: collectives.all_reduce(x, self.group, site=SITE))
        count = int(2 * collective_s / product_s) + 1
        count = collectives.gather_objects(count, self.group, site=SITE)[0]

        def both() -> None:
            finish = collectives.start_all_reduce(x, self.group, site=SITE)
            for _ in range(count):
                product()
            finish()

        together_s = self._seconds_of(both)
        return max(0.0, min(1.0, (collective_s + count * product_s - together_s) / collective_s))

    def peer_copy(self) -> float | None:
        """Bytes per second of a copy to another GPU; None on a CPU, and if some rank sees no other GPU."""
        count = torch.cuda.device_count() if self.device.type == "cuda" else 0
        others = [index for index in range(count) if index != self.device.index]
        if not all(collectives.gather_objects(bool(others), self.group, site=SITE)):
            return None
        source = torch.empty(self.sizes()[-1], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source, device=torch.device("cuda", others[0]))
        return source.nbytes / self._seconds_of(lambda: target.copy_(source))

    def _seconds_of(self, call: Callable[[], Any]) -> float:
        """Seconds of one call on the device."""
        return self._times_of(call).device.value * 1e-6

    def _times_of(self, call: Callable[[], Any]) -> Times:
        return self.compare(call, call)[0]

    def compare(self, ours: Callable[[], Any], peer: Callable[[], Any]) -> tuple[Times, Times]:
        """Time both in turn, by either clock for half of the time, over numbers of rounds that all ranks agree on."""
        alone = [partial(self._finished, side) for side in (ours, peer)]
        calls = 1 if self.dry else QUEUED
        by_host = compare_fixed(*alone, rounds=self._rounds(alone, 1), calls=1)
        by_device = compare_queued(
            ours, peer, self.device, rounds=self._rounds(alone, calls), calls=calls, align=self._align
        )
        first, second = (Times(*each) for each in zip(by_device, by_host))
        return first, second

    def _rounds(self, sides: Sequence[Callable[[], Any]], calls: int) -> int:
        """How many rounds of so many calls take half of the time; the same number on every rank."""
        if self.dry:
            return 1
        once = compare_fixed(*sides, rounds=3, calls=1)
        wanted = self.seconds / 2 / (calls * sum(side.value for side in once) * 1e-6)
        return max(MIN_ROUNDS, min(MAX_ROUNDS, collectives.gather_objects(int(wanted), self.group, site=SITE)[0]))

    def _align(self) -> None:
        collectives.all_reduce(self._word, self.group, site=SITE)

    def _finished(self, call: Callable[[], Any]) -> None:
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(start, per byte) of seconds = start + per byte * bytes, with the least relative error over (bytes, seconds).

    Neither is below 0: if noise made one negative, it is 0, and the other is fitted alone.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points)) / spread if spread else 0.0
    largest_x, longest = max(points)
    if slope <= 0:
        return 0.0, longest / largest_x
    start = mean_y - slope * mean_x
    return (start, slope) if start >= 0 else (0.0, mean_y / mean_x)
