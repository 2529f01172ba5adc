"""A launch: the threads of some blocks side by side, their schedule, and the instructions that reach memory.

Thread t of block b is element b * threads + t of every register. Of the threads that do not wait, those at the lowest
basic block run. Copies by cp.async move their data when they are waited for, not earlier: a missing wait reads poison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .lanes import Lanes
from .memory import UNDER_WAY, Allocation, Array, Global, Guard, Reports, Shared
from .parse import BITS
from .program import EXIT, SHARED_BASE, Program
from .tensor_copies import TensorCopies
from .warp_groups import WarpGroups

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
_POISON = {1: (False, bool), 8: (0xAD, u2), 16: (0xBAAD, u2), 32: (0xFFF0BAAD, u4), 64: (0xFFF0BAADFFF0BAAD, u8)}
_ATOMIC: dict[str, Callable[[Any, list[Any]], Any]] = {
    "add": lambda was, given: was + given[0],
    "exch": lambda was, given: given[0],
    "max": lambda was, given: max(was, given[0]),
    "min": lambda was, given: min(was, given[0]),
    "and": lambda was, given: was & given[0],
    "or": lambda was, given: was | given[0],
    "cas": lambda was, given: given[1] if was == given[0] else was,
}
_PATIENCE = 500  # times that a basic block may follow itself while other threads could run
_TURN = 8  # of so many steps one is drawn, in kernels that wait for other blocks


class Launch(Lanes, TensorCopies, WarpGroups):
    """``ids`` are the blocks of ``grid`` that run here. ``end``: at which end of their error approximate instructions
    are, 1 or -1, or 0 for none.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        ids: Sequence[tuple[int, int, int]],
        parameters: list[int],
        allocations: Sequence[Allocation],
        shared: int,
        reports: Reports,
        end: int = 0,
    ) -> None:
        kernel = program.kernel
        self.program, self.parameters, self.end = program, parameters, end
        self.threads, self.blocks = kernel.threads, len(ids)
        self.n = self.threads * self.blocks
        each = np.arange(self.n)
        self.block, self.warp = each // self.threads, each // 32
        self.tid = (each % self.threads).astype(u4)
        self.lane, self.warp_in_block = self.tid & u4(31), self.tid >> u4(5)
        self.warps = -(-self.threads // 32)
        if self.threads % 32:
            raise NotImplementedError(f"{kernel.name}: a block of {self.threads} threads, which are no whole warps")
        for k, axis in enumerate("xyz"):
            setattr(self, f"ctaid_{axis}", np.array([block[k] for block in ids], u4)[self.block])
            setattr(self, f"nctaid_{axis}", np.full(self.n, grid[k], u4))
        self.reports = reports
        self.globals = Global(allocations, self.reports)
        self.shared = Shared(self.blocks, shared, self.warps, program.granule, SHARED_BASE, self.reports)
        self.R = [np.full(self.n, *_POISON[bits]) for bits in kernel.registers.values()]
        self.waiting = np.zeros(self.n, bool)  # at a barrier of the block
        self.stalled = np.zeros(self.n, bool)  # for an mbarrier
        self.committed = np.zeros(self.n, np.int64)  # groups of copies, by thread
        self.pending: list[dict[str, Any]] = []  # copies
        self.executed = 0  # instructions
        self._filled: dict[int, Array] = {}
        self.start_copies()
        self.start_products()

    # ------------------------------------------------------------------------------------------------------- schedule

    def run(self, limit_s: float = 600.0) -> None:
        """To the end. Raises RuntimeError where threads wait for ever, TimeoutError after ``limit_s``."""
        until = time.monotonic() + limit_s
        with np.errstate(all="ignore"):
            self._run(until)
        for copy in self.pending:
            self.reports.add("a copy that is never waited for", copy["where"])
        self.end_copies()
        self.end_products()

    def _run(self, until: float) -> None:
        R, step = self.R, self.program.step
        sizes = [end - start for start, end in self.program.ranges]
        at: Any = 0
        last, again, steps, drawn = -1, 0, 0, np.random.default_rng(1)
        while True:
            steps += 1
            if steps % 64 == 0 and time.monotonic() > until:
                raise TimeoutError(f"{self.program.kernel.name}: not done in time")
            if not isinstance(at, np.ndarray):
                if at == EXIT:
                    return
                self.executed += sizes[at]
                at = step(at, False)(self, R, None)
                if self.waiting.any() or self.stalled.any():
                    at = at if isinstance(at, np.ndarray) else np.full(self.n, at)
                    self._release(at)
                continue
            ready = ~self.waiting & ~self.stalled & (at != EXIT)
            if not ready.any():
                if not self.waiting.any() and not self.stalled.any():
                    return
                if not self._release(at) and not self.give_up():
                    raise RuntimeError(f"{self.program.kernel.name}: deadlock: every thread waits or has ended")
                continue
            b = int(at[ready].min())
            again = again + 1 if b == last else 0
            if again > _PATIENCE or (self.program.waits_for_others and steps % _TURN == 0):
                b, again = int(drawn.choice(np.unique(at[ready]))), 0
            last = b
            m = ready & (at == b)
            if m.all():
                at = b
                continue
            self.executed += sizes[b]
            at = np.where(m, step(b, True)(self, R, m), at)
            if self.waiting.any():
                self._release(at)

    def branch(self, test: Array, to: int, rest: int) -> Any:
        if test.all():
            return to
        return np.where(test, to, rest) if test.any() else rest

    def barrier(self, guard: Guard, where: int) -> None:
        self.waiting |= True if guard is None else guard

    def _release(self, at: Array) -> bool:
        """Let blocks go on of which every thread that has not ended waits."""
        there = (self.waiting | (at == EXIT)).reshape(self.blocks, -1).all(1)
        there &= self.waiting.reshape(self.blocks, -1).any(1)
        for block in np.flatnonzero(there):
            self.shared.meet(block)
            self.waiting[block * self.threads : (block + 1) * self.threads] = False
        return bool(there.any())

    # --------------------------------------------------------------------------------------------------------- values

    def filled(self, value: int) -> Array:
        if value not in self._filled:
            self._filled[value] = np.full(self.n, value, u4)
        return self._filled[value]

    def timer(self) -> Array:
        """%globaltimer stands still."""
        return np.zeros(self.n, u8)

    def parameter(self, index: int, kind: str, offset: int) -> Array:
        bits = BITS[kind]
        raw = np.array((self.parameters[index] >> 8 * offset) & ((1 << bits) - 1), f"u{bits // 8}")
        return np.full(self.n, raw.view({"s32": np.int32, "f32": np.float32}.get(kind, raw.dtype)))

    def threads_of(self, guard: Guard) -> Array:
        return np.arange(self.n) if guard is None else np.flatnonzero(guard)

    # --------------------------------------------------------------------------------------------------------- memory

    def load_global(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        return self.globals.load(address, size, count, guard, where)

    def store_global(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        self.globals.store(address, size, values, guard, where)

    def shared_places(self, address: Array, width: int, guard: Guard, where: int, what: str) -> tuple[Array, Array]:
        """(threads whose access is good, where it begins)."""
        chosen = self.threads_of(guard)
        first, good = self.shared.place(address[chosen], width, self.block[chosen], where, what)
        return (chosen, first) if good.all() else (chosen[good], first[good])

    def load_shared(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        chosen, first = self.shared_places(address, size * count, guard, where, "read")
        self.shared.note_read(first, size * count, self.warp[chosen], where)
        view, found = self.shared.views[size], []
        for i in range(count):
            values = view[first // size + i]
            if len(chosen) < self.n:
                values, some = np.zeros(self.n, view.dtype), values
                values[chosen] = some
            found.append(values)
        return found

    def store_shared(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        chosen, first = self.shared_places(address, size * len(values), guard, where, "write")
        view, at = self.shared.views[size], first // size
        given = [each[chosen].astype(view.dtype) for each in values]
        same = np.logical_and.reduce([view[at + i] == each for i, each in enumerate(given)])
        self.shared.note_write(first, size * len(values), self.warp[chosen], where, same=same)
        for i, each in enumerate(given):
            view[at + i] = each
        lost = np.logical_or.reduce([view[at + i] != each for i, each in enumerate(given)])
        if lost.any():
            self.reports.add("race: threads write different values to one place at once", where, int(lost.sum()))

    def atomic(self, operation: str, size: int, address: Array, values: list[Array], guard: Guard, where: int) -> Array:
        old = np.zeros(self.n, values[0].dtype)
        chosen = self.threads_of(guard)
        good = self.globals.check(address[chosen], size, where, "atomic") if len(chosen) else np.ones(0, bool)
        view = self.globals.views[size].view(values[0].dtype)
        for t in chosen[good]:
            at = self.globals.index(address[t], size)
            old[t] = view[at]
            view[at] = _ATOMIC[operation](view[at], [each[t] for each in values])
        return old.view(f"u{size}")

    # --------------------------------------------------------------------------------------------------------- copies

    def copy(self, to: Array, source: Array, size: int, given: Array, guard: Guard, where: int) -> None:
        """cp.async: ``given`` of ``size`` bytes, the rest zeros."""
        chosen, first = self.shared_places(to, size, guard, where, "copy")
        self.shared.note_write(first, size, self.warp[chosen], where, UNDER_WAY)
        self.shared.bytes.reshape(-1, size)[first // size] = 0xFF
        given, source = np.minimum(given[chosen], u4(size)).astype(np.int64), source[chosen]
        reads = given > 0
        if reads.any():
            width = size if (given[reads] == size).all() else 1
            good = self.globals.check(source[reads], width, where, "copy's read")
            given[np.flatnonzero(reads)[~good]] = 0
        self.pending.append(
            {"threads": chosen, "first": first, "source": source, "given": given, "group": self.committed[chosen]}
            | {"size": size, "where": where}
        )

    def commit(self, guard: Guard) -> None:
        self.committed = self.committed + (1 if guard is None else guard.astype(np.int64))

    def wait(self, most: int, guard: Guard) -> None:
        """Land the copies of all but the ``most`` latest groups of each thread that waits; -1: of the open one too."""
        left = []
        for copy in self.pending:
            due = copy["group"] <= self.committed[copy["threads"]] - 1 - most
            if guard is not None:
                due &= guard[copy["threads"]]
            if due.any():
                self._land(copy, due)
            if not due.all():
                left.append(
                    {key: value[~due] if isinstance(value, np.ndarray) else value for key, value in copy.items()}
                )
        self.pending = left

    def _land(self, copy: dict[str, Any], due: Array) -> None:
        size, given, first = copy["size"], copy["given"][due], copy["first"][due]
        inside = np.arange(size) < given[:, None]
        start = np.where(given > 0, self.globals.index(copy["source"][due], 1), 0)
        data = np.where(inside, self.globals.bytes[np.where(inside, start[:, None] + np.arange(size), 0)], u1(0))
        self.shared.bytes.reshape(-1, size)[first // size] = data
        self.shared.land(first, size, self.warp[copy["threads"][due]])
