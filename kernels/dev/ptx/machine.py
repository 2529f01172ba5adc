"""A launch: the threads of some blocks side by side, their schedule, and the instructions that reach memory.

Thread t of block b is element b * threads + t of every register. Of the threads that do not wait, those at the lowest
basic block run. Copies by cp.async move their data when they are waited for, not earlier: a missing wait reads poison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import arithmetic
from .convergence import together
from .lanes import Lanes
from .memory import UNDER_WAY, Allocation, Array, Global, Guard, Reports, Shared
from .parse import BITS
from .program import EXIT, SHARED_BASE, Program
from .races import GlobalRaces
from .settings import Settings
from .tensor_copies import TensorCopies
from .tensor_cores import TensorCores
from .tensor_memory import TensorMoves
from .warp_groups import WarpGroups

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
_DTYPES = {1: bool, 8: u2, 16: u2, 32: u4, 64: u8}  # of a register by its bits
_PARAMETERS, _PARAMETER = 1 << 60, 1 << 16  # where parameters lie, where no host has memory, and from one to the next


def _flushed_sum(was: Array, x: Array) -> Array:
    """Of fp32 in global memory, where subnormal numbers become zeros: PTX ISA, "atom"."""
    a, b = (arithmetic.flush(each.view(np.float32)) for each in (was, x))
    return arithmetic.flush(a + b).view(u4)


def _half_sum(kind: str, was: Array, x: Array) -> Array:
    return arithmetic.half("add", [arithmetic.from_half(each, kind) for each in (was, x)], kind)


def _packed_sum(kind: str, was: Array, x: Array) -> Array:
    return arithmetic.packed("add", [was, x], kind)


_ATOMIC: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "exch": lambda was, x: x,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "cas": lambda was, expected, x: np.where(was == expected, x, was),
    "add.f32": _flushed_sum,
    "add.f64": lambda was, x: (was.view(np.float64) + x.view(np.float64)).view(u8),
}
_ATOMIC |= {f"add.{kind}": partial(_half_sum, kind) for kind in ("f16", "bf16")}
_ATOMIC |= {f"add.{kind}x2": partial(_packed_sum, kind) for kind in ("f16", "bf16")}
_PATIENCE = 500  # times that a basic block may follow itself while other threads could run
_TURN = 8  # of so many steps one is drawn, in kernels that wait for other blocks


class Launch(Lanes, TensorCopies, WarpGroups, TensorMoves, TensorCores):
    """``ids`` are the blocks of ``grid`` that run here, [blocks, 3]; ``races`` those of the whole grid's accesses."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        ids: Array | Sequence[tuple[int, int, int]],
        parameters: list[int],
        allocations: Sequence[Allocation],
        shared: int,
        reports: Reports,
        settings: Settings,
        races: GlobalRaces | None = None,
    ) -> None:
        kernel = program.kernel
        self.program, self.parameters, self.end = program, parameters, settings.end
        self.step = program.step
        self.early = settings.early
        self.threads, self.blocks = kernel.threads, len(ids)
        self.n = self.threads * self.blocks
        self._each = each = np.arange(self.n)
        self.block, self.warp = each // self.threads, each // 32
        self.tid = (each % self.threads).astype(u4)
        self.lane, self.warp_in_block = self.tid & u4(31), self.tid >> u4(5)
        self.warps = -(-self.threads // 32)
        if self.threads % 32:
            raise NotImplementedError(f"{kernel.name}: a block of {self.threads} threads, which are no whole warps")
        places = np.asarray(ids, np.int64).reshape(-1, 3)
        for k, axis in enumerate("xyz"):
            setattr(self, f"ctaid_{axis}", places[:, k].astype(u4)[self.block])
            setattr(self, f"nctaid_{axis}", np.full(self.n, grid[k], u4))
        self.reports = reports
        self.globals = Global(allocations, self.reports)
        self.shared = Shared(
            self.blocks, shared, self.warps, program.granule, SHARED_BASE, self.reports, settings.shared
        )
        self._begins = self.block * self.shared.pitch  # where the memory of a thread's block does
        self.races = races or GlobalRaces(program.accesses, self.warps, allocations, reports)
        self.races.begin(places @ [1, grid[0], grid[0] * grid[1]], self.shared)
        self.R = [self._unwritten(bits, settings.registers) for bits in kernel.registers.values()]
        self.waiting = np.zeros(self.n, bool)  # at a barrier of the block
        self.stalled = np.zeros(self.n, bool)  # for an mbarrier
        self.committed = np.zeros(self.n, np.int64)  # groups of copies, by thread
        self.pending: list[dict[str, Any]] = []  # copies
        self.executed = 0  # instructions
        self._filled: dict[int, Array] = {}
        self.start_copies()
        self.start_products()
        self.start_tensor_memory(settings)
        self.start_tensor_cores()

    def _unwritten(self, bits: int, poison: int) -> Array:
        return np.full(self.n, poison >> 1 & 1 if bits == 1 else poison & ((1 << bits) - 1), _DTYPES[bits])

    # ------------------------------------------------------------------------------------------------------- schedule

    def run(self, limit_s: float = 600.0) -> None:
        """To the end. Raises RuntimeError where threads wait for ever, TimeoutError after ``limit_s``."""
        until = time.monotonic() + limit_s
        if limit_s <= 0:
            raise TimeoutError(f"{self.program.kernel.name}: not done in time")
        with np.errstate(all="ignore"):
            self._run(until)
        for copy in self.pending:
            self.reports.add("a copy that is never waited for", copy["where"])
        self.end_tensor_cores()
        self.end_tensor_memory()
        self.end_copies()
        self.end_products()

    def _run(self, until: float) -> None:
        R, step = self.R, self.step
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
            if again > _PATIENCE or (self.program.waits_for_others and steps % _TURN == 0):
                b, again = int(drawn.choice(np.unique(at[ready]))), 0
            m = ready & (at == b)
            if m.all():
                at = b
                continue
            if b in self.program.gathers:
                b, m = self._gathered(at, ready, b)
                if not m.any():
                    continue
            last, again = b, again + 1 if b == last else 0
            self.executed += sizes[b]
            at = np.where(m, step(b, True)(self, R, m), at)
            if self.waiting.any():
                self._release(at)

    def _gathered(self, at: Array, ready: Array, b: int) -> tuple[int, Array]:
        """(a basic block, its threads that need not wait for others of their warps): ``b``, or else another.

        Where all wait, those that try an mbarrier may give up; then lanes go on by themselves, and are reported.
        """
        for each in dict.fromkeys([b, *np.unique(at[ready]).tolist()]):
            m = ready & (at == each)
            if (gathering := self.program.gathers.get(each)) is not None:
                masks = [self.R[self.program.translator.index[name]] for name in gathering.registers]
                m = together(gathering, masks, m, at == EXIT)
            if m.any():
                return each, m
        if self.give_up():
            return b, np.zeros(self.n, bool)
        name = "lanes wait for others of their warp that do not come"
        m = ready & (at == b)
        self.reports.add(name, self.program.gathers[b].where, int(m.sum()))
        return b, m

    def branch(self, test: Array, to: int, rest: int) -> Any:
        if test.all():
            return to
        return np.where(test, to, rest) if test.any() else rest

    def barrier(self, guard: Guard, where: int) -> None:
        self.waiting |= True if guard is None else guard
        self.lanes_meet(guard)

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
        letter = kind[0] if kind[0] == "f" else "i" if kind[0] == "s" else "u"
        return np.full(self.n, raw.view(f"{letter}{bits // 8}"))

    def parameter_address(self, index: int) -> Array:
        return np.full(self.n, _PARAMETERS + index * _PARAMETER, u8)

    def parameter_bytes(self, address: int, size: int) -> bytes | None:
        """What lies at an address within a parameter; None elsewhere."""
        index, offset = divmod(address - _PARAMETERS, _PARAMETER)
        if not 0 <= index < len(self.parameters):
            return None
        whole = self.program.kernel.params[index].size
        found = self.parameters[index].to_bytes(whole, "little")[offset : offset + size]
        return found if len(found) == size else None

    def threads_of(self, guard: Guard) -> Array:
        return self._each if guard is None else np.flatnonzero(guard)

    # --------------------------------------------------------------------------------------------------------- memory

    def load_global(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        chosen = self.globals.reached(address, size * count, guard, where, "read")
        there, warp = (address, self.warp) if chosen is None else (address[chosen], self.warp[chosen])
        self.races.note_read(there, size * count, warp, where)
        view, first, found = self.globals.views[size], self.globals.index(there, size), []
        for i in range(count):
            values = view[first + i]
            if chosen is not None:
                values, some = np.zeros(self.n, view.dtype), values
                values[chosen] = some
            found.append(values)
        return found

    def store_global(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        chosen = self.globals.reached(address, size * len(values), guard, where, "write")
        there, warp = (address, self.warp) if chosen is None else (address[chosen], self.warp[chosen])
        view, first = self.globals.views[size], self.globals.index(there, size)
        given = [(each if chosen is None else each[chosen]).astype(view.dtype) for each in values]
        same = np.logical_and.reduce([view[first + i] == each for i, each in enumerate(given)])
        self.races.note_write(there, size * len(values), warp, where, same)
        for i, each in enumerate(given):
            view[first + i] = each
        lost = np.logical_or.reduce([view[first + i] != each for i, each in enumerate(given)])
        if lost.any():
            name = "race in global memory: threads write different values to one place at once"
            self.reports.add(name, where, int(lost.sum()))

    def shared_places(self, address: Array, width: int, guard: Guard, where: int, what: str) -> tuple[Array, Array]:
        """(threads whose access is good, where it begins)."""
        chosen, given, begins = self._each, address, self._begins
        if guard is not None:
            chosen = np.flatnonzero(guard)
            given, begins = address[chosen], begins[chosen]
        if self.shared.holds(given, width):
            return chosen, begins + given
        first, good = self.shared.place(given, width, self.block[chosen], where, what)
        return (chosen, first) if good.all() else (chosen[good], first[good])

    def load_shared(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        chosen, first = self.shared_places(address, size * count, guard, where, "read")
        self.shared.note_read(first, size * count, self.warp[chosen], where)
        view, at, found = self.shared.views[size], first // size, []
        for i in range(count):
            values = view[at + i]
            if len(chosen) < self.n:
                values, some = np.zeros(self.n, view.dtype), values
                values[chosen] = some
            found.append(values)
        return found

    def store_shared(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        chosen, first = self.shared_places(address, size * len(values), guard, where, "write")
        if self.program.makes_descriptors:
            self._unmet.append((chosen, first, size * len(values)))
        view, at = self.shared.views[size], first // size
        given = [each[chosen].astype(view.dtype) for each in values]
        same = np.logical_and.reduce([view[at + i] == each for i, each in enumerate(given)])
        self.shared.note_write(first, size * len(values), self.warp[chosen], where, same=same)
        for i, each in enumerate(given):
            view[at + i] = each
        lost = np.logical_or.reduce([view[at + i] != each for i, each in enumerate(given)])
        if lost.any():
            self.reports.add("race: threads write different values to one place at once", where, int(lost.sum()))

    def atomic(
        self, operation: str, size: int, address: Array, values: list[list[Array]], guard: Guard, where: int
    ) -> list[Array]:
        """What was there before each thread's operation; ``values``: of each element, which are apart, its operands.

        Threads that name one place come there one after the other, the lowest first.
        """
        kind, chosen = values[0][0].dtype, self.threads_of(guard)
        chosen = chosen[self.globals.check(address[chosen], size * len(values), where, "atomic")]
        view, first = self.globals.views[size].view(kind), self.globals.index(address[chosen], size)
        turns, found = _turns(first), []
        for k, operands in enumerate(values):
            old = np.zeros(self.n, kind)
            for threads in (chosen[each] for each in turns):
                at = self.globals.index(address[threads], size) + k
                old[threads] = view[at]
                view[at] = _ATOMIC[operation](view[at], *(each[threads] for each in operands))
            found.append(old.view(f"u{size}"))
        return found

    def fence_memory(self, guard: Guard, where: int) -> None:
        """fence.acq_rel, fence.sc and membar: global memory is coherent here; ``ranks`` has memory that is not."""

    def fence_global(self, guard: Guard) -> None:
        """fence.proxy.async of global memory: likewise."""

    # --------------------------------------------------------------------------------------------------------- copies

    def copy(self, to: Array, source: Array, size: int, given: Array, guard: Guard, where: int) -> None:
        """cp.async: ``given`` of ``size`` bytes, the rest zeros."""
        chosen, first = self.shared_places(to, size, guard, where, "copy")
        if not len(chosen):
            return
        self.shared.note_write(first, size, self.warp[chosen], where, UNDER_WAY)
        self.shared.bytes.reshape(-1, size)[first // size] = 0xFF
        given, source = np.minimum(given[chosen], u4(size)).astype(np.int64), source[chosen]
        reads = given > 0
        if reads.any():
            width = size if (given[reads] == size).all() else 1
            good = self.globals.check(source[reads], width, where, "copy's read")
            given[np.flatnonzero(reads)[~good]] = 0
        for width in np.unique(given[given > 0]).tolist():
            some = given == width
            self.races.note_read(source[some], width, self.warp[chosen[some]], where)
        copy = {"threads": chosen, "first": first, "source": source, "given": given, "group": self.committed[chosen]}
        self.pending.append(copy | {"size": size, "where": where})
        if self.early:
            self._move(self.pending[-1], np.ones(len(chosen), bool))

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
        if not self.early:
            self._move(copy, due)
        self.shared.land(copy["first"][due], copy["size"], self.warp[copy["threads"][due]])

    def _move(self, copy: dict[str, Any], due: Array) -> None:
        size, given, first = copy["size"], copy["given"][due], copy["first"][due]
        inside, data = np.arange(size) < given[:, None], np.zeros((len(given), size), u1)
        start = self.globals.index(copy["source"][due], 1)
        data[inside] = self.globals.bytes[(start[:, None] + np.arange(size))[inside]]
        self.shared.bytes.reshape(-1, size)[first // size] = data

    # --------------------------------------------------------------------------------------------------- tensor copies

    def load_tensor(
        self, to: Array, descriptor: Array, corner: list[Array], mbarrier: Array, guard: Guard, where: int
    ) -> None:
        super().load_tensor(to, descriptor, corner, mbarrier, guard, where)
        if self.early:
            for barrier in self._barriers.values():
                barrier.land()

    def store_tensor(self, descriptor: Array, corner: list[Array], source: Array, guard: Guard, where: int) -> None:
        super().store_tensor(descriptor, corner, source, guard, where)
        if self.early:
            for _, _, land, _ in self._stores:
                land()
            self._stores = []

    def _land_tile(self, barrier: Any, size: int, source: Array, inside: Array, *rest: Any) -> None:
        warp, tick, where = rest[-3:]
        address = (source[inside] * size + self.globals.base).astype(u8)
        self.races.note_read(address, size, np.full(len(address), warp), where, np.full(len(address), tick, np.int32))
        super()._land_tile(barrier, size, source, inside, *rest)

    def _store_tile(self, size: int, tile: Array, into: Array, lines: Array, warp: int, where: int) -> None:
        same = self.globals.views[size][into] == self.shared.views[size][tile // size]
        address = (into * size + self.globals.base).astype(u8)
        self.races.note_write(address, size, np.full(len(into), warp), where, same)
        super()._store_tile(size, tile, into, lines, warp, where)


def _turns(places: Array) -> list[Array]:
    """Indices of ``places`` in turns, of which none names a place twice: the first of each place, the second, ..."""
    order = np.argsort(places, kind="stable")
    begins = np.flatnonzero(np.diff(places[order], prepend=-1))
    turn = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    return [order[turn == each] for each in range(int(turn.max(initial=-1)) + 1)]
