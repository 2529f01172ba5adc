"""The flag protocol in every order it can happen in: it holds, and each of the ways to get it wrong is found.

The model is comm_model.py, and the check of recorded traces comm_trace.py. Run with -s for the numbers of states and
the counterexamples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from comm_model import OPS, Exchange, Me, Model, Program, Step, model, reached
from comm_search import Result, explore
from comm_trace import Event, ProtocolError, conforms

from shardfuse.kernels.runtime import signals


def _even(op: str, world: int, chunks: int = 1) -> Exchange:
    return Exchange(op, (chunks,) * world, chunks)


# The last shards are short or empty, and one operation's data lie where another's were two exchanges before.
_MIXED_2 = [
    Exchange("all_gather", (2, 1), 2),
    Exchange("reduce_scatter", (1, 0)),
    Exchange("all_reduce", (2, 1), 2),
    Exchange("all_gather", (1, 0)),
]
_MIXED_3 = [
    Exchange("all_gather", (2, 1, 0), 2),
    Exchange("reduce_scatter", (1, 1, 0)),
    Exchange("all_reduce", (1, 1, 0)),
]


def _explored(name: str, subject: Model, **options: Any) -> Result:
    result = explore(subject, **options)
    print(f"\n{name}: {result.states} states" + (f"\n{result.trace}" if result.rule else ""))
    return result


# --------------------------------------------------------------------------------------------- the protocol holds


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("world", "times"), [(2, 4), (3, 3)])
def test_it_holds_in_every_order(op: str, world: int, times: int) -> None:
    """No early read, no reuse before consumption, no deadlock: without any reduction of the search."""
    result = _explored(
        f"{op}, {world} ranks, {times} exchanges", model(world, [_even(op, world)] * times), reduced=False
    )
    assert not result.rule, result.trace


@pytest.mark.parametrize("exchanges", [_MIXED_2, _MIXED_3], ids=["two-ranks", "three-ranks"])
def test_it_holds_for_mixtures_with_chunks_and_short_and_empty_shards(exchanges: list[Exchange]) -> None:
    world = len(exchanges[0].rows)
    result = _explored(f"a mixture, {world} ranks", model(world, exchanges), reduced=False)
    assert not result.rule, result.trace


def test_it_holds_for_four_ranks() -> None:
    result = _explored("all_gather, 4 ranks, 3 exchanges", model(4, [_even("all_gather", 4)] * 3))
    assert not result.rule, result.trace


@pytest.mark.parametrize(
    "exchanges",
    [
        [Exchange("all_gather", (2, 1), 2)] * 3,
        [Exchange("all_gather", (1, 0))] * 3,
        [Exchange("reduce_scatter", (1, 1))] * 2,
        [Exchange("all_reduce", (2, 0), 2)],
    ],
    ids=lambda exchanges: f"{exchanges[0].op}-{len(exchanges)}",
)
def test_it_holds_for_kernels_of_two_programs(exchanges: list[Exchange]) -> None:
    """They share counters, of which the last to arrive raises the flag, and the epoch that the last to end counts."""
    result = _explored(f"{exchanges[0].op}, 2 ranks of 2 programs", model(2, exchanges, programs=2))
    assert not result.rule, result.trace


@pytest.mark.parametrize(
    ("world", "exchanges", "streams"),
    [
        (2, [Exchange("pushed_gather", (2, 1), 2)] * 3, 2),
        (2, [Exchange("pushed_gather", (3, 2), 3)] * 2, 2),
        (2, [Exchange("pushed_gather", (1, 0))] * 3, 1),
        (3, [Exchange("pushed_gather", (1, 1, 0))] * 2, 1),
    ],
    ids=["two-pieces", "three-pieces", "empty", "three-ranks"],
)
def test_it_holds_for_copies_on_streams_of_their_own(world: int, exchanges: list[Exchange], streams: int) -> None:
    """Data and flags of a piece on one stream, pieces on several, beside the product that waits."""
    result = _explored(f"{streams} streams, {world} ranks", model(world, exchanges, programs=1 + streams))
    assert not result.rule, result.trace


def test_it_holds_where_epochs_wrap() -> None:
    subject = model(2, _MIXED_2, modulus=8, first_epoch=6)  # 6, 7, 0, 1
    result = _explored("epochs 6, 7, 0, 1", subject, reduced=False)
    assert not result.rule, result.trace


@pytest.mark.parametrize("dies", [None, 0, 2])
@pytest.mark.parametrize("op", OPS)
def test_a_slow_or_dead_rank_leaves_the_others_finished_or_timed_out(op: str, dies: int | None) -> None:
    """Whenever a rank dies, and whichever waits run out of time: nobody hangs, and nobody reads what is not there."""
    subject = model(3, [_even(op, 3)] * (1 if op == "all_reduce" else 2))
    who = "none dies" if dies is None else f"rank {dies} dies"
    result = _explored(f"{op}, 3 ranks, {who}", subject, timeouts=True, dies=dies)
    assert not result.rule, result.trace


def test_a_dead_rank_leaves_kernels_of_two_programs_finished_or_timed_out() -> None:
    subject = model(2, [_even("all_gather", 2)] * 2, programs=2)
    result = _explored("2 ranks of 2 programs, one dies", subject, timeouts=True, dies=0)
    assert not result.rule, result.trace


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_rank_that_gave_up_does_no_harm_unnoticed_as_long_as_it_is_silent(op: str) -> None:
    """What it had launched may still write where a peer reads. That peer then waits in vain for the flag of it."""
    subject = model(2, [_even(op, 2)] * 3, after_timeout="silent")
    result = _explored(f"{op}, silent after a timeout", subject, timeouts=True)
    assert not result.rule, result.trace
    heedless = subject.changed(lambda me, steps: [s for s in steps if s.epoch < 3 or s.kind not in ("wait", "read")])
    assert _explored("the last flags not awaited", heedless, timeouts=True).rule == "wrong unnoticed"


# ------------------------------------------------------------------------------------- flags that are left alone


def _left_alone(exchanges: int, rebased: bool = False) -> list[Exchange]:
    """Chunk 1 has a flag in the first exchange and again in the last, ``exchanges`` later."""
    often, seldom = _even("all_gather", 2), _even("all_gather", 2, chunks=2)
    middle = [often] * (exchanges - 1)
    if rebased:
        middle.insert(len(middle) // 2, Exchange("rebase", ()))
    return [seldom, *middle, seldom]


def test_a_flag_left_alone_for_half_the_numbers_is_misread_and_rebasing_cures_it() -> None:
    """Of 8 numbers, 4 count as ahead. Channels rebase after half of that, when no flag can be further behind."""
    just_not = _explored("left alone for 4 of 8", model(2, _left_alone(4), modulus=8))
    assert not just_not.rule, just_not.trace
    assert _explored("left alone for 5 of 8", model(2, _left_alone(5), modulus=8)).rule == "early read"
    cured = _explored("rebased", model(2, _left_alone(5, rebased=True), modulus=8))
    assert not cured.rule, cured.trace


@pytest.mark.parametrize("near", [1, 2**30, 2**31 - 1, 2**31, 2**32 - 1])
def test_kernels_compare_epochs_as_the_model_does(near: int) -> None:
    for epoch in (near - 1, near, near + 1):
        for ahead in (-(2**31) + 1, -2, -1, 0, 1, 2, 2**31 - 1):
            flag = (epoch + ahead + 2**31) % 2**32 - 2**31
            assert signals.reached(flag, epoch) == reached(flag, epoch, 2**32) == (ahead >= 0)


# ------------------------------------------------------------------------------------------------- seeded bugs


def _each(change: Callable[[Me, Step], list[Step]]) -> Callable[[Me, Program], Program]:
    """A change of single steps."""
    return lambda me, steps: [new for step in steps for new in change(me, step)]


def _with(kind: str, **fields: Any) -> Callable[[Me, Program], Program]:
    """Every step of a kind with other fields."""
    return _each(lambda me, step: [step._replace(**fields) if step.kind == kind else step])


def _resetting(me: Me, step: Step) -> list[Step]:
    return [step, step._replace(kind="reset")] if step.kind == "read" else [step]


def _one_epoch_less(me: Me, step: Step) -> list[Step]:
    return [step._replace(epoch=step.epoch - 1) if step.kind == "wait" else step]


def _raised_at_the_next_rank(me: Me, step: Step) -> list[Step]:
    return [step._replace(peer=(step.peer + 1) % me.world) if step.kind == "raise" else step]


def _waits_for_the_next_rank(me: Me, step: Step) -> list[Step]:
    return [step._replace(peer=(step.peer + 1) % me.world) if step.kind == "wait" else step]


def _next_begins_before_the_last_read(me: Me, steps: Program) -> Program:
    """The last read of each exchange comes after the flags of the next."""
    steps = list(steps)
    for last in [i for i, step in enumerate(steps) if step.kind == "end"][-2::-1]:
        read = next(i for i in range(last, -1, -1) if steps[i].kind == "read")
        raised = max(i for i, step in enumerate(steps) if step.kind == "raise" and step.epoch == steps[last].epoch + 1)
        steps.insert(raised, steps.pop(read))
    return steps


def _empty_shards_raise_nothing(me: Me, steps: Program) -> Program:
    written = {(step.epoch, step.peer) for step in steps if step.kind == "write"}
    return [step for step in steps if step.kind != "raise" or (step.epoch, step.peer) in written]


def _waits_only_for_what_is_read(me: Me, steps: Program) -> Program:
    needed = {(step.epoch, step.peer) for step in steps if step.kind == "read"}
    return [step for step in steps if step.kind != "wait" or (step.epoch, step.peer) in needed]


def _filled_without_second_barrier(me: Me, steps: Program) -> Program:
    return [step for step, before in zip(steps, [None, *steps]) if not before or before.kind != "fill"]


def _on_streams(change: Callable[[Me, Program], Program]) -> Callable[[Me, Program], Program]:
    """A change of the streams' steps alone."""
    return lambda me, steps: change(me, steps) if me.program else steps


