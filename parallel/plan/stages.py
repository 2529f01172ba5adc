"""Which part of a model each pipeline rank has, and how many of its micro-batches it keeps at a time.

Stage i of p of a pipeline with one stage on each rank keeps p - i micro-batches (1F1B: Narayanan et al.,
arXiv:2006.09503). With v stages on a rank, the interleaved schedule (arXiv:2104.04473, section 2.2) runs
(v - 1) p + 2 (p - 1 - i) forwards before it alternates, so rank i keeps 1 + (p - 1 - 2 i) / (p v) times the activations
of its layers for p micro-batches. For other schedules torch's own order of passes is counted
(``pipeline/timeline.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.partition import balanced, owners
from ..pipeline.schedules import find
from ..pipeline.timeline import order
from .layout import Layout
from .shapes import ModelShape
from .software import Software

PERIODS = 3  # rounds of an interleaved schedule, after which it repeats itself


@dataclass(frozen=True)
class Stage:
    """A stage's number of blocks, and whether it has the embedding and the head.

    The number is a fraction where software divides blocks that do not divide, and is not known to do it otherwise.
    """

    blocks: float
    first: bool
    last: bool


def of_rank(shape: ModelShape, layout: Layout, software: Software, rank: int) -> list[Stage]:
    """The stages of pipeline rank ``rank``, in order."""
    count = layout.pp * layout.interleave
    if layout.pp == 1:
        return [Stage(shape.layers, True, True)]
    kind = find(layout.schedule).layout
    own = [stage for stage, owner in enumerate(owners(count, layout.pp, kind)) if owner == rank]
    if not software.balances:
        blocks = -(-shape.layers // layout.pp) / layout.interleave
        return [Stage(blocks, stage == 0, stage == count - 1) for stage in own]
    ranges = _cut(shape.layers, _block_cost(shape, layout.length), shape.hidden * shape.vocab, count, layout.pp, kind)
    end = shape.layers + 1  # the head's place among the parts; the embedding is the first
    return [
        Stage(min(ranges[stage].stop, end) - max(ranges[stage].start, 1), stage == 0, stage == count - 1)
        for stage in own
    ]


def _block_cost(shape: ModelShape, length: int) -> int:
    """Multiplications of a token's forward through a block; causal attention computes half of the scores."""
    return shape.layer_matrices + length * shape.q_width


@functools.lru_cache(1024)
def _cut(layers: int, block: int, head: int, stages: int, ranks: int, kind: str) -> list[range]:
    """The library's own cut of embedding, blocks and head: ``pipeline.partition``."""
    return balanced([0.0, *[float(block)] * layers, float(head)], stages, layout=kind, ranks=ranks)


def in_flight(sizes: Sequence[float], layout: Layout, rank: int) -> list[int]:
    """The micro-batches of each stage that pipeline rank ``rank`` keeps at its fullest moment.

    ``sizes`` are the bytes of one micro-batch in each of the rank's stages.
    """
    if layout.pp == 1:
        return [1]
    if layout.schedule == "1f1b":
        return [min(layout.pp - rank, layout.microbatches)]
    if layout.schedule == "interleaved_1f1b":
        changes = _interleaved(layout.pp, layout.interleave, layout.microbatches, rank)
    else:
        changes = _in_torchs_order(layout.schedule, layout.pp, min(layout.microbatches, 4 * layout.pp), rank)
    held = [0] * len(sizes)
    fullest, most, now = list(held), 0.0, 0.0
    for stage, change in changes:
        held[stage] += change
        now += change * sizes[stage]
        if now > most:
            most, fullest = now, list(held)
    return fullest


@functools.lru_cache(4096)
def _interleaved(ranks: int, stages: int, microbatches: int, rank: int) -> list[tuple[int, int]]:
    """How many micro-batches more of which stage each pass of a rank keeps, up to the last forward."""
    rounds = max(1, microbatches // ranks)
    together = microbatches // rounds  # micro-batches of one stage before the next one's turn
    total = together * min(rounds, PERIODS) * stages
    ahead = min((stages - 1) * together + 2 * (ranks - 1 - rank), total)
    changes = [(step // together % stages, 1) for step in range(ahead)]
    for step in range(total - ahead):
        changes.append(((ahead + step) // together % stages, 1))
        changes.append((stages - 1 - step // together % stages, -1))
    return changes


@functools.lru_cache(4096)
def _in_torchs_order(schedule: str, ranks: int, microbatches: int, rank: int) -> list[tuple[int, int]]:
    """The same in the order in which torch runs a schedule's passes; a weight's gradient frees what is kept."""
    passes = [one for together in order(schedule, ranks, microbatches)[rank] for one in together]
    own = sorted({one.stage for one in passes})
    return [(own.index(one.stage), {"F": 1, "I": 0}.get(one.kind, -1)) for one in passes]
