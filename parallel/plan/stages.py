"""Which part of a model each pipeline rank has, and how many of its micro-batches it keeps at a time.

Stage i of p of a pipeline with one stage on each rank keeps p - i micro-batches (1F1B: Narayanan et al.,
arXiv:2006.09503). With v stages on a rank, the interleaved schedule (arXiv:2104.04473, section 2.2) runs
(v - 1) p + 2 (p - 1 - i) forwards before it alternates, so rank i keeps 1 + (p - 1 - 2 i) / (p v) times the activations
of its layers for p micro-batches. For other schedules the order of their passes is counted
(``pipeline/orders.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import ge, le, mul
from typing import NamedTuple

from ..pipeline import orders
from ..pipeline.orders import Move, interleaved
from ..pipeline.partition import balanced, owners
from ..pipeline.schedules import find
from .layout import Layout
from .shapes import ModelShape
from .software import Software

PERIODS = 3  # rounds of an interleaved schedule, after which it repeats itself
FILLED = 2  # micro-batches a rank: with more no rank keeps more at a time
Counts = tuple[int, ...]  # of each of a rank's stages


@dataclass(frozen=True)
class Stage:
    """A stage's number of blocks, whether it has embedding and head, and whether it follows a stage of its own rank.

    The number is a fraction where software divides blocks that do not divide, and is not known to do it otherwise.
    """

    blocks: float
    first: bool
    last: bool
    follows: bool


def of_rank(shape: ModelShape, layout: Layout, software: Software, rank: int) -> tuple[Stage, ...]:
    """The stages of pipeline rank ``rank``, in order."""
    return _cut(shape, layout, software).ranks[rank]


def slowest(shape: ModelShape, layout: Layout, software: Software, loss: float) -> tuple[float, bool]:
    """The blocks of the rank that takes the longest, and whether it has the head; ``loss`` is its time in blocks."""
    ranks = _cut(shape, layout, software).ranks
    loads = ((sum(each.blocks for each in rank), any(each.last for each in rank)) for rank in ranks)
    return max(loads, key=lambda load: load[0] + load[1] * loss)


def among_fullest(shape: ModelShape, layout: Layout, software: Software) -> tuple[int, ...]:
    """Pipeline ranks among which the fullest one is: of ranks with equal stages the first and the last."""
    return _cut(shape, layout, software).fullest


class _Cut(NamedTuple):
    """The stages of every rank, and the ranks among which the fullest one is."""

    ranks: tuple[tuple[Stage, ...], ...]
    fullest: tuple[int, ...]


def _cut(shape: ModelShape, layout: Layout, software: Software) -> _Cut:
    if layout.pp == 1:
        return _Cut(((Stage(shape.layers, True, True, False),),), (0,))
    kind = find(layout.schedule).layout
    costs = (_block_cost(shape, layout.length), shape.hidden * shape.vocab) if software.balances else None
    return _divided(shape.layers, costs, layout.pp, layout.interleave, kind)


@functools.lru_cache(1024)
def _divided(layers: int, costs: tuple[int, int] | None, ranks: int, stages: int, kind: str) -> _Cut:
    """The cut of so many layers; ``costs`` are those of a block and of the head, None for blocks divided evenly."""
    count = ranks * stages
    owner, last = owners(count, ranks, kind), count - 1
    blocks: list[float] = [-(-layers // ranks) / stages] * count
    if costs is not None:  # the library's own cut of embedding, blocks and head
        block, head = map(float, costs)
        cut = balanced([0.0, *[block] * layers, head], count, layout=kind, ranks=ranks)
        blocks = [min(each.stop, layers + 1) - max(each.start, 1) for each in cut]
    found: list[list[Stage]] = [[] for _ in range(ranks)]
    for stage in range(count):
        follows = stage > 0 and owner[stage - 1] == owner[stage]
        found[owner[stage]].append(Stage(blocks[stage], stage == 0, stage == last, follows))
    stages_of = tuple(map(tuple, found))
    firsts = {mine: rank for rank, mine in reversed(list(enumerate(stages_of)))}
    lasts = {mine: rank for rank, mine in enumerate(stages_of)}
    return _Cut(stages_of, tuple(sorted({*firsts.values(), *lasts.values()})))


def _block_cost(shape: ModelShape, length: int) -> int:
    """Multiplications of a token's forward through a block; causal attention computes half of the scores."""
    return shape.layer_matrices + length * shape.q_width


def fullest(sizes: Sequence[float], early: Sequence[float], layout: Layout, rank: int) -> tuple[float, Counts]:
    """The most bytes that pipeline rank ``rank`` keeps at a time, and the micro-batches of each stage that it has then.

    A micro-batch leaves ``sizes`` in each of the rank's stages, of which a backward for the inputs alone frees
    ``early``.
    """
    microbatches = layout.microbatches
    if layout.schedule not in ("1f1b", "interleaved_1f1b"):
        microbatches = min(microbatches, FILLED * layout.pp)
    peaks = _peaks(layout.schedule, layout.pp, layout.interleave, microbatches, rank)
    totals = [sum(map(mul, kept, sizes)) - sum(map(mul, halves, early)) for kept, halves in peaks]
    most = max(totals)
    return most, peaks[totals.index(most)][0]


@functools.lru_cache(4096)
def _peaks(schedule: str, ranks: int, stages: int, microbatches: int, rank: int) -> tuple[tuple[Counts, Counts], ...]:
    """The moments among which the fullest one of a rank is, whatever its stages keep: no other has as much of each.

    Of each moment and stage, the micro-batches that the rank keeps, and those of them whose inputs' gradients are done.
    """
    moments: dict[tuple[Counts, Counts], None] = {}  # before backwards: forwards only add
    kept, halves, before = [0] * stages, [0] * stages, ""
    for kind, stage in _passes(schedule, ranks, stages, microbatches, rank):
        if before == "F" != kind:
            moments[tuple(kept), tuple(halves)] = None
        kept[stage] += {"F": 1, "I": 0}.get(kind, -1)
        halves[stage] += {"I": 1, "W": -1}.get(kind, 0)
        before = kind
    if before == "F":
        moments[tuple(kept), tuple(halves)] = None
    return tuple(one for one in moments if not any(_exceeds(other, one) for other in moments))


def _exceeds(other: tuple[Counts, Counts], one: tuple[Counts, Counts]) -> bool:
    """Whether ``other`` keeps as much as ``one`` in every stage, and more in some."""
    return other != one and all(map(ge, other[0], one[0])) and all(map(le, other[1], one[1]))


def _passes(schedule: str, ranks: int, stages: int, microbatches: int, rank: int) -> Iterable[Move]:
    """The passes of a rank up to its fullest moment or further, each with its stage among the rank's."""
    if ranks == 1:
        return [("F", 0)]
    if schedule == "1f1b":
        return [("F", 0)] * min(ranks - rank, microbatches)
    if schedule == "interleaved_1f1b":
        rounds = max(1, microbatches // ranks)
        repeats = microbatches // rounds * min(rounds, PERIODS)
        return interleaved(range(stages), rank, ranks, repeats, split=False)
    passes = orders.of_rank(schedule, rank, ranks, microbatches)
    own = {stage: index for index, stage in enumerate(sorted({one.stage for one in passes}))}
    return [(one.kind, own[one.stage]) for one in passes]
