"""Times calls so that two versions can be compared.

Both sides run interleaved, in alternating order, so that drifting clocks and other load affect them alike.

On a GPU, device events bracket each call after a short spin that hides the host's part, the calls rotate over input
sets larger than the L2 cache together, and the figure is the median over rounds. By the host's clock the figure is the
first decile: any disturbance makes a sample longer, and on a shared machine more than half may be disturbed. On a CPU
only the ratio of two interleaved sides is meaningful.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter  # bound before any implementation is loaded, which might replace it
from typing import Any, Protocol

import torch

Call = Callable[[], object]

MIN_SAMPLE_US = 200.0  # a shorter host-clock sample measures the clock; a longer one is disturbed more often
MIN_ROUNDS, MAX_ROUNDS = 10, 1000
SPIN_MARGIN = 1.5  # the spin lasts longer than the host's time per call by this factor
SPIN_CLOCK_HZ = 2.0e9  # at least the boost clock of the chips we know: a value too high only costs time
L2_SHARE = 4.0  # input sets together exceed the cache by this factor
HOST_CALLS = 50  # calls per sample of host time; few enough that the launch queue never fills


@dataclass(frozen=True)
class Timing:
    """One side of a comparison, in the metric's unit.

    ``noise`` is the relative difference between the figures of every other round, among the rounds that this side began
    and among those that it ended (the larger): the same version timed twice. ``host`` is the host's time per call in
    microseconds, if the value itself is device time. ``ratio_between`` is an interval of the ratio of the peer's time
    to ours, and ``ratio_low`` the first decile of the rounds' ratios, if the rounds gave them.
    """

    value: float
    noise: float | None = None
    host: float | None = None
    ratio_between: tuple[float, float] | None = None
    ratio_low: float | None = None


class Elsewhere(Protocol):
    """A side that runs in another process."""

    def sample(self, calls: int) -> float:
        """Microseconds per call."""


def compare(
    ours: Sequence[Call], peer: Sequence[Call], device: torch.device, *, seconds: float = 1.0, dry: bool = False
) -> tuple[Timing, Timing]:
    """Microseconds per call of both sides: device time on a GPU (and the host's beside it), elsewhere the host's.

    Each side is one call per input set. They rotate half a cycle apart: otherwise the second call of a round would find
    in the cache the operands that the first has just read. ``dry`` makes one call of each.
    """
    if dry:
        return Timing(_per_call(ours[0], 1)), Timing(_per_call(peer[0], 1))
    sides = (_Rotation(ours), _Rotation(peer, len(peer) // 2))
    if device.type == "cuda":
        return _device_rounds(sides, _for_seconds(seconds))
    calls = [max(1, round(MIN_SAMPLE_US / _warm(side))) for side in sides]
    return _alternate(lambda side: _per_call(sides[side], calls[side]), _for_seconds(seconds))


def compare_fixed(ours: Call, peer: Call, *, rounds: int, calls: int) -> tuple[Timing, Timing]:
    """Microseconds per call by the host's clock over a fixed number of calls, the same on every rank."""
    sides = (ours, peer)
    return _alternate(lambda side: _per_call(sides[side], calls), lambda done: done < rounds)


def compare_rounds(ours: Call, peer: Call | Elsewhere, *, rounds: int, calls: int = 1) -> tuple[Timing, Timing]:
    """Microseconds by the host's clock of calls so long that other load disturbs most of them: medians over ``rounds``,
    ``calls`` of each side in a round.

    The peer's value is ours times the median of the rounds' own ratios, for which there is an interval with a
    confidence of 95 %: between two of the ratios in their order, whatever they are distributed like.
    """
    sides: tuple[Any, Any] = (ours, peer)
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            samples[side].append(_sample(sides[side], calls))
    ratios = sorted(theirs / mine for mine, theirs in zip(*samples))
    aside = int(rounds / 2 - math.sqrt(rounds))  # twice the standard deviation of how many lie below the median
    timing, other = (_summary(each, statistics.median) for each in samples)
    between = (ratios[aside], ratios[-1 - aside]) if aside >= 0 else None
    median = statistics.median(ratios)
    found = replace(timing, ratio_between=between, ratio_low=_first_decile(ratios))
    return found, replace(other, value=timing.value * median)


def keep_freed_memory() -> None:
    """From now on glibc returns no freed memory to the system, so that neither side pays for what the other one freed.

    Otherwise the state of the heap decides which side faults its pages in anew, in every call.
    """
    with contextlib.suppress(OSError, AttributeError):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 1 << 30)


