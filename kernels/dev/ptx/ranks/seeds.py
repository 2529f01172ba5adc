"""Faults seeded into the protocol, each of which has to be found: in a kernel's PTX, or in what the host does.

A fault is found if a result is wrong, a wait never ends, or a race is reported, under one of its schedules; without the
fault the same exchanges are in order. ``model`` names the same fault in tests/kernels/test_comm_model.py, where the
protocol's model finds it in every order of its steps.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .. import driver
from .host import Wrong
from .programs import USUAL, Outcome, Program, Setup, fewer, programs, run
from .schedules import schedule

_BLOCKS = 4  # of a kernel whose blocks have flags of their own
_RAISED = r"(atom\.global\.)sys\.release(\.exch\.b32)"
_AWAITED = r"ld\.acquire\.sys(\.global\.b32 seen, \[flag)\]"
_COUNTED = r"(atom\.global\.gpu\.)acq_rel(\.add\.u32)"
_INDEXED = r"mad\.wide\.s32 flag, ([^,]+), 4,"
_REACHED = r"setp\.ge\.s32 p, word, 0;"


@dataclass(frozen=True)
class Seed:
    """One fault. ``where`` is in the label of the program that has it, ``change`` (pattern, replacement) of its PTX."""

    name: str
    where: str
    change: tuple[str, str] | None = None
    setup: Setup = USUAL
    schedules: tuple[str, ...] = ("turns", "first-late", "random")
    model: str = ""
    counted: bool = False  # by the device
    needs: str = ""  # an architecture, and later ones
    at: int | None = None  # of the places that match, the one that is changed; None: all

    @property
    def label(self) -> str:
        at = "" if self.at is None else f" ({self.at + 1})"
        return f"{self.name}{at}: {self.where}"


_ONE, _TWO = "all_reduce_rmsnorm t4-d96", "all_reduce_rmsnorm t11-d64"
_SCATTER, _REDUCE = "linear_reduce_scatter t66-k40", "linear_all_reduce t66-k40"  # several tiles for each owner
_GATHER, _TMA = "all_gather_linear t66-k40", "all_gather_linear t40-k64"
_UNEVEN = "all_gather_linear t5-k136"
_SENT = "sent dgrad, reduce-scatter t70"
_OWN = ("copies-last", "turns", "random")  # schedules in which copies are late
_SENDS = (_ONE, _TWO, _SENT, _REDUCE)


def _of_kernels() -> Iterator[Seed]:
    for where in _SENDS:
        yield Seed("flags are raised relaxed", where, (_RAISED, r"\1sys.relaxed\2"), model="missing-release")
        yield Seed("flags are raised at .gpu", where, (_RAISED, r"\1gpu.release\2"), model="missing-release")
    for where in (*_SENDS, _GATHER, _TMA):
        yield Seed("flags are read relaxed", where, (_AWAITED, r"ld.relaxed.sys\1]"), model="missing-acquire")
        yield Seed("flags are read at .gpu", where, (_AWAITED, r"ld.acquire.gpu\1]"), model="missing-acquire")
        yield Seed("the flag of a source that is none is read", where, (_AWAITED, r"ld.acquire.sys\1+256]"))
        yield Seed("the last epoch's flag is enough", where, (_REACHED, "setp.ge.s32 p, word, -1;"),
                   model="epoch-off-by-one", schedules=(*_OWN, "first-late", "flags-late"))  # fmt: skip
        if where == _TWO:
            continue  # no flag of two rounds can be raised again before it was seen: a reset does no harm
        reset = "setp.ge.s32 p, word, 0; @p st.relaxed.sys.global.b32 [flag], 0;"
        yield Seed("a flag that was seen is reset", where, (_REACHED, reset), model="flag-reset",
                   schedules=("first-late", "last-late", "flags-late", "turns", "random"))  # fmt: skip
    for where in (_SCATTER, _REDUCE):
        yield Seed("tiles are counted relaxed", where, (_COUNTED, r"\1relaxed\2"), model="arrivals-relaxed")
    other = r"xor.b32 word, \1, 64; mad.wide.s32 flag, word, 4,"  # of two ranks
    yield Seed("another source's flag is read", _GATHER, (_INDEXED, other), model="wrong-peer-awaited",
               schedules=_OWN)  # fmt: skip
    yield Seed("no proxy fence behind the wait", _TMA, (r"fence\.proxy\.async\.global;", ""), needs="sm_90")
    # A store after its signal: the barrier is missing that all stores come before.
    for where, barriers in ((_ONE, 2), (_TWO, 4)):
        for at in range(barriers):
            yield Seed("a barrier is missing", where, (r"bar\.sync\s+0;", ""), at=at)


def _of_hosts() -> Iterator[Seed]:
    for where in (*_SENDS, _GATHER):
        yield Seed("one slot for every exchange", where, setup=Setup(one_slot=True), model="early-reuse-one-slot",
                   schedules=("first-late", "last-late", "turns", "random"))  # fmt: skip
    for where in (_SCATTER, _REDUCE):
        yield Seed("the flag comes with the first tile", where, setup=Setup(counters=1),
                   model="last-arriver-too-early", schedules=("blocks-first", "blocks-last", "random"))  # fmt: skip
        yield Seed("no tile is the last", where, setup=Setup(counters=-1), model="last-arriver-never")
        yield Seed("flags go to the next rank", where, setup=Setup(crossed_pads=True), model="wrong-peer-raised")
    for name, wrong, model in (
        ("flags before the rows", Wrong(flags_first=True), "flags-before-the-rows"),
        ("flags of the other stream's piece", Wrong(flags_crossed=True), "flags-on-the-other-stream"),
        ("streams ahead of the own rows", Wrong(unordered=True), "streams-ahead-of-the-own-rows"),
        ("an exchange ends before its copies", Wrong(not_awaited=True), "exchange-ends-before-its-copies"),
    ):
        yield Seed(name, _GATHER, setup=Setup(wrong=wrong), model=model, schedules=_OWN)
    yield Seed("the first block to end counts the exchange", _ONE, setup=Setup(ended=_BLOCKS - 1), counted=True,
               model="first-to-end-counts", schedules=("one-resident", "blocks-first", "random"))  # fmt: skip
    silent = Setup(wrong=Wrong(silent=True))
    yield Seed("pieces without rows raise no flag", _UNEVEN, setup=silent, model="empty-shards-silent")


def seeds(arch: str) -> list[Seed]:
    """All faults that kernels for ``arch`` can have."""
    return [
        each
        for each in (*_of_kernels(), *_of_hosts())
        if not each.needs or driver.ARCHS[arch] >= driver.ARCHS[each.needs]
    ]


def program_of(seed: Seed, ranks: int = 2) -> Program:
    return next(
        fewer(each, _BLOCKS) for each in programs(ranks) if seed.where in each.label and each.counted == seed.counted
    )


@dataclass(frozen=True)
class Finding:
    """What was found of a fault: ``kinds`` as the protocol's model calls them, and the first line of each."""

    kinds: frozenset[str]
    lines: tuple[str, ...]
    changed: int  # places in PTX
    schedule: str  # under which it was found; "" if it was missed


