"""The one place that decides which implementation of an op runs.

``impl="auto" | "triton" | "onednn" | "reference"`` is an argument of every op. An explicit request is honoured or
refused, never replaced. ``auto`` takes Triton wherever a GPU and Triton are present and the op supports the call,
unless a committed measurement says that the stock path wins there; otherwise the reference, which is plain torch. On a
CPU matrix products may run in oneDNN instead, where a measurement says that it is faster (``linear/cpu.py``). Ops
without a product run the reference with "onednn", too.

``SHARDFUSE_IMPL`` sets what ``auto`` means for a whole process (for bisecting a problem, and for tests).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import NamedTuple

import torch

from . import tuning
from .names import expected

IMPLS = ("auto", "triton", "onednn", "reference")


@dataclass(frozen=True)
class Choice:
    """Which implementation runs, and why (one line, for people)."""

    impl: str
    reason: str
    triton: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "triton", self.impl == "triton")  # asked several times a call: no property


class OneDNN(NamedTuple):
    """What oneDNN has to offer a call."""

    lacks: str | None = None  # why it cannot take the call
    wins: bool = False  # whether a measurement says that it is faster
    why: str = ""  # that measurement


# What ran in this process: (op, implementation) -> calls. Written by the ops, outside torch.compile only.
counts: Counter[tuple[str, str]] = Counter()


def stock_wins(arch: str, op: str, bucket: Callable[[], str | None]) -> str | None:
    """The measurement by which the stock path is faster, for ``choose(stock_wins=...)``; None: there is none.

    ``bucket`` is called only where a table claims anything of ``op``, so that a call costs a dict look-up elsewhere.
    While torch.compile traces, the answer is None and ``bucket`` is not called: sizes may be symbolic there, and a
    decision by their value would tie the graph to it, one graph per bucket of token counts.
    """
    if torch.compiler.is_compiling():
        return None
    claims = tuning.claims(arch, op)
    return claims.get(bucket() or "") if claims else None


def count(op: str, impl: str) -> None:
    if not torch.compiler.is_compiling():
        counts[op, impl] += 1


def _find_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _why_no_interpreter(triton: str, numpy: str) -> str | None:
    """Why the interpreter of a ``triton`` does not run the kernels with a ``numpy``, None where it does.

    Until Triton 3.7 it makes an integer of an array of one element, which numpy 2.4 refuses. Triton 3.9 refuses masks
    in which a block's condition meets a scalar's.
    """
    ours, theirs = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (triton, numpy))
    if ours and ours < (3, 7) and theirs >= (2, 4):
        return f"the interpreter of Triton {triton} breaks with numpy {numpy} (pip install 'numpy<2.4' or Triton 3.8)"
    if ours >= (3, 9):
        return f"the interpreter of Triton {triton} refuses the kernels' masks (pip install 'triton<3.9')"
    return None


def _read_auto() -> str:
    value = os.environ.get("SHARDFUSE_IMPL", "auto")
    if value not in IMPLS:
        raise ValueError(f"SHARDFUSE_IMPL={value!r}: {expected(value, IMPLS)}")
    return value


# Read once: torch.compile then sees constants, and Triton itself fixes interpretation when a kernel is defined.
_TRITON_VERSION = _find_triton()
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
_INTERPRETER_BREAKS = (
    _why_no_interpreter(_TRITON_VERSION, metadata.version("numpy")) if _INTERPRETING and _TRITON_VERSION else None
)
_AUTO = _read_auto()
_row_invariant = os.environ.get("SHARDFUSE_ROW_INVARIANT", "0") == "1"


def row_invariant() -> bool:
    """Whether a row of a product must come out the same whatever rows share its batch. See :func:`row_invariance`."""
    return _row_invariant


def row_by_row(x: torch.Tensor) -> bool:
    """Whether this is :func:`row_invariance` on a CPU, where only calls of one shape give a row the same bits."""
    return _row_invariant and x.is_cpu


@contextlib.contextmanager
def row_invariance(enabled: bool = True) -> Iterator[None]:
    """Within the block a token's result does not depend, in any bit, on how many tokens are computed with it.

    Matrix products then run one kernel configuration for every number of tokens, and ``auto`` takes the kernel
    wherever a GPU and Triton are present: the stock library picks its algorithm by the number of rows. On a CPU
    attention over pages keeps the promise by itself. The other ops run the stock library there: the engine calls them
    with one shape only, in one thread (``serving/windows.py``). ``SHARDFUSE_ROW_INVARIANT=1`` sets it for a whole
    process. Not for threads.
    """
    global _row_invariant
    outer, _row_invariant = _row_invariant, enabled
    try:
        yield
    finally:
        _row_invariant = outer


def default_impl() -> str:
    """What ``impl="auto"`` means in this process: SHARDFUSE_IMPL."""
    return _AUTO


def asked(impl: str) -> str:
    """``impl``, or for "auto" what that means in this process."""
    return _AUTO if impl == "auto" else impl


def triton_version() -> str | None:
    """The installed Triton's version, or None. Does not import Triton."""
    return _TRITON_VERSION


def interpreting() -> bool:
    """Whether Triton kernels are interpreted in this process (``TRITON_INTERPRET=1`` when Python started)."""
    return _INTERPRETING


