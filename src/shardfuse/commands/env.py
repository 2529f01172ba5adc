"""``shardfuse env``: the facts about a machine that a bug report needs, and no others.

The command must also work in a broken installation: it prints the facts that it finds, and the error.
"""

from __future__ import annotations

import json as jsonlib
import os
import platform
import shutil
import subprocess
import textwrap
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C")
OPS = "ops on"  # the beginning of a section's name
_PACKAGES = ("shardfuse", "torch", "triton", "numpy", "einops", "safetensors", "rich", "typer", "transformers")
# Variables that change what runs. No others are shown: an environment holds secrets.
_PREFIXES = (
    "SHARDFUSE_",
    "TRITON_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "HIP_",
    "TORCH_NCCL_",
    "TORCHINDUCTOR_",
    "OMP_",
    "MKL_",
    "ONEDNN_",
)
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONSAFEPATH", "LD_PRELOAD")


def show(*, json: bool = False) -> None:
    """Print the report: aligned text to paste, or one line of JSON."""
    report = collect()
    if json:
        print(jsonlib.dumps(report))
        return
    for section, content in report.items():
        if not isinstance(content, dict):
            _print(f"{section}: {content}", hang=2)
            continue
        print(f"{section}:{'' if content else ' none'}")
        if section.startswith(OPS):
            for choice, ops in by_choice(content).items():
                _print(f"  {choice}", hang=2)
                _print(f"    {', '.join(ops)}", hang=4)
            continue
        width = max(map(len, content), default=0)
        for name, value in content.items():
            _print(f"  {name:{width}}  {value}", hang=4)


def _print(line: str, hang: int) -> None:
    """Print a line, wrapped to the terminal's width; all lines but the first start with ``hang`` spaces."""
    columns = shutil.get_terminal_size().columns
    wrapped = textwrap.wrap(line, columns, subsequent_indent=" " * hang, break_on_hyphens=False)
    print("\n".join(wrapped))


def by_choice(choices: Mapping[str, C]) -> dict[C, list[str]]:
    """The ops of each choice, so that a reason that several ops share is printed once."""
    found: dict[C, list[str]] = {}
    for op, choice in choices.items():
        found.setdefault(choice, []).append(op)
    return found


def collect() -> dict[str, Any]:
    """The report by section; a section is a string or a mapping from names to strings."""
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": f"{_cpu_model()}, {_cores()} cores usable of {os.cpu_count()}",
        "memory": _memory(),
        **_asked_of_torch(),
        "environment": _environment(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _asked_of_torch() -> dict[str, Any]:
    """Devices, backends and choices; if torch or this package fails to import, the error."""
    try:
        import torch

        from ..kernels.dev import registry
        from ..kernels.linear import cpu
        from ..kernels.runtime import dispatch, launcher

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return {
            "gpus": _gpus(),
            "cuda": torch.version.cuda or torch.version.hip or "torch was built without it",
            "distributed": _backends(),
            "triton interpreter": "on" if dispatch.interpreting() else "off",
            "kernels launched by": launcher.said(),
            "threads": str(torch.get_num_threads()),
            "oneDNN on this cpu": _said(cpu),
            f"{OPS} {device}": {name: _choice(name, device) for name in sorted(registry.ops())},
        }
    except Exception as error:  # the report of a broken installation matters most
        return {"broken": f"{type(error).__name__}: {error}"}


def _said(cpu: Any) -> str:
    try:
        return str(cpu.said())
    except ValueError as error:  # a broken table
        return str(error)


def _choice(op: str, device: Any) -> str:
    from ..kernels.runtime import dispatch

    try:
        choice = dispatch.choose(op, device)
    except RuntimeError as error:  # SHARDFUSE_IMPL=triton where Triton is unavailable
        return f"refused: {error}"
    return f"{choice.impl}: {choice.reason}"


def _gpus() -> dict[str, str]:
    import torch

    driver = _driver()
    found = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found[str(index)] = (
            f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB, driver {driver}"
            f"{_small_tiles(index)}"
        )
    return found


def _small_tiles(index: int) -> str:
    """What a GPU has to do without because of the installed Triton; nothing in most cases."""
    import torch

    from ..kernels.runtime import device, dispatch, fences

    if dispatch.triton_version() is None or fences.fenced(device.architecture(torch.device("cuda", index))):
        return ""
    return (
        f"; Triton {dispatch.triton_version()} leaves out fences that asynchronous products need: attention, and "
        "products whose operands TMA does not take, run in tiles of 32 rows (3.7 has them)"
    )


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        # The command line is fixed.
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]  # noqa: S603
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "torch was built without it"
    present = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return ", ".join(name for name, there in present.items() if there) or "no backend"


def _environment() -> dict[str, str]:
    """The variables that change what runs, with the home folder written as ``~``."""
    home = os.path.expanduser("~")
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _VARIABLES)
    return {name: os.environ[name].replace(home, "~") if home != "/" else os.environ[name] for name in names}
