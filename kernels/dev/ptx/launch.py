"""Run one kernel: a grid of blocks, some at a time."""

from __future__ import annotations

import dataclasses
import math
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .counters import Counters
from .machine import Launch
from .memory import Allocation, Reports, Shared
from .parse import Parameter, parse
from .program import SHARED_BASE, Program
from .races import GlobalRaces
from .settings import Settings
from .tensor_memory import TensorMemory

LANES = Settings().lanes  # threads that run side by side, in whole blocks
_USUAL = Settings()


@dataclasses.dataclass
class Result:
    """What a launch reported, and how long it took."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int  # of a block
    executed: int = 0  # instructions, of all threads together counted once
    seconds: float = 0.0
    reports: list[str] = dataclasses.field(default_factory=list)
    counters: Counters | None = None  # with ``Settings.count``


def execute(
    program: Program,
    grid: tuple[int, int, int],
    parameters: list[int],
    allocations: Sequence[Allocation],
    shared: int,
    settings: Settings = _USUAL,
    reports: Reports | None = None,
) -> Result:
    """Run a grid with its parameters' bits, and add to ``reports``. Raises what ``machine.Launch`` raises, and
    MemoryError.
    """
    kernel, until = program.kernel, time.monotonic() + settings.seconds
    if len(parameters) != len(kernel.params):
        raise ValueError(f"{kernel.name} takes {len(kernel.params)} parameters, and {len(parameters)} were given")
    result, begun = Result(kernel.name, grid, kernel.threads), time.perf_counter()
    reports = Reports(kernel) if reports is None else reports
    races = GlobalRaces(program.accesses, -(-kernel.threads // 32), allocations, reports, settings.memory)
    result.counters = Counters(program, grid, allocations) if settings.count else None
    begin = result.counters.launch if result.counters else Launch
    for ids in _chunks(program, grid, shared, settings):
        launch = begin(program, grid, ids, parameters, allocations, shared, reports, settings, races)
        try:
            launch.run(until - time.monotonic())
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError("; ".join([str(error), *reports.lines()])) from error
        result.executed += launch.executed
    result.reports = reports.lines()
    result.seconds = time.perf_counter() - begun
    return result


def _chunks(program: Program, grid: tuple[int, int, int], shared: int, settings: Settings) -> Iterator[np.ndarray]:
    """The blocks [n, 3] that run side by side, in turn: as many as ``settings`` allow, or all that wait for each other.

    Raises MemoryError where there is no room for them.
    """
    count, kernel = math.prod(grid), program.kernel
    each = kernel.threads * sum(-(-bits // 8) for bits in kernel.registers.values())
    each += Shared.bytes_of(shared, -(-kernel.threads // 32), program.granule, SHARED_BASE)
    each += TensorMemory.bytes_of(-(-kernel.threads // 32)) if program.tensor_memory else 0
    side_by_side = count if program.waits_for_others else 1
    if side_by_side * each > settings.memory:
        raise MemoryError(
            f"{kernel.name}: {side_by_side} blocks of {kernel.threads} threads, which run side by side, need "
            f"{side_by_side * each / 1e9:.1f} GB, more than the {settings.memory / 1e9:.1f} GB of Settings.memory: "
            "launch fewer blocks, or allow more"
        )
    side_by_side = max(side_by_side, min(settings.lanes // kernel.threads, settings.memory // each), 1)
    for at in range(0, count, side_by_side):
        numbers = np.arange(at, min(at + side_by_side, count))
        numbers = count - 1 - numbers if settings.reverse else numbers
        yield np.stack([numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])], 1)


def run(
    text: str,
    *arguments: np.ndarray | float,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    end: int = 0,
    settings: Settings = _USUAL,
) -> list[str]:
    """Run PTX on numpy arrays, whose addresses are passed, and numbers. Returns the reports.

    ``shared``: bytes of dynamic shared memory. ``end`` stands for that of ``settings``.
    """
    program = Program(parse(text))
    parameters, allocations = [], []
    for number, (parameter, value) in enumerate(zip(program.kernel.params, arguments, strict=True)):
        if isinstance(value, np.ndarray):
            parameters.append(value.ctypes.data)
            name, at = f"argument {number} {value.shape}", value.ctypes.data
            allocations.append(Allocation(at, value.nbytes, name, itemsize=value.itemsize))
        else:
            parameters.append(_bits(value, parameter))
    settings = dataclasses.replace(settings, end=end)
    return execute(program, grid, parameters, allocations, shared, settings).reports


def _bits(value: Any, parameter: Parameter) -> int:
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f" if parameter.kind == "f32" else "<d", value), "little")
    return int(value) & ((1 << 8 * parameter.size) - 1)
