"""The flag protocol of kernels/comm as a small model: the steps of each program of each rank.

R ranks share a channel. On every rank it has two slots of data, used in turn, and a pad of flags. :func:`program` and
the operations below it are the protocol, as lists of steps to compare with docs/overlap.md, "The protocol". A rank may
have several programs (those of a persistent kernel), which share an exchange's work.

comm_search.py explores every interleaving of the programs' steps, comm_trace.py compares recordings of real ranks with
the lists, and test_comm_model.py runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One action of a program. ``peer`` is the other rank: the destination or source of data and flags."""

    kind: str
    epoch: int
    phase: int = 0
    peer: int = 0
    chunk: int = 0
    order: str = "relaxed"  # or "release", "acquire", "acq_rel"
    of: int = 1  # arrive, end: the number of arrivals after which the program acts
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
    rows: tuple[int, ...]  # of each rank's shard, in chunks; the last chunks have fewer rows, or none
    chunks: int = 1  # flags for each shard; chunks without rows have flags too


class Me(NamedTuple):
    """The owner of a list of steps: one of ``programs`` programs of one of ``world`` ranks."""

    rank: int
    world: int
    program: int = 0
    programs: int = 1

    def ranks(self, first: int = 0) -> list[int]:
        """Every rank, starting ``first`` places after this one."""
        return [(self.rank + first + i) % self.world for i in range(self.world)]


Program = list[Step]


def program(me: Me, exchanges: Iterable[Exchange]) -> Iterator[Step]:
    """All steps of one program: exchange 1, 2, ... one after another."""
    epoch = 0
    for x in exchanges:
        if x.op == "rebase":
            yield from rebase(me, epoch)
        else:
            epoch += 1
            yield Step("begin", epoch)
            yield from OPS[x.op](me, x, epoch)
            yield Step("end", epoch, of=me.programs)  # the last program to end increments the device's epoch


def gather(me: Me, x: Exchange, epoch: int, phase: int = 0) -> Iterator[Step]:
    """[T/R, D] of each rank to [T, D] on all: push the own shard in chunks, read the others' as they arrive."""
    for i, (peer, chunk) in enumerate((peer, chunk) for peer in me.ranks() for chunk in range(x.chunks)):
        if i % me.programs == me.program:
            if chunk < x.rows[me.rank]:
                yield Step("write", epoch, phase, peer, chunk)
            yield Step("raise", epoch, phase, peer, chunk, order="release")
    for i, (source, chunk) in enumerate((source, chunk) for source in me.ranks() for chunk in range(x.chunks)):
        needed = i % me.programs == me.program and chunk < x.rows[source]
        if needed or me.program == 0:  # program 0 waits for every rank
            yield Step("wait", epoch, phase, source, chunk, order="acquire", timeout=True)
        if needed:
            yield Step("read", epoch, phase, source, chunk)


def pushed_gather(me: Me, x: Exchange, epoch: int) -> Iterator[Step]:
    """The same as the host has it done: kernels/comm/transport.py.

    Program 0 keeps the own rows in the own slot, then reads all; it is the product. The other programs are the streams
    that copy from the own slot, each its pieces: a piece's rows to all peers, then its flag. They begin behind the own
    rows, of which their wait is a sign. Without them (on a CPU) program 0 sends too.
    """
    chunks, peers, streams = range(x.chunks), me.ranks(first=1)[:-1], me.programs - 1
    if me.program == 0:
        for chunk in range(min(x.chunks, x.rows[me.rank])):
            yield Step("write", epoch, 0, me.rank, chunk)
        for chunk in chunks:
            yield Step("raise", epoch, 0, me.rank, chunk, order="release")
    for chunk in chunks if not streams else chunks[me.program - 1 :: streams] if me.program else ():
        if streams:
            yield Step("wait", epoch, 0, me.rank, chunk, order="acquire", timeout=True)
        if chunk < x.rows[me.rank]:
            if streams:
                yield Step("read", epoch, 0, me.rank, chunk)
            for peer in peers:
                yield Step("write", epoch, 0, peer, chunk)
        for peer in peers:
            yield Step("raise", epoch, 0, peer, chunk, order="release")
    for source in me.ranks() if me.program == 0 else ():
        for chunk in chunks:
            yield Step("wait", epoch, 0, source, chunk, order="acquire", timeout=True)
            if chunk < x.rows[source]:
                yield Step("read", epoch, 0, source, chunk)


def reduce_scatter(me: Me, x: Exchange, epoch: int) -> Iterator[Step]:
    """Addends [T, N] of each rank to sums [T/R, N]: every program has tiles for every owner; the last one raises."""
    for owner in me.ranks(first=1):  # the own rows last
        if x.rows[owner] > 0:
            yield Step("write", epoch, 0, owner)
        yield Step("arrive", epoch, 0, owner, order="acq_rel", of=me.programs)
        yield Step("raise", epoch, 0, owner, order="release")  # only the last to arrive raises; the others skip it
    for source in range(me.world):  # the order of the sum, the same on every rank
        needed = x.rows[me.rank] > 0
        if needed or me.program == 0:
            yield Step("wait", epoch, 0, source, order="acquire", timeout=True)
        if needed:
            yield Step("read", epoch, 0, source)


def all_reduce(me: Me, x: Exchange, epoch: int) -> Iterator[Step]:
    """Addends [T, N] of each rank to their sum on all, in two shots: owners add, then push their sums."""
    yield from reduce_scatter(me, x, epoch)
    yield from gather(me, x, epoch, phase=1)


def rebase(me: Me, epoch: int) -> Iterator[Step]:
    """Raise unused flags to the current epoch, before wrap-around makes them look ahead of it."""
    yield Step("barrier", epoch, timeout=True)
    if me.program == 0:
        yield Step("fill", epoch)
    yield Step("barrier", epoch, timeout=True)


OPS: dict[str, Callable[[Me, Exchange, int], Iterator[Step]]] = {
    "all_gather": gather,
    "pushed_gather": pushed_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


class Model(NamedTuple):
    """The model to explore: the programs of rank 0, of rank 1, ..., and their shared settings."""

    world: int
    steps: list[Program]
    slots: int = 2
    first_epoch: int = 1  # the flag value of exchange 1
    modulus: int = 2**32  # numbers wrap there
    after_timeout: str = "stops"  # the behaviour of a program after a timeout: see comm_search.py

    @property
    def programs(self) -> int:
        """The number of programs of a rank."""
        return len(self.steps) // self.world

    def who(self, index: int) -> Me:
        """The owner of the list ``steps[index]``."""
        rank, part = divmod(index, self.programs)
        return Me(rank, self.world, part, self.programs)

    def changed(self, change: Callable[[Me, Program], Program]) -> Model:
        """A copy with each program replaced by ``change``'s result, to seed bugs."""
        return self._replace(steps=[change(self.who(i), steps) for i, steps in enumerate(self.steps)])


def model(world: int, exchanges: Iterable[Exchange], programs: int = 1, **options: Any) -> Model:
    """The correct protocol; options are Model's."""
    exchanges = list(exchanges)
    everyone = [Me(rank, world, i, programs) for rank in range(world) for i in range(programs)]
    return Model(world, [list(program(me, exchanges)) for me in everyone], **options)


def reached(flag: int, epoch: int, modulus: int) -> bool:
    """Whether the value ``flag`` has reached ``epoch``: a signed comparison that wraps."""
    return (flag - epoch) % modulus < modulus // 2
