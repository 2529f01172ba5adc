"""What is known of a kernel's accesses to global memory from its text, for ``races.py``."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from .parse import BITS, Address, Immediate, Instruction, Kernel, registers_of

_STRONG = {"acquire", "release", "acq_rel", "relaxed", "volatile", "mmio"}
_ELEMENTS = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)  # bytes by a tensor map's elemtype
_PURE = {"mov", "cvt", "add", "sub", "mul", "mad", "fma", "neg", "abs", "min", "max", "and", "or", "xor", "not", "shl"}
_PURE |= {"shr", "prmt", "lop3", "bfe", "bfi", "selp", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "div", "rem"}
_ENDS = ("bra", "ret", "exit", "bar", "barrier")


@dataclass(frozen=True)
class Accesses:
    granule: int  # bytes of the narrowest, at most 8
    strong: frozenset[int]  # instructions that order others or need no order: acquire, release, volatile and so on
    updates: frozenset[int]  # loads whose value reaches nothing but stores to the same address, of the same thread
    updating: frozenset[int]  # those stores: a thread's result depends on whether another's came before
    between: bool  # whether nothing orders blocks: no atomic and no strong instruction


def accesses(kernel: Kernel) -> Accesses:
    code = kernel.code
    strong = {n for n, i in enumerate(code) if i.parts[0] in ("ld", "st") and _STRONG & set(i.parts)}
    updates = _updates(kernel)
    return Accesses(
        granule=min([8, *filter(None, map(_width, code))]),
        strong=frozenset(strong),
        updates=frozenset(updates),
        updating=frozenset().union(*updates.values()),
        between=not strong and not any(i.parts[0] in ("atom", "red") for i in code),
    )


def _updates(kernel: Kernel) -> dict[int, set[int]]:
    """The loads of values that are only updated in place, with the stores that do so."""
    code = kernel.code
    targets = {i.args[0] for i in code if i.opcode.startswith("st.global")}
    loads = [n for n, i in enumerate(code) if i.opcode.startswith("ld.global") and i.args[1] in targets]
    if not loads:
        return {}
    ends = sorted(
        {n + 1 for n, i in enumerate(code) if i.parts[0] in _ENDS} | set(kernel.labels.values()) | {len(code)}
    )
    readers: dict[str, list[int]] = {}
    for n, i in enumerate(code):
        for name in _read(i):
            readers.setdefault(name, []).append(n)
    found = {n: _updating(code, readers, n, ends[bisect.bisect_right(ends, n)]) for n in loads}
    return {n: stores for n, stores in found.items() if stores}


def _read(i: Instruction) -> set[str]:
    """The registers that an instruction reads; of one with several results, maybe also those."""
    into = i.args and i.parts[0] not in ("st", "red", "bra", "wgmma") and not isinstance(i.args[0], Address)
    first = [] if into else i.args[:1]
    return registers_of([*first, *i.args[1:]]) | ({i.predicate} if i.predicate else set())


def _updating(code: list[Instruction], readers: dict[str, list[int]], load: int, end: int) -> set[int]:
    """The stores to where a value was loaded from, if it is used until ``end`` only, in arithmetic that ends in them;
    else nothing.

    A thread that makes none of these stores has no use for the value: of the threads that hold the same element of a
    tensor, Triton lets one store it.
    """
    stores: set[int] = set()
    open_, seen = list(registers_of(code[load].args[0])), set()
    while open_:
        name = open_.pop()
        if name in seen:
            continue
        seen.add(name)
        for n in readers.get(name, []):
            i = code[n]
            if not load < n < end or i.predicate == name:
                return set()
            if i.opcode.startswith("st.global"):
                if i.args[0] != code[load].args[1]:
                    return set()
                stores.add(n)
            elif i.parts[0] in _PURE:
                open_ += registers_of(i.args[0])
            else:
                return set()
    last, base = max(stores, default=load), registers_of(code[load].args[1])
    moved = any(base & registers_of(i.args[:1]) for i in code[load + 1 : last] if i.parts[0] not in ("st", "ld"))
    return set() if moved else stores


def _width(i: Instruction) -> int:
    """Bytes of an access to global memory; 0 of other instructions."""
    if i.parts[0] in ("ld", "st", "atom", "red") and "global" in i.parts:
        return BITS[i.parts[-1]] // 8 * i.count
    value: Any = i.args[1] if len(i.args) > 1 else None
    if i.opcode.startswith("tensormap.replace.tile.elemtype"):
        return _ELEMENTS[value.value] if isinstance(value, Immediate) else 1
    if i.opcode.startswith(("cp.async.ca", "cp.async.cg")):
        size: Any = i.args[2]
        return int(size.value)
    return 0
