"""Run one kernel: a grid of blocks, some at a time."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .machine import Launch
from .memory import Allocation, Reports
from .parse import BITS, parse
from .program import Program

LANES = 4096  # threads that run side by side, in whole blocks


@dataclasses.dataclass
class Result:
    """What a launch reported, and how long it took."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int  # of a block
    executed: int = 0  # instructions, of all threads together counted once
    seconds: float = 0.0
    reports: list[str] = dataclasses.field(default_factory=list)


def execute(
    program: Program,
    grid: tuple[int, int, int],
    parameters: list[int],
    allocations: Sequence[Allocation],
    shared: int,
    end: int = 0,
    lanes: int = LANES,
) -> Result:
    """Run a grid with its parameters' bits. Raises what ``machine.Launch`` raises."""
    kernel = program.kernel
    if len(parameters) != len(kernel.params):
        raise ValueError(f"{kernel.name} takes {len(kernel.params)} parameters, and {len(parameters)} were given")
    result, begun = Result(kernel.name, grid, kernel.threads), time.perf_counter()
    ids = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(grid)))]
    # Blocks that wait for each other run side by side, all of them.
    per = len(ids) if program.waits_for_others else max(1, lanes // kernel.threads)
    reports = Reports(kernel)
    for at in range(0, len(ids), per or 1):
        launch = Launch(program, grid, ids[at : at + per], parameters, allocations, shared, reports, end)
        try:
            launch.run()
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError("; ".join([str(error), *reports.lines()])) from error
        result.executed += launch.executed
    result.reports = reports.lines()
    result.seconds = time.perf_counter() - begun
    return result


def run(
    text: str, *arguments: np.ndarray | float, grid: tuple[int, int, int] = (1, 1, 1), shared: int = 0, end: int = 0
) -> list[str]:
    """Run PTX on numpy arrays, whose addresses are passed, and numbers. Returns the reports.

    ``shared``: bytes of dynamic shared memory. ``end``: see ``machine.Launch``.
    """
    program = Program(parse(text))
    parameters, allocations = [], []
    for number, ((kind, _), value) in enumerate(zip(program.kernel.params, arguments, strict=True)):
        if isinstance(value, np.ndarray):
            parameters.append(value.ctypes.data)
            allocations.append(Allocation(value.ctypes.data, value.nbytes, f"argument {number} {value.shape}"))
        else:
            parameters.append(_bits(value, kind))
    return execute(program, grid, parameters, allocations, shared, end).reports


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f" if kind == "f32" else "<d", value), "little")
    return int(value) & ((1 << BITS[kind]) - 1)
