"""Hopper's matrix products by warp groups of 128 threads (wgmma), whose operands lie in shared memory.

A product takes effect when its group is waited for. Until then the registers of its result hold poison, and what it
reads may not be written. PTX ISA, "Asynchronous warpgroup level matrix instructions"; results are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


@dataclass(eq=False)
class Product:
    """One wgmma under way: D [64, n] = A [64, k] @ B [n, k]^T, plus C with ``adds``."""

    group: int
    batch: int  # commits of its group before it
    where: int
    n: int
    k: int
    kinds: list[str]
    registers: list[int]  # of D
    a: int | list[int]  # a matrix descriptor, or registers
    b: int
    turned_a: int  # whether its rows are contiguous, not its columns
    turned_b: int
    adds: bool
    c: Product | Array = None  # registers, or the product under way whose result it is
    given: list[Array] = field(default_factory=list)  # A's registers when it began
    held: list[Array] = field(default_factory=list)  # what it reads of shared memory
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
        self._tiles: dict[Any, Array] = {}

    def end_products(self) -> None:
        if self._products:
            self.reports.add("a wgmma that is never waited for", self._products[0].where, len(self._products))

    def _groups(self, guard: Guard) -> Array:
        return np.unique(self.threads_of(guard) // _GROUP)

    def _check_kept(self, product: Product) -> None:
        """Whether A's registers have kept their values: until its wait a product may read them."""
        threads = slice(product.group * _GROUP, (product.group + 1) * _GROUP)
        now = [self.R[r] for r in product.a] if isinstance(product.a, list) else []
        if any(a is not b and (a[threads] != b[threads]).any() for a, b in zip(now, product.given)):
            self.reports.add("registers with a wgmma's A are written before its wait", product.where)

    def _set_registers(self, product: Product, values: Any) -> None:
        """Write the result's registers, or poison, in order with other products."""
        threads = slice(product.group * _GROUP, (product.group + 1) * _GROUP)
        for row, r in enumerate(product.registers):
            self.R[r] = self.R[r].copy()
            self.R[r][threads] = values[row] if isinstance(values, np.ndarray) else values

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
        for group in self._groups(guard):
            first = int(group) * _GROUP
            threads = slice(first, first + _GROUP)
            product = Product(
                group=int(group),
                batch=int(self._batches[group]),
                where=where,
                n=n,
                k=k,
                kinds=kinds,
                registers=registers,
                a=a if isinstance(a, list) else int(a[first]),
                b=int(b[first]),
                turned_a=turned_a,
                turned_b=turned_b,
                adds=bool(adds[first]),
            )
            chain = [each for each in self._products if each.group == group and each.registers == registers]
            product.c = chain[-1] if chain else np.stack([self.R[r][threads] for r in registers])
            product.given = [self.R[r] for r in a] if isinstance(a, list) else []
            self._products.append(product)
            self._operands(product)
            for lines in product.held:
                self.shared.hold(lines, _LINE, 1)
            self._set_registers(product, _POISON)

    def wait_products(self, most: int, guard: Guard) -> None:
        """For all but the ``most`` latest batches of each warp group."""
        groups, left = set(self._groups(guard).tolist()), []
        for product in self._products:
            if product.group in groups and product.batch <= self._batches[product.group] - 1 - most:
                self._finish(product)
            else:
                left.append(product)
        self._products = left

    def wait_for_registers(self, registers: list[int], where: int) -> None:
        """Registers are touched: where products under way write them, ptxas waits for those and all before them."""
        wanted = set(registers)
        last = max((k for k, each in enumerate(self._products) if wanted & set(each.registers)), default=-1)
        if last >= 0:
            self.reports.add("note: a wgmma's registers are touched before its wait; ptxas waits there", where)
        for product in self._products[: last + 1]:
            self._finish(product)
        self._products = self._products[last + 1 :]

    def _finish(self, product: Product) -> None:
        held, product.held = product.held, []
        self._check_kept(product)
        a, b = self._operands(product)
        for lines in held:
            self.shared.hold(lines, _LINE, -1)
        # (column group, row half, pair) by (warp, row, column pair), as registers by threads.
        found = (a @ b.T).reshape(4, 2, 8, product.n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, _GROUP)
        if product.adds:
            c = product.c.result if isinstance(product.c, Product) else product.c
            found = np.ascontiguousarray(c).view(np.float32) + found
        product.result = np.ascontiguousarray(found.astype(np.float32)).view(u4)
        product.c = None
        under_way = any(each.result is None and each.group == product.group and each.registers == product.registers
                        for each in self._products)  # fmt: skip
        if not under_way:
            self._set_registers(product, product.result)

    def _operands(self, product: Product) -> tuple[Array, Array]:
        """A [64, k] and B [n, k] as fp32."""
        size, k = ITEMSIZE[product.kinds[0]], product.k
        if isinstance(product.a, list):
            threads = slice(product.group * _GROUP, (product.group + 1) * _GROUP)
            bits = np.stack([self.R[r][threads] for r in product.a]).reshape(k * size // 16, 2, 4, 8, 4)
            a = numbers(bits[..., None], product.kinds[0]).transpose(2, 1, 3, 0, 4, 5).reshape(64, k)
        else:
            a = numbers(self._tile(product, product.a, 64, size, product.turned_a), product.kinds[0])
        return a, numbers(self._tile(product, product.b, product.n, size, product.turned_b), product.kinds[1])

    def _tile(self, product: Product, descriptor: int, rows: int, size: int, turned: int) -> Array:
        """The elements [rows, k] that a matrix descriptor names; the read is noted."""
        start = (descriptor & 0x3FFF) << 4
        leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        mode = _SWIZZLES[descriptor >> 62]
        if descriptor >> 49 & 7 or mode == 0:
            raise NotImplementedError("a matrix descriptor with a base offset, or without a swizzle")
        key = (rows, product.k, size, turned, leading, stride, mode)
        if key not in self._tiles:
            width = 16 << mode  # bytes of a row of the swizzle's pattern
            row, column = np.arange(rows)[:, None], np.arange(product.k)[None, :]
            if turned:
                per = width // size
                offset = row // per * leading + row % per * size + column // 8 * stride + column % 8 * width
            else:
                offset = row // 8 * stride + row % 8 * width + column * size
            self._tiles[key] = offset
        block = product.group * _GROUP // self.threads
        address = swizzled(start + self._tiles[key], mode)
        lines = np.unique(address >> 4) << 4
        placed, good = self.shared.place(lines, _LINE, np.full(len(lines), block), product.where, "wgmma read")
        product.held.append(placed[good])
        for warp in range(product.group * 4, product.group * 4 + 4):
            self.shared.note_unit_read(placed[good], _LINE, np.full(int(good.sum()), warp), product.where)
        inside = (address >= self.shared.base) & (address + size <= self.shared.end)
        found = self.shared.views[size][np.where(inside, block * self.shared.pitch + address, 0) // size]
        return np.where(inside, found, found.dtype.type(0))
