"""The device that kernels run on: what chip it is, and the one place from which they are launched on it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import cache_key, launcher
from .chips import INTERPRETER as INTERPRETER
from .chips import described

# Stands for a GPU that ``explain`` is asked about where there is none: its measurements decide.
ASSUMED = "sm_90"
_INTERPRETER_PROGRAMS = 3  # not a divisor of usual tile counts


@dataclass(frozen=True)
class Launch:
    """One kernel launch that was captured instead of run."""

    fn: Any  # triton.JITFunction
    args: dict[str, Any]
    num_warps: int
    num_stages: int
    config: Any  # what the kernel's configuration function returned
    gemm: Any = None  # what a matrix product was asked to do (linear/gemm.py), or None


@dataclass(frozen=True)
class _Capture:
    arch: str
    tf32: bool
    launches: list[Launch]


_capture: _Capture | None = None  # the one that runs


@contextlib.contextmanager
def capture(arch: str, *, tf32: bool = False) -> Iterator[list[Launch]]:
    """Within the block, launches on ``meta`` tensors are collected as if ``arch`` were the chip, and nothing runs.

    ``tf32`` stands for torch's setting for fp32 matrix products.
    Ahead-of-time codegen thereby compiles the very arguments that the launchers pass.
    """
    global _capture
    outer, _capture = _capture, _Capture(arch, tf32, [])
    try:
        yield _capture.launches
    finally:
        _capture = outer


def launch(
    fn: Any,
    grid: tuple[int, ...],
    args: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int,
    on: torch.Tensor,
    config: Any,
    gemm: Any = None,
) -> Any:
    """Run ``fn[grid](**args)`` on the device of tensor ``on``; ``config`` and ``gemm`` are kept for reports.

    Returns what Triton compiled for it, None where nothing was compiled.
    """
    if on.is_meta:
        assert _capture is not None, "a kernel was launched on meta tensors outside capture()"
        _capture.launches.append(Launch(fn, args, num_warps, num_stages, config, gemm))
        return None
    if getattr(fn, "hash", "") is None:
        cache_key.settle(fn)
    if args.get("USE_TMA"):
        import triton

        triton.set_allocator(launcher.scratch)  # a context variable: autograd's threads do not inherit it
    with torch.cuda.device_of(on):
        return fn[grid](**args, num_warps=num_warps, num_stages=num_stages)


class Prepared:
    """A kernel with all its arguments but the tensors, launched again and again with tensors of one kind.

    The caller promises that these are the same at every launch: which of them are None, their dtypes, and whether their
    addresses are multiples of 16 bytes. The first launch on a device goes through Triton, which compiles; later ones
    hand their arguments to what it compiled (``launcher.py``), past the binder that would look at each of them again
    and is most of what a launch costs on the host. ``SHARDFUSE_BINDER=1`` has it look every time.
    """

    def __init__(
        self, fn: Any, rest: dict[str, Any], *, num_warps: int, num_stages: int, config: Any, gemm: Any = None
    ) -> None:
        tensors = len(fn.arg_names) - len(rest)
        self._names = fn.arg_names[:tensors]
        assert fn.arg_names[tensors:] == list(rest), "the tensors come first, the rest in the kernel's order"
        self._fn, self._rest = fn, rest
        self._launched = {"num_warps": num_warps, "num_stages": num_stages, "config": config, "gemm": gemm}
        self._values = tuple(rest.values())
        self._runs: dict[tuple[int, tuple[int, int, int]], launcher.Run] = {}  # by the device's index and the grid

    def launch(self, grid: tuple[int, int, int], tensors: tuple[Any, ...], *, on: torch.Tensor) -> None:
        """As the function :func:`launch`, with ``tensors`` (tensors, None, tuples of these) as the first arguments."""
        index = on.get_device()
        run = self._runs.get((index, grid))
        if run is None:
            args = dict(zip(self._names, tensors)) | self._rest
            compiled = launch(self._fn, grid, args, on=on, **self._launched)
            if _SKIP_BINDER and hasattr(type(compiled), "__getitem__"):  # else still compiling elsewhere
                self._runs[index, grid] = launcher.bind(compiled, grid, index)
        else:
            run(tensors + self._values)


def kinds_of(tensors: Sequence[torch.Tensor | None] | None) -> Any:
    """What :class:`Prepared` is promised of ``tensors``, as part of a key: (dtype, aligned), or None, for each."""
    if tensors is None:
        return None
    return tuple([None if t is None else (t.dtype, not t.data_ptr() & 15) for t in tensors])


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only where its last dimension is strided; kernels take every other stride as an argument."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# HIP: Triton also asks for a tensor's size, which is not promised.
_SKIP_BINDER = torch.version.hip is None and os.environ.get("SHARDFUSE_BINDER", "0") != "1"


def divisor(size: int) -> int:
    """16 if it divides ``size``, else 1: what a kernel is told of an argument whose value it is not specialised on."""
    return 1 if size % 16 else 16


def setting() -> Any:
    """What a launch depends on beside its arguments, and a process may change: for keys of what is remembered."""
    return _most_programs, _capture is None, architecture, program_slots


def architecture(device: torch.device) -> str:
    """The chip as codegen targets are called ("sm_90", "gfx942"): INTERPRETER on a CPU, ASSUMED for a missing GPU."""
    if _capture is not None and device.type == "meta":
        return _capture.arch
    return _own_architecture(device)


@functools.cache
def _own_architecture(device: torch.device) -> str:
    assert device.type != "meta", "meta tensors have a chip only inside capture()"
    if device.type == "cpu":
        return INTERPRETER
    if device.type == "cuda" and not torch.cuda.is_available():
        return ASSUMED
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_most_programs: int | None = None  # inside slots()


@contextlib.contextmanager
def slots(most: int) -> Iterator[None]:
    """Within the block a persistent kernel runs in ``most`` programs at most.

    For ranks that share a GPU and wait for each other: all their programs have to fit on it at once. Not for several
    threads at a time.
    """
    if most < 1:
        raise ValueError(f"slots({most}): expected at least 1 program")
    global _most_programs
    outer, _most_programs = _most_programs, most
    program_slots.cache_clear()
    try:
        yield
    finally:
        _most_programs = outer
        program_slots.cache_clear()


def capped(programs: int) -> int:
    """``programs``, or as many of them as :func:`slots` allows."""
    return programs if _most_programs is None else min(programs, _most_programs)


@functools.cache
def program_slots(device: torch.device) -> int:
    """How many programs of a persistent kernel run at once: one per multiprocessor, or what :func:`slots` allows."""
    if device.type != "cuda":
        return capped(_INTERPRETER_PROGRAMS)
    return capped(int(torch.cuda.get_device_properties(device).multi_processor_count))


def cache_bytes(device: torch.device) -> int:
    """The size of the last cache before device memory: the GPU's own; AMD's, and for what is captured, as on paper."""
    if device.type == "cuda" and not torch.version.hip:
        return _own_cache_bytes(device)
    arch = architecture(device)
    return 0 if arch == INTERPRETER else described(arch).cache


@functools.cache
def _own_cache_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def allow_tf32() -> bool:
    """Whether torch's settings let fp32 matrix products round their inputs to tf32 on a GPU."""
    if _capture is not None:
        return _capture.tf32
    if _fp32_precision is not None:
        return bool(_fp32_precision("cuda", "matmul") == "tf32")
    return _MATMUL.fp32_precision == "tf32" if _NAMES_PRECISION else bool(_MATMUL.allow_tf32)


_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # what the attribute below asks, past Python
_MATMUL = torch.backends.cuda.matmul
_NAMES_PRECISION = hasattr(_MATMUL, "fp32_precision")  # torch >= 2.9; reading the older flag beside it may raise
