"""Hopper's mbarriers and tensor copies (TMA), with descriptors that the kernel makes.

A copy into shared memory lands when a thread waits for its mbarrier, a copy out of it when its bulk group is waited for
or the launch ends: each as late as it may. From issue to landing the target holds poison. PTX ISA, "Asynchronous
operations", "Tensors" and "mbarrier"; a descriptor's 128 bytes are opaque there, and have a layout of our own here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import WORDS, Array, Guard

if TYPE_CHECKING:
    from .memory import Global, Reports, Shared

u4, u8 = np.uint32, np.uint64
_DESCRIPTOR = 128  # bytes
_LINE = 16  # bytes, of which copies are multiples
_ATTEMPTS = 4

# Where a descriptor keeps its fields here: (first byte, bytes of each).
_FIELDS = {
    "global_address": (0, 8),
    "rank": (8, 4),  # less 1
    "elemtype": (12, 4),
    "interleave_layout": (16, 4),
    "swizzle_mode": (20, 4),
    "fill_mode": (24, 4),
    "box_dim": (28, 4),
    "global_dim": (48, 4),
    "element_stride": (68, 4),
    "global_stride": (88, 8),
}
# Bytes of an element by .elemtype: u8, u16, u32, s32, u64, s64, f16, f32, f32.ftz, f64, bf16, tf32, tf32.ftz.
_ELEMENTS = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)


@dataclass
class Tensor:
    """What a descriptor says, innermost dimension first."""

    address: int
    itemsize: int
    swizzle: int  # 0: none, then of 32, 64 and 128 bytes
    box: list[int]
    sizes: list[int]
    strides: list[int]  # bytes, from the second dimension on


class Barrier:
    """An mbarrier: it counts arrivals and bytes of copies, and then a phase ends."""

    def __init__(self, count: int, warps: int) -> None:
        self.count = self.left = count
        self.bytes = self.phase = 0
        self.clock = np.zeros(warps, np.int32)  # what those who arrived knew
        self.released = np.zeros(warps, np.int32)  # the same of the phase that ended last
        self.copies: list[tuple[int, Callable[[], None]]] = []  # (where, what lands when a thread waits)

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count
            self.released = self.clock.copy()

    def land(self) -> None:
        """Land all copies so far."""
        for _, land in self.copies:
            land()
        self.copies = []
        self.settle()


def swizzled(address: Array, mode: int) -> Array:
    """Where bytes of a tile lie in shared memory: bits 4 to 6 of their address xor those from bit 7 on."""
    return address if mode == 0 else address ^ (((address >> 7) & ((1 << mode) - 1)) << 4)


class TensorCopies:
    """Methods of ``machine.Launch``."""

    n: int
    warps: int
    block: Array
    warp: Array
    stalled: Array
    reports: Reports
    globals: Global
    shared: Shared
    threads_of: Callable[[Guard], Array]
    shared_places: Callable[..., tuple[Array, Array]]
    parameter_bytes: Callable[[int, int], bytes | None]

    def start_copies(self) -> None:
        self._barriers: dict[tuple[int, int], Barrier] = {}
        self._stores: list[tuple[int, int, Callable[[], None], int]] = []  # (thread, its bulk group, what lands, where)
        self._bulk = np.zeros(self.n, np.int64)  # bulk groups that each thread has committed
        self._boxes: dict[Any, Any] = {}
        self._tried: set[Any] = set()
        self._given_up = 0  # times since the last arrival or copy
        self._noted = False  # that an mbarrier was not fenced
        # Of each descriptor in global memory: (warp, its time) of its publication, then of the fences that acquired it.
        self._published: dict[int, list[tuple[int, int]]] = {}
        self._unmet: list[tuple[Array, Array, int]] = []  # stores (threads, where, bytes) since lanes last met

    def end_copies(self) -> None:
        for _, _, land, _ in self._stores:
            land()
        for _, _, _, where in self._stores:
            self.reports.add("a tensor copy that is never waited for", where)
        for barrier in self._barriers.values():
            for where, _ in barrier.copies:
                self.reports.add("a tensor copy into shared memory that is never waited for", where)

    # ---------------------------------------------------------------------------------------------------- descriptors

    def set_descriptor(self, address: Array, field: str, ordinal: int, values: Array, guard: Guard, where: int) -> None:
        """tensormap.replace, of a descriptor in shared memory."""
        offset, size = _FIELDS[field]
        offset += size * ordinal
        chosen, first = self.shared_places(address + u4(offset), size, guard, where, "write")
        if (address[chosen] % u4(_DESCRIPTOR) != 0).any():
            self.reports.add("a descriptor that is not aligned to 128 bytes", where)
        self.shared.note_write(first, size, self.warp[chosen], where)
        self._check_lanes(chosen, first, where)
        for half in range(size // 4):
            self.shared.views[4][first // 4 + half] = (values[chosen].astype(u8) >> u8(32 * half)).astype(u4)

    def publish_descriptor(self, to: Array, source: Array, guard: Guard, where: int) -> None:
        """tensormap.cp_fenceproxy: to global memory, by a whole warp."""
        chosen = self.threads_of(guard)
        for t in chosen[np.unique(self.warp[chosen], return_index=True)[1]]:
            placed, good = self.shared.place(source[t : t + 1], _DESCRIPTOR, self.block[t : t + 1], where, "read")
            if not good.all():
                continue
            at = int(placed[0])
            self.shared.note_read(np.array([at]), _DESCRIPTOR, self.warp[t : t + 1], where)
            if self.globals.check(to[t : t + 1], _DESCRIPTOR, where, "write of a descriptor").all():
                start = int(to[t]) - self.globals.base
                self.globals.bytes[start : start + _DESCRIPTOR] = self.shared.bytes[at : at + _DESCRIPTOR]
                self._published[int(to[t])] = [(int(self.warp[t]), self.shared.tick(self.warp[t]))]

    def acquire_descriptor(self, address: Array, guard: Guard) -> None:
        """fence.proxy.tensormap::generic.acquire, which counts where its warp knows of the publication."""
        chosen = self.threads_of(guard)
        for t in chosen[np.unique(self.warp[chosen], return_index=True)[1]]:
            events = self._published.get(int(address[t]), [])
            if events and self._knows(int(self.warp[t]), events[0]):
                events.append((int(self.warp[t]), self.shared.tick(self.warp[t])))

    def _knows(self, warp: int, event: tuple[int, int]) -> bool:
        by, time = event
        same_block = warp // self.warps == by // self.warps
        return same_block and (warp == by or bool(self.shared.clock[warp, self.shared.own[by]] >= time))

    def lanes_meet(self, guard: Guard) -> None:
        """bar.warp.sync or bar.sync: what these warps' lanes stored before is ordered before what they do next."""
        met = np.zeros(self.n // 32, bool)
        met[self.warp[self.threads_of(guard)]] = True
        left = [(threads, first, size, ~met[self.warp[threads]]) for threads, first, size in self._unmet]
        self._unmet = [(threads[some], first[some], size) for threads, first, size, some in left if some.any()]

    def _check_lanes(self, chosen: Array, first: Array, where: int) -> None:
        """Report where other lanes of the warp stored into a descriptor, and the lanes have not met since."""
        for t, start in zip(chosen, first // _DESCRIPTOR * _DESCRIPTOR):
            for threads, at, size in self._unmet:
                near = (self.warp[threads] == self.warp[t]) & (threads != t)
                if (near & (at + size > start) & (at < start + _DESCRIPTOR)).any():
                    name = (
                        "a descriptor's field is written after stores of other lanes, without a bar.warp.sync between"
                    )
                    self.reports.add(name, where)
                    return

    def _tensor(self, address: int, warp: int, where: int) -> Tensor | None:
        raw = self.parameter_bytes(address, _DESCRIPTOR)  # of the host's descriptors
        if raw is None:
            if not self.globals.check(np.array([address], u8), _DESCRIPTOR, where, "read of a descriptor").all():
                return None
            if address not in self._published:
                self.reports.add("a tensor copy by what is no descriptor", where)
                return None
            if not any(self._knows(warp, event) for event in self._published[address][1:]):
                name = "a tensor copy by a descriptor that no fence.proxy.tensormap before it has acquired"
                self.reports.add(name, where)
            start = address - self.globals.base
            raw = self.globals.bytes[start : start + _DESCRIPTOR].tobytes()

        def field(name: str, ordinal: int = 0) -> int:
            offset, size = _FIELDS[name]
            return int.from_bytes(raw[offset + size * ordinal : offset + size * (ordinal + 1)], "little")

        dims = range(min(field("rank"), 5) + 1)
        box, steps = [field("box_dim", k) for k in dims[:5]], [field("element_stride", k) for k in dims[:5]]
        most = {"rank": 4, "elemtype": len(_ELEMENTS) - 1, "interleave_layout": 2, "swizzle_mode": 3, "fill_mode": 1}
        good = all(field(name) <= limit for name, limit in most.items()) and all(1 <= step <= 8 for step in steps)
        room = self.shared.end - self.shared.base
        good = good and all(1 <= size <= 256 for size in box) and math.prod(box) * _ELEMENTS[field("elemtype")] <= room
        if not good or box[0] * _ELEMENTS[field("elemtype")] % _LINE:
            self.reports.add("a tensor copy by what is no descriptor", where)
            return None
        if field("interleave_layout") or field("fill_mode") or steps != [1] * len(dims):
            raise NotImplementedError("a tensor copy with interleaving, NaN as filling or element strides")
        found = Tensor(
            address=field("global_address"),
            itemsize=_ELEMENTS[field("elemtype")],
            swizzle=field("swizzle_mode"),
            box=box,
            sizes=[field("global_dim", k) for k in dims],
            strides=[field("global_stride", k) for k in dims[:-1]],
        )
        if found.address % _LINE or any(stride % _LINE for stride in found.strides):
            self.reports.add("a descriptor whose address or pitch is no multiple of 16 bytes", where)
        return found

    def _box(self, tensor: Tensor, corner: list[int]) -> tuple[Array, Array, Array]:
        """(addresses, which are in the tensor, offsets in the tile) of the elements of a box."""
        key = (tuple(tensor.box), tensor.itemsize)
        if key not in self._boxes:
            grids = np.meshgrid(*map(np.arange, reversed(tensor.box)), indexing="ij")
            self._boxes[key] = [grid.reshape(-1).astype(np.int64) for grid in reversed(grids)]
        places = [first + each for first, each in zip(corner, self._boxes[key])]
        inside = np.logical_and.reduce([(at >= 0) & (at < size) for at, size in zip(places, tensor.sizes)])
        address = tensor.address + sum(at * step for at, step in zip(places, [tensor.itemsize, *tensor.strides]))
        return address.astype(u8), inside, np.arange(len(inside), dtype=np.int64) * tensor.itemsize

    # ------------------------------------------------------------------------------------------------------ mbarriers

    def give_up(self) -> bool:
        """Where no thread can go on: let those that try an mbarrier fail, as after its limit of time, a few times."""
        if not self.stalled.any() or self._given_up == _ATTEMPTS:
            return False
        self._given_up += 1
        self.stalled[:] = False
        return True

    def _advance(self) -> None:
        """Something happened that threads may wait for."""
        self._given_up = 0
        self.stalled[:] = False

    def _barrier(self, t: int, address: int, where: int) -> Barrier | None:
        found = self._barriers.get((int(self.block[t]), address))
        if found is None:
            self.reports.add("an mbarrier that is not initialised", where)
        else:  # its initialisation must be known to this warp
            at = np.array([int(self.block[t]) * self.shared.pitch + address])
            self.shared.note_read(at, 8, self.warp[t : t + 1], where)
        return found

    def init_barrier(self, address: Array, counts: Array, guard: Guard, where: int) -> None:
        chosen, first = self.shared_places(address, 8, guard, where, "write")
        self.shared.set_live(first, False)
        self.shared.note_write(first, 8, self.warp[chosen], where)
        self.shared.set_live(first, True)
        for t in chosen:
            key = int(self.block[t]), int(address[t])
            if key in self._barriers:
                self.reports.add("an mbarrier that is initialised again without an mbarrier.inval before", where)
            self._barriers[key] = Barrier(int(counts[t]), self.warps)

    def end_barrier(self, address: Array, guard: Guard, where: int) -> None:
        chosen, first = self.shared_places(address, 8, guard, where, "write")
        self.shared.set_live(first, False)
        self.shared.note_write(first, 8, self.warp[chosen], where)
        for t in chosen:
            ended = self._barriers.pop((int(self.block[t]), int(address[t])), None)
            if ended is not None and ended.copies:
                self.reports.add("an mbarrier that ends with copies under way", where)

    def arrive(self, address: Array, expected: Array, guard: Guard, where: int) -> None:
        """An arrival that expects so many more bytes of copies."""
        for t in self.threads_of(guard):
            barrier = self._barrier(t, int(address[t]), where)
            if barrier is None:
                continue
            barrier.bytes += int(expected[t])
            barrier.left -= 1
            if barrier.left < 0:
                self.reports.add("more arrivals at an mbarrier than it counts", where)
            barrier.clock = np.maximum(barrier.clock, self.shared.clock[self.warp[t]])
            self.shared.tick(self.warp[t])
            barrier.settle()
        self._advance()

    def try_wait(self, address: Array, parity: Array, guard: Guard, where: int) -> Array:
        """Whether the phase of ``parity`` has ended. The first try fails, as it may: a loop is needed around it."""
        done = np.ones(self.n, bool)
        chosen = self.threads_of(guard)
        keys = (self.block[chosen].astype(np.int64) << 32) | address[chosen].astype(np.int64)
        for key in np.unique(keys):
            threads = chosen[keys == key]
            barrier = self._barrier(threads[0], int(key & 0xFFFFFFFF), where)
            if barrier is None:
                continue
            place = int(key >> 32) * self.shared.pitch + int(key & 0xFFFFFFFF)
            warps = np.unique(self.warp[threads])
            self.shared.note_read(np.full(len(warps), place), 8, warps, where)
            for phase in np.unique(parity[threads]):
                waiting = threads[parity[threads] == phase]
                done[waiting] = self._has_ended(barrier, int(phase), waiting, (int(key), int(waiting[0]), len(waiting)))
        return done

    def _has_ended(self, barrier: Barrier, parity: int, waiting: Array, key: tuple[int, ...]) -> bool:
        attempt = (*key, barrier.phase)
        if barrier.phase & 1 == parity and attempt not in self._tried:
            self._tried.add(attempt)
            return False
        if barrier.phase & 1 == parity:
            barrier.land()
        if barrier.phase & 1 == parity:
            self.stalled[waiting] = True
            return False
        for warp in np.unique(self.warp[waiting]):
            self.shared.clock[warp] = np.maximum(self.shared.clock[warp], barrier.released)
        return True

    # ---------------------------------------------------------------------------------------------------------- copies

    def load_tensor(
        self, to: Array, descriptor: Array, corner: list[Array], mbarrier: Array, guard: Guard, where: int
    ) -> None:
        for t in self.threads_of(guard):
            tensor = self._tensor(int(descriptor[t]), int(self.warp[t]), where)
            if tensor is None:
                continue
            address, inside, offsets = self._box(tensor, [int(each[t]) for each in corner])
            inside[inside] = self.globals.check(address[inside], tensor.itemsize, where, "tensor copy's read")
            block, warp, start = int(self.block[t]), int(self.warp[t]), int(to[t])
            if start % (128 << tensor.swizzle):
                name = "a tensor copy's tile that is not aligned to 128 bytes, or to its swizzle"
                self.reports.add(name, where, 1, str(start))
            total = len(offsets) * tensor.itemsize
            ends = np.array([start, start + total - _LINE])
            placed, good = self.shared.place(ends, _LINE, block, where, "tensor copy")
            barrier = self._barrier(t, int(mbarrier[t]), where)
            if barrier is None or not good.all():
                continue
            lines = placed[0] + np.arange(0, total, _LINE)
            if not (free := self.shared.is_free(lines, warp)):
                self.shared.check_fenced(lines, _LINE, warp, where, "an asynchronous unit writes over what was written")
            at = np.array([block * self.shared.pitch + int(mbarrier[t])])
            if not self._noted:  # once, as Triton leaves that fence out
                name = "note: an asynchronous unit uses an mbarrier, initialised"
                self._noted = self.shared.check_fenced(at, 8, warp, where, name)
            self.shared.note_unit_write(lines, warp, where, free)
            self.shared.bytes[placed[0] : placed[0] + total] = 0xFF
            tile = block * self.shared.pitch + swizzled(start + offsets, tensor.swizzle)
            source = np.where(inside, self.globals.index(address, tensor.itemsize), 0)
            tick = self.shared.tick(warp)
            land = partial(self._land_tile, barrier, tensor.itemsize, source, inside, tile, lines, warp, tick, where)
            barrier.copies.append((where, land))
        self._advance()

    def _land_tile(
        self,
        barrier: Barrier,
        size: int,
        source: Array,
        inside: Array,
        tile: Array,
        lines: Array,
        warp: int,
        tick: int,
        where: int,
    ) -> None:
        found = np.zeros(len(inside), WORDS[size])
        found[inside] = self.globals.views[size][source[inside]]
        self.shared.views[size][tile // size] = found
        self.shared.land_unit(lines, warp, tick)
        barrier.bytes -= _LINE * len(lines)
        own = self.shared.own[warp]
        barrier.clock[own] = max(barrier.clock[own], tick)

    def store_tensor(self, descriptor: Array, corner: list[Array], source: Array, guard: Guard, where: int) -> None:
        for t in self.threads_of(guard):
            tensor = self._tensor(int(descriptor[t]), int(self.warp[t]), where)
            if tensor is None:
                continue
            size = tensor.itemsize
            address, inside, offsets = self._box(tensor, [int(each[t]) for each in corner])
            inside[inside] = self.globals.check(address[inside], size, where, "tensor copy's write")
            block, warp, start = int(self.block[t]), int(self.warp[t]), int(source[t])
            total = len(offsets) * size
            ends = np.array([start, start + total - _LINE])
            placed, good = self.shared.place(ends, _LINE, block, where, "tensor copy's read")
            if not good.all():
                continue
            lines = placed[0] + np.arange(0, total, _LINE)
            self.shared.note_unit_read(lines, range(warp, warp + 1), where)
            self.shared.hold(lines, 1)
            tile = (block * self.shared.pitch + swizzled(start + offsets, tensor.swizzle))[inside]
            into = self.globals.index(address[inside], size)

            land = partial(self._store_tile, size, tile, into, lines, warp, where)
            self._stores.append((int(t), int(self._bulk[t]), land, where))

    def _store_tile(self, size: int, tile: Array, into: Array, lines: Array, warp: int, where: int) -> None:
        self.shared.note_unit_read(lines, range(warp, warp + 1), where)
        self.shared.hold(lines, -1)
        self.globals.views[size][into] = self.shared.views[size][tile // size]

    def commit_stores(self, guard: Guard) -> None:
        self._bulk = self._bulk + (1 if guard is None else guard.astype(np.int64))

    def wait_stores(self, most: int, guard: Guard) -> None:
        """For all but the ``most`` latest bulk groups of each thread. With .read, too, they end there."""
        left = []
        for thread, group, land, where in self._stores:
            if (guard is None or guard[thread]) and group <= self._bulk[thread] - 1 - most:
                land()
            else:
                left.append((thread, group, land, where))
        self._stores = left

    def fence_barriers(self, guard: Guard) -> None:
        for warp in np.unique(self.warp[self.threads_of(guard)]):
            self.shared.fence_barriers(int(warp))

    def fence_proxy(self, guard: Guard) -> None:
        for warp in np.unique(self.warp[self.threads_of(guard)]):
            self.shared.fence_units(int(warp))