def _flags_on_the_other_stream(me: Me, steps: Program) -> Program:
    """Each of two streams raises the flags of the other one's piece."""
    return [step._replace(chunk=1 - step.chunk) if step.kind == "raise" else step for step in steps]


def _flags_before_the_rows(me: Me, steps: Program) -> Program:
    """The copies of a piece are still under way when its flags leave."""
    order = ["begin", "wait", "read", "raise", "write", "end"]
    return sorted(steps, key=lambda step: (step.epoch, order.index(step.kind)))


class Bug(NamedTuple):
    """A way to get the protocol wrong, where it shows, and which property it breaks."""

    subject: Model
    change: Callable[[Me, Program], Program] | None
    rule: str
    says: str  # the end of the counterexample
    options: dict[str, Any] = {}  # noqa: RUF012 - of the search; nothing changes it


_GATHERS = model(2, [_even("all_gather", 2)] * 3)
_UNEVEN = model(2, [Exchange("all_gather", (1, 0))] * 3)
_SCATTER_3 = model(3, [_even("reduce_scatter", 3)])
_TWO_PROGRAMS = model(2, [_even("reduce_scatter", 2)], programs=2)
_TWO_PROGRAMS_UNEVEN = model(2, [Exchange("all_gather", (1, 0))] * 3, programs=2)
_TWO_PROGRAMS_GATHER = model(2, [_even("all_gather", 2)] * 2, programs=2)
_ONE_ALL_REDUCE = model(2, [_even("all_reduce", 2)])
_REBASING = model(2, [_even("all_gather", 2), Exchange("rebase", ()), _even("all_gather", 2)])