def find(seed: Seed, ranks: int = 2) -> Finding:
    """Run a fault under its schedules until one of them finds it. ValueError where the PTX has no such place."""
    program, changed = program_of(seed, ranks), 0
    for name in seed.schedules:
        with _seeded(seed) as places:
            outcome = run(program, schedule(name), seed.setup)
        changed = sum(places.values())
        if seed.change is not None and not changed:
            raise ValueError(f"{seed.label}: no kernel of {program.label} has {seed.change[0]!r}: change the pattern")
        if not outcome.ok:
            return Finding(frozenset(kinds_of(outcome)), (*outcome.wrong, *outcome.reports), changed, name)
    return Finding(frozenset(), (), changed, "")


@contextlib.contextmanager
def _seeded(seed: Seed) -> Iterator[dict[str, int]]:
    """Within the block kernels have the fault; gives the places, by the PTX of each kernel."""
    before, places, change = driver.mutate, dict[str, int](), seed.change
    if change is not None:
        driver.mutate = lambda text: _changed(text, *change, seed.at, places)
    try:
        yield places
    finally:
        driver.mutate = before


def _changed(text: str, pattern: str, instead: str, at: int | None, places: dict[str, int]) -> str:
    found = list(re.finditer(pattern, text))
    if at is not None:
        found = found[at : at + 1] if "_reduce_kernel" in text else []
    places[text] = len(found)
    for match in reversed(found):
        text = text[: match.start()] + match.expand(instead) + text[match.end() :]
    return text


def kinds_of(outcome: Outcome) -> Iterator[str]:
    """What went wrong, as the protocol's model names it, or "wrong result"."""
    for line in (*outcome.wrong, *outcome.reports):
        if "deadlock" in line:
            yield "stuck"
        elif "read of what was written" in line:
            yield "early read"
        elif "write over" in line:
            yield "reuse before consumption"
        else:
            yield "wrong result"
