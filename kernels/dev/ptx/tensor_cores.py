"""Blackwell's matrix products by a single thread (tcgen05.mma), whose result lies in tensor memory.

Products of a thread take effect one after the other, when a thread waits for the mbarrier of a tcgen05.commit after
them. Until then what they read of shared memory may not be written, and their result may not be read. PTX ISA,
"TensorCore 5th Generation Matrix Multiply and accumulate Operations", "Instruction descriptor", "Shared memory
descriptor", "Data Path Layout Organization"; results are summed in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .lanes import ITEMSIZE, numbers
from .memory import UNDER_WAY, WRITTEN, Array, Guard
from .tensor_copies import swizzled
from .tensor_memory import COLUMNS, GROUP, LANES, TensorMemory
from .warp_groups import Tile

if TYPE_CHECKING:
    from .memory import Reports, Shared
    from .tensor_copies import Barrier

u4 = np.uint32
_LINE = 16  # bytes
_K = 32  # bytes of a row that a product multiplies
# Formats by .kind and by the instruction descriptor's number.
_FORMATS = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}
_SWIZZLES = {0: 0, 2: 3, 4: 2, 6: 1}  # of a matrix descriptor: none, 128, 64 and 32 bytes -> as in ``swizzled``


class Shape(NamedTuple):
    """What an instruction descriptor says."""

    m: int
    n: int
    formats: tuple[str, str]  # of A and B
    signs: tuple[int, int]
    along_mn: tuple[bool, bool]  # whether the elements of a column of A, of a row of B are contiguous


@dataclass(eq=False)
class Product:
    """One tcgen05.mma under way: D [m, n] = A [m, k] @ B [n, k]^T, plus D with ``adds``."""

    thread: int
    where: int
    shape: Shape
    key: int  # of D: the same for products of one shape with one place
    d: Array  # granules [1, k]
    cells: Array  # [m, n]
    tiles: list[Tile]  # of A, unless it is in tensor memory, and B
    a: Array  # cells of A [m, 8]
    adds: bool
    lines: Array  # that it reads of shared memory
    tick: int  # of its warp
    batch: int  # commits of its thread before it


class _Arrival(partial[None]):
    """What a tcgen05.commit does in the end."""


class TensorCores:
    """Methods of ``machine.Launch``: tcgen05.mma and .commit."""

    block: Array
    warp: Array
    early: bool
    reports: Reports
    shared: Shared
    tensor: TensorMemory
    threads_of: Callable[[Guard], Array]
    _barriers: dict[tuple[int, int], Barrier]
    _barrier: Callable[[int, int, int], Barrier | None]
    _advance: Callable[[], None]

    def start_tensor_cores(self) -> None:
        self._issued: dict[int, list[Product]] = {}  # under way, by thread
        self._commits: dict[int, int] = {}  # so far, by thread
        self._keys: dict[Any, int] = {}

    def end_tensor_cores(self) -> None:
        for barrier in self._barriers.values():
            late = [where for where, land in barrier.copies if isinstance(land, _Arrival)]
            for where in late:
                self.reports.add("a tcgen05.commit that is never waited for", where)
            barrier.copies = [each for each in barrier.copies if not isinstance(each[1], _Arrival)]
        for products in self._issued.values():
            for product in products:
                self.reports.add("a tcgen05.mma that is never waited for", product.where)

    def multiply_by_thread(
        self, kind: str, d: Array, a: Array, in_tensor: bool, b: Array, shape: Array, adds: Array, guard: Guard, n: int
    ) -> None:
        """tcgen05.mma by each thread. ``a``: matrix descriptors, or with ``in_tensor`` addresses of tensor memory."""
        for t in self.threads_of(guard).tolist():
            found = _instruction(kind, int(shape[t]))
            if isinstance(found, str):
                self.reports.add(f"a tcgen05.mma with {found}", n, 1, f"{int(shape[t]):#x}")
                continue
            self._begin_product(t, found, int(d[t]), int(a[t]), in_tensor, int(b[t]), bool(adds[t]), n)

    def _begin_product(
        self, t: int, shape: Shape, d: int, a: int, in_tensor: bool, b: int, adds: bool, where: int
    ) -> None:
        block, warp = int(self.block[t]), int(self.warp[t])
        size, sides = ITEMSIZE[shape.formats[0]], [(b, shape.n, shape.along_mn[1])]
        if not in_tensor:
            sides.insert(0, (a, shape.m, shape.along_mn[0]))
        for descriptor, _, _ in sides:
            if problem := _problem(descriptor):
                self.reports.add(f"a tcgen05.mma by a matrix descriptor {problem}", where, 1, f"{descriptor:#x}")
        tiles = [_tile(descriptor, rows, _K // size, size, along) for descriptor, rows, along in sides]
        granules, cells = self._in_tensor_memory(block, d, shape.m, shape.n, where)
        if granules is None:
            return
        key = self._keys.setdefault((t, d, shape.m, shape.n), len(self._keys) + 1)
        warps = np.array([warp])
        if adds and not ((self.tensor.state[granules] == UNDER_WAY) & (self.tensor.of[granules] == key)).all():
            self.tensor.note_read(granules, warps, where)
        left: Array = None
        if in_tensor:
            read, left = self._in_tensor_memory(block, a, shape.m, _K // 4, where)
            if read is None:
                return
            self.tensor.note_read(read, warps, where)
        self.tensor.note_write(granules, warps, where, key)
        lines = self._read_tiles(tiles, block, warp, where)
        self.shared.hold(lines, 1)
        tick = self.shared.tick(warp)
        batch = self._commits.get(t, 0)
        product = Product(t, where, shape, key, granules, cells, tiles, left, adds, lines, tick, batch)
        self._issued.setdefault(t, []).append(product)

    def _in_tensor_memory(self, block: int, address: int, rows: int, columns: int, where: int) -> tuple[Array, Array]:
        """(granules [1, k], cells [rows, columns]) of a matrix in tensor memory; (None, None) where it is not there.

        Row 0 is the address's lane. 128 rows are as many lanes; 64 are 16 of each 32 (layouts D and F).
        """
        lane, column = address >> 16, address & 0xFFFF
        if lane not in ((0,) if rows == LANES else (0, GROUP)):
            self.reports.add(
                "a tcgen05.mma on tensor memory from another lane than its shape allows", where, 1, str(lane)
            )
            return None, None
        lanes = lane + (np.arange(LANES) if rows == LANES else np.arange(rows) // GROUP * 32 + np.arange(rows) % GROUP)
        at, groups = (np.array([block]), lanes[None, ::GROUP])
        if not self.tensor.within(at, groups, np.array([column]), columns, where).all():
            return None, None
        cells = (block * LANES + lanes[:, None]) * COLUMNS + column + np.arange(columns)
        return self.tensor.granules(at, groups, np.array([column]), columns), cells

    def _read_tiles(self, tiles: list[Tile], block: int, warp: int, where: int) -> Array:
        """Note that a product reads its tiles; returns their lines in shared memory."""
        parts = []
        for tile in tiles:
            lines = block * self.shared.pitch + tile.lines
            if not (self.shared.base <= tile.lines[0] and tile.end <= self.shared.end):
                there = np.full(len(lines), block)
                placed, good = self.shared.place(tile.lines, _LINE, there, where, "tcgen05.mma read")
                lines = placed[good]
            parts.append(lines)
        lines = np.concatenate(parts)
        self.shared.note_unit_read(lines, range(warp, warp + 1), where, None, parts)
        return lines

    def commit_to_barrier(self, address: Array, guard: Guard, where: int) -> None:
        """tcgen05.commit: an arrival at an mbarrier, once all the thread's products so far have taken effect."""
        for t in self.threads_of(guard).tolist():
            barrier = self._barrier(t, int(address[t]), where)
            if barrier is None:
                continue
            warp = int(self.warp[t])
            known, issued = self.shared.clock[warp].copy(), self._issued.get(t)
            last = issued[-1] if issued else None
            self.shared.tick(warp)
            self._commits[t] = self._commits.get(t, 0) + 1
            barrier.copies.append((where, _Arrival(self._arrive_late, barrier, known, t, last, where)))
            if self.early:
                barrier.land()
        self._advance()

    def _arrive_late(self, barrier: Barrier, known: Array, thread: int, last: Product | None, where: int) -> None:
        if last is not None:
            self._finish_products(thread, last)
        barrier.left -= 1
        if barrier.left < 0:
            self.reports.add("more arrivals at an mbarrier than it counts", where)
        barrier.clock = np.maximum(barrier.clock, known)

    def _finish_products(self, thread: int, last: Product) -> None:
        """A thread's products up to this one take effect, if they have not."""
        products = self._issued[thread]
        if last not in products:
            return
        due, left = products[: products.index(last) + 1], products[products.index(last) + 1 :]
        self._issued[thread] = left
        while due:  # those of a batch that add to one result after each other, at once
            count, of = 1, (due[0].key, due[0].batch)
            while count < len(due) and (due[count].key, due[count].batch) == of and due[count].adds:
                count += 1
            self._multiply_products(due[:count])
            due = due[count:]
        open_ = {product.key for product in left}
        for product in products[: len(products) - len(left)]:
            self.shared.hold(product.lines, -1)
            if product.key not in open_:
                own = int(self.shared.own[self.warp[thread]])
                self.tensor.mark(product.d, WRITTEN, own, product.tick)

    def _multiply_products(self, products: list[Product]) -> None:
        sides = [self._product_operands(product) for product in products]
        a, b = (np.concatenate(side, 1) if len(side) > 1 else side[0] for side in zip(*sides))
        first, cells = products[0], self.tensor.cells
        found = (a @ b.T).astype(np.float32)
        if first.adds:
            found = cells[first.cells].view(np.float32) + found
        cells[first.cells] = found.view(u4)

    def _product_operands(self, product: Product) -> tuple[Array, Array]:
        """A [m, k] and B [n, k] as fp32."""
        shape, found = product.shape, []
        size = ITEMSIZE[shape.formats[0]]
        pitch, block = self.shared.pitch // size, int(self.block[product.thread])
        memory = self.shared.views[size][block * pitch : (block + 1) * pitch]
        for tile in product.tiles:
            if self.shared.base <= tile.lines[0] and tile.end <= self.shared.end:
                found.append(memory[tile.elements])
                continue
            inside = (tile.elements >= self.shared.base // size) & (tile.elements < self.shared.end // size)
            found.append(np.where(inside, memory[np.where(inside, tile.elements, 0)], memory.dtype.type(0)))
        if product.a is not None:
            found.insert(0, self.tensor.cells[product.a].view(memory.dtype))
        a, b = (numbers(each[..., None] if size == 4 else each, kind) for each, kind in zip(found, shape.formats))
        a, b = (each.reshape(rows, _K // size) for each, rows in ((a, shape.m), (b, shape.n)))
        return a * shape.signs[0] if shape.signs[0] < 0 else a, b * shape.signs[1] if shape.signs[1] < 0 else b


@functools.lru_cache(maxsize=256)
def _instruction(kind: str, bits: int) -> Shape | str:
    """What an instruction descriptor for a dense product of one block says, or what is wrong with it."""
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    if bits & 0b111 or bits >> 3 & 1 or bits >> 6 & 1 or bits >> 23 & 1 or bits >> 29:
        return "bits of the instruction descriptor set that are 0 for a dense product"
    formats = [_FORMATS[kind].get(bits >> place & 7) for place in (7, 10)]
    if bits >> 4 & 3 != 1:
        raise NotImplementedError(f"a tcgen05.mma whose result is not fp32: instruction descriptor {bits:#x}")
    if None in formats:
        return f"formats of A and B that .kind::{kind} does not have, or that are not known"
    if m not in (64, 128) or not n or n > 256 or n % (8 if m == 64 else 16):
        return f"the shape {m} x {n}: expected 64 rows and a multiple of 8, or 128 and of 16 columns, at most 256"
    signs = 1 - 2 * (bits >> 13 & 1), 1 - 2 * (bits >> 14 & 1)
    return Shape(m, n, (str(formats[0]), str(formats[1])), signs, (bool(bits >> 15 & 1), bool(bits >> 16 & 1)))


def _problem(descriptor: int) -> str:
    """What is wrong with a matrix descriptor in shared memory; "" for nothing."""
    if descriptor >> 46 & 7 != 1:
        return "whose bits 46 to 48 are not 0b001"
    return "with bits set that are 0" if descriptor >> 53 & 0xFF or descriptor >> 14 & 3 or descriptor >> 30 & 3 else ""


@functools.lru_cache(maxsize=4096)
def _tile(descriptor: int, rows: int, k: int, size: int, along_mn: bool) -> Tile:
    """The [rows, k] elements of ``size`` bytes that a matrix descriptor names; ``along_mn``: columns are contiguous.

    The canonical layouts of CUTLASS, include/cute/arch/mma_sm100_desc.hpp; without a swizzle the two strides of a
    matrix along M or N change their roles.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    mode = _SWIZZLES.get(descriptor >> 61)
    if descriptor >> 49 & 15 or mode is None:
        raise NotImplementedError(
            f"a matrix descriptor with a base offset, absolute strides or swizzles of 32 bytes: {descriptor:#x}"
        )
    width = 16 << mode  # bytes of a row of the swizzle's pattern
    row, column = np.arange(rows)[:, None], np.arange(k)[None, :]
    if along_mn:
        per = width // size
        beside, below = (leading, stride) if mode else (stride, leading)
        offset = row // per * beside + row % per * size + column // 8 * below + column % 8 * width
    else:
        byte = column * size
        offset = row // 8 * stride + row % 8 * width + byte // width * leading + byte % width
    address = swizzled(start + offset, mode)
    lines = np.unique(address >> 4) << 4
    return Tile(address // size, lines, int(lines[-1]) + _LINE)