_STREAMS = model(2, [Exchange("pushed_gather", (2, 2), 2)] * 2, programs=3)
_ONE_STREAM = model(2, [_even("pushed_gather", 2)] * 3, programs=2)

_BUGS = {
    "flags-on-the-other-stream": Bug(_STREAMS, _on_streams(_flags_on_the_other_stream), "early read", "writes chunk"),
    "flags-before-the-rows": Bug(_ONE_STREAM, _on_streams(_flags_before_the_rows), "early read", "writes chunk 0"),
    "streams-ahead-of-the-own-rows": Bug(
        _ONE_STREAM,
        _on_streams(_each(lambda me, step: [] if step.kind == "wait" else [step])),
        "early read",
        "rank 0, program 1, reads chunk 0",
    ),
    "exchange-ends-before-its-copies": Bug(
        _ONE_STREAM, _on_streams(_next_begins_before_the_last_read), "reuse before consumption", "exchange 3"
    ),
    "flag-reset": Bug(_GATHERS, _each(_resetting), "stuck", "waits until its flag"),
    "missing-release": Bug(_GATHERS, _with("raise", order="relaxed"), "early read", "writes chunk 0"),
    "missing-acquire": Bug(_GATHERS, _with("wait", order="relaxed"), "early read", "writes chunk 0"),
    "epoch-off-by-one": Bug(_GATHERS, _each(_one_epoch_less), "early read", "exchange 1"),
    "early-reuse-one-slot": Bug(_GATHERS._replace(slots=1), None, "reuse before consumption", "exchange 2"),
    "early-reuse-late-read": Bug(_GATHERS, _next_begins_before_the_last_read, "reuse before consumption", "exchange 3"),
    "wrong-peer-raised": Bug(_SCATTER_3, _each(_raised_at_the_next_rank), "early read", "writes chunk 0"),
    "wrong-peer-awaited": Bug(_SCATTER_3, _each(_waits_for_the_next_rank), "early read", "writes chunk 0"),
    "empty-shards-silent": Bug(_UNEVEN, _empty_shards_raise_nothing, "stuck", "flag [0, 1, 0]"),
    "empty-shards-unheard": Bug(_UNEVEN, _waits_only_for_what_is_read, "reuse before consumption", "exchange 3"),
    "no-program-hears-all": Bug(
        _TWO_PROGRAMS_UNEVEN, _waits_only_for_what_is_read, "reuse before consumption", "exchange 3"
    ),
    "last-arriver-too-early": Bug(_TWO_PROGRAMS, _with("arrive", of=1), "early read", "writes chunk 0"),
    "last-arriver-never": Bug(_TWO_PROGRAMS, _with("arrive", of=3), "stuck", "waits until its flag"),
    "arrivals-relaxed": Bug(_TWO_PROGRAMS, _with("arrive", order="relaxed"), "early read", "writes chunk 0"),
    "first-to-end-counts": Bug(_TWO_PROGRAMS_GATHER, _with("end", of=1), "epochs disagree", "takes for exchange 2"),
    "wait-without-timeout": Bug(
        _GATHERS, _with("wait", timeout=False), "stuck", "waits until", {"timeouts": True, "dies": 0}
    ),
    "goes-on-after-giving-up": Bug(
        _GATHERS._replace(after_timeout="goes on"), None, "early read", "after it gave up", {"timeouts": True}
    ),
    "sums-after-giving-up": Bug(
        _ONE_ALL_REDUCE._replace(after_timeout="goes on"), None, "early read", "after it gave up", {"timeouts": True}
    ),
    "rebase-with-one-barrier": Bug(_REBASING, _filled_without_second_barrier, "stuck", "has reached 2"),
}


