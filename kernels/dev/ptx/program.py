"""A kernel as Python functions: two for each basic block, for when all threads run it and for when some do.

Each takes (S, R, m): the launch, the registers and, for the second, which threads run it. It returns where they go on:
a number of a basic block for all, or an array over the threads. They are compiled when they first run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import arithmetic, convergence, tcgen05, units
from .accesses import accesses
from .parse import BITS, Address, Immediate, Instruction, Kernel, Symbol, Vector, registers_of
from .translate import Translator, Unknown

EXIT = 1 << 30  # the "basic block" of threads that have ended
SHARED_BASE = 1024  # so that address 0 is invalid; swizzled tiles are aligned to 1024 bytes
_BRANCHES = ("bra", "ret", "exit")
_FIRST = "first"  # stands for that there was no wgmma.fence so far; no register's name
_WAITING = {"acquire", "cas", "volatile", "relaxed"}  # of loads in loops that wait for other blocks
_TYPES = {name: getattr(arithmetic, name) for name in ("u1", "u2", "u4", "u8")}
_TYPES |= {name: getattr(arithmetic, name) for name in ("i1", "i2", "i4", "i8", "f2", "f4", "f8")}

Step = Callable[[Any, Any, Any], Any]


class Program:
    """``step`` has the functions by basic block, ``ranges`` the instructions of each.

    Raises NotImplementedError naming every opcode that is not known.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        if len(set(kernel.shared)) > 1:
            raise NotImplementedError(f"{kernel.name}: several shared variables: {', '.join(kernel.shared)}")
        self.translator = Translator(kernel, dict.fromkeys(kernel.shared, SHARED_BASE))
        self.params = {each.name: i for i, each in enumerate(kernel.params)}
        self.granule = min([4, *(_width(i) for i in kernel.code if _is_shared(i))])
        straight = self._ranges()
        self._near_products = self._found_near_products(straight)
        self._early = self._found_early(straight)
        self.unfenced = frozenset(self._found_unfenced(straight))
        self.tensor_memory = tcgen05.used(kernel)
        self._touched_loads = tcgen05.touched_early(kernel, straight)
        self.ranges = [part for each in straight for part in convergence.parts(kernel.code, *each)]
        self.number = {start: n for n, (start, _) in enumerate(self.ranges)}
        self.number[len(kernel.code)] = EXIT
        gathers = (convergence.gathering(kernel.code, *each) for each in self.ranges)
        self.gathers = {n: found for n, found in enumerate(gathers) if found is not None}
        # A loop that waits for other blocks may not keep them from running.
        self.waits_for_others = any(i.parts[0] in ("ld", "atom") and _WAITING & set(i.parts) for i in kernel.code)
        self.accesses = accesses(kernel)
        self.makes_descriptors = any(i.opcode.startswith("tensormap.replace") for i in kernel.code)
        self._names: dict[str, Any] = {**_TYPES, "np": np, "A": arithmetic, "where": np.where, "EXIT": EXIT}
        self._steps: dict[tuple[int, bool], Step] = {}
        unknown: set[str] = set()
        self._sources = [self._source(number, False, unknown) for number in range(len(self.ranges))]
        if unknown:
            raise NotImplementedError(f"{kernel.name}: instructions not known: {'; '.join(sorted(unknown))}")

    def _ranges(self) -> list[tuple[int, int]]:
        code, labels = self.kernel.code, self.kernel.labels
        starts = {0} | {labels[_label(i)] for i in code if i.parts[0] == "bra"}
        starts |= {n + 1 for n, i in enumerate(code) if i.parts[0] in _BRANCHES or units.is_barrier(i)}
        order = sorted(start for start in starts if start < len(code))
        return list(zip(order, [*order[1:], len(code)]))

    def step(self, number: int, masked: bool) -> Step:
        """The function of a basic block."""
        if (number, masked) not in self._steps:
            source = self._source(number, True, set()) if masked else self._sources[number]
            self._names |= self.translator.constants
            exec(compile(source, self.kernel.name, "exec"), self._names)  # noqa: S102 - its source is made here
            self._steps[number, masked] = self._names["step"]
        return self._steps[number, masked]

    def _source(self, number: int, masked: bool, unknown: set[str]) -> str:
        start, end = self.ranges[number]
        early, lines = self._early, ["def step(S, R, m):"]
        for n in range(start, end):
            lines += [f"    S.wait_for_registers({early[n]}, {n})"] if n in early else []
            lines += [f"    S.touch_loads({self._touched_loads[n]}, {n})"] if n in self._touched_loads else []
            try:
                lines += [f"    {line}" for line in self._lines(n, masked)]
            except Unknown as error:
                unknown.add(f"{self.kernel.code[n].opcode} ({error})")
        if self.kernel.code[end - 1].parts[0] not in _BRANCHES:
            lines.append(f"    return {self.number.get(end, EXIT)}")
        return "\n".join(lines)

    def _lines(self, n: int, masked: bool) -> list[str]:
        i = self.kernel.code[n]
        guard, lines, test = ("m" if masked else None), [], ""
        if i.predicate is not None:
            test = f"{'~' * i.negated}R[{self.translator.index[i.predicate]}]"
            lines.append(f"g = m & {test}" if masked else f"g = {test}")
            guard = "g"
        if i.parts[0] in _BRANCHES:
            to = self.number[self.kernel.labels[_label(i)]] if i.parts[0] == "bra" else EXIT
            if not test:
                return [f"return {to}"]
            return [*lines, f"return S.branch({test}, {to}, {self.number.get(n + 1, EXIT)})"]
        if i.opcode.startswith("ld.param"):
            return lines + self._parameter(i, guard)
        found = units.lines(self.translator, n, i, guard)
        return lines + (self.translator.lines(i, guard) if found is None else found)

    def _parameter(self, i: Instruction, guard: str | None) -> list[str]:
        into, address, kind = i.args[0], i.args[1], i.parts[-1]
        items = into.items if isinstance(into, Vector) else (into,)
        if not isinstance(address, Address) or not isinstance(address.base, Symbol):
            raise Unknown(i.text)
        if address.base.name not in self.params or BITS[kind] > 64 or len(items) != i.count:
            raise Unknown(i.text)
        number, offset, size = self.params[address.base.name], address.offset, BITS[kind] // 8
        if offset + size * len(items) > self.kernel.params[number].size:
            raise ValueError(f"PTX line {i.line}: `{i.text}` reads past the parameter")
        calls = [f"S.parameter({number}, '{kind}', {offset + size * k})" for k in range(len(items))]
        return [self.translator.put(each, call, kind, guard) for each, call in zip(items, calls)]

    def _found_near_products(self, straight: list[tuple[int, int]]) -> dict[int, list[int]]:
        """By basic block, the instructions of wgmma, and those that touch a register which a wgmma names as D or A."""
        code, named = self.kernel.code, set[str]()
        for i in code:
            named |= registers_of(i.args[:2]) if i.opcode.startswith("wgmma.mma_async") else set()
        if not named:
            return {}
        near = [i.opcode.startswith("wgmma.") or not named.isdisjoint(registers_of(i.args)) for i in code]
        return {start: [n for n in range(start, end) if near[n]] for start, end in straight}

    def _found_early(self, straight: list[tuple[int, int]]) -> dict[int, list[int]]:
        """Instructions that touch registers which a wgmma before them may still write, and which registers.

        The PTX ISA leaves that undefined; ptxas waits there (its advisories C7510 and following), and Triton relies on
        it where each step's product is added to sums of their own, and in epilogues within a loop. Blocks are looked at
        until what is under way at their starts grows no more.
        """
        found: dict[int, list[int]] = {}
        self._follow(straight, set(), lambda start, begun: self._touched_early(start, begun, found))
        return found

    def _found_unfenced(self, straight: list[tuple[int, int]]) -> set[int]:
        """Each wgmma that is a warp group's first, or whose D or A other instructions have touched, and no wgmma.fence
        lies between on some way there.

        PTX ISA, "wgmma.fence". Between wgmmas of one shape it is not needed for D.
        """
        found: set[int] = set()
        self._follow(straight, {_FIRST}, lambda start, begun: self._touched_since(start, begun, found))
        return found

    def _touched_since(self, start: int, touched: set[str], found: set[int]) -> set[str]:
        """Add those of a basic block to ``found``; returns what is touched without a fence since, at its end."""
        for n in self._near_products[start]:
            i = self.kernel.code[n]
            if i.opcode.startswith("wgmma.mma_async"):
                own = f" {i.parts[4]}"  # registers that a wgmma of that shape sums into, by their names with this
                into, a = registers_of(i.args[0]), registers_of(i.args[1:2]) if isinstance(i.args[1], Vector) else set()
                shapes = {name for name in touched if " " in name and not name.endswith(own)}
                others = {name.partition(" ")[0] for name in shapes}
                if _FIRST in touched or (into | a) & (touched | others):
                    found.add(n)
                touched |= {name + own for name in into}
            elif i.opcode.startswith("wgmma.fence"):
                touched.clear()
            elif not i.opcode.startswith("wgmma."):
                touched |= registers_of(i.args)
        return touched

    def _follow(
        self, straight: list[tuple[int, int]], first: set[str], through: Callable[[int, set[str]], set[str]]
    ) -> None:
        """Go ``through`` basic blocks, from what holds at the start of one to its end, until nothing more is found.

        ``first`` holds where the kernel starts.
        """
        if not self._near_products:
            return
        code, labels = self.kernel.code, self.kernel.labels
        ends, begun = dict(straight), {start: set[str]() for start, _ in straight}
        begun[straight[0][0]] |= first
        waiting = list(begun)
        while waiting:
            start = waiting.pop()
            end = ends[start]
            left = through(start, set(begun[start]))
            last = code[end - 1]
            after = [labels[_label(last)]] if last.parts[0] == "bra" else []
            after += [end] if last.parts[0] not in _BRANCHES or last.predicate is not None else []
            for follower in after:
                if follower in begun and not left <= begun[follower]:
                    begun[follower] |= left
                    waiting.append(follower)

    def _touched_early(self, start: int, under_way: set[str], found: dict[int, list[int]]) -> set[str]:
        """Add those of a basic block to ``found``; returns the registers that a wgmma may still write at its end."""
        for n in self._near_products[start]:
            i = self.kernel.code[n]
            if i.opcode.startswith("wgmma.wait_group") and i.args[0] == Immediate(0):
                under_way.clear()
            own = registers_of(i.args[0]) if i.opcode.startswith("wgmma.mma_async") else set()
            touched = registers_of(i.args[1:] if own else i.args) & under_way
            touched |= own & under_way if not own <= under_way else set()
            if touched:
                found[n] = sorted(self.translator.index[name] for name in touched)
            under_way = (under_way - touched) | own
        return under_way


def _label(i: Instruction) -> str:
    target = i.args[-1]
    assert isinstance(target, Symbol), i.text
    return target.name


def _is_shared(i: Instruction) -> bool:
    return i.parts[0] in ("ld", "st") and i.parts[1].startswith("shared")


def _width(i: Instruction) -> int:
    """Bytes that a thread's access covers."""
    return BITS[i.parts[-1]] // 8 * i.count
