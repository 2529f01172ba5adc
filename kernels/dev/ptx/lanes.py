"""What the 32 lanes of a warp do together: shuffles, reductions, and matrices by ldmatrix, stmatrix and mma.

The fragments are those of the PTX ISA, "Matrix multiply-accumulate operation using mma instruction" and "Warp-level
matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import arithmetic
from .memory import Array, Guard

if TYPE_CHECKING:
    from .memory import Reports, Shared

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
ITEMSIZE = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
_REDUCE = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or}
_LANE = np.arange(32)


class Lanes:
    """Methods of ``machine.Launch``."""

    n: int
    warps: int
    lane: Array
    warp: Array
    reports: Reports
    shared: Shared

    def shuffle(self, mode: str, value: Array, b: Array, clamp: Array, guard: Guard, where: int) -> tuple[Array, Array]:
        """(values, whether the lane they come from is in range)."""
        lane, b = self.lane.astype(np.int64), (b & u4(31)).astype(np.int64)
        segment, clamp = ((clamp >> u4(8)) & u4(31)).astype(np.int64), (clamp & u4(31)).astype(np.int64)
        most, least = (lane & segment) | (clamp & ~segment), lane & segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment)}[mode]
        good = source >= most if mode == "up" else source <= most
        source = np.where(good, source, lane) + (np.arange(self.n) - lane)
        if guard is not None and not guard[source][guard].all():
            name = "shuffle from a lane that does not take part"
            self.reports.add(name, where, int((~guard[source] & guard).sum()))
        return value[source], good

    def check_whole(self, guard: Guard, threads: int, what: str, where: int) -> None:
        """Report where a part of a warp, or of a warp group, runs what all of it must."""
        if guard is not None:
            active = guard.reshape(-1, threads)
            parts = active.any(1) & ~active.all(1)
            if parts.any():
                self.reports.add(f"{what} by a part of its threads", where, int(parts.sum()))

    def reduce(self, operation: str, value: Array, whole: bool, guard: Guard, where: int) -> Array:
        """redux.sync of integers, over the lanes that take part; ``whole``: its mask names all."""
        if whole:
            self.check_whole(guard, 32, "redux", where)
        grouped = value.reshape(-1, 32)
        function = np.bitwise_xor if operation == "xor" else _REDUCE[operation]
        if guard is not None:
            info = np.iinfo(value.dtype)
            neutral = {"max": info.min, "min": info.max, "and": info.max if info.min == 0 else -1}.get(operation, 0)
            grouped = np.where(guard.reshape(-1, 32), grouped, value.dtype.type(neutral))
        return np.repeat(function.reduce(grouped, 1, dtype=value.dtype), 32)

    def reduce_numbers(
        self, operation: str, value: Array, guard: Guard, where: int, *, nan: bool, magnitudes: bool, whole: bool
    ) -> Array:
        """redux.sync of fp32, least or largest. NaN counts with ``nan`` alone, or where there is nothing else."""
        if whole:
            self.check_whole(guard, 32, "redux", where)
        value = np.abs(value) if magnitudes else value
        found = np.full(self.n // 32, arithmetic._NAN if not nan else np.inf * (1 if operation == "min" else -1), "f4")
        active = np.ones(self.n, bool) if guard is None else guard
        for lanes, there in zip(value.reshape(-1, 32).T, active.reshape(-1, 32).T):
            least = arithmetic.minimum(found, lanes, nan=nan, largest=operation == "max")
            found = np.where(there, least, found)
        return np.repeat(found, 32)

    def elect(self, guard: Guard) -> tuple[Array, Array]:
        """(the lowest lane of each warp that takes part, whether a thread is that)."""
        active = np.ones((self.n // 32, 32), bool) if guard is None else guard.reshape(-1, 32)
        found = np.zeros_like(active)
        rows, first = np.flatnonzero(active.any(1)), active.argmax(1)
        found[rows, first[rows]] = True
        return np.repeat(first, 32).astype(u4), found.reshape(-1)

    def _rows(self, address: Array, count: int, guard: Guard, where: int, what: str) -> tuple[Array, Array, Array]:
        """(warps, where the rows of their matrices begin [warps, count, 8], the warp of each), of whole warps."""
        self.check_whole(guard, 32, "a matrix access", where)
        rows = address.reshape(-1, 32)[:, : 8 * count]
        warps = np.arange(len(rows)) if guard is None else np.flatnonzero(guard.reshape(-1, 32).all(1))
        each = np.repeat(warps, 8 * count)
        first, good = self.shared.place(rows[warps].reshape(-1), 16, each // self.warps, where, what)
        return warps, np.where(good, first, self.shared.base), each

    def ldmatrix(self, address: Array, count: int, turned: bool, guard: Guard, where: int) -> list[Array]:
        warps, first, each = self._rows(address, count, guard, where, "read")
        self.shared.note_read(first, 16, each, where)
        first = first.reshape(-1, count, 8)
        found = []
        for k in range(count):
            if turned:
                view = self.shared.views[2]
                low, high = (view[first[:, k, _LANE % 4 * 2 + e] // 2 + _LANE // 4] for e in (0, 1))
                values = arithmetic.joined(low, high)
            else:
                values = self.shared.views[4][first[:, k, _LANE // 4] // 4 + _LANE % 4]
            whole = np.zeros((self.n // 32, 32), u4)
            whole[warps] = values
            found.append(whole.reshape(-1))
        return found

    def stmatrix(self, address: Array, values: list[Array], turned: bool, guard: Guard, where: int) -> None:
        warps, first, each = self._rows(address, len(values), guard, where, "write")
        self.shared.note_write(first, 16, each, where)
        first = first.reshape(-1, len(values), 8)
        for k, whole in enumerate(values):
            value = whole.reshape(-1, 32)[warps]
            if turned:
                for e in (0, 1):
                    half = (value >> u4(16 * e)).astype(u2)
                    self.shared.views[2][first[:, k, _LANE % 4 * 2 + e] // 2 + _LANE // 4] = half
            else:
                self.shared.views[4][first[:, k, _LANE // 4] // 4 + _LANE % 4] = value

    def mma(self, shape: str, kind_a: str, kind_b: str, a: Any, b: Any, c: Any, guard: Guard, where: int) -> Array:
        """m16n8: rows of A over lane / 4, its columns and the rows of B over lane % 4, both over registers also."""
        self.check_whole(guard, 32, "mma", where)
        warps, k, each = self.n // 32, int(shape.partition("k")[2]), 4 // ITEMSIZE[kind_a]
        half = k // (4 * each)  # registers along K
        a = numbers(np.stack(a).reshape(half, 2, warps, 8, 4)[..., None], kind_a)
        b = numbers(np.stack(b).reshape(half, warps, 8, 4)[..., None], kind_b)
        a = a.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, k)
        b = b.transpose(1, 0, 3, 4, 2).reshape(warps, k, 8)
        product = (a @ b).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
        c = np.stack(c).view(np.float32).reshape(2, 2, warps, 8, 4)  # row half, pair, warp, row, column pair
        return (c + product).astype(np.float32).view(u4).reshape(4, self.n)


def numbers(bits: Array, kind: str) -> Array:
    """Elements, or those in 32-bit registers along a last axis of one, as fp32."""
    bits = np.ascontiguousarray(bits)
    if kind in ("bf16", "f16"):
        return arithmetic.from_half(bits.view(u2), kind)
    if kind == "tf32":
        return (bits.view(u4) & u4(0xFFFFE000)).view(np.float32)
    return arithmetic.from_fp8(bits.view(u1), kind)
