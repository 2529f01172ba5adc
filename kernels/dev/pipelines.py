"""How far a kernel's loops run ahead: whether copies stay clear of what products still read, and who waits for all.

Products that run asynchronously (wgmma, tcgen05) read their operands until they are waited for. Triton's software
pipeline has to give each operand so many buffers that no copy goes to where a product under way still reads; with one
too few the next copy overwrites the operand beneath it (triton-lang/triton#6691). Machine code does not show that
plainly. Triton's IR for GPUs ("TTGIR") does: its loops are run here on buffers and slots alone. The same run counts the
products that a loop goes round with, which for tcgen05 no number in the machine code says: they signal on barriers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from . import triton_ir
from .triton_ir import Op

_ASYNCHRONOUS = ("ttng.warp_group_dot ", "ttng.tc_gen5_mma")
# Copies and stores into shared memory, and the first operand that can be their target.
_WRITES = {
    "ttng.async_tma_copy_global_to_local": 1,
    "ttng.async_tma_gather": 1,
    "ttg.async_copy_global_to_local": 1,
    "ttg.local_store": 1,
}
_ROUNDS = 12  # of an innermost loop: more than any pipeline has stages, so that every slot is used again
_OUTER_ROUNDS = 3

_INTEGER = re.compile(r"^arith\.constant (-?\d+|true|false)\b")
_PENDINGS = re.compile(r"pendings = (\d+)")


class Pipelines(NamedTuple):
    """``overwrites``: copies that go to where a product under way still reads, each place in the text once.

    ``pending``: wgmma or tcgen05 products that a loop of theirs goes round with, of all such loops the one with the
    fewest; 0 where they are in no loop, None where there are none.
    """

    overwrites: int
    pending: int | None


def read(ttgir: str) -> Pipelines:
    """What the loops of a kernel with wgmma or tcgen05 do; other products (mma) are over when the kernel goes on.

    Conditions that only a running kernel knows are all taken to hold, then all not to hold; loops go round a few times.
    Either way a copy may overwrite. Of products under way the better one counts: an epilogue that only a tile's last
    step enters may wait for all.
    """
    if not any(product in ttgir for product in _ASYNCHRONOUS):
        return Pipelines(0, None)
    body = triton_ir.parse(ttgir)
    found: set[int] = set()
    pending: dict[int, int] = {}
    for assumed in (True, False):
        walk = _Walk(assumed)
        walk.run(body)
        found |= walk.found
        pending |= {loop: max(count, pending.get(loop, 0)) for loop, count in walk.pending.items()}
    return Pipelines(len(found), min(pending.values(), default=0))


# ----------------------------------------------------------------------------------------------------- running it


class _Slot(NamedTuple):
    """One of a buffer's slots; ``at`` is None for a buffer of one, and where the IR's arithmetic does not tell."""

    buffer: int
    at: int | None


def _overlap(one: _Slot | None, other: _Slot) -> bool:
    """A slot that is not known may be any."""
    return one is not None and one.buffer == other.buffer and (one.at == other.at or None in (one.at, other.at))


class _Product(NamedTuple):
    reads: tuple[_Slot, ...]
    barrier: _Slot | None  # that its end is signalled on (tcgen05); None: it is waited for by count (wgmma)


class _Walk:
    """One run of a kernel's loops. A value is an int, a bool, a :class:`_Slot`, or None for all that is not known."""

    def __init__(self, assumed: bool) -> None:
        self.found: set[int] = set()  # lines of copies that overwrite
        self.pending: dict[int, int] = {}  # lines of loops that begin products: how many they go round with
        self._assumed = assumed
        self._values: dict[str, Any] = {}
        self._under_way: list[_Product] = []
        self._begun = 0
        self._allocated = 0

    def run(self, block: list[Op]) -> list[Any]:
        """Run a region; what it yields."""
        yielded: list[Any] = []
        for op in block:
            if op.text.startswith(("scf.yield", "scf.condition")):
                yielded = self._operands(op)
            elif op.text.startswith("scf.for"):
                self._loop(op)
            elif op.regions:
                self._region(op)
            else:
                self._step(op)
        return yielded

    def _operands(self, op: Op) -> list[Any]:
        return [self._values.get(name) for name in op.operands]

    def _set(self, op: Op, values: list[Any]) -> None:
        for i, name in enumerate(op.result_names):
            self._values[name] = values[i] if i < len(values) else None

    def _loop(self, op: Op) -> None:
        header = triton_ir.FOR.match(op.text)
        assert header, f"not a loop as Triton prints it: {op.text}"
        pairs = op.carried()
        carried = [self._values.get(start) for _, start in pairs]
        at, step = self._values.get(header[2]), self._values.get(header[3])
        innermost = not _holds_loop(op)
        for round_ in range(_ROUNDS if innermost else _OUTER_ROUNDS):
            begun = self._begun
            self._values[header[1]] = at
            for (name, _start), value in zip(pairs, carried):
                self._values[name] = value
            carried = self.run(op.regions[0])
            at = at + step if isinstance(at, int) and isinstance(step, int) else None
            if innermost and self._begun > begun and round_ >= _ROUNDS // 2:  # no longer on its way up
                self.pending[op.line] = min(len(self._under_way), self.pending.get(op.line, len(self._under_way)))
        self._set(op, carried)

    def _region(self, op: Op) -> None:
        """A branch, or something else with regions: each of them once."""
        if not op.text.startswith("scf.if"):
            for region in op.regions:
                self.run(region)
            self._set(op, [])
            return
        condition = self._operands(op)[0]
        taken = self._assumed if condition is None else bool(condition)
        if taken or len(op.regions) > 1:
            self._set(op, self.run(op.regions[0 if taken else 1]))

    def _step(self, op: Op) -> None:
        name = op.text.split(" ", 1)[0]
        operands = self._operands(op)
        if name == "ttg.local_alloc":
            self._allocated += 1
            slot = _Slot(self._allocated, None)
            if operands:  # with its content: the same memory each time round
                slot = _Slot(-op.line, None)
                self._write(slot, op)
            self._set(op, [slot])
        elif name == "ttg.memdesc_index":
            base, at = operands[0], operands[1] if len(operands) > 1 else None
            self._set(op, [base._replace(at=at) if isinstance(base, _Slot) else None])
        elif name.startswith("ttg.memdesc_"):
            self._set(op, operands[:1])
        elif name in _WRITES:
            self._write(next((value for value in operands[_WRITES[name] :] if isinstance(value, _Slot)), None), op)
        elif name == "ttng.warp_group_dot":
            self._begin(operands[:2], None, "isAsync = true" in op.text)
        elif name == "ttng.warp_group_dot_wait":
            pending = _PENDINGS.search(op.text)
            assert pending, op.text
            self._under_way = self._under_way[max(0, len(self._under_way) - int(pending[1])) :]
            self._set(op, operands)
        elif name.startswith("ttng.tc_gen5_mma"):
            barrier = next((value for value in operands[3:] if isinstance(value, _Slot)), None)
            self._begin(operands[:2], barrier, "is_async" in op.text)
        elif name == "ttng.wait_barrier":
            self._end(operands[0])
        else:
            self._set(op, [_arithmetic(op.text, name, operands)])

    def _write(self, slot: _Slot | None, op: Op) -> None:
        if any(_overlap(slot, read) for product in self._under_way for read in product.reads):
            self.found.add(op.line)

    def _begin(self, operands: list[Any], barrier: _Slot | None, asynchronous: bool) -> None:
        self._begun += 1
        if asynchronous:
            self._under_way.append(_Product(tuple(slot for slot in operands if isinstance(slot, _Slot)), barrier))

    def _end(self, barrier: Any) -> None:
        """Products end in the order in which they began: the oldest that signals here, and all before it."""
        for i, product in enumerate(self._under_way):
            if product.barrier is not None and product.barrier == barrier:
                self._under_way = self._under_way[i + 1 :]
                return


