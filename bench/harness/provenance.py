"""The provenance of a result: machine, versions, commit, and the sources whose change makes it stale."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...kernels.dev import registry
from ...kernels.runtime import processor
from .benchmark import Benchmark

PACKAGE = __name__.rpartition(".bench.")[0]
# Every benchmark's numbers depend on these.
HARNESS = ("bench/harness/benchmark.py", "bench/harness/gate.py", "bench/harness/report.py", "bench/harness/timing.py")
FLOORS = ("kernels", "parallel", "layers", "serving", "training", "integrations", "bench")
JUDGES = ("kernels/dev/accuracy.py", "kernels/dev/registry.py", "kernels/runtime", "bench/harness/gate.py")
TUNED = ("kernels/runtime/chips.py", "kernels/linear/tuned.py", "kernels/tuned")  # what picks the GEMM's configuration
# The same for all ops that have one of these among their sources.
_TUNED_BY = {
    "linear/launch.py": TUNED,
    "paged_attention/launch.py": ("kernels/runtime/chips.py", "kernels/paged_attention/tuned.py", "kernels/tuned"),
}
PREFIX = "SHARDFUSE_"
# Told by other fields or rows, or of no effect.
_OTHERWISE_TOLD = (
    "SHARDFUSE_BENCH_VLLM",
    "SHARDFUSE_SIDE_TRITON",
    "SHARDFUSE_COMMIT",
    "SHARDFUSE_DEBUG",
    "SHARDFUSE_DIRTY",
)
MACHINE = ("device", "torch", "triton")  # fields of an origin that all rows of one result must share
GPU_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


def device_name(device: torch.device) -> str:
    """The GPU's name as CUDA reports it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name: str) -> str:
    """A device's folder below bench/results: "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def describe(device: torch.device) -> dict[str, Any]:
    """The origin that every result file states: versions, device, current clocks, commit, date, and every
    ``SHARDFUSE_*`` variable that is set.
    """
    commit, dirty = revision()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "environment": environment(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "liger": _version("liger-kernel"),
        "cuda": torch.version.cuda,
        "shardfuse": _version("shardfuse"),
        "device": device_name(device),
        "gpu": gpu_state() if device.type == "cuda" else None,
        "cpu": processor.description(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # when the run began: processes that want a core
    }


def environment() -> dict[str, str]:
    """The environment variables that may change what runs, with their values."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX) and name not in _OTHERWISE_TOLD
    }


def check_machine(path: str | Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError if the contents of ``path`` were measured on another device, or with other versions, than ``now``."""
    if any(earlier[name] != now[name] for name in MACHINE):
        raise ValueError(
            f"{path} was measured on {_machine(earlier)}, and this is {_machine(now)}: rows of the two must not "
            "end up in one result; choose another place for this one"
        )


def _machine(origin: Mapping[str, Any]) -> str:
    return f"{origin['device']} with torch {origin['torch']} and triton {origin['triton']}"


def gpu_state() -> dict[str, str] | None:
    """Driver, clocks, power and temperature in nvidia-smi's words; None if it does not run."""
    try:
        command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
        # One fixed command line.
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(GPU_QUERY.split(","), (field.strip() for field in out.splitlines()[0].split(","))))


@functools.cache
def revision() -> tuple[str, bool | None]:
    """(commit, dirty). ``SHARDFUSE_COMMIT`` and ``SHARDFUSE_DIRTY`` give them for a tree without ``.git``."""
    if "SHARDFUSE_COMMIT" in os.environ:
        dirty = os.environ.get("SHARDFUSE_DIRTY")
        return os.environ["SHARDFUSE_COMMIT"], dirty != "0" if dirty else None
    commit = _git("rev-parse", "HEAD")
    return (commit, bool(_git("status", "--porcelain"))) if commit else ("unknown", None)


def source_files(benchmark: Benchmark) -> dict[str, Path]:
    """Every file that a result of ``benchmark`` depends on, by its path below the package ("kernels/linear/op.py")."""
    names = [f"bench/suites/{benchmark.name}.py", *HARNESS, *benchmark.sources]
    for name in benchmark.ops:
        sources = registry.op(name).sources
        names += [f"kernels/{source}" for source in sources]
        names += [name for source in sources for name in _TUNED_BY.get(source, ())]
    return dict(_expand(sorted(set(names))))


def source_hashes(benchmark: Benchmark) -> dict[str, str]:
    """Path below the package -> the first 16 digits of the file's SHA-256."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in source_files(benchmark).items()}


def source_hash(benchmark: Benchmark) -> str:
    """One hash over ``source_hashes``, which a resumed run compares."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(source_hashes(benchmark).items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def op_hash(name: str) -> str:
    """One hash over the sources of an op and of what judges it."""
    files = dict(_expand([*(f"kernels/{source}" for source in registry.op(name).sources), *JUDGES]))
    return _hash_of(files.values())


@functools.cache
def package_hash() -> str:
    """One hash over all Python and JSON sources of the package, but for its results."""
    files: list[Path] = []
    for floor in FLOORS:
        folder = package_folder(floor)
        found = (path for kind in ("*.py", "*.json") for path in folder.rglob(kind))
        files += sorted(path for path in found if path.relative_to(folder).parts[0] != "results")
    return _hash_of(files)


def tests_hash(file: Path) -> str:
    """One hash over a test file, what tests share, and the package."""
    folder = next((parent for parent in file.parents if parent.name == "tests"), None)
    shared = [] if folder is None else [folder / "conftest.py", *sorted((folder / "support").glob("*.py"))]
    return hashlib.sha256(f"{package_hash()} {_hash_of([file, *shared])}".encode()).hexdigest()[:16]


def _hash_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def package_folder(floor: str) -> Path:
    """The folder of ``shardfuse.<floor>``, wherever the package is installed."""
    return Path(importlib.import_module(f"{PACKAGE}.{floor}").__path__[0]).resolve()


def _expand(names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Paths below the package as files; a folder stands for the Python and JSON files in it."""
    for name in names:
        floor, _, rest = name.partition("/")
        path = package_folder(floor) / rest
        if path.is_dir():
            yield from ((f"{name}/{file.name}", file) for file in sorted((*path.glob("*.py"), *path.glob("*.json"))))
        elif path.is_file():
            yield name, path
        else:
            raise RuntimeError(
                f"a benchmark names {name} among its sources, and {path} does not exist: correct the name"
            )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(package_folder("bench").parent), *arguments]
        # git's subcommands are written out by the callers.
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
