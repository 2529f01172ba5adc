"""The order in which the ranks of a pipeline schedule run their passes.

It is the order in which torch runs them, written down here because asking torch for it takes as long as importing torch
twice; a test holds the two against each other. DualPipeV's is torch's own (``pipeline_order`` of its class).

A stage runs the micro-batches of each kind of pass one after another, so an order is a list of kinds and stages: the
n-th pass of a kind in a stage is that of micro-batch n.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .schedules import check_microbatches, find, stages_of

KINDS = ("F", "B", "I", "W")  # see timeline.py

Move = tuple[str, int]  # a pass's kind and stage


class Todo(NamedTuple):
    """A pass that has not been timed yet."""

    kind: str  # one of KINDS
    stage: int
    microbatch: int


@functools.lru_cache(64)
def order(name: str, ranks: int, microbatches: int) -> list[list[tuple[Todo, ...]]]:
    """For each rank its passes in the order in which torch runs them; passes that run as one share a tuple.

    Raises ValueError for numbers that the schedule does not support.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: expected at least 1")
    check_microbatches(name, microbatches, ranks)
    if name == "dualpipev":
        return torchs(name, ranks, microbatches)
    return [[(todo,) for todo in of_rank(name, rank, ranks, microbatches)] for rank in range(ranks)]


def of_rank(name: str, rank: int, ranks: int, microbatches: int) -> list[Todo]:
    """The passes of one rank in order; those that run as one follow each other. Raises ValueError as :func:`order`."""
    if name == "dualpipev":
        return [todo for together in order(name, ranks, microbatches)[rank] for todo in together]
    check_microbatches(name, microbatches, ranks)
    return [todo for todo in _numbered(_moves(name, rank, ranks, microbatches)) if todo.microbatch < microbatches]


def _numbered(moves: Iterable[Move]) -> Iterator[Todo]:
    done: Counter[Move] = Counter()
    for move in moves:
        yield Todo(*move, done[move])
        done[move] += 1


def _moves(name: str, rank: int, ranks: int, microbatches: int) -> list[Move]:
    """The passes of a rank, in order."""
    if name == "zbv":
        return _zbv(rank, ranks, microbatches)
    if name.startswith("interleaved"):
        stages = stages_of(name, rank, ranks)
        return interleaved(stages, rank, ranks, microbatches, split=find(name).splits_backward)
    ahead = {"naive": 0, "1f1b": ranks - 1 - rank}.get(name, microbatches)
    return _in_turn([("F", rank)] * microbatches, [("B", rank)] * microbatches, ahead)


def _in_turn(forwards: list[Move], backwards: list[Move], ahead: int) -> list[Move]:
    """``ahead`` forwards, then one forward and one backward in turn until both are done."""
    moves = forwards[:ahead]
    for index, backward in enumerate(backwards):
        moves += [*forwards[ahead + index : ahead + index + 1], backward]
    return moves


def interleaved(stages: Sequence[int], rank: int, ranks: int, microbatches: int, *, split: bool) -> list[Move]:
    """The passes of a rank whose ``stages`` take turns, a round of micro-batches each.

    Narayanan et al. (arXiv:2104.04473), section 2.2; with ``split`` backwards Qi et al. (arXiv:2401.10241), ZB-H1: the
    weights' gradients follow those of the inputs ``rank`` passes later, so that no rank keeps more than the first one.
    """
    together = microbatches // max(1, microbatches // ranks)  # micro-batches of a stage in a round
    count = microbatches * len(stages)
    turns = [step // together % len(stages) for step in range(count)]
    forwards = [("F", stages[turn]) for turn in turns]
    backwards = [("I" if split else "B", stages[-1 - turn]) for turn in turns]
    ahead = (len(stages) - 1) * together + (1 if split else 2) * (ranks - 1 - rank)
    moves = _in_turn(forwards, backwards, min(ahead, count))
    if not split:
        return moves
    inputs, found = [], []
    for move in moves:
        found.append(move)
        if move[0] == "I":
            inputs.append(move)
            if len(inputs) > rank:
                found.append(("W", inputs[-1 - rank][1]))
    return found + [("W", stage) for _, stage in inputs[max(0, count - rank) :]]


def _zbv(rank: int, ranks: int, microbatches: int) -> list[Move]:
    """Qi et al. (arXiv:2401.10241), section 6: one stage of a rank on the way down the ranks, one on the way up.

    With fewer micro-batches than fill the pipeline the order is that of a full one, and leaves some out.
    """
    down, up = rank, 2 * ranks - 1 - rank
    microbatches = max(microbatches, 2 * ranks - 1)
    behind = ranks - rank  # this rank and those after it
    there, back = [("I", down), ("W", down)], [("F", up), ("I", up), ("W", up)]
    fed, steady = microbatches - ranks - behind + 1, microbatches - ranks
    moves = [("F", down)] * (2 * behind - 1) + [("F", up), ("F", down)] * rank + back * behind
    moves += [("F", down), *there, *back] * fed + [*there, *back] * (steady - fed)
    moves += [("I", down), ("I", up)] * rank + there * behind
    return moves + [("W", up)] * rank + [("W", down)] * rank


def torchs(name: str, ranks: int, microbatches: int) -> list[list[tuple[Todo, ...]]]:
    """The order as torch's class lists it, for a schedule with several stages on a rank."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    schedule = find(name)
    actions = get_schedule_ops(schedule.kind, ranks, microbatches, schedule.stages_per_rank)
    return [[todos for action in mine if (todos := _todos(action))] for mine in actions]


def _todos(action: Any) -> tuple[Todo, ...]:
    """The passes in one action of torch's; none in a gap, or in an action that moves data or gradients."""
    if action is None:
        return ()
    parts = action.sub_actions or (action,)
    named = [(part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts]
    return tuple(Todo(*one) for one in named if one[0] in KINDS)
