"""Benchmarks while a CPU stands in for the GPU: the GPU's plans and shapes, launches by Triton's binder, no numbers.

``make gpu-kernels`` compiles so what a GPU run launches; ``make gpu DRY=1`` runs rows so, and compiles nothing.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...kernels.dev import stand_in
from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime import device as chips
from . import gate, timing, virtual_ranks
from .benchmark import Benchmark, Measurement, Settings
from .timing import Timing

_LARGE = 1 << 20  # elements
_ONLY_A_GPU = ("requires CUDA", "No viable backend", "from the 'CPU' backend")  # has streams, cuDNN, FlashAttention


class OnCpu(Settings):
    """The settings of a GPU's run, with tensors on the CPU."""

    @property
    def cuda(self) -> bool:
        return True


SETTINGS = OnCpu(torch.device("cpu"), short=True)


def install(on_error: Callable[[str, Exception], None], *, compiling: bool = True) -> None:
    """From now on this process's CPU stands in for a GPU, there is no way back; checks find that everything is right.

    ``on_error`` is told what did not compile.
    """
    stand_in.install(stand_in.TARGET, on_error, compiling=compiling)
    for real, instead in _INSTEAD.items():
        for module in [each for each in sys.modules.values() if getattr(each, real.__name__, None) is real]:
            setattr(module, real.__name__, instead)


def _once(compare: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: compare(*args, **options | {"dry": True})


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    gate.check_outputs: lambda ours, **others: [Verdict(name, 0.0, 1.0) for name in ours],
    virtual_ranks.share_of: lambda device, size: (chips.program_slots(device) - virtual_ranks.SPARE) // size,
    timing.compare: _once(timing.compare),
    timing.compare_host: _once(timing.compare_host),
    timing.ceilings: lambda device: timing.Ceilings(1e15, 1e13),
}


def standing(benchmark: Benchmark, seconds: float) -> Benchmark:
    """``benchmark`` for a process that called :func:`install`; a check with its row takes ``seconds``, or longer."""

    def plan(settings: Settings) -> Sequence[Measurement]:
        begun = time.monotonic()
        return [replace(each, run=partial(_run, each, begun + seconds)) for each in benchmark.plan(settings)]

    def check(settings: Settings, names: Sequence[str]) -> Any:
        with Untouched():
            return list(benchmark.check(settings, names))

    return replace(benchmark, plan=plan, check=check)


def _run(planned: Measurement, until: float) -> tuple[Timing, Timing]:
    with Untouched():
        try:
            planned.run()
        except (RuntimeError, NotImplementedError) as error:
            if not any(words in str(error) for words in _ONLY_A_GPU):
                raise
    time.sleep(max(0.0, until - time.monotonic()))
    return Timing(1.0), Timing(1.0)


def age() -> float:
    """Seconds since this process began, if that is a minute at most; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0.0
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    found = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return found if 0.0 <= found <= 60.0 else 0.0


class Untouched(TorchDispatchMode):
    """Leaves unwritten what torch's own ops would compute of large tensors: models' shapes take gigabytes and hours."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        large = any(tensor.numel() > _LARGE for tensor in tensors)
        aliases = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
        if func.namespace != "aten" or torch.Tag.data_dependent_output in func.tags:
            return func(*args, **kwargs)
        if func._opname in ("randn", "randint") and math.prod(_size(func, args)) > _LARGE:
            kwargs.pop("generator", None)
            return torch.ops.aten.empty.memory_format(_size(func, args), **kwargs)
        if large and aliases and aliases[0].is_write and func._opname.endswith("_"):
            return args[0]
        if large and func._overloadname == "out":
            return kwargs["out"]
        if large and not aliases:
            with torch.device("meta"):
                shapes = func(*_on_meta(args), **_on_meta(kwargs))
            return tree_map_only(torch.Tensor, _unwritten, shapes)
        return func(*args, **kwargs)


def _size(func: Any, args: Any) -> Any:
    return next(each for each in args if isinstance(each, (list, tuple)))


def _on_meta(values: Any) -> Any:
    found = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)
    return tree_map_only(torch.device, lambda device: torch.device("meta"), found)


def _unwritten(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
