"""Memory of a launch, with checks like those of NVIDIA's compute-sanitizer.

Global memory is the host's own: an access must lie in one allocation and be aligned. Shared memory is divided into
granules of the narrowest access that the kernel makes. Each has a state, and the clocks of its last writer and of its
readers; reads of whole lines of 16 bytes, as asynchronous units make them, are kept by line. A clock is a vector over
the warps of a block, which barriers join (Flanagan and Freund, "FastTrack", 2009): two accesses by different warps of
which one is a write, and neither known to the other's clock, are a race. Pages tell which accesses need no look at
granules: those of memory that was not touched since all warps last met, or since it was looked at.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .parse import Kernel

u1, u4, u8 = np.uint8, np.uint32, np.uint64
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# States of a granule; UNDER_WAY: no thread has waited for the copy into it; MBARRIER: of an mbarrier until it is
# invalidated.
NEVER, WRITTEN, UNDER_WAY, MBARRIER = 0, 1, 2, 3
_KEPT = {UNDER_WAY: "shared write to a copy's target before its wait", MBARRIER: "shared write to a live mbarrier"}
_MOST_REPORTS = 50
_LINE = 16  # bytes; asynchronous units read multiples
_PAGE = 1024  # bytes, of which is known when they were last written

Array = Any
Guard = Any  # which threads take part; None: all


class Allocation(NamedTuple):
    address: int
    size: int  # bytes
    name: str
    origin: int = 0  # where its storage begins; 0: at ``address``
    itemsize: int = 0  # bytes of an element; 0: not known


class Reports:
    """Faults, one for each kind and instruction, with how many accesses."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.found: dict[tuple[str, int], list[Any]] = {}

    def add(self, kind: str, where: int, count: int = 1, first: str = "") -> None:
        if (kind, where) in self.found:
            self.found[kind, where][0] += count
        elif len(self.found) < _MOST_REPORTS:
            self.found[kind, where] = [count, first]

    def lines(self) -> list[str]:
        """Each with the line of PTX and of Python."""
        code, lines = self.kernel.code, []
        for (kind, where), (count, first) in self.found.items():
            i = code[where]
            at = f"PTX line {i.line}" + (f", {i.source}" if i.source else "")
            lines.append(f"{kind}: {self.kernel.name}, {at}, `{i.text[:90]}`: {count}{first and f'; first: {first}'}")
        return lines


