"""Where the lanes of a warp wait for each other: shfl.sync, mma.sync.aligned and others alike, by their member masks.

The PTX ISA: "causes the executing thread to wait until all non-exited threads corresponding to membermask have executed
the instruction with the same qualifiers and same membermask value". What is ``.aligned`` needs all of a warp.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from .memory import Array
from .parse import Immediate, Instruction, Register

_ALL = 0xFFFFFFFF
_GROUP = 128  # threads of a warp group
_EFFECTS = ("st", "atom", "red", "mbarrier")  # what other threads may wait for
_MASKED = ("shfl", "redux", "vote", "match", "elect")  # their last operand is the mask


class Gathering(NamedTuple):
    """A run of instructions before which lanes wait for each other."""

    where: int  # the first instruction for which they do
    threads: int  # 32, or 128: all of a warp group
    mask: int  # lanes of a warp
    registers: list[str]  # that hold masks


def _is_collective(i: Instruction) -> bool:
    return "sync" in i.parts[1:] and not i.opcode.startswith(("bar.sync", "barrier.sync"))


def _members(i: Instruction) -> int | str:
    """The mask, or the register that holds it."""
    if "aligned" in i.parts or not (i.parts[0] in _MASKED or i.opcode.startswith(("bar.warp", "barrier.warp"))):
        return _ALL
    mask = i.args[-1]
    if isinstance(mask, Immediate):
        return mask.value & _ALL
    return mask.name if isinstance(mask, Register) else _ALL


def parts(code: list[Instruction], start: int, end: int) -> Iterator[tuple[int, int]]:
    """A basic block in parts: before lanes wait for each other, what others may wait for has happened."""
    seen = False
    for n in range(start, end):
        i = code[n]
        if _is_collective(i) and n > start and (seen or isinstance(_members(i), str)):
            yield start, n
            start, seen = n, False
        seen |= i.parts[0] in _EFFECTS
    yield start, end


def gathering(code: list[Instruction], start: int, end: int) -> Gathering | None:
    """What the lanes wait for that come to these instructions."""
    found = [n for n in range(start, end) if _is_collective(code[n])]
    if not found:
        return None
    masks = [_members(code[n]) for n in found]
    grouped = any(code[n].parts[0] == "wgmma" for n in found)
    fixed = functools.reduce(operator.or_, (each for each in masks if isinstance(each, int)), 0)
    return Gathering(found[0], _GROUP if grouped else 32, fixed, [each for each in masks if isinstance(each, str)])


def together(gathering: Gathering, masks: Iterable[Array], here: Array, ended: Array) -> Array:
    """Which of the threads that are ``here`` have all whom they wait for; ``masks``: those of the registers."""
    if gathering.threads == _GROUP or (gathering.mask == _ALL and not gathering.registers):
        whole = (here | ended).reshape(-1, min(gathering.threads, len(here))).all(1)
        return here & np.repeat(whole, len(here) // len(whole))
    lanes = (here | ended).reshape(-1, 32) << np.arange(32, dtype=np.uint32)
    missing = ~np.repeat(np.bitwise_or.reduce(lanes, 1), 32)
    mask = functools.reduce(operator.or_, masks, np.uint32(gathering.mask))
    return here & (mask & missing == 0)