def _holds_loop(op: Op) -> bool:
    return any(inner.text.startswith("scf.for") or _holds_loop(inner) for region in op.regions for inner in region)


_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.divsi": operator.floordiv,
    "arith.remsi": operator.mod,
    "arith.divui": operator.floordiv,
    "arith.remui": operator.mod,
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.minui": min,
    "arith.maxui": max,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    **{f"{sign}{name}": getattr(operator, name) for sign in "su" for name in ("lt", "le", "gt", "ge")},
}


def _arithmetic(text: str, name: str, operands: list[Any]) -> Any:
    """What an operation on known numbers gives; None where it is another, or one of them is not known."""
    constant = _INTEGER.match(text)
    if constant:
        return constant[1] == "true" if constant[1].isalpha() else int(constant[1])
    if name == "arith.select":
        condition, yes, no = operands
        return None if condition is None else yes if condition else no
    if name in ("arith.extui", "arith.extsi", "arith.trunci"):
        return operands[0]
    if len(operands) != 2 or not all(isinstance(value, int) for value in operands):
        return None
    if name == "arith.cmpi":
        return _COMPARISONS[text.split()[1].rstrip(",")](*operands)
    if name in ("arith.divsi", "arith.remsi", "arith.divui", "arith.remui") and operands[1] == 0:
        return None
    return _INTEGERS[name](*operands) if name in _INTEGERS else None
