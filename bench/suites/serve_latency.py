"""When tokens come, of the requests that ``serve`` sends all at once: percentiles of the first one, and between two.

Rows of the benchmark ``serve``, against transformers' ``generate``, whose requests advance together, and its
``generate_batch``, a rolling batch like ours; ``serve_http`` has the same percentiles against vLLM's server. The tokens
are those of ``serve``, which its check compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..harness.benchmark import Measurement, Settings
from ..harness.latency import Figure, Times, percentiles, timing
from ..harness.timing import Timing, keep_freed_memory

if TYPE_CHECKING:
    from .serve import Rig

ROUNDS = 6


def engine(rig: Rig) -> Times:
    """Of our engine."""
    requests, began = rig.requests(), time.perf_counter()
    arrivals: dict[int, list[float]] = {rig.rolling.add(request): [] for request in requests}
    for event in rig.rolling.run():
        arrivals[event.request].append(time.perf_counter())
    return _whole(rig, began, list(arrivals.values()))


def static(rig: Rig) -> Times:
    """Of ``generate``: every step adds a token to all requests."""
    steps: list[float] = []

    def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        steps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    began = time.perf_counter()
    rig.static(stopping_criteria=[note])
    return _whole(rig, began, [steps] * len(rig.prompts))


def batch(rig: Rig) -> Times:
    """Of ``generate_batch``, by the times that it records by the same clock; each call makes its cache anew."""
    began = time.perf_counter()
    return _whole(rig, began, [each.timestamps for each in rig.batch_outputs(record_timestamps=True)])


def _whole(rig: Rig, began: float, arrivals: list[list[float]]) -> Times:
    """RuntimeError where a side gave a request more or fewer tokens than it was asked for."""
    counts = sorted({len(tokens) for tokens in arrivals})
    if counts != [rig.new]:
        raise RuntimeError(f"requests got {counts} tokens where {rig.new} were asked for: their latencies do not count")
    return Times.of(began, arrivals)


@cache
def _loads(rig: Rig, peer: Callable[[Rig], Times], rounds: int) -> tuple[list[Times], list[Times]]:
    """Both sides' loads, in turns; the first round is not kept: steps of new sizes want memory and oneDNN's code."""
    keep_freed_memory()
    found = [(engine(rig), peer(rig)) for _ in range(rounds + 1)]
    ours, theirs = zip(*found[1:])
    return list(ours), list(theirs)


def plan(
    settings: Settings, case: str, rig: Callable[[], Rig], peers: Mapping[str, Callable[[Rig], Times]]
) -> list[Measurement]:
    """Rows of ``case``: each percentile against each of ``peers``, by its name."""

    def run(peer: Callable[[Rig], Times], figure: Figure) -> tuple[Timing, Timing]:
        ours, theirs = _loads(rig(), peer, 1 if settings.dry else ROUNDS)
        return timing(figure, ours), timing(figure, theirs)

    return [
        Measurement(case, metric, name, None, partial(run, peer, figure))
        for name, peer in peers.items()
        for metric, figure in percentiles().items()
    ]