@pytest.mark.parametrize("name", _BUGS)
def test_a_seeded_bug_is_found(name: str) -> None:
    """With the shortest counterexample, in words. Without the bug the same exchanges are in order."""
    bug = _BUGS[name]
    subject = bug.subject if bug.change is None else bug.subject.changed(bug.change)
    result = explore(subject, reduced=False, **bug.options)
    print(f"\n{name}, after {result.states} states:\n{result.trace}")
    assert result.rule == bug.rule
    assert bug.says in result.trace.splitlines()[-1]
    assert explore(subject, **bug.options).rule == bug.rule  # the reduced search finds it, too
    sound = explore(bug.subject._replace(slots=2, after_timeout="stops"), **bug.options)
    assert not sound.rule, sound.trace


# ---------------------------------------------------------------------------------------------- recorded traces


def _recorded(exchanges: list[Exchange]) -> list[list[Event]]:
    """What the ranks of a run that kept to the protocol write down."""
    return [
        [event for step in steps for event in _event(step)] for steps in model(len(exchanges[0].rows), exchanges).steps
    ]


def _event(step: Step) -> list[Event]:
    if step.kind == "arrive":
        return []
    if step.kind in ("begin", "end"):
        return [(step.kind, step.epoch)]
    seen = [step.epoch] if step.kind == "wait" else []
    return [(step.kind, step.phase, step.peer, step.chunk, step.epoch, *seen)]


