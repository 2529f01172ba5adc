"""Hopper's matrix products by warp groups of 128 threads (wgmma), whose operands lie in shared memory.

A product takes effect when its group is waited for. Until then the registers of its result hold poison, and what it
reads may not be written. PTX ISA, "Asynchronous warpgroup level matrix instructions"; results are summed in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .lanes import ITEMSIZE, numbers
from .memory import Array, Guard
from .tensor_copies import swizzled

if TYPE_CHECKING:
    from .memory import Reports, Shared
    from .program import Program

u4 = np.uint32
_GROUP = 128  # threads
_LINE = 16  # bytes
_POISON = u4(0xFFF0BAAD)
_SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}  # of a matrix descriptor: none, 128, 64 and 32 bytes -> as in ``swizzled``


class Tile(NamedTuple):
    """Where the elements of a matrix lie in a block's shared memory."""

    elements: Array  # [rows, k], in a view of their size
    lines: Array  # that hold them
    end: int  # of the last line


@dataclass(eq=False)
class Product:
    """One wgmma under way: D [64, n] = A [64, k] @ B [n, k]^T, plus C with ``adds``."""

    group: int
    batch: int  # commits of its group before it
    where: int
    n: int
    k: int
    kinds: list[str]
    registers: tuple[int, ...]  # of D
    a: list[int]  # registers; none where it lies in shared memory
    tiles: list[Tile]  # of A, unless it is in registers, and B
    adds: bool
    c: Product | Array = None  # registers, or the product under way whose result it is
    given: list[Array] = field(default_factory=list)  # A's registers when it began
    held: Array = None  # the lines that it reads of shared memory
    checked: int | None = None  # what ``note_unit_read`` returned
    result: Array = None


