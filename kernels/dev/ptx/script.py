"""Emulate whatever Triton kernels a script launches on CPU tensors.

python -m shardfuse.kernels.dev.ptx.script my_kernel.py
"""

from __future__ import annotations

import argparse
import gc
import runpy
import sys
from collections import Counter
from pathlib import Path

from ...runtime import dispatch
from . import driver

_DEVICE = "choose device='cpu', or triton.runtime.driver.active.get_active_torch_device()"


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.file.is_file():
        parser.error(f"{options.file}: no such file: expected a Python script that launches Triton kernels")
    if dispatch.triton_version() is None:
        parser.error("Triton is not installed here: pip install triton (Linux)")
    if dispatch.interpreting():
        parser.error("TRITON_INTERPRET is set, so that nothing would be compiled: unset it")
    try:
        driver.install(options.arch, options.slots)
    except RuntimeError as error:
        parser.error(str(error))
    sys.argv = [str(options.file), *options.arguments]
    sys.path.insert(0, str(options.file.resolve().parent))
    gc.set_threshold(100_000, 50, 100)  # translated kernels are many objects, and stay
    try:
        runpy.run_path(str(options.file), run_name="__main__")
    except SystemExit as ended:  # its own end, which is its exit status where no launch has a fault
        faults = _told()
        if faults and not ended.code:
            return 1
        raise
    except BaseException as error:  # what a launch reported may explain it
        _told()
        if "CUDA" in str(error):
            print("error: tensors are on the CPU here: " + _DEVICE, file=sys.stderr)
        raise
    return int(_told() > 0)


def _told() -> int:
    """Print each different launch, and what it reported; returns how many have a fault, or 1 where none was."""
    launches: Counter[str] = Counter()
    faults = 0
    for result in driver.log:
        reports = "".join(f"\n    {report}" for report in result.reports)
        grid = " x ".join(map(str, result.grid))
        launches[
            f"{result.kernel}: {grid} blocks of {result.threads} threads, {result.executed} instructions{reports}"
        ] += 1
        faults += any(not report.startswith("note: ") for report in result.reports)
    for line, count in launches.items():
        print(f"{count} x {line}" if count > 1 else line)
    if not launches:
        print(
            "error: no kernel was launched in this process; those of processes that it starts are not seen",
            file=sys.stderr,
        )
        return 1
    print(f"{len(driver.log)} launches, {faults} with faults")
    return faults


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.kernels.dev.ptx.script",
        description="Run a Python script whose Triton kernels are compiled to PTX as for a GPU and emulated on its CPU "
        "tensors. Each launch is reported; the exit status is 1 where one has a fault.",
    )
    parser.add_argument("file", type=Path, help="the script; its tensors are on the CPU")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, default=[], help="the script's own, if it takes any")
    parser.add_argument("--arch", choices=list(driver.ARCHS), default="sm_90")
    parser.add_argument("--slots", type=int, default=3, help="multiprocessors (default: 3)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