def _replaced(trace: list[list[Event]], rank: int, old: Event, *new: Event) -> list[list[Event]]:
    """With other events in place of one of ``rank``'s."""
    at = trace[rank].index(old)
    return [[*events[:at], *new, *events[at + 1 :]] if i == rank else events for i, events in enumerate(trace)]


def _moved(trace: list[list[Event]], rank: int, event: Event, before: Event) -> list[list[Event]]:
    return _replaced(_replaced(trace, rank, event), rank, before, event, before)


_GOOD = _recorded([_even("all_gather", 2)] * 3)
_WAIT, _RAISE, _READ, _WRITE = (
    ("wait", 0, 1, 0, 2, 2),
    ("raise", 0, 1, 0, 2),
    ("read", 0, 1, 0, 2),
    ("write", 0, 1, 0, 2),
)
_VIOLATIONS = {
    "no end": (_replaced(_GOOD, 0, ("end", 2)), "the exchange before has not ended"),
    "no last end": (_replaced(_GOOD, 1, ("end", 3)), "the exchange does not end"),
    "epoch left out": (_replaced(_GOOD, 1, ("begin", 2), ("begin", 4)), r"rank 0 has the exchanges \[1, 2, 3\]"),
    "one exchange more": (_replaced(_GOOD, 1, ("end", 3), ("end", 3), ("begin", 4)), "rank 0 makes 3 exchanges"),
    "one exchange less": ([_GOOD[0], _GOOD[1][: _GOOD[1].index(("begin", 3))]], "rank 0 makes 3 exchanges"),
    "outside an exchange": (_moved(_GOOD, 0, _RAISE, ("begin", 2)), "it is not that exchange's time"),
    "of another exchange": (_replaced(_GOOD, 0, _RAISE, ("raise", 0, 1, 0, 1)), "it is not that exchange's time"),
    "nothing raised": (_replaced(_GOOD, 0, _RAISE), "it raised no flag at rank 1"),
    "not heard": (_replaced(_replaced(_GOOD, 0, _WAIT), 0, _READ), "it has not heard from rank 1"),
    "wait not over": (_replaced(_GOOD, 0, _WAIT, (*_WAIT[:5], 1)), "the flag has not reached the epoch"),
    "seen too far": (_replaced(_GOOD, 0, _WAIT, (*_WAIT[:5], 4)), "2 exchanges ahead"),
    "seen what nobody raised": (
        _replaced(_replaced(_GOOD, 1, ("raise", 0, 0, 0, 2), ("raise", 0, 0, 1, 2)), 0, _READ),
        "rank 1 did not set that flag to 2",
    ),
    "raised at the wrong rank": (
        _replaced(_GOOD, 1, ("raise", 0, 0, 0, 2), ("raise", 0, 1, 0, 2)),
        "it raised no flag at rank 0",
    ),
    "read before the wait": (_moved(_GOOD, 0, _READ, _WAIT), "early read"),
    "written after the flag": (_moved(_GOOD, 0, _RAISE, _WRITE), "early read"),
    "read what nobody wrote": (_replaced(_GOOD, 0, _WRITE), "early read: nobody writes"),
    "wait for one another": (
        [
            [
                event
                for kind in ("begin", "wait", "raise", "end")
                for event in events
                if event[0] == kind and event[-1] == 1
            ]
            for events in _GOOD
        ],
        "wait for one another",
    ),
}


@pytest.mark.parametrize("name", _VIOLATIONS)
def test_a_trace_that_breaks_the_protocol_is_refused(name: str) -> None:
    trace, says = _VIOLATIONS[name]
    with pytest.raises(ProtocolError, match=says):
        conforms(trace)


def test_a_trace_of_other_flags_than_the_models_is_refused() -> None:
    exchanges = [_even("all_gather", 2)] * 3
    conforms(_GOOD, exchanges)
    twice = _replaced(_GOOD, 0, _RAISE, _RAISE, _RAISE)
    with pytest.raises(ProtocolError, match=r"rank 0 raises flag \[0, own, 0\] of rank 1 to 2.*1 times more"):
        conforms(twice, exchanges)
    with pytest.raises(ProtocolError, match=r"rank 0 .*1 times less"):
        conforms(_GOOD, [*exchanges[:2], _even("all_gather", 2, chunks=2)])
