"""Build the stub of CUDA's driver, over which Triton launches without a GPU: ``stub_cuda.c``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1")


def compiler() -> str | None:
    """The path of a C compiler, if there is one."""
    return shutil.which("gcc") or shutil.which("cc")


def build(folder: Path) -> Path:
    """Compile ``libcuda.so.1`` into ``folder``; returns its path. Raises RuntimeError without a C compiler."""
    found = compiler()
    if found is None:
        raise RuntimeError("the stub of CUDA's driver needs a C compiler: install gcc")
    library = folder / "libcuda.so.1"
    subprocess.run([found, *_FLAGS, "-o", str(library), str(SOURCE)], check=True)  # noqa: S603 - our own source
    return library
