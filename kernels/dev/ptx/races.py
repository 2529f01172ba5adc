"""Races in global memory: two accesses to a place, one of them a write, that nothing orders.

Within a block, barriers order the accesses of different warps, as in shared memory (``memory.Shared``). Between blocks
nothing does, unless the kernel has atomic or acquiring instructions: their order is not modelled, and only races within
a block are looked for then. A write of what is there already is no race, unless it was made of what was read there.

Each granule, the narrowest access of the kernel, has its last writer and the readers of the block that read it last.
Reads of memory that nothing has written so far are only listed: most arguments are only read, or only written.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .accesses import Accesses
from .memory import Allocation, Array, Reports, Shared

_PAGE = 12  # bits: tables grow by pages of 4096 granules, and have none for memory that is not touched
_MOST_LISTED = 64 << 20  # bytes of lists of reads


class _Some(NamedTuple):
    """Of some threads by one instruction."""

    address: Array  # int64
    width: int  # bytes
    block: Array  # of the grid, from 1
    warp: Array  # of its block
    time: Array  # of the warp's clock


class Tables:
    """Of one range of addresses, by granule."""

    def __init__(self, start: int, end: int, granule: int, warps: int) -> None:
        self.shift = granule.bit_length() - 1
        self.first = start >> self.shift >> _PAGE
        self.page = np.zeros((end - 1 >> self.shift >> _PAGE) - self.first + 1, np.int32)  # 0: none yet
        self.used, self.bytes = 1, self.page.nbytes
        self.writer = np.zeros(0, np.int32)  # block, from 1; 0: none
        self.warp = np.zeros(0, np.int16)  # the writer's
        self.written = np.zeros(0, np.int32)
        self.reader = np.zeros(0, np.int32)  # the block that read last
        self.shared = np.zeros(0, bool)  # whether another block read before
        self.read = np.zeros((0, warps), np.int32)  # when the reader's warps did

    def places(self, address: Array, width: int) -> Array:
        """[n, granules of an access]: aligned accesses do not cross pages."""
        granule = address >> self.shift
        page = (granule >> _PAGE) - self.first
        slot = self.page[page]
        if not slot.all():
            missing = np.unique(page[slot == 0])
            self.page[missing] = np.arange(self.used, self.used + len(missing))
            self.used += len(missing)
            self._grow()
            slot = self.page[page]
        first = (slot.astype(np.int64) << _PAGE) | (granule & ((1 << _PAGE) - 1))
        return first[:, None] + np.arange(max(1, width >> self.shift))

    def _grow(self) -> None:
        needed, have = self.used << _PAGE, len(self.writer)
        if needed > have:
            size = max(needed, 2 * have)
            for name in ("writer", "warp", "written", "reader", "shared", "read"):
                old = getattr(self, name)
                new = np.zeros((size, *old.shape[1:]), old.dtype)
                new[:have] = old
                setattr(self, name, new)
            self.bytes = self.page.nbytes + size * (15 + 4 * self.read.shape[1])

    def note_reads(self, at: Array, a: _Some) -> None:
        block, warp = (np.broadcast_to(each[:, None], at.shape) for each in (a.block, a.warp))
        before = self.reader[at]
        if (fresh := before != block).any():
            self.shared[at[fresh & (before > 0)]] = True
            self.read[at[fresh]] = 0
        self.reader[at] = block
        last = self.reader[at] == block  # of several blocks at once, one
        self.shared[at[~last]] = True
        self.read[at[last], warp[last]] = np.broadcast_to(a.time[:, None], at.shape)[last]


class GlobalRaces:
    """Of one launch, whose blocks run some at a time: ``begin`` says which."""

    def __init__(
        self, known: Accesses, warps: int, allocations: Sequence[Allocation], reports: Reports, memory: int = 1 << 30
    ) -> None:
        self.known, self.warps, self.reports, self.memory = known, warps, reports, memory
        self.unordered = known.strong | known.updates
        spans: list[list[int]] = []
        for each in sorted(allocations):
            if spans and each.address <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], each.address + each.size)
            elif each.size:
                spans.append([each.address, each.address + each.size])
        self.starts, self.ends = [start for start, _ in spans], [end for _, end in spans]
        self.tables: list[Tables | None] = [None] * len(spans)
        self.listed: list[list[_Some]] = [[] for _ in spans]
        self.bytes = 0  # of the lists
        self.off = False

    def begin(self, blocks: Array, shared: Shared) -> None:
        """These run now: their numbers in the grid, and the clocks of their warps."""
        self.blocks, self.clocks = blocks.astype(np.int32) + 1, shared
        if not self.known.between:  # blocks that have ended take no part in any race
            self.listed, self.bytes = [[] for _ in self.starts], 0

    def note_read(self, address: Array, width: int, warp: Array, where: int, time: Array = None) -> None:
        """Warps of the launch read; ``time``, if not now."""
        for k, chosen in [] if where in self.unordered else self._spans(address):
            tables = self.tables[k]
            a = self._some(address, width, warp, time, chosen)
            if tables is None:
                self.listed[k].append(a)
                self.bytes += 4 * a.address.nbytes
                if self.bytes > _MOST_LISTED:
                    self._write_down(where)
                continue
            at = tables.places(a.address, a.width)
            within, elsewhere = self._written(tables, at, a, warp if chosen is None else warp[chosen])
            self._report("read of what another warp wrote, without a barrier between", within, where)
            self._report("read of what another block wrote", elsewhere, where)
            tables.note_reads(at, a)
            self._limit(where)

    def note_write(self, address: Array, width: int, warp: Array, where: int, same: Array) -> None:
        """Warps of the launch write; ``same`` says which write what is there already."""
        for k, chosen in [] if where in self.known.strong else self._spans(address):
            tables = self.tables[k] or self._open(k)
            a = self._some(address, width, warp, None, chosen)
            at = tables.places(a.address, a.width)
            by, other = (warp, ~same) if chosen is None else (warp[chosen], ~same[chosen])
            if where in self.known.updating:
                other = np.ones(len(by), bool)
            if other.any():
                self._check_write(tables, at, a, by, other[:, None], where)
            tables.writer[at] = a.block[:, None]
            tables.warp[at] = a.warp[:, None]
            tables.written[at] = a.time[:, None]
            if where in self.known.updating:
                lost = (tables.warp[at] != a.warp[:, None]) | (tables.writer[at] != a.block[:, None])
                self._report("threads update one place at once", lost, where)
            self._limit(where)

    def _check_write(self, tables: Tables, at: Array, a: _Some, warp: Array, other: Array, where: int) -> None:
        block = a.block[:, None]
        within, elsewhere = self._written(tables, at, a, warp)
        self._report("write over what another warp wrote, without a barrier between", within & other, where)
        self._report("write over what another block wrote", elsewhere & other, where)
        reader = tables.reader[at]
        if not reader.any():
            return
        if (own := (reader == block) & other).any():
            late = tables.read[at] > self.clocks.clock[warp][:, None, :]
            late &= np.arange(self.warps) != a.warp[:, None, None]
            self._report("write over what another warp read, without a barrier between", late.any(2) & own, where)
        if self.known.between:
            foreign = ((reader > 0) & (reader != block)) | tables.shared[at]
            self._report("write over what another block read", foreign & other, where)

    def _written(self, tables: Tables, at: Array, a: _Some, warp: Array) -> tuple[Array, Array]:
        """Whether a granule's last writer is (a warp of the same block that is not known, another block)."""
        writer = tables.writer[at]
        if not writer.any():
            return np.zeros(at.shape, bool), np.zeros(at.shape, bool)
        own, by = writer == a.block[:, None], tables.warp[at].astype(np.int64)
        known = np.take_along_axis(self.clocks.clock[warp], np.where(own, by, 0), 1)
        within = own & (by != a.warp[:, None]) & (tables.written[at] > known)
        return within, (writer > 0) & ~own if self.known.between else np.zeros(at.shape, bool)

    def _report(self, what: str, found: Array, where: int) -> None:
        if found.any():
            self.reports.add(f"race in global memory: {what}", where, int(found.any(1).sum()))

    def _some(self, address: Array, width: int, warp: Array, time: Array, chosen: Array) -> _Some:
        if chosen is not None:
            address, warp = address[chosen], warp[chosen]
            time = None if time is None else time[chosen]
        own = self.clocks.own[warp]
        time = self.clocks.clock[warp, own] if time is None else time
        return _Some(address.astype(np.int64), width, self.blocks[warp // self.warps], own, time)

    def _spans(self, address: Array) -> list[tuple[int, Array]]:
        """(a range of addresses, which of the accesses lie there; None: all)."""
        if not len(address) or self.off:
            return []
        k = bisect.bisect_right(self.starts, int(address.min())) - 1
        if int(address.max()) < self.ends[k]:
            return [(k, None)]
        index = np.searchsorted(np.array(self.starts, np.uint64), address, "right") - 1
        return [(int(each), np.flatnonzero(index == each)) for each in np.unique(index)]

    def _open(self, k: int) -> Tables:
        """Tables of a range, with the reads so far."""
        tables = self.tables[k] = Tables(self.starts[k], self.ends[k], self.known.granule, self.warps)
        for a in self.listed[k]:
            tables.note_reads(tables.places(a.address, a.width), a)
            self.bytes -= 4 * a.address.nbytes
        self.listed[k] = []
        return tables

    def _write_down(self, where: int) -> None:
        for k, listed in enumerate(self.listed):
            if listed:
                self._open(k)
        self._limit(where)

    def _limit(self, where: int) -> None:
        """Look for no more races where the tables need too much memory."""
        if sum(each.bytes for each in self.tables if each is not None) > self.memory:
            name = f"note: no races in global memory are looked for from here on, in {self.memory / 1e9:.1f} GB"
            self.reports.add(name, where)
            self.off, self.tables, self.listed = True, [None] * len(self.starts), [[] for _ in self.starts]
