"""A launch of one rank: all its blocks side by side, its accesses to symmetric memory on the clocks of the world."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import launch
from ..convergence import together
from ..launch import Result
from ..memory import WORDS, Allocation, Array, Guard, Reports
from ..program import EXIT, Program
from ..settings import Settings
from .clocks import NOBODY, NOTHING, WEAK, Accesses, added
from .orders import OrderedLaunch
from .world import Actor, Flag, Store, current


def execute(
    program: Program,
    grid: tuple[int, int, int],
    parameters: list[int],
    allocations: Sequence[Allocation],
    shared: int,
    settings: Settings,
) -> Result:
    """``launch.execute``; in the thread of a rank, with what that rank's launches do beside."""
    actor = current()
    if actor is None:
        return launch.execute(program, grid, parameters, allocations, shared, settings)
    kernel, begun, numbers = program.kernel, time.perf_counter(), np.arange(math.prod(grid))
    reports, world = Reports(kernel), actor.world
    result = Result(kernel.name, grid, kernel.threads)
    world.launches.append((actor.rank, result))
    numbers = numbers[::-1] if settings.reverse else numbers
    ids = np.stack([numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])], 1)
    running = RankLaunch(actor, program, grid, ids, parameters, allocations, shared, reports, settings)
    try:
        running.run(settings.seconds)
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError("; ".join([f"rank {actor.rank}: {error}", *reports.lines()])) from error
    finally:
        result.reports = [f"rank {actor.rank}: {line}" for line in reports.lines()]
    result.executed, result.seconds = running.executed, time.perf_counter() - begun
    return result


