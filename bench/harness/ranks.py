"""What benchmarks over several processes of this machine share: their start, their verdicts and their timing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.dev.accuracy import Verdict
from ...training.launch import Stopped, launch, stop_signals
from .timing import Call, Timing, compare_fixed, compare_rounds

MIN_ROUNDS, MAX_ROUNDS = 30, 300


def on_ranks(worker: Callable[..., Any], *args: Any, processes: int) -> Any:
    """Run ``worker(*args)`` in that many new processes; returns rank 0's result. A stop signal ends this process."""
    try:
        with stop_signals():
            return launch(worker, *args, processes=processes)[0]
    except Stopped as stop:
        sys.exit(128 + stop.signum)


def worst(found: Sequence[Verdict]) -> list[Verdict]:
    """Of each comparison the rank's that came out worst. Every rank has the same comparisons in order. Collective."""
    everyone: list[list[Verdict]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, list(found))
    return [max(same, key=lambda verdict: (not verdict.ok, verdict.error)) for same in zip(*everyone, strict=True)]


def compare_on_ranks(ours: Call, peer: Call, *, seconds: float) -> tuple[Timing, Timing]:
    """Microseconds of a call by each rank's clock, interleaved, over a number of rounds that rank 0 decides.

    The rounds take about ``seconds``, but are at least MIN_ROUNDS and at most MAX_ROUNDS. Collective.
    """
    ours_once, peer_once = compare_fixed(ours, peer, rounds=3, calls=1)
    wanted = seconds / ((ours_once.value + peer_once.value) * 1e-6)
    rounds = torch.tensor(max(MIN_ROUNDS, min(MAX_ROUNDS, int(wanted))))
    dist.broadcast(rounds, 0)
    return compare_rounds(ours, peer, rounds=int(rounds))