class Global:
    """The allocations of the host that the kernel may touch."""

    def __init__(self, allocations: Iterable[Allocation], reports: Reports) -> None:
        self.reports = reports
        self.allocations = sorted(each for each in allocations if each.size)
        self.starts = np.array([each.address for each in self.allocations], u8)
        # Views of one tensor may lie within each other.
        self.ends = np.maximum.accumulate(np.array([each.address + each.size for each in self.allocations], u8))
        self._starts, self._ends = self.starts.tolist(), self.ends.tolist()
        # One view from the lowest to the highest: only addresses that were checked are looked up in it.
        self.base = int(self.starts[0]) & ~4095 if self.allocations else 4096
        size = (int(self.ends.max()) - self.base + 4095) & ~4095 if self.allocations else 0
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.base))
        self.views = {width: self.bytes[: size // width * width].view(word) for width, word in WORDS.items()}

    def check(self, address: Array, width: int, where: int, what: str) -> Array:
        """Which of the accesses are in an allocation and aligned."""
        if self._all_in_one(address, width):
            good = np.ones(len(address), bool)
        elif not self.allocations:
            self.reports.add(f"{what} outside every allocation", where, len(address), hex(int(address[0])))
            return np.zeros(len(address), bool)
        else:
            good = self._in_any(address, width)
            if not good.all():
                first = self._near(address[~good][0])
                self.reports.add(f"{what} outside every allocation", where, int((~good).sum()), first)
        if width & (width - 1) == 0 and not int(np.bitwise_or.reduce(address, initial=0)) & (width - 1):
            return good
        crooked = good & (address % u8(width) != 0)
        if crooked.any():
            self.reports.add(f"misaligned {what}", where, int(crooked.sum()), hex(int(address[crooked][0])))
        return good & ~crooked

    def _all_in_one(self, address: Array, width: int) -> bool:
        if not len(address) or not self.allocations:
            return not len(address)
        first = int(address.min())
        k = bisect.bisect_right(self._starts, first) - 1
        return k >= 0 and first < self._ends[k] and int(address.max()) + width <= self._ends[k]

    def _in_any(self, address: Array, width: int) -> Array:
        index = np.searchsorted(self.starts, address, "right") - 1
        # Not their sum, which may pass 2^64.
        return (index >= 0) & (address < self.ends[index]) & (self.ends[index] - address >= u8(width))

    def _near(self, address: Array) -> str:
        at = int(address)
        near = min(self.allocations, key=lambda each: min(abs(at - each.address), abs(at - each.address - each.size)))
        return f"{at:#x} is at {at - near.address} of the {near.size} bytes of {near.name}"

    def index(self, address: Array, width: int) -> Array:
        """Of checked addresses in the view of that width."""
        return ((address - u8(self.base)) // u8(width)).astype(np.int64)

    def reached(self, address: Array, width: int, guard: Guard, where: int, what: str) -> Array:
        """The threads whose access is good; None: all."""
        chosen = None if guard is None else np.flatnonzero(guard)
        good = self.check(address if chosen is None else address[chosen], width, where, what)
        if good.all():
            return chosen
        return np.flatnonzero(good) if chosen is None else chosen[good]


class Shared:
    """The shared memory of some blocks of ``warps`` warps, ``size`` bytes from address ``base`` on in each."""

    def __init__(
        self, blocks: int, size: int, warps: int, granule: int, base: int, reports: Reports, poison: int = 0xFF
    ) -> None:
        self.pitch = self.pitch_of(size, base)
        self.base, self.end, self.granule, self.warps = base, base + size, granule, warps
        self.bytes = np.full(blocks * self.pitch, poison, u1)
        self.views = {width: self.bytes.view(word) for width, word in WORDS.items()}
        self.reports = reports
        granules = blocks * self.pitch // granule
        self.state = np.zeros(granules, u1)
        self.writer = np.zeros(granules, np.int16)  # warp of its block
        self.written = np.zeros(granules, np.int32)  # at which time of its clock
        self.read = np.zeros((granules, warps), np.int32)
        lines = blocks * self.pitch // _LINE
        self.held = np.zeros(lines, np.int16)  # how many operations under way still read it
        self.line_read = np.zeros((lines, warps), np.int32)  # whole, by units among others
        self.accesses = 0  # so far, counted: the last to each page that wrote, and that read
        self.page = np.zeros(blocks * self.pitch // _PAGE, np.int64)
        self.page_read = np.zeros_like(self.page)
        self.by_unit = np.zeros(granules, bool)  # written by an asynchronous unit
        self.own = np.arange(blocks * warps) % warps
        self.met = np.zeros(blocks * warps, np.int64)  # how many accesses there were when all of its block last met
        self._steps = np.arange(max(warps, 16))
        self.clock = np.zeros((blocks * warps, warps), np.int32)  # what each warp knows of each of its block
        self.clock[np.arange(blocks * warps), self.own] = 1
        # Of each warp its proxy fences: when, and what it then knew.
        self.fences: list[tuple[list[int], list[Array]]] = [([], []) for _ in range(blocks * warps)]
        self._views: dict[tuple[int, int], tuple[int, Array, Array]] = {}

    @staticmethod
    def pitch_of(size: int, base: int) -> int:
        """Bytes from a block to the next, those before ``base`` included."""
        return (size + base + 1023) // 1024 * 1024

    @staticmethod
    def bytes_of(size: int, warps: int, granule: int, base: int) -> int:
        """What a block's memory takes here, with its tables."""
        lines = Shared.pitch_of(size, base) // _LINE * (2 + 4 * warps)
        return Shared.pitch_of(size, base) // granule * (granule + 8 + 4 * warps) + lines

    def meet(self, block: int) -> None:
        """A barrier of a block: each warp knows what the others know, and time goes on."""
        rows = self.clock[block * self.warps : (block + 1) * self.warps]
        rows[:] = rows.max(0)
        rows[self._steps[: self.warps], self._steps[: self.warps]] += 1
        self.met[block * self.warps : (block + 1) * self.warps] = self.accesses

    def tick(self, warp: int) -> int:
        """A warp's time, which goes on."""
        own = self.own[warp]
        now = int(self.clock[warp, own])
        self.clock[warp, own] += 1
        return now

    def holds(self, address: Array, width: int) -> bool:
        """Whether all accesses are in the block's memory and aligned."""
        if not len(address) or int(np.bitwise_or.reduce(address)) & (width - 1) or width & (width - 1):
            return False
        return self.base <= int(address.min()) and int(address.max()) + width <= self.end

    def place(self, address: Array, width: int, block: Array, where: int, what: str) -> tuple[Array, Array]:
        """(where accesses begin in ``bytes``, which of them are in the block's memory and aligned)."""
        address = np.asarray(address).astype(np.int64)
        good = (address >= self.base) & (address + width <= self.end)
        if not good.all():
            first = f"{int(address[~good][0]) - self.base} of {self.end - self.base} bytes"
            self.reports.add(f"shared {what} outside the block's memory", where, int((~good).sum()), first)
        crooked = good & (address % width != 0) if width & (width - 1) == 0 else ~good
        if (crooked & good).any():
            first = str(int(address[crooked & good][0]) - self.base)
            self.reports.add(f"misaligned shared {what}", where, int((crooked & good).sum()), first)
        return block * self.pitch + address, good & ~crooked

    def _granules(self, first: Array, width: int) -> Array:
        return (first // self.granule)[:, None] + np.arange(max(1, width // self.granule))

    def note_read(self, first: Array, width: int, warp: Array, where: int) -> None:
        """Warps read what begins at ``first``."""
        at, own = self._granules(first, width), self.own[warp]
        page = first // _PAGE
        if not self._met_since(self.page[page], warp) or np.count_nonzero(self.state[at] != WRITTEN):
            self._check_read(at, warp, where)
        self.accesses += 1
        self.page_read[page] = self.accesses
        if width == _LINE:
            self.line_read[first // _LINE, own] = self.clock[warp, own]
        else:
            self.read[at, own[:, None]] = self.clock[warp, own][:, None]

    def _met_since(self, accesses: Array, warp: Array) -> bool:
        """Whether these warps have all met those of their blocks since: nothing before that is a race."""
        return not np.count_nonzero(accesses > self.met[warp])

    def _check_read(self, at: Array, warp: Array, where: int) -> None:
        state, own = self.state[at], self.own[warp]
        if (state != WRITTEN).any():
            names = {NEVER: "shared read of what was never written", UNDER_WAY: "shared read of a copy before its wait"}
            for kind, name in names.items():
                if count := int((state == kind).any(1).sum()):
                    self.reports.add(name, where, count)
        writer = self.writer[at]
        unknown = (self.written[at] > self.clock[warp[:, None], writer]) & (writer != own[:, None])
        if unknown.any():
            name = "race: read of what another warp wrote, without a barrier between"
            self.reports.add(name, where, int(unknown.any(1).sum()))

    def note_write(
        self, first: Array, width: int, warp: Array, where: int, state: int = WRITTEN, same: Array = None
    ) -> None:
        """Warps write; ``same`` says which of them write what is there already, as several warps may at once."""
        at = self._granules(first, width)
        own = self.own[warp][:, None]
        before = self.state[at]
        if (before > WRITTEN).any():
            for kind, name in _KEPT.items():
                if count := int((before == kind).any(1).sum()):
                    self.reports.add(name, where, count)
        line = first // _LINE
        if (held := self.held[line]).any():
            name = "shared write to what an operation under way still reads"
            self.reports.add(name, where, int((held != 0).sum()))
        page = first // _PAGE
        if not self._met_since(np.maximum(self.page[page], self.page_read[page]), warp):
            self._check_write(at, line, warp, where, same)
        self._touch(first)
        self._mark(at, state, own, self.clock[warp, own[:, 0]][:, None])

    def _check_write(self, at: Array, line: Array, warp: Array, where: int, same: Array) -> None:
        own = self.own[warp][:, None]
        writer, known = self.writer[at], self.clock[warp]
        unknown = (self.written[at] > np.take_along_axis(known, writer.astype(np.int64), 1)) & (writer != own)
        if same is not None:
            unknown &= ~same[:, None]
        if unknown.any():
            name = "race: write over what another warp wrote, without a barrier between"
            self.reports.add(name, where, int(unknown.any(1).sum()))
        late = self.line_read[line] > known
        for column in at.T:
            late |= self.read[column] > known
        late &= self._steps[: self.warps] != own
        if late.any():
            name = "race: write over what another warp reads, without a barrier between"
            self.reports.add(name, where, int(late.any(1).sum()))

    def _mark(self, at: Any, state: int, writer: Any, written: Any, by_unit: bool = False) -> None:
        self.state[at], self.by_unit[at] = state, by_unit
        self.writer[at], self.written[at] = writer, written

    def _touch(self, first: Array) -> None:
        self.accesses += 1
        self.page[first // _PAGE] = self.accesses

    def _span(self, lines: Array) -> slice:
        """The granules of lines that lie one after the other."""
        return slice(int(lines[0]) // self.granule, (int(lines[-1]) + _LINE) // self.granule)

    def is_free(self, lines: Array, warp: int) -> bool:
        """Whether an asynchronous unit may write these lines, which lie one after the other, for a warp."""
        at, line, own = self._span(lines), slice(lines[0] // _LINE, lines[-1] // _LINE + 1), self.own[warp]
        if (self.state[at] > WRITTEN).any() or self.held[line].any():
            return False
        known, fenced = self._view(range(warp, warp + 1))
        writer, written, known = self.writer[at], self.written[at], known.copy()
        if ((written > fenced[writer]) & ~self.by_unit[at]).any() or (written > known[writer]).any():
            return False
        known[own] = np.iinfo(known.dtype).max
        return bool((self.read[at].max(0) <= known).all() and (self.line_read[line].max(0) <= known).all())

    def note_unit_write(self, lines: Array, warp: int, where: int, free: bool) -> None:
        """An asynchronous unit begins to write such lines; ``free``: that it may is known."""
        if not free:
            return self.note_write(lines, _LINE, np.full(len(lines), warp), where, UNDER_WAY)
        self._touch(lines)
        self._mark(self._span(lines), UNDER_WAY, own := self.own[warp], self.clock[warp, own])
        return None

    def land_unit(self, lines: Array, warp: int, tick: int) -> None:
        """What it wrote is there, as its deed at that time of the warp."""
        self._touch(lines)
        self._mark(self._span(lines), WRITTEN, self.own[warp], tick, by_unit=True)

    def note_unit_read(
        self, lines: Array, warps: range, where: int, checked: int | None = None, parts: Sequence[Array] = ()
    ) -> int | None:
        """An asynchronous unit reads lines for warps of one block: ordinary writes need a proxy fence before that.
        ``parts``: of several operands, each counted by itself.

        Returns up to which write that is right; None where it is not. It stays so where nothing is written: what
        ``checked``, returned by an earlier read of these lines for these warps, covers is not looked at again.
        """
        now: int | None = self.accesses
        page = lines // _PAGE
        written = checked is None or np.count_nonzero(self.page[page] > checked)
        if written and not self._is_readable(self._granules(lines, _LINE), warps):
            now = None
            for some, warp in itertools.product(parts or [lines], warps):
                self._check_read(self._granules(some, _LINE), np.full(len(some), warp), where)
                self.check_fenced(some, _LINE, warp, where, "an asynchronous unit reads what was written")
        self.accesses += 1
        self.page_read[page] = self.accesses
        own = warps.start % self.warps
        rows = self._steps[: len(warps)]
        self.line_read[lines // _LINE, own : own + len(warps)] = self.clock[warps.start + rows, own + rows]
        return now

    def _is_readable(self, at: Array, warps: range) -> bool:
        """Whether asynchronous units may read these for each of the warps."""
        if np.count_nonzero(self.state[at] != WRITTEN):
            return False
        known, fenced = self._view(warps)
        writer, written = self.writer[at], self.written[at]
        if np.count_nonzero(written > known[writer]):
            return False
        return bool(((written <= fenced[writer]) | self.by_unit[at]).all())

    def _view(self, warps: range) -> tuple[Array, Array]:
        """Of each warp of their block, up to when all of these warps know its writes, and up to when its writes are
        fenced for them.
        """
        clock, key = self.clock[warps.start : warps.stop], (warps.start, warps.stop)
        total = int(clock.sum())  # clocks only grow
        if self._views.get(key, (-1,))[0] != total:
            self._views[key] = total, clock.min(0), np.minimum.reduce([self.fenced(warp) for warp in warps])
        return self._views[key][1:]

    def check_fenced(self, first: Array, width: int, warp: int, where: int, what: str) -> bool:
        """Whether ordinary writes, which are reported, lack a proxy fence before the asynchronous units of a warp."""
        at = self._granules(first, width)
        bare = (self.written[at] > self.fenced(warp)[self.writer[at]]) & ~self.by_unit[at]
        bare &= (self.state[at] == WRITTEN) | (self.state[at] == MBARRIER)
        if bare.any():
            self.reports.add(f"{what} without a fence.proxy.async since", where, int(bare.any(1).sum()))
        return bool(bare.any())

    def set_live(self, first: Array, live: bool) -> None:
        """These are mbarriers from now on, or no longer."""
        at = self._granules(first, 8)
        self._touch(first)
        self.state[at] = MBARRIER if live else np.where(self.state[at] == MBARRIER, WRITTEN, self.state[at])

    def fence_barriers(self, warp: int) -> None:
        """fence.mbarrier_init: asynchronous units see the mbarriers that a warp has initialised."""
        rows = slice(
            warp // self.warps * self.pitch // self.granule, (warp // self.warps + 1) * self.pitch // self.granule
        )
        self.by_unit[rows] |= (self.state[rows] == MBARRIER) & (self.writer[rows] == self.own[warp])

    def fence_units(self, warp: int) -> None:
        """fence.proxy.async: asynchronous units see all writes that the warp knows of, where the fence is known."""
        times, known = self.fences[warp]
        known.append(self.clock[warp].copy())
        times.append(self.tick(warp))

    def fenced(self, warp: int) -> Array:
        """The time of each warp of the block up to which its writes lie before a fence that ``warp`` knows of.

        PTX ISA, "Memory Consistency Model": a proxy fence orders what precedes it in causality order with what follows
        it in that order, by whichever threads.
        """
        found, first = np.zeros(self.warps, np.int32), warp // self.warps * self.warps
        for other in range(self.warps):
            times, known = self.fences[first + other]
            if latest := bisect.bisect_right(times, int(self.clock[warp, other])):
                np.maximum(found, known[latest - 1], out=found)
        return found

    def hold(self, lines: Array, by: int) -> None:
        """An operation under way reads these until further notice (1), or has read them (-1)."""
        self.held[lines // _LINE] += by

    def land(self, first: Array, width: int, warp: Array) -> None:
        """A copy's data is there for the warps that waited."""
        own = self.own[warp]
        self._touch(first)
        self._mark(self._granules(first, width), WRITTEN, own[:, None], self.clock[warp, own][:, None])