def sampler(sides: tuple[Sequence[Call], Sequence[Call]], device: torch.device) -> Callable[[int], float]:
    """A function that times side 0 or 1 once: microseconds per call, device time on a GPU, elsewhere the host's.

    Each side is one call per input set; they rotate as in :func:`compare`. It warms both sides first, and makes so many
    calls a sample that each lasts long enough for the clock.
    """
    rotations = _Rotation(sides[0]), _Rotation(sides[1], len(sides[1]) // 2)
    calls = [max(1, round(MIN_SAMPLE_US / _warm(side))) for side in rotations]
    if device.type != "cuda":
        return lambda side: _per_call(rotations[side], calls[side])
    spin = [count * _spin_cycles(side) for side, count in zip(rotations, calls)]

    def sample(side: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()  # work that a side left on another stream counts for neither
        torch.cuda._sleep(spin[side])
        begin.record()
        _per_call(rotations[side], calls[side])
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls[side]

    return sample


def calls_for(call: Call, microseconds: float) -> int:
    """How many calls take that long together, at least one; it runs a few."""
    return max(1, round(microseconds / _warm(_Rotation([call]))))


def compare_queued(
    ours: Call, peer: Call, device: torch.device, *, rounds: int, calls: int, align: Call
) -> tuple[Timing, Timing]:
    """Microseconds per call of both sides, ``calls`` of them in a row, in a fixed number of rounds, the same on every
    rank: device time on a GPU, where the calls queue up and the host's part is hidden; elsewhere the host's.

    ``align`` runs before each row: a collective, behind which the ranks begin together.
    """
    if device.type == "cuda":
        rotations = _Rotation([ours]), _Rotation([peer])
        return _device_rounds(rotations, lambda done: done < rounds, calls=calls, align=align)
    sides = (ours, peer)

    def sample(side: int) -> float:
        align()
        return _per_call(sides[side], calls)

    return _alternate(sample, lambda done: done < rounds)


def compare_host(
    ours: Call, peer: Call, device: torch.device, *, seconds: float = 1.0, dry: bool = False
) -> tuple[Timing, Timing]:
    """Microseconds of host time per call of both sides; on a GPU it does not wait for the device's work."""
    if device.type != "cuda" or dry:
        return compare([ours], [peer], device, seconds=seconds, dry=dry)
    sides = (ours, peer)
    for side in sides:
        _per_call(side, HOST_CALLS)

    def sample(side: int) -> float:
        torch.cuda.synchronize()
        return _per_call(sides[side], HOST_CALLS)

    return _alternate(sample, _for_seconds(seconds))


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """The number of input sets that exceed the L2 cache together; one on a CPU, where nothing rotates.

    Two if one set alone exceeds it. Otherwise an even number of at least 4, so that enough others run between two uses
    of one.
    """
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    if bytes_per_set >= L2_SHARE * cache:
        return 2
    sets = int(L2_SHARE * cache / max(bytes_per_set, 1)) + 1
    return max(4, min(64, sets + sets % 2))


@dataclass(frozen=True)
class Ceilings:
    """The best rates measured on a device: operations per second in a product, bytes per second in a copy."""

    flops: float
    bandwidth: float


KNOWN_CEILINGS: dict[torch.device, Ceilings] = {}  # measured by this process, or handed on to it


def ceilings(device: torch.device) -> Ceilings:
    """The ceilings, measured at most once per process: cuBLAS's plain bf16 product of 8192^3, and a copy of 1 GiB.

    On a CPU, whose caches hold most operands, the better of a bf16 and an fp32 product, and the best of several copies.
    """
    if device not in KNOWN_CEILINGS and device.type == "cpu":
        flops = max(gemm_peak(device, size=512, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        bandwidth = max(copy_bandwidth(device, size=1 << bits) for bits in (16, 18, 20, 22))
        KNOWN_CEILINGS[device] = Ceilings(flops, bandwidth)
    elif device not in KNOWN_CEILINGS:
        KNOWN_CEILINGS[device] = Ceilings(gemm_peak(device), copy_bandwidth(device))
    return KNOWN_CEILINGS[device]


def gemm_peak(device: torch.device, *, size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations per second of torch's plain product of two random [size, size] matrices, by default in bf16."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product, _ = compare([lambda: a @ b], [lambda: a @ b], device, seconds=0.5)
    return 2 * size**3 / (product.value * 1e-6)


def copy_bandwidth(device: torch.device, *, size: int = 1 << 30) -> float:
    """Bytes per second of a copy of ``size`` random bytes within the device; reads and writes both count."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy, _ = compare([lambda: target.copy_(source)], [lambda: target.copy_(source)], device, seconds=0.3)
    return 2 * size / (copy.value * 1e-6)


def _device_rounds(
    sides: tuple[_Rotation, _Rotation], more: Callable[[int], bool], *, calls: int = 1, align: Call | None = None
) -> tuple[Timing, Timing]:
    for side in sides:
        _warm(side)
    ahead = 0 if align is None else _spin_cycles(align)
    spin = [ahead + calls * _spin_cycles(side) for side in sides]
    host: tuple[list[float], list[float]] = ([], [])

    def sample(side: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(spin[side])
        if align is not None:
            align()
        begin.record()
        host[side].append(_per_call(sides[side], calls))
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    ours, peer = _alternate(sample, more, statistics.median)
    return (
        Timing(ours.value, ours.noise, statistics.median(host[0])),
        Timing(peer.value, peer.noise, statistics.median(host[1])),
    )


class _Rotation:
    """Calls the version of the next input set each time, beginning with the one at ``start``."""

    def __init__(self, calls: Sequence[Call], start: int = 0) -> None:
        self._next = itertools.cycle((*calls[start:], *calls[:start])).__next__
        self.count = len(calls)

    def __call__(self) -> object:
        return self._next()()


def _first_decile(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 10]


def _alternate(
    sample: Callable[[int], float],
    more: Callable[[int], bool],
    figure: Callable[[Sequence[float]], float] = _first_decile,
) -> tuple[Timing, Timing]:
    """Run rounds of one sample per side, in alternating order, while ``more(rounds so far)``."""
    samples: tuple[list[float], list[float]] = ([], [])
    while more(len(samples[0])):
        for side in (0, 1) if len(samples[0]) % 2 == 0 else (1, 0):
            samples[side].append(sample(side))
    return _summary(samples[0], figure), _summary(samples[1], figure)


def _for_seconds(seconds: float) -> Callable[[int], bool]:
    until = perf_counter() + seconds
    return lambda done: done < MIN_ROUNDS or (done < MAX_ROUNDS and perf_counter() < until)


def _sample(side: Any, calls: int) -> float:
    return float(side.sample(calls)) if hasattr(side, "sample") else _per_call(side, calls)


def _per_call(call: Call, count: int) -> float:
    """Microseconds per call by the host's clock."""
    started = perf_counter()
    for _ in range(count):
        call()
    return (perf_counter() - started) / count * 1e6


def _warm(side: _Rotation) -> float:
    """Touch every input set, then estimate the microseconds per call."""
    for _ in range(max(3, side.count)):
        side()
    return max(_per_call(side, 3), 1e-3)


def _spin_cycles(side: Call) -> int:
    """Device cycles that last longer than the host's work for one call, so that its kernels queue up behind them."""
    torch.cuda.synchronize()
    host_us = statistics.median(_per_call(side, 1) for _ in range(5))
    torch.cuda.synchronize()
    return int(SPIN_CLOCK_HZ * host_us * 1e-6 * SPIN_MARGIN) + 10_000


def _summary(samples: list[float], figure: Callable[[Sequence[float]], float]) -> Timing:
    value = figure(samples)
    apart = [abs(figure(samples[i::4]) - figure(samples[i + 2 :: 4])) for i in (0, 1) if len(samples) > i + 2]
    return Timing(value, max(apart) / value if apart else None)
