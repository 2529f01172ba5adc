"""The flag protocol of kernels/comm as a small model: what each program of each rank does, step by step.

R ranks share a channel. On every rank it has two slots of data, used in turn, and a pad of flags. :func:`program` and
the operations below it are the protocol, as lists of steps to be held next to docs/overlap.md, "The protocol". A rank
may have several programs, those of a persistent kernel, which share an exchange's work.

comm_search.py goes through every order in which the steps of all programs can be made, comm_trace.py holds what real
ranks did against the lists, and test_comm_model.py has both do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One action of a program. ``peer`` is the rank at the other end: where data and flags go, or whence they come."""

    kind: str
    epoch: int
    phase: int = 0
    peer: int = 0
    chunk: int = 0
    order: str = "relaxed"  # or "release", "acquire", "acq_rel"
    of: int = 1  # arrive, end: the arrival that acts on it
    timeout: bool = False

    def __str__(self) -> str:
        where = f"[{self.phase}, {self.peer}, {self.chunk}]"
        own = f"[{self.phase}, own, {self.chunk}]"
        return {
            "begin": f"begins exchange {self.epoch}",
            "write": f"writes chunk {self.chunk} (phase {self.phase}) to rank {self.peer}, exchange {self.epoch}",
            "raise": f"raises flag {own} of rank {self.peer} to {self.epoch} ({self.order})",
            "wait": f"waits until its flag {where} has reached {self.epoch} ({self.order})",
            "read": f"reads chunk {self.chunk} (phase {self.phase}) from rank {self.peer}, exchange {self.epoch}",
            "arrive": f"counts its part for rank {self.peer} as done ({self.order})",
            "end": f"ends exchange {self.epoch}",
            "reset": f"sets its flag {where} to 0",
            "fill": f"fills its own pad with {self.epoch}",
            "barrier": "is at a barrier",
        }[self.kind]


class Exchange(NamedTuple):
    """One use of the channel by all ranks, or a ``rebase`` between two of them."""

    op: str
    rows: tuple[int, ...]  # of each rank's shard, in chunks: fewer in the last ones, or none
    chunks: int = 1  # flags for each shard; those without rows are raised too


class Me(NamedTuple):
    """Whose list of steps it is: one of ``programs`` programs of one of ``world`` ranks."""

    rank: int
    world: int
    program: int = 0
    programs: int = 1

    def ranks(self, first: int = 0) -> list[int]:
        """Every rank, from the one that comes ``first`` places after this."""
        return [(self.rank + first + i) % self.world for i in range(self.world)]


Program = list[Step]


def program(me: Me, exchanges: Iterable[Exchange]) -> Iterator[Step]:
    """All that one program does: exchange 1, 2, ... one after another."""
    epoch = 0
    for x in exchanges:
        if x.op == "rebase":
            yield from rebase(me, epoch)
        else:
            epoch += 1
            yield Step("begin", epoch)
            yield from OPS[x.op](me, x, epoch)
            yield Step("end", epoch, of=me.programs)  # the last program to end has the device count the exchange


def gather(me: Me, x: Exchange, epoch: int, phase: int = 0) -> Iterator[Step]:
    """[T/R, D] of each rank to [T, D] on all: push the own shard in chunks, take the others' as they come."""
    for i, (peer, chunk) in enumerate((peer, chunk) for peer in me.ranks() for chunk in range(x.chunks)):
        if i % me.programs == me.program:
            if chunk < x.rows[me.rank]:
                yield Step("write", epoch, phase, peer, chunk)
            yield Step("raise", epoch, phase, peer, chunk, order="release")
    for i, (source, chunk) in enumerate((source, chunk) for source in me.ranks() for chunk in range(x.chunks)):
        needed = i % me.programs == me.program and chunk < x.rows[source]
        if needed or me.program == 0:  # program 0 hears from everybody
            yield Step("wait", epoch, phase, source, chunk, order="acquire", timeout=True)
        if needed:
            yield Step("read", epoch, phase, source, chunk)


def reduce_scatter(me: Me, x: Exchange, epoch: int) -> Iterator[Step]:
    """Addends [T, N] of each rank to sums [T/R, N]: every program has tiles for every owner; the last one tells it."""
    for owner in me.ranks(first=1):  # the own rows come last
        if x.rows[owner] > 0:
            yield Step("write", epoch, 0, owner)
        yield Step("arrive", epoch, 0, owner, order="acq_rel", of=me.programs)
        yield Step("raise", epoch, 0, owner, order="release")  # for the last to arrive; the others go on
    for source in range(me.world):  # the order of the sum, the same on every rank
        needed = x.rows[me.rank] > 0
        if needed or me.program == 0:
            yield Step("wait", epoch, 0, source, order="acquire", timeout=True)
        if needed:
            yield Step("read", epoch, 0, source)


def all_reduce(me: Me, x: Exchange, epoch: int) -> Iterator[Step]:
    """Addends [T, N] of each rank to their sum on all, in two shots: owners add up, then push what they have."""
    yield from reduce_scatter(me, x, epoch)
    yield from gather(me, x, epoch, phase=1)


def rebase(me: Me, epoch: int) -> Iterator[Step]:
    """Bring flags that were left alone up to the epoch, before they look as if they were ahead of it."""
    yield Step("barrier", epoch, timeout=True)
    if me.program == 0:
        yield Step("fill", epoch)
    yield Step("barrier", epoch, timeout=True)


OPS: dict[str, Callable[[Me, Exchange, int], Iterator[Step]]] = {
    "all_gather": gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


class Model(NamedTuple):
    """What is explored: the programs of rank 0, of rank 1, ..., and what they share."""

    world: int
    steps: list[Program]
    slots: int = 2
    first_epoch: int = 1  # the number of exchange 1 when it is written into flags
    modulus: int = 2**32  # numbers wrap there
    after_timeout: str = "stops"  # what a program that gave up does: see comm_search.py

    @property
    def programs(self) -> int:
        """How many programs a rank has."""
        return len(self.steps) // self.world

    def who(self, index: int) -> Me:
        """Whose list of steps ``steps[index]`` is."""
        rank, part = divmod(index, self.programs)
        return Me(rank, self.world, part, self.programs)

    def changed(self, change: Callable[[Me, Program], Program]) -> Model:
        """With what ``change`` makes of each program: how bugs are seeded."""
        return self._replace(steps=[change(self.who(i), steps) for i, steps in enumerate(self.steps)])


def model(world: int, exchanges: Iterable[Exchange], programs: int = 1, **options: Any) -> Model:
    """The protocol as it should be; options are Model's."""
    exchanges = list(exchanges)
    everyone = [Me(rank, world, i, programs) for rank in range(world) for i in range(programs)]
    return Model(world, [list(program(me, exchanges)) for me in everyone], **options)


def reached(flag: int, epoch: int, modulus: int) -> bool:
    """Whether a flag that stands at ``flag`` says that ``epoch`` has come: a signed comparison that wraps."""
    return (flag - epoch) % modulus < modulus // 2
