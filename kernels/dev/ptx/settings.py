"""What a launch is emulated under: what a GPU leaves open, and how much of this machine may be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """No field but ``end`` may change a bit of a kernel's results."""

    end: int = 0  # at which end of their error approximate instructions are: -1, 0 (exact), 1
    registers: int = 0xFFF0BAADFFF0BAAD  # what nothing has written holds its lowest bits; predicates hold its bit 1
    shared: int = 0xFF  # each byte of shared memory that nothing has written; 0xFF: NaN in every format
    reverse: bool = False  # blocks run from the last to the first
    lanes: int = 4096  # threads that run side by side, in whole blocks
    early: bool = False  # copies land when they are issued, not when they are waited for
    memory: int = 8 << 30  # bytes that a launch's registers, shared memory and tables of accesses may need
    seconds: float = 600.0  # that a launch may take
    count: bool = False  # ``Result.counters`` is filled: counters.py


# Other machines: name -> fields that differ.
VARIATIONS: dict[str, dict[str, Any]] = {
    "zeros in registers and shared memory": {"registers": 0, "shared": 0},
    "numbers in registers and shared memory": {"registers": 0x4048F5C34048F5C3, "shared": 0x3C},
    "blocks in reverse order": {"reverse": True},
    "one block at a time": {"lanes": 1},
    "copies that land at once": {"early": True},
}
