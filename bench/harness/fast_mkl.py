"""A stock call in a process in which MKL's fast path is forced: what stock torch would be if MKL ran it everywhere.

MKL takes its AVX-512 code on Intel's processors only. A library with two lines of C, preloaded, makes it take that
code here, too (``tests/support/fast_mkl.c``, in a checkout with gcc). Nobody should run so, as MKL promises nothing
there; it tells how much of a gain over stock torch is MKL's choice of code.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from functools import cache
from pathlib import Path

import torch

from ...kernels.runtime import processor
from .timing import _per_call, keep_freed_memory

NAME = "stock torch, MKL's fast path forced"
PAUSE = 0.005  # seconds in which the other process's threads go to sleep
_SOURCE = Path(__file__).resolve().parents[2] / "tests" / "support" / "fast_mkl.c"


def available() -> bool:
    """Whether there is something to force, and what forces it."""
    slow = "amd" in processor.architecture() and torch.backends.mkl.is_available()
    return slow and _SOURCE.is_file() and shutil.which("gcc") is not None


class Forced:
    """``module.build(name)()`` in such a process, which ends with this object."""

    def __init__(self, module: str, name: str) -> None:
        command = [sys.executable, "-m", __name__, module, name, str(torch.get_num_threads())]
        environment = os.environ | {"LD_PRELOAD": str(library())}
        self._child = subprocess.Popen(  # noqa: S603 - this program's own module
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        weakref.finalize(self, self._child.kill)

    def sample(self, calls: int) -> float:
        """Microseconds per call, by that process's clock, after one that wakes its threads and fills its caches."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        time.sleep(PAUSE)
        self._child.stdin.write(f"{calls}\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process with MKL's fast path forced ended with code {self._child.wait()}")
        time.sleep(PAUSE)
        return float(answer)


@cache
def library() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="shardfuse-")
    _kept.append(folder)
    library = Path(folder.name) / "fast_mkl.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE], check=True)  # noqa: S603, S607 - our own
    return library


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _main(module: str, name: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    keep_freed_memory()
    call = importlib.import_module(module).build(name)
    for _ in range(3):
        call()
    for line in sys.stdin:
        call()
        print(_per_call(call, int(line)), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