class RankLaunch(OrderedLaunch):
    """All blocks of a grid, on the rank of an actor."""

    def __init__(self, actor: Actor, *given: Any) -> None:
        super().__init__(actor.world, actor.rank, *given)
        self.actor = actor
        self.spinning = np.zeros(self.n, bool)
        self._polled: dict[tuple[int, int], tuple[int, int]] = {}  # by thread and instruction: address, value
        self._polling: dict[int, int] = {}  # the instruction with which a thread polled last
        self._issuer = NOBODY  # the thread whose tensor copy is issued

    # ------------------------------------------------------------------------------------------------------ schedule

    def run(self, limit_s: float = 600.0) -> None:
        super().run(limit_s)
        self.world.progress = True
        self.end_launch()

    def _run(self, until: float) -> None:
        sizes = [end - start for start, end in self.program.ranges]
        at, steps = np.zeros(self.n, np.int64), 0
        while (at != EXIT).any():
            steps += 1
            if steps % 64 == 0 and time.monotonic() > until:
                raise TimeoutError(f"{self.program.kernel.name}: not done in time")
            chosen = self._next(at)
            if chosen is None:
                if not self._release(at) and not self.give_up():
                    self._wait_for_others(at)
                continue
            b, m = chosen
            self.executed += sizes[b]
            if m.all():
                at = np.array(np.broadcast_to(self.program.step(b, False)(self, self.R, None), self.n))
            else:
                at = np.where(m, self.program.step(b, True)(self, self.R, m), at)
            if self.waiting.any():
                self._release(at)
            if self.world.schedule.order == "random" and self.world.draw.random() < 0.02:
                self.world.progress = True
                self.actor.pause()
                self.spinning[:] = False  # a flag may have come meanwhile

    def _next(self, at: Array) -> tuple[int, Array] | None:
        """(a basic block, its threads that run now), as the schedule has it; None where no thread can go on."""
        schedule, ended = self.world.schedule, at == EXIT
        ready = ~self.waiting & ~self.stalled & ~ended & ~self.spinning
        if schedule.resident:
            alive = np.flatnonzero(~ended.reshape(self.blocks, -1).all(1))[: schedule.resident]
            ready &= np.isin(self.block, alive)
        if not ready.any():
            return None
        for some in self._turns(ready):
            order = np.unique(at[some]).tolist()
            if schedule.order == "random":
                self.world.draw.shuffle(order)
            for b in order:
                m = some & (at == b)
                if (gathering := self.program.gathers.get(b)) is not None:
                    masks = [self.R[self.program.translator.index[name]] for name in gathering.registers]
                    m = together(gathering, masks, m, ended)
                if m.any():
                    return int(b), m
        return None

    def _turns(self, ready: Array) -> Iterator[Array]:
        """The threads that are ready, those of one block after another's if the schedule says so."""
        schedule = self.world.schedule
        if schedule.blocks == "together":
            yield ready
            return
        blocks = np.unique(self.block[ready]).tolist()
        if schedule.blocks == "random":
            self.world.draw.shuffle(blocks)
        for block in reversed(blocks) if schedule.blocks == "last" else blocks:
            yield ready & (self.block == block)

    def _wait_for_others(self, at: Array) -> None:
        """Every thread waits, some for flags: other ranks go on."""
        if not self.spinning.any():
            name = self.program.kernel.name
            raise RuntimeError(f"{name}: deadlock: every thread waits for others of its block, or has ended")
        self.actor.pause(self._waits)
        self.spinning[:] = False

    def _waits(self) -> list[str]:
        """What each block waits for."""
        found: dict[str, list[int]] = {}
        for t in np.flatnonzero(self.spinning):
            where = self._polling[int(t)]
            address, value = self._polled[int(t), where]
            i = self.code[where]
            at = f"PTX line {i.line}" + (f", {i.source}" if i.source else "")
            block = int(self.block[t])
            line = f"{self.program.kernel.name}, {at}, waits for {self.world.name_of(address)}, which stands at {value}"
            found.setdefault(line, []).append(block)
        return [f"block {', '.join(map(str, dict.fromkeys(blocks)))} of {line}" for line, blocks in found.items()]

    def timer(self) -> Array:
        return np.full(self.n, self.world.now_ns, np.uint64)

    # --------------------------------------------------------------------------------------------------------- memory

    def _accesses(self, threads: Array, at: Array, strength: int, view: Array) -> Accesses:
        block = self.block[threads]
        return Accesses(at, self.agent[block], self.barriers[block], view[threads], strength, self.rank)

    def _tracked(self, address: Array, width: int) -> tuple[Array, Array, Array]:
        """(which of the addresses are watched, their granules, the ranks whose memory it is)."""
        shadow = self.world.shadow
        region = shadow.region_of(address)
        inside = np.flatnonzero(region >= 0)
        region = region[inside]
        owner = np.array([each.rank for each in shadow.regions] or [0])[region]
        return inside, shadow.places(address[inside], width, region), owner

    def _check(self, a: Accesses, writes: bool, where: int) -> None:
        for (what, rank), count in self.world.shadow.check(a, writes).items():
            by = f"another block of rank {rank}" if rank == self.rank else f"rank {rank}"
            self.reports.add(f"race in symmetric memory: {what} by {by}, and nothing orders them", where, count)

    def _reads(self, threads: Array, address: Array, width: int, view: Array, where: int) -> None:
        inside, at, owner = self._tracked(address, width)
        if not len(inside):
            return
        self.world.counted["checked reads"] += len(inside)
        if self.world.stores and (owner != self.rank).any():
            self.world.finish(self.rank)  # a thread sees its own stores
        a = self._accesses(threads[inside], at, self.strengths[where][1], view)
        self._check(a, False, where)
        self.world.shadow.read(a)
        self.remember(True, threads[inside], at, a.time)

    def load_global(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        threads = self.threads_of(guard)
        self._reads(threads, address[threads], size * count, self.view, where)
        found = super().load_global(address, size, count, guard, where)
        order, strength = self.strengths[where]
        if strength:
            for t in threads[~self.world.shadow.is_kind(address[threads], "slots")].tolist():
                self.acquires(t, int(address[t]), order, strength)
            if order == "volatile":  # of a flag, it may be in a loop that waits
                threads = threads[self.world.shadow.is_kind(address[threads], "flags")]
            self._poll(threads, address, found[0], where)
        return found

    def _poll(self, threads: Array, address: Array, values: Array, where: int) -> None:
        """A thread that finds at one place what it found there before waits until another rank has run."""
        for t in threads.tolist():
            seen, key = (int(address[t]), int(values[t].astype(np.int32))), (t, where)
            if self._polled.get(key) == seen:
                self.spinning[t] = True
            else:
                self.world.progress |= key in self._polled
            self._polled[key], self._polling[t] = seen, where

    def store_global(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        threads = self.threads_of(guard)
        if not len(threads):
            return
        self.world.progress = True
        order, strength = self.strengths[where]
        if strength:
            for t in threads.tolist():
                self._store_strong(t, address, size, values, order, strength, where)
            return
        good = self.globals.check(address[threads], size * len(values), where, "write")
        inside, at, owner = self._tracked(address[threads], size * len(values))
        inside, at, owner = inside[good[inside]], at[good[inside]], owner[good[inside]]
        if not len(inside):
            super().store_global(address, size, values, guard, where)
            return
        a = self._accesses(threads[inside], at, WEAK, self.view)
        self._check(a, True, where)
        self.remember(False, threads[inside], at, a.time)
        away = owner != self.rank
        mine = np.ones(self.n, bool) if guard is None else guard.copy()
        mine[threads[inside[away]]] = False
        if mine.any():
            super().store_global(address, size, values, mine, where)
            self.world.shadow.wrote(_some(a, ~away))
        if away.any():
            far = threads[inside[away]]
            given = [each[far].astype(WORDS[size]) for each in values]
            views, base = self.globals.views, self.globals.base
            store = Store(address[far], size, given, _some(a, away), self.unique[far], views, base)
            self.world.delay(store)

    def _one(self, t: int) -> Array:
        return self._each == t

    def _store_strong(
        self, t: int, address: Array, size: int, values: list[Array], order: str, strength: int, where: int
    ) -> None:
        view, scope = self.passed_on(t, order, strength)
        message = lambda before: added(self.world.clocks, NOTHING, self.rank, view, scope)
        put = lambda: super(RankLaunch, self).store_global(address, size, values, self._one(t), where)
        self._put(t, int(address[t]), size * len(values), put, message, strength, where)

    def _put(
        self, t: int, address: int, width: int, put: Callable[[], None], message: Any, strength: int, where: int
    ) -> None:
        """A strong write: at once, or to another rank's memory when the schedule has it seen."""
        inside, at, owner = self._tracked(np.array([address], np.uint64), width)
        if not len(inside):
            put()
            self.world.messages[address] = message(self.world.messages.get(address, NOTHING))
            return
        a = self._accesses(np.array([t]), at, strength, self.view)
        self._check(a, True, where)
        flag = Flag(address, put, message, a)
        if owner[0] == self.rank:
            self.world.seen(flag)
        else:
            self.world.send(flag)

    def atomic(
        self, operation: str, size: int, address: Array, values: list[list[Array]], guard: Guard, where: int
    ) -> list[Array]:
        order, strength = self.strengths[where]
        threads = self.threads_of(guard)
        self.world.progress |= len(threads) > 0 and operation != "cas"
        if order == "relaxed" and not len(self._tracked(address[threads], size)[0]):
            return super().atomic(operation, size, address, values, guard, where)
        found = [np.zeros(self.n, each[0].dtype).view(f"u{size}") for each in values]
        for t in threads.tolist():
            for into, old in zip(found, self._atomic(t, operation, size, address, values, order, strength, where)):
                into[t] = old[t]
        return found

    def _atomic(
        self, t: int, operation: str, size: int, address: Array, values: Any, order: str, strength: int, where: int
    ) -> list[Array]:
        """Of one thread. A read-modify-write passes on what the word did before, too."""
        view, scope = self.passed_on(t, order, strength)
        there = int(address[t])
        plain = super().atomic
        if operation == "exch":  # it may be seen late: what was there before is known, and rarely used
            old = plain("or", size, address, [[np.zeros_like(each[0])] for each in values], self._one(t), where)
        else:
            old = []

        def put() -> None:
            nonlocal old
            found = plain(operation, size, address, values, self._one(t), where)
            old = old or found

        message = lambda before: added(self.world.clocks, before, self.rank, view, scope)
        if operation != "exch":  # its result decides what happens next
            self.acquires(t, there, order, strength)
            inside, at, _ = self._tracked(address[t : t + 1], size * len(values))
            put()
            if len(inside):
                a = self._accesses(np.array([t]), at, strength, self.view)
                self._check(a, True, where)
                self.world.shadow.wrote(a)
            self.world.messages[there] = message(self.world.messages.get(there, NOTHING))
            if operation == "cas":  # it may be in a loop that waits
                self._poll(self._each[t : t + 1], address, old[0], where)
            return old
        self._put(t, there, size * len(values), put, message, strength, where)
        self.acquires(t, there, order, strength)
        return old

    # --------------------------------------------------------------------------------------------------------- copies

    def copy(self, to: Array, source: Array, size: int, given: Array, guard: Guard, where: int) -> None:
        threads = self.threads_of(guard)
        threads = threads[given[threads] > 0]
        self._reads(threads, source[threads], size, self.view, where)
        super().copy(to, source, size, given, guard, where)

    def _land(self, copy: dict[str, Any], due: Array) -> None:
        some = due & (copy["given"] > 0)  # it reads until it lands
        self._read_again(copy["threads"][some], copy["source"][some], copy["size"], copy["where"])
        super()._land(copy, due)

    def _read_again(self, threads: Array, address: Array, width: int, where: int) -> None:
        inside, at, _ = self._tracked(address, width)
        if len(inside):
            self.world.shadow.read(self._accesses(threads[inside], at, WEAK, self.view))

    def load_tensor(
        self, to: Array, descriptor: Array, corner: list[Array], mbarrier: Array, guard: Guard, where: int
    ) -> None:
        for t in self.threads_of(guard).tolist():
            self._issuer, self._issued_at = t, where
            super().load_tensor(to, descriptor, corner, mbarrier, self._one(t), where)
        self._issuer = NOBODY

    def _box(self, tensor: Any, corner: list[int]) -> tuple[Array, Array, Array]:
        address, inside, offsets = super()._box(tensor, corner)
        if self._issuer != NOBODY:
            there = address[inside]
            threads = np.full(len(there), self._issuer)
            self._reads(threads, there, tensor.itemsize, self.async_view, self._issued_at)
        return address, inside, offsets

    def _land_tile(self, barrier: Any, size: int, source: Array, inside: Array, *rest: Any) -> None:
        warp, _, where = rest[-3:]
        address = (source[inside] * size + self.globals.base).astype(np.uint64)
        self._read_again(np.full(len(address), warp * 32), address, size, where)
        super()._land_tile(barrier, size, source, inside, *rest)

    def _store_tile(self, size: int, tile: Array, into: Array, lines: Array, warp: int, where: int) -> None:
        if len(self._tracked((into * size + self.globals.base).astype(np.uint64), size)[0]):
            raise NotImplementedError(f"{self.program.kernel.name}: a tensor copy into symmetric memory")
        super()._store_tile(size, tile, into, lines, warp, where)


def _some(a: Accesses, chosen: Array) -> Accesses:
    return Accesses(a.at[chosen], a.agent[chosen], a.time[chosen], a.view[chosen], a.strength, a.rank)
