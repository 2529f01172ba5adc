"""Blackwell's tcgen05 instructions, as Python source: calls of methods of ``tensor_memory.py`` and ``tensor_cores.py``.

Of the order of tcgen05.fence nothing is modelled: what it orders, barriers and mbarriers order here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .parse import Address, Immediate, Instruction, Kernel, Operand, Register, Symbol, Vector, registers_of
from .tensor_memory import registers_of_shape
from .translate import Translator, Unknown

_ENDS = ("bra", "ret", "exit")


def lines(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    """Source for instruction ``n``. Raises Unknown."""
    op, args, rest = i.parts[1], i.args, i.parts[2:]
    if op.startswith("fence::"):
        return ["pass"]
    if rest == ["sync", "aligned"] and op in ("wait::ld", "wait::st"):
        method = "wait_loads" if op == "wait::ld" else "wait_stores_of_tensor_memory"
        return [f"S.{method}({guard})"]
    if op in ("ld", "st"):
        return _move(t, n, i, guard)
    if rest[:1] != ["cta_group::1"]:
        raise Unknown(i.opcode)
    match op, rest[1:]:
        case "alloc", ["sync", "aligned", "shared::cta", "b32"]:
            count = t.array(args[1], "u32")
            return [f"S.allocate_columns({t.address(args[0], 'u32')}, {count}, {guard}, {n})"]
        case "dealloc", ["sync", "aligned", "b32"]:
            return [f"S.free_columns({t.array(args[0], 'u32')}, {t.array(args[1], 'u32')}, {guard}, {n})"]
        case "relinquish_alloc_permit", ["sync", "aligned"]:
            return [f"S.allocate_no_more({guard}, {n})"]
        case "commit", ["mbarrier::arrive::one", "b64"] | ["mbarrier::arrive::one", "shared::cluster", "b64"]:
            return [f"S.commit_to_barrier({_address(t, args[0])}, {guard}, {n})"]
        case "mma", ["kind::f16" | "kind::tf32" | "kind::f8f6f4" as kind] if len(args) == 5:
            into, a, b, shape, adds = args
            there = isinstance(a, Address)
            left = t.address(a, "u32") if there else t.array(a, "u64")
            return [
                f"S.multiply_by_thread('{kind[6:]}', {t.address(into, 'u32')}, {left}, {there}, {t.array(b, 'u64')}, "
                f"{t.array(shape, 'u32')}, {t.source(adds, 'pred')}, {guard}, {n})"
            ]
    raise Unknown(i.opcode)


def _address(t: Translator, operand: Operand) -> str:
    """Of shared memory, also where it is a generic address: both are numbers of 32 bits here."""
    assert isinstance(operand, Address)
    wide = isinstance(operand.base, Register) and t.bits[operand.base.name] == 64
    return t.address(operand, "u64" if wide else "u32")


def _move(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    """tcgen05.ld r, [taddr]{, split}; tcgen05.st [taddr], {split,} r."""
    found = re.fullmatch(r"tcgen05\.(ld|st)\.sync\.aligned\.(\w+)\.x(\d+)\.b32", i.opcode)
    if found is None:
        raise Unknown(i.opcode)
    loading, shape, count = found[1] == "ld", found[2], int(found[3])
    place, values = (i.args[1], i.args[0]) if loading else (i.args[0], i.args[-1])
    split = next((each.value for each in i.args[1:] if isinstance(each, Immediate)), 0)
    items = values.items if isinstance(values, Vector) else (values,)
    if registers_of_shape(shape, count) != len(items) or len(i.args) != 2 + (shape == "16x32bx2"):
        raise Unknown(i.opcode)
    if loading:
        registers = [t.index[each.name] for each in items if isinstance(each, Register)]
        given, method = str(registers), "load_tensor_memory"
    else:
        given, method = "[" + ", ".join(t.array(each, "b32") for each in items) + "]", "store_tensor_memory"
    return [f"S.{method}('{shape}', {count}, {t.address(place, 'u32')}, {split}, {given}, {guard}, {n})"]


def used(kernel: Kernel) -> bool:
    return any(i.parts[0] == "tcgen05" for i in kernel.code)


def touched_early(kernel: Kernel, ranges: Iterable[tuple[int, int]]) -> dict[int, bool]:
    """Instructions that touch registers which a tcgen05.ld before them may still write; whether they only move them.

    None of these has a tcgen05.wait::ld before it on every way there.
    ``ranges``: the basic blocks. They are looked at until what is under way at their starts grows no more.
    """
    code, ends, found = kernel.code, dict(ranges), dict[int, bool]()
    if not any(i.opcode.startswith("tcgen05.ld") for i in code):
        return found
    begun = {start: set[str]() for start in ends}
    waiting = list(begun)
    while waiting:
        start = waiting.pop()
        under_way = _through(code, start, ends[start], set(begun[start]), found)
        for follower in _followers(kernel, ends[start]):
            if follower in begun and not under_way <= begun[follower]:
                begun[follower] |= under_way
                waiting.append(follower)
    return found


def _through(code: list[Instruction], start: int, end: int, under_way: set[str], found: dict[int, bool]) -> set[str]:
    """Add those of a basic block to ``found``; returns the registers that a load may still write at its end."""
    for n in range(start, end):
        i = code[n]
        if i.opcode.startswith("tcgen05.wait::ld"):
            under_way.clear()
        elif under_way and under_way & (registers_of(i.args) | ({i.predicate} if i.predicate else set())):
            found[n] = i.parts[0] == "mov"
            under_way |= registers_of(i.args[0]) if found[n] else set()
        if i.opcode.startswith("tcgen05.ld"):
            under_way |= registers_of(i.args[0])
    return under_way


def _followers(kernel: Kernel, end: int) -> list[int]:
    last = kernel.code[end - 1]
    target = last.args[-1] if last.parts[0] == "bra" else None
    found = [kernel.labels[target.name]] if isinstance(target, Symbol) else []
    return found + ([end] if last.parts[0] not in _ENDS or last.predicate is not None else [])
