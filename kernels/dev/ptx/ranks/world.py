"""The ranks of one emulation: which of them runs, what is under way between them, and whether they can go on.

Each actor, a rank or a stream of its copies, is a thread; the one that holds the baton runs, until it passes it on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....runtime.signals import CHUNKS
from ..memory import Array
from .clocks import NOTHING, SYS, WEAK, Accesses, Clocks, Message, Region, Shadow, added
from .schedules import Schedule

local = threading.local()


class Deadlock(RuntimeError):
    """Waits that nothing will end; the message names each."""


class _Stop(BaseException):
    """Ends an actor whose world has ended."""


def current() -> Actor | None:
    """The actor that runs in this thread."""
    return getattr(local, "actor", None)


class Actor:
    """A rank, or one of its streams of copies: a thread that runs ``body`` while it holds the baton."""

    def __init__(self, world: World, name: str, rank: int, body: Callable[[], None], copies: bool = False) -> None:
        self.world, self.name, self.rank, self.copies, self.turn = world, name, rank, copies, 0
        self.done = False
        self.error: BaseException | None = None
        self.waits: Callable[[], list[str]] = lambda: []  # for what
        self._body, self._go = body, threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        local.actor = self
        torch.set_num_threads(1)
        self._go.acquire()
        try:
            if not self.world.ending:
                with torch.no_grad():
                    self._body()
        except _Stop:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.world.back.release()

    def go_on(self) -> None:
        """Give it the baton, and wait until it comes back."""
        self._go.release()
        self.world.back.acquire()

    def join(self) -> None:
        """Wait until its thread has freed what it held: it cannot once the interpreter ends, which then aborts."""
        self._thread.join()

    def pause(self, waits: Callable[[], list[str]] | None = None) -> None:
        """From its own thread: pass the baton on, and wait for it; ``waits`` says for what it cannot go on."""
        self.waits = waits or (lambda: [])
        self.world.back.release()
        self._go.acquire()
        if self.world.ending:
            raise _Stop


@dataclass(eq=False)
class Store:
    """Weak stores of a launch to other ranks' memory that have not reached it."""

    address: Array
    size: int
    values: list[Array]
    accesses: Accesses
    thread: Array  # [n]: who stores, unique in the world
    views: dict[int, Array]  # of the launch's memory
    base: int


@dataclass(eq=False)
class Flag:
    """A strong store to another rank's memory that has not been seen there."""

    address: int
    put: Callable[[], None]
    message: Callable[[Message], Message]
    accesses: Accesses


