"""Check recordings of real ranks against the flag protocol's model in comm_model.py.

A trace is a list of events for each rank, in the rank's own order (its programs one after another, as the interpreter
runs them):

- ``("begin", e)`` and ``("end", e)``: around all events of exchange e;
- ``("write", phase, peer, chunk, e)``: data stored into ``peer``'s slot;
- ``("raise", phase, peer, chunk, e)``: flag [phase, own rank, chunk] of ``peer``'s pad set to e;
- ``("wait", phase, peer, chunk, e, seen)``: own flag [phase, peer, chunk] awaited, and its final value;
- ``("read", phase, peer, chunk, e)``: data of ``peer``'s taken from the own slot.

Epochs are the flags' values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from comm_model import Exchange, Model, Program, Step, model, reached
from comm_search import Machine, Violation

Event = tuple[Any, ...]
_ORDERS = {"raise": "release", "wait": "acquire", "end": "acq_rel"}


class ProtocolError(AssertionError):
    """A trace that violates the protocol; the message gives rank, event and reason."""


def conforms(
    trace: Sequence[Sequence[Event]], exchanges: Iterable[Exchange] | None = None, modulus: int = 2**32
) -> None:
    """Raise ProtocolError unless the ranks that recorded ``trace`` kept to the protocol.

    All ranks make the same exchanges, one after another. In each, a rank raises flags at every peer and waits for every
    peer before the end; the awaited rank raised the value that a wait saw, at most one exchange ahead. It follows that
    two slots are enough. Then the lists run as the model's programs: the writes that a read should see must happen
    before it, hence in every execution of these lists and not just in the recorded one.

    exchanges: the exchanges that ran; flags raised, flags awaited and data must be exactly the model's
    modulus: the value at which epochs wrap
    """
    epochs = [event[1] for event in trace[0] if event[0] == "begin"]
    steps = [_steps_of(rank, events, epochs, len(trace), modulus) for rank, events in enumerate(trace)]
    _check_seen(trace, steps, modulus)
    if exchanges is not None:
        _compare(steps, model(len(trace), exchanges))
    _run(Model(len(trace), steps, first_epoch=epochs[0] if epochs else 1, modulus=modulus))


def _steps_of(rank: int, events: Sequence[Event], epochs: list[int], world: int, modulus: int) -> Program:
    """A rank's events as the model's steps, their epochs counted from 1."""
    steps: Program = []
    number, inside = 0, False
    told: set[int] = set()
    heard: set[int] = set()
    for event in events:
        kind, epoch = event[0], event[1] if event[0] in ("begin", "end") else event[4]
        if kind == "begin":
            _check(not inside, rank, event, "the exchange before has not ended")
            _check(number < len(epochs), rank, event, f"rank 0 makes {len(epochs)} exchanges")
            follows = number == 0 or (epoch - epochs[number - 1]) % modulus == 1
            _check(follows and epoch == epochs[number], rank, event, f"rank 0 has the exchanges {epochs}")
            number, inside = number + 1, True
            told, heard = set(), set()
        _check(inside and epoch == epochs[number - 1], rank, event, "it is not that exchange's time")
        if kind == "end":
            inside = False
            for what, ranks in (("raised no flag at", told), ("has not heard from", heard)):
                missing = set(range(world)) - ranks - {rank}
                _check(not missing, rank, event, f"it {what} rank {min(missing, default=None)} in this exchange")
        told |= {event[2]} if kind == "raise" else set()
        heard |= {event[2]} if kind == "wait" else set()
        phase, peer, chunk = (0, 0, 0) if kind in ("begin", "end") else event[1:4]
        steps.append(Step(kind, number, phase, peer, chunk, _ORDERS.get(kind, "relaxed")))
    _check(not inside, rank, events[-1] if events else (), "the exchange does not end")
    _check(number == len(epochs), rank, events[-1] if events else (), f"rank 0 makes {len(epochs)} exchanges")
    return steps


def _check_seen(trace: Sequence[Sequence[Event]], steps: list[Program], modulus: int) -> None:
    """Check that the awaited rank raised the value that ended each wait, in that exchange or the next."""
    raised = {
        (step.peer, step.phase, rank, step.chunk, step.epoch)
        for rank, made in enumerate(steps)
        for step in made
        if step.kind == "raise"
    }
    for rank, events in enumerate(trace):
        for event, step in zip(events, steps[rank]):
            if event[0] != "wait":
                continue
            ahead = (event[5] - event[4]) % modulus
            _check(reached(event[5], event[4], modulus), rank, event, "the flag has not reached the epoch")
            _check(ahead <= 1, rank, event, f"the flag is {ahead} exchanges ahead, and no rank can be by more than one")
            flag = (rank, step.phase, step.peer, step.chunk, step.epoch + ahead)
            _check(flag in raised, rank, event, f"rank {step.peer} did not set that flag to {event[5]}")


def _compare(steps: list[Program], expected: Model) -> None:
    """Check that each rank's steps are the model's, in any order of tiles."""
    kinds = {"begin", "end", "raise", "wait", "write", "read"}
    for rank, (made, wanted) in enumerate(zip(steps, expected.steps)):
        found, asked = (Counter(step[:5] for step in program if step.kind in kinds) for program in (made, wanted))
        # Several tiles may wait for one flag, or read of one chunk.
        repeated = {step for step in found if step[0] in ("wait", "read", "write")}
        found = Counter({step: 1 if step in repeated else count for step, count in found.items()})
        for step, count in ((found - asked) | (asked - found)).items():
            more = "more" if found[step] > asked[step] else "less"
            raise ProtocolError(f"rank {rank} {Step(*step)}: {count} times {more} than the model's program")


def _run(recorded: Model) -> None:
    """Run the lists in one order. Happens-before follows from the lists, so any order shows it."""
    machine = Machine(recorded)
    state, moving = machine.start(), True
    while moving:
        moving = False
        for who in range(machine.programs):
            try:
                while (new := machine.following(state, who)) is not None:
                    state, moving = new, True
            except Violation as violation:
                raise ProtocolError(str(violation)) from None
    stuck = [machine.next_step(state, who) for who in range(machine.programs) if machine.alive(state, who)]
    if stuck:
        raise ProtocolError(f"these wait for one another: {'; '.join(stuck)}")


def _check(holds: bool, rank: int, event: Event, rule: str) -> None:
    if not holds:
        raise ProtocolError(f"rank {rank}, {event}: {rule}")
