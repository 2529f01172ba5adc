"""Exact counts of a launch, by line of PTX: sectors, wavefronts, bytes and instructions, as a profiler counts them.

``Settings.count`` turns them on, ``Result.counters`` has them, and ``counted.py`` sums them up. ``CountedLaunch`` looks
at each access before it is made; of each basic block is counted how many warps ran it, and with how many threads.

A *request* is one instruction of one warp with an active lane. In global memory it takes the *sectors* of 32 bytes that
its lanes touch, each once. ``Places`` gives addresses as on a GPU, whose allocator aligns to 256 bytes: a storage
begins at a multiple of 256 there, wherever the host's lies, and a view of it where it lies in that storage.

Shared memory has 32 banks of 4 bytes, and a *wavefront* serves one word of each. Accesses of 8 bytes go by half warps,
those of 16 bytes and the rows of ldmatrix and stmatrix by quarters: so many wavefronts are *needed*, and what comes on
top are bank conflicts. Of loads two parts are served at once where lanes 2i and 2i + 1, or i and i ^ 2, name one
address (NVIDIA's developer forum, thread 77228). What asynchronous units read and write of shared memory counts as
without conflicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .machine import Launch
from .memory import WORDS, Allocation, Array, Guard

if TYPE_CHECKING:
    from .program import Program

# Of each instruction that reaches memory.
FIELDS = (
    "requests",
    "lanes",  # that were active in them
    "asked",  # bytes: lanes by their width
    "used",  # bytes that a request's lanes name, each once
    "sectors",
    "lines",  # of 128 bytes
    "wavefronts",
    "needed",  # wavefronts without conflicts
    "collisions",  # lanes of an atomic operation whose place an earlier lane of the warp names
)
SECTOR, LINE, ALIGNMENT = 32, 128, 256  # bytes
_BANKS = 32
_ONES = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
_BLOCK = 40  # bits of a sector's number, below those of a block's


def fresh(rows: Array) -> tuple[Array, Array]:
    """Rows sorted, and which of their entries come for the first time; -1 is no entry."""
    rows = np.sort(rows, 1)
    new = rows >= 0
    new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return rows, new


def _distinct(rows: Array) -> int:
    return int(np.count_nonzero(fresh(rows)[1]))


def wavefronts(words: Array) -> Array:
    """Of each row of words: as many as there are distinct ones in the bank that has most of them. -1 is no word."""
    words, new = fresh(words)
    row, column = np.nonzero(new)
    hits = np.bincount(row * _BANKS + words[row, column] % _BANKS, minlength=len(words) * _BANKS)
    return hits.reshape(-1, _BANKS).max(1)


def passes(address: Array, width: int, loading: bool) -> tuple[Array, Array]:
    """(wavefronts, those needed) of each request; ``address`` [requests, 32] is -1 of idle lanes."""
    each = max(1, width // 4)
    words = np.where(address[..., None] >= 0, (address[..., None] >> 2) + np.arange(each), -1)  # [requests, 32, each]

    def by(parts: int) -> tuple[Array, Array]:
        rows = words.reshape(len(words) * parts, -1)
        return wavefronts(rows).reshape(-1, parts).sum(1), (rows >= 0).any(1).reshape(-1, parts).sum(1)

    found, needed = by(each)
    if loading and each > 1:
        lanes, idle = np.arange(32), address < 0
        paired = np.zeros(len(address), bool)
        for apart in (1, 2):
            other = lanes ^ apart
            paired |= ((address == address[:, other]) | idle | idle[:, other]).all(1)
        merged, least = by(each // 2)
        found, needed = np.where(paired, merged, found), np.where(paired, least, needed)
    return found, needed


class Places:
    """Where a launch's allocations would lie on a GPU, and which of their bytes it has read and written."""

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self.allocations = sorted(each for each in allocations if each.size)
        ends: dict[int, int] = {}  # of storages
        for each in self.allocations:
            origin = each.origin or each.address
            ends[origin] = max(ends.get(origin, 0), each.address + each.size)
        moved, self.size = dict[int, int](), ALIGNMENT
        for origin, end in ends.items():
            moved[origin] = self.size - origin
            self.size += -(-(end - origin) // ALIGNMENT) * ALIGNMENT
        self.starts = np.array([each.address for each in self.allocations], np.int64)
        self.ends = np.maximum.accumulate(np.array([each.address + each.size for each in self.allocations], np.int64))
        self.moved = np.array([moved[each.origin or each.address] for each in self.allocations], np.int64)
        self.touched = {way: np.zeros(self.size, np.uint8) for way in ("load", "store")}  # 1: of those bytes

    def of(self, address: Array) -> tuple[Array, Array]:
        """(places of addresses, -1 outside every allocation; which allocations these are)."""
        if not self.allocations:
            return np.full(len(address), -1), np.zeros(len(address), np.int64)
        index = np.maximum(np.searchsorted(self.starts, address, "right") - 1, 0)
        inside = (address >= self.starts[index]) & (address < self.ends[index])
        return np.where(inside, address + self.moved[index], -1), index

    def touch(self, way: str, place: Array, width: int) -> None:
        word = width if width in WORDS else 8 if width % 8 == 0 else 1
        word = 1 if (place % word).any() else word
        view, first = self.touched[way].view(WORDS[word]), place // word
        for i in range(width // word):
            view[first + i] = _ONES[word]

    def bytes(self, way: str, index: int | None = None) -> int:
        """How many were touched, in all or in one allocation."""
        touched = self.touched[way]
        if index is not None:
            start = int(self.starts[index] + self.moved[index])
            touched = touched[start : start + self.allocations[index].size]
        return int(np.count_nonzero(touched))

    def sectors(self, way: str) -> int:
        return int(np.count_nonzero(self.touched[way].reshape(-1, SECTOR).any(1)))


class Counters:
    """Of all blocks of one launch; arrays by instruction, or by basic block."""

    def __init__(self, program: Program, grid: tuple[int, int, int], allocations: Sequence[Allocation]) -> None:
        code = program.kernel.code
        self.program, self.grid = program, grid
        self.found = {field: np.zeros(len(code), np.int64) for field in FIELDS}
        self.on: list[set[int]] = [set() for _ in code]  # the allocations that an instruction has reached
        self.issues = np.zeros(len(program.ranges), np.int64)  # warps that ran a basic block, each time
        self.active = np.zeros(len(program.ranges), np.int64)  # threads of them
        self.parted = np.zeros(len(program.ranges), np.int64)  # warps whose threads went different ways after it
        self.blocks = self.warps = self.threads = 0
        self.places = Places(allocations)
        self.by_block = 0  # sectors that are loaded, each once for each block
        self._loaded: list[Array] = []  # (block, sector) of the blocks that run now

    def launch(self, *arguments: Any, **named: Any) -> CountedLaunch:
        """As ``machine.Launch``."""
        return CountedLaunch(self, *arguments, **named)

    def begin(self, launch: Launch) -> None:
        self.blocks += launch.blocks
        self.warps += launch.n // 32
        self.threads += launch.n

    def end(self) -> None:
        """The blocks that began have ended."""
        if self._loaded:
            self.by_block += len(np.unique(np.concatenate(self._loaded)))
        self._loaded = []

    def ran(self, block: int, threads: int, mask: Guard, to: Any) -> None:
        """All ``threads`` of the launch, or those of the mask, ran a basic block and go on at ``to``."""
        self.issues[block] += threads // 32 if mask is None else int(np.count_nonzero(mask.reshape(-1, 32).any(1)))
        self.active[block] += threads if mask is None else int(np.count_nonzero(mask))
        if isinstance(to, np.ndarray):
            ways, there = to.reshape(-1, 32), True if mask is None else mask.reshape(-1, 32)
            most, least = np.where(there, ways, -1).max(1), np.where(there, ways, 1 << 40).min(1)
            self.parted[block] += int(np.count_nonzero(most > least))

    def _add(self, where: int, **values: Any) -> None:
        for field, value in values.items():
            self.found[field][where] += int(value)

    def _touch(self, way: str, where: int, place: Array, index: Array, width: int, block: Array) -> None:
        self.on[where].update(np.unique(index).tolist())
        self.places.touch(way, place, width)
        if way == "load":
            self._loaded.append(np.unique((block.astype(np.int64) << _BLOCK) | (place // SECTOR)))

    def access(
        self, launch: CountedLaunch, way: str, where: int, address: Array, width: int, guard: Guard, asks: bool = True
    ) -> None:
        """Of global memory. With ``asks``, requests and lanes are counted here."""
        rows, warps = _requests(address, guard)
        active = rows >= 0
        place, index = self.places.of(rows[active])
        rows[active] = place
        active, good = rows >= 0, place >= 0
        lanes = int(np.count_nonzero(active))
        if not lanes:
            return
        if asks:
            self._add(where, requests=np.count_nonzero(active.any(1)), lanes=lanes)
        self._add(
            where,
            asked=lanes * width,
            used=_distinct(rows) * width,
            sectors=_distinct(np.where(active, rows // SECTOR, -1)),
            lines=_distinct(np.where(active, rows // LINE, -1)),
        )
        block = np.broadcast_to(launch.numbers[warps // launch.warps][:, None], rows.shape)[active]
        self._touch(way, where, place[good], index[good], width, block)

    def atomic(self, launch: CountedLaunch, where: int, address: Array, width: int, guard: Guard) -> None:
        self.access(launch, "store", where, address, width, guard)
        rows, _ = _requests(address, guard)
        self._add(where, collisions=np.count_nonzero(rows >= 0) - _distinct(rows))

    def banks(self, where: int, address: Array, width: int, guard: Guard, loading: bool) -> None:
        """Of shared memory, by lanes of their own addresses."""
        rows, _ = _requests(address, guard)
        if len(rows):
            found, needed = passes(rows, width, loading)
            lanes = np.count_nonzero(rows >= 0)
            self._add(where, requests=len(rows), lanes=lanes, wavefronts=found.sum(), needed=needed.sum())

    def matrices(self, where: int, address: Array, count: int, guard: Guard) -> None:
        """Of shared memory by ldmatrix and stmatrix: eight rows of 16 bytes at a time."""
        rows, _ = _requests(address, guard)
        words = (rows[:, : 8 * count].reshape(-1, 8)[..., None] >> 2) + np.arange(4)
        found = wavefronts(words.reshape(-1, _BANKS)).sum()
        self._add(where, requests=len(rows), lanes=32 * len(rows), wavefronts=found, needed=count * len(rows))

    def box(self, way: str, where: int, address: Array, inside: Array, size: int, block: int) -> None:
        """A tensor copy: ``address`` [elements] of ``size`` bytes, of which some are ``inside`` the tensor."""
        place, index = self.places.of(address[inside].astype(np.int64))
        good = place >= 0
        place, index, served = place[good], index[good], -(-len(inside) * size // LINE)
        self._add(
            where,
            requests=1,
            lanes=1,
            asked=len(place) * size,
            used=len(place) * size,
            sectors=len(np.unique(place // SECTOR)),
            lines=len(np.unique(place // LINE)),
            wavefronts=served,
            needed=served,
        )
        if len(place):
            self._touch(way, where, place, index, size, np.array([block]))


def _requests(address: Array, guard: Guard) -> tuple[Array, Array]:
    """(addresses [requests, 32], -1 of idle lanes; the warps that make them)."""
    rows = address.astype(np.int64).reshape(-1, 32)
    if guard is None:
        return rows, np.arange(len(rows))
    rows = np.where(guard.reshape(-1, 32), rows, -1)
    warps = np.flatnonzero((rows >= 0).any(1))
    return rows[warps], warps


class CountedLaunch(Launch):
    """A launch that counts what it does."""

    def __init__(
        self, counters: Counters, program: Program, grid: tuple[int, int, int], ids: Any, *others: Any, **named: Any
    ) -> None:
        super().__init__(program, grid, ids, *others, **named)
        self.counters = counters
        self.numbers = np.asarray(ids, np.int64).reshape(-1, 3) @ [1, grid[0], grid[0] * grid[1]]  # of its blocks
        self.step = self._counted
        self._issuer = 0, 0  # the copy of a tensor that is under way: where, and the block

    def run(self, limit_s: float = 600.0) -> None:
        self.counters.begin(self)
        super().run(limit_s)
        self.counters.end()

    def _counted(self, number: int, masked: bool) -> Any:
        return partial(self._ran, number, self.program.step(number, masked))

    def _ran(self, number: int, step: Any, launch: Any, registers: Any, mask: Guard) -> Any:
        to = step(launch, registers, mask)
        self.counters.ran(number, self.n, mask, to)
        return to

    def load_global(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        self.counters.access(self, "load", where, address, size * count, guard)
        return super().load_global(address, size, count, guard, where)

    def store_global(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        self.counters.access(self, "store", where, address, size * len(values), guard)
        super().store_global(address, size, values, guard, where)

    def atomic(
        self, operation: str, size: int, address: Array, values: list[list[Array]], guard: Guard, where: int
    ) -> list[Array]:
        self.counters.atomic(self, where, address, size * len(values), guard)
        return super().atomic(operation, size, address, values, guard, where)

    def load_shared(self, address: Array, size: int, count: int, guard: Guard, where: int) -> list[Array]:
        self.counters.banks(where, address, size * count, guard, True)
        return super().load_shared(address, size, count, guard, where)

    def store_shared(self, address: Array, size: int, values: list[Array], guard: Guard, where: int) -> None:
        self.counters.banks(where, address, size * len(values), guard, False)
        super().store_shared(address, size, values, guard, where)

    def copy(self, to: Array, source: Array, size: int, given: Array, guard: Guard, where: int) -> None:
        for width in np.unique(given[self.threads_of(guard)]).tolist():
            reads = given == width if guard is None else guard & (given == width)
            if width:  # the others fill with zeros
                self.counters.access(self, "load", where, source, min(width, size), reads, asks=False)
        self.counters.banks(where, to, size, guard, False)
        super().copy(to, source, size, given, guard, where)

    def ldmatrix(self, address: Array, count: int, turned: bool, guard: Guard, where: int) -> list[Array]:
        self.counters.matrices(where, address, count, guard)
        return super().ldmatrix(address, count, turned, guard, where)

    def stmatrix(self, address: Array, values: list[Array], turned: bool, guard: Guard, where: int) -> None:
        self.counters.matrices(where, address, len(values), guard)
        super().stmatrix(address, values, turned, guard, where)

    def load_tensor(
        self, to: Array, descriptor: Array, corner: list[Array], mbarrier: Array, guard: Guard, where: int
    ) -> None:
        for alone in self._issuers("load", guard, where):
            super().load_tensor(to, descriptor, corner, mbarrier, alone, where)

    def store_tensor(self, descriptor: Array, corner: list[Array], source: Array, guard: Guard, where: int) -> None:
        for alone in self._issuers("store", guard, where):
            super().store_tensor(descriptor, corner, source, alone, where)

    def _issuers(self, way: str, guard: Guard, where: int) -> Any:
        """A guard for each thread, so that ``_box`` knows whose copy it is."""
        for thread in self.threads_of(guard):
            alone = np.zeros(self.n, bool)
            alone[thread] = True
            self._way, self._issuer = way, (where, int(self.numbers[self.block[thread]]))
            yield alone

    def _box(self, tensor: Any, corner: list[int]) -> tuple[Array, Array, Array]:
        address, inside, offsets = super()._box(tensor, corner)
        self.counters.box(self._way, self._issuer[0], address, inside, tensor.itemsize, self._issuer[1])
        return address, inside, offsets