class WarpGroups:
    """Methods of ``machine.Launch``."""

    n: int
    threads: int
    R: list[Array]
    program: Program
    reports: Reports
    shared: Shared
    threads_of: Callable[[Guard], Array]
    check_whole: Callable[..., None]

    def start_products(self) -> None:
        self._products: list[Product] = []
        self._batches = np.zeros(max(1, self.n // _GROUP), np.int64)  # that each warp group has committed
        self._last: dict[tuple[int, tuple[int, ...]], Product] = {}  # under way, by group and D

    def end_products(self) -> None:
        if self._products:
            self.reports.add("a wgmma that is never waited for", self._products[0].where, len(self._products))

    def _groups(self, guard: Guard) -> Array:
        return np.unique(self.threads_of(guard) // _GROUP)

    def _check_kept(self, product: Product) -> None:
        """Whether A's registers have kept their values: until its wait a product may read them."""
        threads = slice(product.group * _GROUP, (product.group + 1) * _GROUP)
        now = [self.R[r] for r in product.a]
        if any(a is not b and (a[threads] != b[threads]).any() for a, b in zip(now, product.given)):
            self.reports.add("registers with a wgmma's A are written before its wait", product.where)

    def _set_registers(self, products: Iterable[Product]) -> None:
        """Write the registers of results, or poison where there are none yet."""
        written: dict[tuple[int, ...], list[Product]] = {}
        for product in products:
            written.setdefault(product.registers, []).append(product)
        for registers, some in written.items():
            for row, r in enumerate(registers):
                self.R[r] = self.R[r].copy()
                for product in some:
                    threads = slice(product.group * _GROUP, (product.group + 1) * _GROUP)
                    self.R[r][threads] = _POISON if product.result is None else product.result[row]

    def commit_products(self, guard: Guard) -> None:
        self._batches[self._groups(guard)] += 1

    def multiply(
        self,
        n: int,
        k: int,
        kinds: list[str],
        registers: list[int],
        a: Any,
        b: Array,
        adds: Any,
        turned_a: int,
        turned_b: int,
        guard: Guard,
        where: int,
    ) -> None:
        """Begin a product in each warp group that takes part."""
        self.check_whole(guard, _GROUP, "wgmma", where)
        if where in self.program.unfenced:
            name = (
                "a wgmma is the first, or its registers are touched, without a wgmma.fence before; ptxas may inject it"
            )
            self.reports.add(name, where)
        size, begun = ITEMSIZE[kinds[0]], []
        for group in self._groups(guard).tolist():
            first = group * _GROUP
            threads = slice(first, first + _GROUP)
            in_registers = isinstance(a, list)
            tiles = [] if in_registers else [_tile(int(a[first]), 64, k, size, turned_a)]
            product = Product(
                group=group,
                batch=int(self._batches[group]),
                where=where,
                n=n,
                k=k,
                kinds=kinds,
                registers=tuple(registers),
                a=a if in_registers else [],
                tiles=[*tiles, _tile(int(b[first]), n, k, size, turned_b)],
                adds=bool(adds[first]),
            )
            before = self._last.get((group, product.registers))
            if before is None:  # else they are poison already
                begun.append(product)
            product.c = before or np.stack([self.R[r][threads] for r in registers])
            product.given = [self.R[r] for r in product.a]
            self._products.append(product)
            self._last[group, product.registers] = product
            product.held = self._read(product)
            self.shared.hold(product.held, 1)
        self._set_registers(begun)

    def wait_products(self, most: int, guard: Guard) -> None:
        """For all but the ``most`` latest batches of each warp group."""
        groups = set(self._groups(guard).tolist())
        due: list[Product] = []
        left: list[Product] = []
        for product in self._products:
            waited = product.group in groups and product.batch <= self._batches[product.group] - 1 - most
            (due if waited else left).append(product)
        self._products = left
        self._finish(due)

    def wait_for_registers(self, registers: list[int], where: int) -> None:
        """Registers are touched: where products under way write them, ptxas waits for those and all before them."""
        wanted = set(registers)
        last = max((k for k, each in enumerate(self._products) if wanted & set(each.registers)), default=-1)
        if last >= 0:
            self.reports.add("note: a wgmma's registers are touched before its wait; ptxas waits there", where)
        due, self._products = self._products[: last + 1], self._products[last + 1 :]
        self._finish(due)

    def _finish(self, products: list[Product]) -> None:
        for product in products:
            self._check_kept(product)
            self._read(product)
            a, b = self._operands(product)
            self.shared.hold(product.held, -1)
            # (column group, row half, pair) by (warp, row, column pair), as registers by threads.
            found = (a @ b.T).reshape(4, 2, 8, product.n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, _GROUP)
            if product.adds:
                c = product.c.result if isinstance(product.c, Product) else product.c
                found = np.ascontiguousarray(c).view(np.float32) + found
            product.result = np.ascontiguousarray(found.astype(np.float32)).view(u4)
            product.c = None
        ended = [each for each in products if self._last[each.group, each.registers] is each]
        for product in ended:
            del self._last[product.group, product.registers]
        self._set_registers(ended)

    def _operands(self, product: Product) -> tuple[Array, Array]:
        """A [64, k] and B [n, k] as fp32."""
        size, k, block = ITEMSIZE[product.kinds[0]], product.k, product.group * _GROUP // self.threads
        pitch, found = self.shared.pitch // size, []
        memory = self.shared.views[size][block * pitch : (block + 1) * pitch]
        for tile in product.tiles:
            elements = tile.elements
            if not self._inside(tile):
                inside = (elements >= self.shared.base // size) & (elements < self.shared.end // size)
                found.append(np.where(inside, memory[np.where(inside, elements, 0)], memory.dtype.type(0)))
            else:
                found.append(memory[elements])
        b = numbers(found.pop(), product.kinds[1])
        if found:
            return numbers(found.pop(), product.kinds[0]), b
        threads = slice(product.group * _GROUP, (product.group + 1) * _GROUP)
        bits = np.stack([self.R[r][threads] for r in product.a]).reshape(k * size // 16, 2, 4, 8, 4)
        return numbers(bits[..., None], product.kinds[0]).transpose(2, 1, 3, 0, 4, 5).reshape(64, k), b

    def _inside(self, tile: Tile) -> bool:
        return bool(self.shared.base <= tile.lines[0] and tile.end <= self.shared.end)

    def _read(self, product: Product) -> Array:
        """Note that the product reads its tiles; returns their lines in shared memory."""
        block, parts = product.group * _GROUP // self.threads, []
        for tile in product.tiles:
            lines = block * self.shared.pitch + tile.lines
            if not self._inside(tile):
                there = np.full(len(lines), block)
                placed, good = self.shared.place(tile.lines, _LINE, there, product.where, "wgmma read")
                lines = placed[good]
            parts.append(lines)
        warps = range(product.group * 4, product.group * 4 + 4)
        lines = np.concatenate(parts)
        product.checked = self.shared.note_unit_read(lines, warps, product.where, product.checked, parts)
        return lines


@functools.lru_cache(maxsize=2048)
def _tile(descriptor: int, rows: int, k: int, size: int, turned: int) -> Tile:
    """The [rows, k] elements of ``size`` bytes that a matrix descriptor names; ``turned``: columns are contiguous."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    mode = _SWIZZLES[descriptor >> 62]
    if descriptor >> 49 & 7 or mode == 0:
        raise NotImplementedError("a matrix descriptor with a base offset, or without a swizzle")
    width = 16 << mode  # bytes of a row of the swizzle's pattern
    row, column = np.arange(rows)[:, None], np.arange(k)[None, :]
    if turned:
        per = width // size
        offset = row // per * leading + row % per * size + column // 8 * stride + column % 8 * width
    else:
        offset = row // 8 * stride + row % 8 * width + column * size
    address = swizzled(start + offset, mode)
    lines = np.unique(address >> 4) << 4
    return Tile(address // size, lines, int(lines[-1]) + _LINE)