def interpreter_breaks() -> str | None:
    """Why Triton's interpreter cannot run the kernels here; None where it can, or is off."""
    return _INTERPRETER_BREAKS


@contextlib.contextmanager
def choosing_for(device: torch.device) -> Iterator[None]:
    """Within the block this thread's ops choose as they do on ``device``, wherever their tensors are: for fake tensors.

    Not for several threads at a time.
    """
    global _stand_in
    outer, _stand_in = _stand_in, (device, threading.get_ident())
    try:
        yield
    finally:
        _stand_in = outer


_stand_in: tuple[torch.device, int] | None = None  # with the thread whose ops it is for


def stand_in() -> torch.device | None:
    """The device of :func:`choosing_for`, None outside of it."""
    if _stand_in is None or _stand_in[1] != threading.get_ident():
        return None
    return _stand_in[0]


def uses_reference(impl: str, on: torch.Tensor) -> bool:
    """Whether :func:`choose` says "reference" of every call with ``impl`` on the device of ``on``, of an op that has no
    oneDNN implementation."""
    impl = _AUTO if impl == "auto" else impl  # asked(), without a call for each launch
    if impl == "auto":
        return (on.is_cpu or on.is_meta) and (_stand_in is None or stand_in() is None)
    return impl == "reference" or (impl == "onednn" and on.is_cpu)


def may_launch(impl: str, on: torch.Tensor) -> bool:
    """Whether a kernel may run of a call with ``impl`` on the device of ``on``."""
    impl = _AUTO if impl == "auto" else impl
    return impl == "triton" or (impl == "auto" and not on.is_cpu)


def choose(
    op: str,
    device: torch.device,
    impl: str = "auto",
    *,
    unsupported: str | None = None,
    stock_wins: str | None = None,
    onednn: OneDNN | None = None,
) -> Choice:
    """Decide for one call of ``op`` on ``device``.

    ``unsupported`` says why the kernel cannot take this call, or None; ``stock_wins`` names the committed
    measurement by which the stock path is faster here, or None. ``onednn`` is None of an op without a matrix product.

    Raises ValueError for an unknown ``impl``, RuntimeError when ``impl="triton"`` or "onednn" cannot be honoured.
    """
    if _row_invariant:
        stock_wins = None  # it picks its algorithm by the number of rows
    if _stand_in is not None:
        device = stand_in() or device
    if torch.compiler.is_compiling():
        return _decide(op, device, impl, unsupported, stock_wins, onednn)
    key = (op, device, impl, unsupported, stock_wins, onednn)
    choice = _decided.get(key)
    if choice is None:
        choice = _decided[key] = _decide(*key)
    return choice


# Nothing that a decision depends on changes while a process runs.
_decided: dict[tuple[str, torch.device, str, str | None, str | None, OneDNN | None], Choice] = {}


def _decide(
    op: str,
    device: torch.device,
    impl: str,
    unsupported: str | None,
    stock_wins: str | None,
    onednn: OneDNN | None,
) -> Choice:
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl={impl!r}: {expected(impl, IMPLS)}")
    if impl == "auto":
        impl = _AUTO
    if impl == "reference":
        return Choice("reference", "asked for")
    if impl == "onednn":
        lacks = None if onednn is None else onednn.lacks
        if device.type not in ("cpu", "meta"):
            lacks = f"the tensors are on {device.type!r} and it runs on CPUs"
        if lacks:
            raise RuntimeError(
                f"{op}: impl='onednn' was asked for, but {lacks}; pass impl='auto' to let another implementation run"
            )
        if onednn is None:
            return Choice("reference", "it has no matrix product, and oneDNN is asked for products only")
        if device.type == "meta":
            return Choice("reference", "nothing is computed on the meta device")
        return Choice("onednn", "asked for")

    missing = _why_not_triton(device) or unsupported
    if impl == "triton":
        if missing:
            raise RuntimeError(
                f"{op}: impl='triton' was asked for, but {missing}; pass impl='auto' to let the reference take over"
            )
        return Choice("triton", "asked for")
    if device.type == "cpu" and onednn is not None and onednn.wins and not onednn.lacks:
        return Choice("onednn", onednn.why)
    if device.type == "cpu" and onednn is not None and (onednn.lacks or onednn.why):
        return Choice("reference", onednn.lacks or onednn.why)
    if device.type == "cpu":
        return Choice("reference", unsupported or _ON_A_CPU)
    if missing:
        return Choice("reference", missing)
    if stock_wins:
        return Choice("reference", stock_wins)
    return Choice("triton", "no measurement that applies here says that the stock path is faster")


_ON_A_CPU = "on a CPU a kernel runs only where impl='triton' asks for it, in Triton's interpreter"


def _why_not_triton(device: torch.device) -> str | None:
    if triton_version() is None:
        return "Triton is not installed (pip install triton; Linux only)"
    if device.type == "cpu" and not interpreting():
        return "the tensors are on a CPU and Triton's interpreter is off (start Python with TRITON_INTERPRET=1)"
    if device.type == "cpu" and interpreter_breaks() is not None:
        return interpreter_breaks()
    if device.type not in ("cpu", "cuda"):
        return f"Triton has no backend here for device {device.type!r}"
    # Asked about a GPU that this machine lacks (`explain`, the planner): it is taken to be one that the kernels know.
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"the kernels need compute capability 8.0, and this GPU has {major}.{minor}"
    return None
