"""Vector clocks over the blocks, hosts and copy engines of all ranks, and what they say of accesses to memory.

An *agent* is a block of a launch, a rank's host or a copy engine; its time is the number of its barriers (of a host or
an engine: of the flags it has raised). A *view* is the number of a vector clock: for each agent the time up to which
its accesses happen before whatever has that view. Views are interned, since most threads of a launch share one.

PTX ISA, "Memory Consistency Model": accesses that nothing orders are no race if both are strong and each one's scope
includes the other's thread. A thread that releases passes on its view; one that acquires what was released joins it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..memory import Array

WEAK, GPU, SYS = 0, 1, 2  # how strong an access is: the scopes of strong ones
_GRANULE = 2  # bytes
NOBODY = -1


class Clocks:
    """The interned vector clocks. View 0 knows nothing."""

    def __init__(self) -> None:
        self._table = np.zeros((256, 64), np.int32)  # [view, agent]
        self._used = 1
        self._joined: dict[tuple[int, int], int] = {}
        self.rank = np.zeros(0, np.int16)  # of each agent
        self.root = np.zeros(0, np.int32)  # the block that an agent is a part of: itself, but for single threads

    def agents(self, rank: int, count: int = 1, root: int = NOBODY) -> Array:
        """New agents of a rank."""
        first = len(self.rank)
        found = np.arange(first, first + count, dtype=np.int32)
        self.rank = np.append(self.rank, np.full(count, rank, np.int16))
        self.root = np.append(self.root, found if root == NOBODY else np.full(count, root, np.int32))
        if first + count > self._table.shape[1]:
            wider = np.zeros((len(self._table), 2 * (first + count)), np.int32)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        return found

    def knows(self, view: Array, agent: Array, time: Array) -> Array:
        """Whether accesses of ``agent`` at ``time`` happen before; agent NOBODY: they do."""
        return (self._table[view, agent] > time) | (agent == NOBODY)

    def join(self, a: int, b: int) -> int:
        if a == b or b == 0:
            return a
        if a == 0:
            return b
        key = (a, b) if a < b else (b, a)
        if key not in self._joined:
            both = np.maximum(self._table[a], self._table[b])
            same = next((each for each in key if (self._table[each] == both).all()), None)
            self._joined[key] = self._new(both) if same is None else same
        return self._joined[key]

    def joined(self, views: Array) -> int:
        """The join of all of them."""
        different = np.unique(views)
        if len(different) == 1:
            return int(different[0])
        return self._new(self._table[different].max(0))

    def knowing(self, view: int, agents: Array, times: Array | int) -> int:
        """``view``, which also knows the accesses of ``agents`` before ``times``."""
        row = self._table[view].copy()
        row[agents] = np.maximum(row[agents], times)
        return self._new(row)

    def _new(self, row: Array) -> int:
        if self._used == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[self._used] = row
        self._used += 1
        return self._used - 1


class Message(NamedTuple):
    """What acquiring a word passes on: by releasing rank, the views of releases at any scope, and at .sys."""

    gpu: dict[int, int]
    sys: dict[int, int]


NOTHING = Message({}, {})


def added(clocks: Clocks, message: Message, rank: int, view: int, scope: int) -> Message:
    """``message`` with one more release, as a read-modify-write leaves it; a plain store begins with NOTHING."""
    found = [dict(message.gpu), dict(message.sys)]
    for each in found[: 1 if scope == GPU else 2]:
        each[rank] = clocks.join(each.get(rank, 0), view)
    return Message(*found)


def received(clocks: Clocks, message: Message, rank: int, scope: int) -> int:
    """The view that a thread of ``rank`` gets by an acquire: from another rank if both sides have scope .sys."""
    view = message.gpu.get(rank, 0)
    for other, released in message.sys.items() if scope == SYS else ():
        view = clocks.join(view, released) if other != rank else view
    return view


class Region(NamedTuple):
    """Memory whose accesses are checked."""

    start: int
    size: int  # bytes
    rank: int  # whose memory it is
    kind: str  # "slots", "flags" or "state"


class Accesses(NamedTuple):
    """Of some threads by one instruction, or of a host."""

    at: Array  # [n, granules]
    agent: Array  # [n]
    time: Array  # [n]
    view: Array  # [n]
    strength: int
    rank: int


class Shadow:
    """For each granule of the regions its last writer, and who has read it since."""

    def __init__(self, clocks: Clocks, regions: Sequence[Region]) -> None:
        self.clocks, self.regions = clocks, sorted(each for each in regions if each.size)
        self._starts = np.array([each.start for each in self.regions], np.int64)
        self._ends = np.array([each.start + each.size for each in self.regions], np.int64)
        sizes = (self._ends - self._starts + _GRANULE - 1) // _GRANULE
        self._first = np.concatenate([[0], np.cumsum(sizes)])
        count = int(self._first[-1])
        self.writer = np.full(count, NOBODY, np.int32)
        self.when = np.zeros(count, np.int32)
        self.strength = np.zeros(count, np.int8)  # of the last write
        self._readers = np.zeros(count, np.int32)  # which of the sets
        self._sets: list[dict[int, int]] = [{}]  # agent -> its last time
        self._numbers: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
        self._grown: dict[tuple[int, int, int], int] = {}
        data = [np.full(int(size), each.kind == "slots") for each, size in zip(self.regions, sizes)]
        self._data = np.concatenate(data) if data else np.zeros(0, bool)

    def region_of(self, address: Array) -> Array:
        """The index of each address's region, or -1."""
        if not self.regions:
            return np.full(len(address), -1)
        address = address.astype(np.int64)
        index = np.searchsorted(self._starts, address, "right") - 1
        return np.where((index >= 0) & (address < self._ends[index]), index, -1)

    def is_kind(self, address: Array, kind: str) -> Array:
        """Which of them are in a region of that kind."""
        return np.array([*(each.kind == kind for each in self.regions), False])[self.region_of(address)]

    def places(self, address: Array, width: int, region: Array) -> Array:
        """[n, granules] of accesses in these regions."""
        first = self._first[region] + (address.astype(np.int64) - self._starts[region]) // _GRANULE
        return first[:, None] + np.arange(max(1, width // _GRANULE))

    def check(self, a: Accesses, writes: bool) -> dict[tuple[str, int], int]:
        """How many of the accesses race, by what with (and of which rank)."""
        found: dict[tuple[str, int], int] = {}
        clocks, root = self.clocks, self.clocks.root
        if not len(a.at):
            return found
        writer = self.writer[a.at]
        bad = (writer != NOBODY) & (root[writer] != root[a.agent][:, None])
        bad &= ~clocks.knows(a.view[:, None], writer, self.when[a.at])
        if a.strength and bad.any():
            theirs = self.strength[a.at]
            near = clocks.rank[writer] == a.rank
            bad &= ~((theirs > WEAK) & (near | ((theirs == SYS) & (a.strength == SYS))))
        for rank in np.unique(clocks.rank[writer[bad]]).tolist():
            key = "write over what was written" if writes else "read of what was written", rank
            found[key] = int((bad & (clocks.rank[writer] == rank)).any(1).sum())
        if writes:
            found |= self._late(a)
        return found

    def _late(self, a: Accesses) -> dict[tuple[str, int], int]:
        """The writes that no order puts behind a read of what they replace."""
        readers = self._readers[a.at]
        if not readers.any():
            return {}
        found: dict[tuple[str, int], int] = {}
        owner = self.clocks.root[a.agent]
        pairs = np.stack([np.broadcast_to(each, readers.shape) for each in (readers, a.view[:, None], owner[:, None])])
        kinds, inverse = np.unique(pairs.reshape(3, -1), axis=1, return_inverse=True)
        counts = np.bincount(inverse.reshape(-1), minlength=kinds.shape[1])
        for (readers_, view, own), count in zip(kinds.T.tolist(), counts.tolist()):
            for agent, time in self._sets[readers_].items():
                if self.clocks.root[agent] != own and not self.clocks.knows(view, agent, time):
                    key = "write over what may still be read", int(self.clocks.rank[agent])
                    found[key] = found.get(key, 0) + count
        return found

    def wrote(self, a: Accesses) -> None:
        """These writes have reached memory."""
        self.writer[a.at] = a.agent[:, None]
        self.when[a.at] = a.time[:, None]
        self.strength[a.at] = a.strength
        self._readers[a.at] = 0

    def read(self, a: Accesses) -> None:
        """These reads of slots have been made; those of flags race with nothing if they are strong."""
        keep = self._data[a.at[:, 0]] if a.strength else np.ones(len(a.at), bool)
        agents, times = a.agent[keep], a.time[keep]
        for agent in np.unique(agents).tolist():
            chosen = agents == agent
            at, time = a.at[keep][chosen].reshape(-1), int(times[chosen].max())
            before, inverse = np.unique(self._readers[at], return_inverse=True)
            self._readers[at] = np.array([self._with(each, agent, time) for each in before.tolist()])[inverse]

    def read_alone(self, at: Array, agent: int, time: int, alone: int) -> None:
        """At these granules it is the agent ``alone`` that has read at that time of ``agent``."""
        before, inverse = np.unique(self._readers[at], return_inverse=True)
        found = []
        for readers in before.tolist():
            others = dict(self._sets[readers])
            if others.get(agent) == time:
                del others[agent]
                others |= {agent: time - 1} if time else {}
                readers = self._with(self._number(others), alone, 0)
            found.append(readers)
        self._readers[at] = np.array(found, np.int32)[inverse]

    def _number(self, readers: dict[int, int]) -> int:
        """Of a set of readers."""
        frozen = frozenset(readers.items())
        if frozen not in self._numbers:
            self._numbers[frozen] = len(self._sets)
            self._sets.append(readers)
        return self._numbers[frozen]

    def _with(self, readers: int, agent: int, time: int) -> int:
        key = readers, agent, time
        if key not in self._grown:
            self._grown[key] = self._number({**self._sets[readers], agent: time})
        return self._grown[key]