@dataclass(eq=False)
class World:
    """``ranks`` ranks under a schedule. ``reports`` are those of hosts and copies; launches have their own."""

    ranks: int
    schedule: Schedule
    limit_s: float = 300.0
    pace_ns: int = 0  # by which %globaltimer goes on with each turn
    actors: list[Actor] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    launches: list[tuple[int, Any]] = field(default_factory=list)  # (rank, launch.Result)
    progress: bool = False  # of the actor that runs
    ending: bool = False
    now_ns: int = 1
    turns: int = 0
    counted: dict[str, int] = field(default_factory=lambda: {"late stores": 0, "late flags": 0, "checked reads": 0})

    def __post_init__(self) -> None:
        self.clocks = Clocks()
        self.shadow = Shadow(self.clocks, [])
        self.messages: dict[int, Message] = {}
        self.host = self.clocks.agents(0, 0)
        for rank in range(self.ranks):
            self.host = np.append(self.host, self.clocks.agents(rank))
        self.host_time = [0] * self.ranks
        self.host_view = [0] * self.ranks
        self.stores: list[Store] = []
        self.flags: list[Flag] = []
        self.back = threading.Semaphore(0)
        self.draw = random.Random(self.schedule.seed)  # noqa: S311 - repeated by its seed
        self._choose: Callable[[Sequence[Actor]], Actor] = self.schedule.choice()

    def watch(self, regions: Sequence[Region]) -> None:
        """Check accesses to these from now on."""
        self.shadow = Shadow(self.clocks, regions)

    # ------------------------------------------------------------------------------------------------------ the baton

    def start(self, name: str, rank: int, body: Callable[[], None], copies: bool = False) -> Actor:
        actor = Actor(self, name, rank, body, copies)
        self.actors.append(actor)
        return actor

    def run(self) -> None:
        """Until every actor has ended. Raises what an actor raised, Deadlock, or TimeoutError."""
        until, waiting = time.monotonic() + self.limit_s, set[Actor]()
        try:
            while live := [each for each in self.actors if not each.done]:
                if time.monotonic() > until:
                    raise TimeoutError(f"{self.ranks} ranks: not done in {self.limit_s:g} s")
                ready = [each for each in live if each not in waiting]
                if not ready:
                    if not self._deliver():
                        raise Deadlock(self._deadlock(live))
                    waiting.clear()
                    continue
                self._turn(self._choose(ready), waiting)
        finally:
            self.ending = True
            for each in self.actors:
                if not each.done:
                    each.go_on()
            for each in self.actors:
                each.join()

    def _turn(self, actor: Actor, waiting: set[Actor]) -> None:
        self.turns += 1
        self.now_ns += self.pace_ns
        actor.turn, self.progress = self.turns, False
        if self._some_arrive():
            waiting.clear()
        actor.go_on()
        if actor.error is not None:
            raise actor.error
        if self.progress or actor.done:
            waiting.clear()
        elif not self.pace_ns:  # where time goes on, every wait ends
            waiting.add(actor)

    def _deadlock(self, live: list[Actor]) -> str:
        lines = [f"{each.name}: {line}" for each in live for line in each.waits()]
        return "\n".join(["a deadlock: none of these waits will end", *lines])

    # --------------------------------------------------------------------------------------------- what is under way

    def _some_arrive(self) -> bool:
        """At random, as the schedule has it; whether a flag was seen."""
        if self.schedule.stores and self.stores:
            for store in list(self.stores):
                self._land(store, np.array([self.draw.random() < self.schedule.stores for _ in store.address]))
        before = len(self.flags)
        while self.flags and self.schedule.flags == "random" and self.draw.random() < 0.5:
            self.seen(self.flags.pop(0))
        return len(self.flags) < before

    def _deliver(self) -> bool:
        """Nothing can go on: the flag that has been under way the longest is seen. False if there is none."""
        if not self.flags:
            return False
        self.seen(self.flags.pop(0))
        return True

    def send(self, flag: Flag) -> None:
        """A strong store to another rank's memory."""
        if self.schedule.flags == "now":
            self.seen(flag)
        else:
            self.counted["late flags"] += 1
            self.flags.append(flag)

    def seen(self, flag: Flag) -> None:
        flag.put()
        self.messages[flag.address] = flag.message(self.messages.get(flag.address, NOTHING))
        self.shadow.wrote(flag.accesses)

    def delay(self, store: Store) -> None:
        self.counted["late stores"] += len(store.address)
        self.stores.append(store)

    def release(self, rank: int, view: int) -> None:
        """Of a rank's stores under way, those that happen before a release at .sys get there."""
        for store in [each for each in self.stores if each.accesses.rank == rank]:
            a = store.accesses
            self._land(store, self.clocks.knows(np.int64(view), a.agent, a.time))

    def rename(self, threads: Array, agent: int, time: int, alone: int) -> None:
        """What these threads have stored at that time of ``agent``, and is under way, is the agent ``alone``'s."""
        for store in self.stores:
            a = store.accesses
            some = np.isin(store.thread, threads) & (a.agent == agent) & (a.time == time)
            if some.any():
                store.accesses = a._replace(agent=np.where(some, alone, a.agent), time=np.where(some, 0, a.time))

    def finish(self, rank: int) -> None:
        """All of a rank's stores get there, as at the end of its launch."""
        for store in [each for each in self.stores if each.accesses.rank == rank]:
            self._land(store, np.ones(len(store.address), bool))

    def _land(self, store: Store, some: Array) -> None:
        if not some.any():
            return
        first = ((store.address[some] - np.uint64(store.base)) // np.uint64(store.size)).astype(np.int64)
        for i, values in enumerate(store.values):
            store.views[store.size][first + i] = values[some]
        a = store.accesses
        self.shadow.wrote(Accesses(a.at[some], a.agent[some], a.time[some], a.view[some], a.strength, a.rank))
        if some.all():
            self.stores.remove(store)
            return
        rest = ~some
        store.accesses = Accesses(a.at[rest], a.agent[rest], a.time[rest], a.view[rest], a.strength, a.rank)
        store.values = [each[rest] for each in store.values]
        store.address, store.thread = store.address[rest], store.thread[rest]

    # ------------------------------------------------------------------------------------------- hosts and copies

    def host_access(self, rank: int, start: int, nbytes: int, writes: bool, agent: int, time: int, view: int) -> None:
        """A host or a copy engine reads or writes all of these bytes."""
        self.progress = True
        address = np.arange(start, start + nbytes, 2, dtype=np.uint64)
        region = self.shadow.region_of(address)
        address, region = address[region >= 0], region[region >= 0]
        if not len(address):
            return
        count = len(address)
        agents, times, views = (np.full(count, value) for value in (agent, time, view))
        a = Accesses(self.shadow.places(address, 2, region), agents, times, views, WEAK, rank)
        for (what, other), found in self.shadow.check(a, writes).items():
            self.reports.append(
                f"rank {rank}, host: race in symmetric memory: {what} by rank {other}: {2 * found} bytes"
            )
        (self.shadow.wrote if writes else self.shadow.read)(a)

    def host_writes(self, rank: int, tensor: torch.Tensor) -> None:
        """This rank's host writes a contiguous tensor, in the order of its stream."""
        where = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        self.host_access(rank, *where, True, int(self.host[rank]), self.host_time[rank], self.host_view[rank])

    def host_knows(self, rank: int) -> int:
        """The view of what follows on this rank's stream; the host's time goes on."""
        self.host_time[rank] += 1
        agent, time = self.host[rank : rank + 1], self.host_time[rank]
        self.host_view[rank] = self.clocks.knowing(self.host_view[rank], agent, time)
        return self.host_view[rank]

    def host_raises(self, rank: int, words: torch.Tensor, value: int, view: int, agent: int, time: int) -> None:
        """A host or a copy engine stores flags, contiguous int32 words, releasing ``view`` at .sys."""
        self.progress = True
        for word in words.view(-1).unbind():
            address = np.array([word.data_ptr()], np.uint64)
            region = self.shadow.region_of(address)
            at = self.shadow.places(address, 4, region)
            a = Accesses(at, np.array([agent]), np.array([time]), np.array([view]), SYS, rank)
            put = lambda word=word: word.fill_(value)
            message = lambda before: added(self.clocks, NOTHING, rank, view, SYS)
            flag = Flag(word.data_ptr(), put, message, a)
            if self.shadow.regions[int(region[0])].rank == rank:
                self.seen(flag)
            else:
                self.send(flag)

    def name_of(self, address: int) -> str:
        """A word of symmetric memory in words."""
        index = int(self.shadow.region_of(np.array([address], np.uint64))[0])
        if index < 0:
            return f"the word at {address:#x}"
        region = self.shadow.regions[index]
        word = (address - region.start) // 4
        if region.kind != "flags":
            return f"word {word} of rank {region.rank}'s {region.kind}"
        phase, source, chunk = word // CHUNKS // self.ranks, word // CHUNKS % self.ranks, word % CHUNKS
        return f"flag [phase {phase}, source {source}, chunk {chunk}] of rank {region.rank}"
