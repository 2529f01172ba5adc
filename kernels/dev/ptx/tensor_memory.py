"""Blackwell's tensor memory: 128 lanes of 512 columns of 32 bits for each block, with checks as shared memory has.

Columns belong to a block from tcgen05.alloc to tcgen05.dealloc. Each instruction reaches multiples of 16 lanes, so a
granule is a column of 16 lanes: it has a state, and the clocks of its last writer and of its readers, which are those
of ``memory.Shared``. A load (tcgen05.ld) and a store (tcgen05.st) take effect when their warp waits for them: until
then registers hold poison, and what a load reads may not be written. PTX ISA, "Tensor Memory", "Data Movement Shape",
"Tensorcore 5th Generation Instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .memory import NEVER, UNDER_WAY, WRITTEN, Array, Guard

if TYPE_CHECKING:
    from .memory import Reports, Shared
    from .program import Program
    from .settings import Settings

u1, u4 = np.uint8, np.uint32
LANES, COLUMNS = 128, 512
GROUP = 16  # lanes of a granule
POISON = u4(0xFFF0BAAD)
STORE = -1  # stands for a store in ``TensorMemory.of``
_LEAST_COLUMNS = 32
_THREAD = np.arange(32)


class TensorMemory:
    """The tensor memory of some blocks. ``shared`` has their clocks."""

    def __init__(self, blocks: int, shared: Shared, reports: Reports, poison: int) -> None:
        self.shared, self.reports = shared, reports
        self.cells = np.full(blocks * LANES * COLUMNS, poison * 0x01010101, u4)
        granules = blocks * LANES // GROUP * COLUMNS
        self.state = np.zeros(granules, u1)
        self.of = np.zeros(granules, np.int64)  # whose write is under way: STORE, or the key of a product's result
        self.writer = np.zeros(granules, np.int16)  # warp of its block
        self.written = np.zeros(granules, np.int32)  # at which time of its clock
        self.read = np.zeros((granules, shared.warps), np.int32)
        self.held = np.zeros(granules, np.int16)  # how many loads under way still read it
        self.owned = np.zeros((blocks, COLUMNS), bool)  # columns that are allocated
        self.allocations: dict[tuple[int, int], tuple[int, int]] = {}  # (block, column) -> (columns, where)
        self.least = np.full(blocks, COLUMNS)  # columns of each block's smallest allocation so far
        self.closed = np.zeros(blocks, bool)  # blocks that have given up the right to allocate

    @staticmethod
    def bytes_of(warps: int) -> int:
        """What a block's memory takes here, with its tables."""
        return LANES * COLUMNS * 4 + LANES // GROUP * COLUMNS * (17 + 4 * warps)

    @staticmethod
    def granules(block: Array, lanes: Array, column: Array, count: int) -> Array:
        """[n, groups * count]: of blocks [n] the granules at ``lanes`` [n, groups] and ``count`` columns."""
        columns = column[:, None] + np.arange(count)
        group = block[:, None] * (LANES // GROUP) + lanes // GROUP
        return (group[:, :, None] * COLUMNS + columns[:, None, :]).reshape(len(block), lanes.shape[1] * count)

    def within(self, block: Array, lanes: Array, column: Array, count: int, where: int) -> Array:
        """Which accesses lie in columns of their block's, [n]; the others are reported."""
        last = column + count
        good = (last <= COLUMNS) & (lanes.max(1, initial=0) < LANES)
        for n in np.flatnonzero(good):
            good[n] = self.owned[block[n], column[n] : last[n]].all()
        if not good.all():
            first = f"columns {column[~good][0]} to {last[~good][0] - 1} from lane {lanes[~good][0, 0]}"
            self.reports.add("access outside the tensor memory of the block", where, int((~good).sum()), first)
        return good

    def note_read(self, at: Array, warp: Array, where: int, fault: str = "") -> None:
        """Warps [n] read granules [n, k]. ``fault`` begins the report of what was never written, which is poison."""
        state, own = self.state[at], self.shared.own[warp]
        if (state != WRITTEN).any():
            names = {
                NEVER: f"{fault}read of tensor memory that was never written",
                UNDER_WAY: "read of tensor memory before the wait for what writes it",
            }
            for kind, name in names.items():
                if count := int((state == kind).any(1).sum()):
                    self.reports.add(name, where, count)
        self._check_writer(at, warp, where, "race: read of tensor memory that another warp wrote")
        self.read[at, own[:, None]] = self.shared.clock[warp, own][:, None]

    def note_write(self, at: Array, warp: Array, where: int, of: int, state: int = UNDER_WAY) -> None:
        """Warps [n] begin to write granules [n, k], or with ``state`` have written them."""
        own = self.shared.own[warp]
        if ((self.state[at] == UNDER_WAY) & (self.of[at] != of)).any():
            self.reports.add("write to tensor memory before the wait for what writes it", where)
        if self.held[at].any():
            self.reports.add("write to tensor memory that a load under way still reads", where)
        self._check_writer(at, warp, where, "race: write over tensor memory that another warp wrote")
        late = self.read[at] > self.shared.clock[warp][:, None, :]
        late[np.arange(len(own)), :, own] = False
        if late.any():
            name = "race: write over tensor memory that another warp reads, without a barrier between"
            self.reports.add(name, where, int(late.any((1, 2)).sum()))
        self.mark(at, state, own[:, None], self.shared.clock[warp, own][:, None], of)

    def _check_writer(self, at: Array, warp: Array, where: int, name: str) -> None:
        writer = self.writer[at]
        unknown = (self.written[at] > self.shared.clock[warp[:, None], writer]) & (
            writer != self.shared.own[warp][:, None]
        )
        if unknown.any():
            self.reports.add(f"{name}, without a barrier between", where, int(unknown.any(1).sum()))

    def mark(self, at: Array, state: int, writer: Any, written: Any, of: int = 0) -> None:
        self.state[at], self.of[at] = state, of
        self.writer[at], self.written[at] = writer, written

    # ----------------------------------------------------------------------------------------------------- allocation

    def allocate(self, block: int, count: int, where: int) -> int:
        """The first of so many columns, the highest that are free. RuntimeError where there are not so many."""
        if count & (count - 1) or not _LEAST_COLUMNS <= count <= COLUMNS:
            name = "a tcgen05.alloc of other than 32, 64, 128, 256 or 512 columns"
            self.reports.add(name, where, 1, str(count))
        if count > self.least[block]:
            self.reports.add("a tcgen05.alloc of more columns than one before it", where)
        if self.closed[block]:
            self.reports.add("a tcgen05.alloc after tcgen05.relinquish_alloc_permit", where)
        unit = max(count, 1)
        for column in range(COLUMNS - unit, -1, -unit):
            if not self.owned[block, column : column + unit].any():
                self.owned[block, column : column + unit] = True
                self.allocations[block, column] = count, where
                self.least[block] = min(self.least[block], count)
                return column
        free = COLUMNS - int(self.owned[block].sum())
        raise RuntimeError(f"deadlock: tcgen05.alloc of {count} columns of tensor memory, {free} of which are free")

    def free(self, block: int, column: int, count: int, warp: int, where: int) -> None:
        found = self.allocations.get((block, column))
        if found is None or found[0] != count:
            name = "a tcgen05.dealloc of what no tcgen05.alloc returned"
            self.reports.add(name, where, 1, f"{count} columns from {column}")
            return
        del self.allocations[block, column]
        lanes = np.arange(0, LANES, GROUP)[None, :]
        at = self.granules(np.array([block]), lanes, np.array([column]), count)
        self.note_write(at, np.array([warp]), where, 0, NEVER)
        self.owned[block, column : column + count] = False


class _Place(NamedTuple):
    """What a tcgen05.ld or tcgen05.st reaches, of each of its warps [n]."""

    granules: Array  # [n, k]
    cells: Array  # [n, 32, registers]


@dataclass
class _Move:
    """Loads or stores under way, of warps [n]."""

    warps: Array
    place: _Place
    where: int
    registers: Sequence[int]  # of a load
    values: Array = None  # of a store, [n, 32, registers]
    moved: bool = False  # whether a load's registers have their values already

    def of(self, chosen: Array) -> _Move:
        """The same of some of the warps."""
        place = _Place(self.place.granules[chosen], self.place.cells[chosen])
        values = None if self.values is None else self.values[chosen]
        return _Move(self.warps[chosen], place, self.where, self.registers, values, self.moved)


class TensorMoves:
    """Methods of ``machine.Launch``: tcgen05.alloc, .dealloc, .ld, .st and .wait."""

    n: int
    blocks: int
    warps: int
    R: list[Array]
    block: Array
    warp: Array
    program: Program
    reports: Reports
    shared: Shared
    threads_of: Callable[[Guard], Array]
    check_whole: Callable[..., None]
    store_shared: Callable[..., None]

    def start_tensor_memory(self, settings: Settings) -> None:
        if self.program.tensor_memory:
            self.tensor = TensorMemory(self.blocks, self.shared, self.reports, settings.shared)
            self._loading: list[_Move] = []
            self._storing: list[_Move] = []

    def end_tensor_memory(self) -> None:
        if not self.program.tensor_memory:
            return
        for move in self._loading:
            self.reports.add("a tcgen05.ld that is never waited for", move.where)
        for move in self._storing:
            self.reports.add("a tcgen05.st that is never waited for", move.where)
        for _, where in self.tensor.allocations.values():
            self.reports.add("tensor memory that is not deallocated when the block ends", where)

    def _moving_warps(self, guard: Guard, what: str, where: int) -> tuple[Array, Array]:
        """(the warps that take part, the first thread of each)."""
        self.check_whole(guard, 32, what, where)
        warps = np.unique(self.warp[self.threads_of(guard)])
        return warps, warps * 32

    # ----------------------------------------------------------------------------------------------------- allocation

    def allocate_columns(self, address: Array, count: Array, guard: Guard, where: int) -> None:
        """tcgen05.alloc: each warp that takes part allocates, and its address goes to shared memory."""
        _, first = self._moving_warps(guard, "tcgen05.alloc", where)
        found, one = np.zeros(self.n, u4), np.zeros(self.n, bool)
        one[first] = True
        for t in first.tolist():
            found[t] = self.tensor.allocate(int(self.block[t]), int(count[t]), where)
        self.store_shared(address, 4, [found], one, where)

    def free_columns(self, address: Array, count: Array, guard: Guard, where: int) -> None:
        for warp, t in zip(*self._moving_warps(guard, "tcgen05.dealloc", where)):
            self.tensor.free(int(self.block[t]), int(address[t]), int(count[t]), int(warp), where)

    def allocate_no_more(self, guard: Guard, where: int) -> None:
        _, first = self._moving_warps(guard, "tcgen05.relinquish_alloc_permit", where)
        self.tensor.closed[self.block[first]] = True

    # ------------------------------------------------------------------------------------------------ loads and stores

    def load_tensor_memory(
        self, shape: str, count: int, address: Array, split: int, registers: list[int], guard: Guard, where: int
    ) -> None:
        """tcgen05.ld: registers hold poison until their warp waits."""
        warps, place = self._moved_place(shape, count, address, split, guard, "tcgen05.ld", where)
        self._set_moved(registers, self._moving_warps(guard, "tcgen05.ld", where)[0], None)
        if not len(warps):
            return
        # Triton loads ahead of a loop what a product there, whose predicate is false, would have written.
        self.tensor.note_read(place.granules, warps, where, "note: ")
        np.add.at(self.tensor.held, place.granules, 1)
        self._loading.append(_Move(warps, place, where, registers))

    def store_tensor_memory(
        self, shape: str, count: int, address: Array, split: int, values: list[Array], guard: Guard, where: int
    ) -> None:
        """tcgen05.st: lands when its warp waits."""
        warps, place = self._moved_place(shape, count, address, split, guard, "tcgen05.st", where)
        if not len(warps):
            return
        self.tensor.note_write(place.granules, warps, where, STORE)
        given = np.stack([np.broadcast_to(each, self.n).reshape(-1, 32)[warps] for each in values], 2)
        self._storing.append(_Move(warps, place, where, (), given))

    def wait_loads(self, guard: Guard) -> None:
        self._loading = self._land_moves(self._loading, guard, self._loaded)

    def wait_stores_of_tensor_memory(self, guard: Guard) -> None:
        self._storing = self._land_moves(self._storing, guard, self._stored)

    def touch_loads(self, moves: bool, where: int) -> None:
        """An instruction touches, or only ``moves``, registers of a tcgen05.ld that may not have been waited for.

        LLVM puts moves there that join registers, which machine code does not have: they take values, not poison.
        """
        if not moves:
            self.reports.add("registers of a tcgen05.ld are touched before tcgen05.wait::ld", where)
            return
        for move in self._loading:
            if not move.moved:
                self._fill_registers(move)
                self.reports.add("note: registers of a tcgen05.ld are moved before tcgen05.wait::ld", move.where)
                move.moved = True

    def _land_moves(self, moves: list[_Move], guard: Guard, land: Callable[[_Move], None]) -> list[_Move]:
        """Land what belongs to the warps that wait; returns the rest."""
        if not moves:
            return moves
        waiting, left = np.unique(self.warp[self.threads_of(guard)]), []
        for move in moves:
            due = np.isin(move.warps, waiting)
            for chosen in (due, ~due):
                if chosen.any():
                    part = move.of(chosen)
                    if chosen is due:
                        land(part)
                    else:
                        left.append(part)
        return left

    def _loaded(self, move: _Move) -> None:
        np.add.at(self.tensor.held, move.place.granules, -1)
        if not move.moved:
            self._fill_registers(move)

    def _fill_registers(self, move: _Move) -> None:
        found = self.tensor.cells[move.place.cells]
        bad = (self.tensor.state[move.place.granules] == UNDER_WAY).any(1)
        found[bad] = POISON
        self._set_moved(move.registers, move.warps, found)

    def _stored(self, move: _Move) -> None:
        self.tensor.cells[move.place.cells] = move.values
        at, own = move.place.granules, self.shared.own[move.warps]
        self.tensor.mark(at, WRITTEN, own[:, None], self.shared.clock[move.warps, own][:, None])

    def _set_moved(self, registers: Sequence[int], warps: Array, values: Array | None) -> None:
        """Write registers of whole warps: ``values`` [n, 32, registers], or poison."""
        everyone = len(warps) * 32 == self.n
        for k, r in enumerate(registers):
            each = np.full((len(warps), 32), POISON) if values is None else values[:, :, k]
            if everyone:
                self.R[r] = each.reshape(-1)
            else:
                self.R[r] = self.R[r].copy()
                self.R[r].reshape(-1, 32)[warps] = each

    def _moved_place(
        self, shape: str, count: int, address: Array, split: int, guard: Guard, what: str, where: int
    ) -> tuple[Array, _Place]:
        """(the warps whose access is right, what they reach). A warp reaches the 32 lanes of its number modulo 4."""
        warps, first = self._moving_warps(guard, what, where)
        base = address.reshape(-1, 32)[warps].astype(np.int64)
        if (base != base[:, :1]).any():
            self.reports.add(f"{what} with other addresses in some lanes of a warp", where)
        good, parts, cells = np.ones(len(warps), bool), [], np.zeros((len(warps), 32, 0), np.int64)
        block = self.block[first]
        lanes, width, pieces, thread, register = _shape(shape, count, split)
        for shift in pieces:
            lane, column = (base[:, 0] + shift) >> 16, (base[:, 0] + shift) & 0xFFFF
            groups = lane[:, None] + np.arange(0, lanes, GROUP)
            own = (lane // 32 == warps % self.warps % 4) & (lane % lanes == 0)
            if not own.all():
                first_bad = f"lane {lane[~own][0]}, warp {warps[~own][0] % self.warps}"
                self.reports.add(f"{what} of lanes that its warp does not reach", where, int((~own).sum()), first_bad)
            good &= own
            good[good] = self.tensor.within(block[good], groups[good], column[good], width, where)
            parts.append(self.tensor.granules(block, groups, column, width))
        offsets = np.array(pieces)[np.where(_THREAD < 16, 0, len(pieces) - 1)]  # the second half's, where there is one
        start = base[:, :1] + offsets
        lane, column = (start >> 16)[:, :, None] + thread, (start & 0xFFFF)[:, :, None] + register
        cells = (block[:, None, None] * LANES + lane) * COLUMNS + column
        return warps[good], _Place(np.concatenate(parts, 1)[good], cells[good])


def registers_of_shape(shape: str, count: int) -> int:
    """Registers of each thread; 0 for a shape that is not known."""
    return {"32x32b": 1, "16x32bx2": 1, "16x256b": 4}.get(shape, 0) * count


def _shape(shape: str, count: int, split: int) -> tuple[int, int, list[int], Array, Array]:
    """(lanes and columns of an access, where the accesses begin, lane and column of each thread's registers [32, r]).

    PTX ISA, "Matrix fragments for shape .32x32b", ".16x256b" and ".16x32bx2", whose second access, by the upper half of
    the threads, begins ``split`` further on.
    """
    one = np.zeros((32, 1), np.int64)
    if shape == "32x32b":
        return 32, count, [0], one + _THREAD[:, None], one + np.arange(count)
    if shape == "16x32bx2":
        return 16, count, [0, split], one + _THREAD[:, None] % 16, one + np.arange(count)
    k = np.arange(4 * count)
    lane = _THREAD[:, None] // 4 + 8 * (k % 4 // 2)
    return 16, 8 * count, [0], lane, 8 * (k // 4) + 2 * (_THREAD[:, None] % 4) + k % 2
