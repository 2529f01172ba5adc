"""Probes: what a foreign module computes, found by running its own code on small tensors.

What surrounds a call of ``fuse`` must not change what a probe finds. So probes run in a thread of their own, which none
of torch's modes reaches: a default device, other function and dispatch modes (fake tensors), autocast, gradient and
inference mode, levels of torch.func, hooks for saved tensors, torch.compile's tracing. Nor do thread-local values of
others; context variables do. Settings of the whole process (default dtype, deterministic algorithms, anomaly mode,
filters of warnings) are set aside meanwhile, for other threads as well, and random states are restored.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

Result = TypeVar("Result")


class _Here(threading.local):
    apart = False  # whether this thread runs probes
    told: list[str] | None = None


_here = _Here()
_one = threading.Lock()  # of two that set the process's settings aside, each would restore the other's
_PATIENCE_S = 2.0  # after an interrupt


def apart(run: Callable[..., Result], *args: Any) -> Result:
    """``run(*args)``, a function with probes, away from all that surrounds the call; raises what it raises.

    While a module is being imported, ``run`` runs in the caller's thread: another one might wait for that import.
    """
    if _here.apart:
        return run(*args)
    work = _Work(run, args)
    if _importing():
        work()
    else:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,), name="shardfuse probes", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:  # an interrupt, or what a signal's handler raises
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join(_PATIENCE_S)
            work.settings.restore()
            raise
    if work.error is not None:
        raise work.error
    result: Result = work.result
    return result


class _Work:
    """A call with probes, its result or its error."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.run, self.args = run, args
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.settings = _Settings()
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        outer, _here.apart = _here.apart, True
        try:
            if self.gpu is not None:
                torch.cuda.set_device(self.gpu)
            with _one:
                self.settings.set_aside()
                try:
                    self.result = self.run(*self.args)
                finally:
                    self.settings.restore()
        except BaseException as error:
            self.error = error
        finally:
            _here.apart = outer


class _Settings:
    """Settings of the process, and its random states: set aside once, and restored once."""

    def __init__(self) -> None:
        self._restore: contextlib.ExitStack | None = None

    def set_aside(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            undo.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            undo.callback(torch.autograd.set_detect_anomaly, *anomaly)
            undo.callback(random.setstate, random.getstate())
            undo.callback(np.random.set_state, np.random.get_state(legacy=False))
            undo.callback(torch.set_rng_state, torch.get_rng_state())
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            torch.set_default_dtype(torch.float32)
            torch.set_deterministic_debug_mode("default")
            torch.autograd.set_detect_anomaly(False)
            self._restore = undo.pop_all()

    def restore(self) -> None:
        undo, self._restore = self._restore, None
        if undo is not None:
            undo.close()


def _importing() -> bool:
    """Whether a module is being imported, in some thread."""
    modules = list(sys.modules.values())
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


class Foreign(Exception):
    """An error of a module's own code: it is not what the probe looks for."""


@contextlib.contextmanager
def foreign(what: str, *passing: type[Exception]) -> Iterator[None]:
    """Around the module's own code, and nothing of ours: an error of it is told as one of ``what``, and becomes a
    :class:`Foreign`. Exceptions of the kinds ``passing`` are ours.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (Foreign, *passing)):
            raise
        said = f"{what} raises {told(error)}"
        if _here.told is not None and said not in _here.told:
            _here.told.append(said)
        raise Foreign(said) from error


def told(error: BaseException) -> str:
    """The error's class, and the beginning of its message."""
    try:
        message = next(iter(str(error).strip().splitlines()), "")
    except Exception:  # a message that cannot be formed
        message = ""
    message = message if len(message) <= _LONGEST else message[:_LONGEST] + " ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_LONGEST = 200  # of a message


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """The errors of foreign code that probes meet within the block."""
    outer, _here.told = _here.told, []
    try:
        yield _here.told
    finally:
        _here.told = outer
