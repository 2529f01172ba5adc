"""``make gpu-kernels OUT=dir``: compiles on a CPU what a GPU run launches, into ``dir/kernels.zip``.

Processes, one per core, do what the run's phases do while a CPU stands in for the GPU (``kernels/dev/stand_in.py``):

- ``smoke``: every op's test cases;
- ``tests``: every op's own tests, whose comparisons are skipped;
- ``benchmarks``: the short plan's cases, with their checks;
- ``tune``: the candidates that ``bench tune`` times.

A GPU run unpacks the file (``kernels.py``) and compiles only what is missing. The same command goes on where an earlier
one was stopped, and compiles what has changed since.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...kernels.dev import carried, registry, stand_in, workers
from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime import dispatch
from .. import tunable, tune
from ..harness import gate, provenance, virtual_ranks
from ..harness.benchmark import Settings
from ..harness.records import left
from ..harness.runner import find
from . import journal
from .kernels import ARCHIVE, noted
from .selection import OP_SUITE, OP_TESTS, selection
from .suite import test_command

PHASES = ("smoke", "tests", "benchmarks", "tune")
SAID_EVERY_S = 10.0
# With the last, "auto" takes kernels for tensors on a CPU too.
_ENVIRONMENT = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SHARDFUSE_IMPL": "triton"}
_TUNE_PARTS = 4  # of a case's candidates, for as many processes
_LARGE = 1 << 20  # elements
Json = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The options of one call. ``limit``: at most so many requests to the processes."""

    out: Path
    phases: tuple[str, ...] = PHASES
    only: tuple[str, ...] = ()
    jobs: int | None = None
    limit: int | None = None


class _OnCpu(Settings):
    """The settings of a GPU's short run, with tensors on the CPU."""

    @property
    def cuda(self) -> bool:
        return True


SETTINGS = _OnCpu(torch.device("cpu"), short=True)


@dataclass
class Outcome:
    """Kernels that were compiled, that were there already, and cases that went wrong."""

    compiled: int = 0
    found: int = 0
    wrong: int = 0


def compile_ahead(options: Options, say: Callable[[str], None]) -> Outcome:
    """Compile and pack; what is said of it goes to ``say``, line by line."""
    started = said = time.monotonic()
    archive = options.out / ARCHIVE
    requests = [each for phase in PHASES if phase in options.phases for each in _REQUESTS[phase](options.only)]
    requests = requests[: options.limit]
    jobs = options.jobs or workers.cores()
    outcome = Outcome()
    cases: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="shardfuse-kernels-") as folder:
        before = carried.Carried()
        if archive.is_file():
            before = carried.unpack(archive, Path(folder))
            say(f"{archive} holds {before.kernels} kernels" + (f"; {before.refused}" if before.refused else ""))
        command = [sys.executable, "-m", f"{__package__}.ahead", "--worker"]
        environment = os.environ | {"TRITON_CACHE_DIR": folder, **_ENVIRONMENT}
        try:
            for number, (index, answer) in enumerate(workers.ask_all(requests, command, environment, jobs), 1):
                ((phase, what),) = requests[index].items()
                counts, faults = answer.get("counts", {}), answer.get("faults", [])
                faults = [*faults, answer["error"]] if "error" in answer else faults
                outcome.compiled += counts.get("compiled", 0)
                outcome.found += counts.get("found", 0)
                outcome.wrong += len(faults)
                for fault in faults:
                    say(f"not compiled: {phase} {' '.join(map(str, what))}: {fault}")
                if phase == "benchmarks" and not faults:
                    cases.append((what[0], what[1]))
                if time.monotonic() - said > SAID_EVERY_S or number == len(requests):
                    said = time.monotonic()
                    say(f"{said - started:6.0f} s  {number} of {len(requests)}, {outcome.compiled} kernels compiled")
        finally:
            notes = noted(cases, before.notes)
            size = carried.pack(Path(folder), archive, notes, compression=zipfile.ZIP_LZMA)
    seconds = time.monotonic() - started
    say(f"{outcome.compiled} kernels compiled in {seconds:.0f} s by {jobs} processes, {outcome.found} were there")
    say(f"{archive}: {size / 2**20:.1f} MB")
    return outcome


# --- what there is to compile -----------------------------------------------------------------------------------------


def _smoke_requests(only: Sequence[str]) -> Iterator[Json]:
    for name in selection(only)[0]:
        yield from ({"smoke": [name, case.name]} for case in registry.op(name).tagged("test"))


def _test_requests(only: Sequence[str]) -> Iterator[Json]:
    tests = provenance.package_folder("bench").parent / "tests"
    for name in OP_TESTS if not only else ():
        yield from ({"tests": [str(path)]} for path in tests.rglob(name))


def _benchmark_requests(only: Sequence[str]) -> Iterator[Json]:
    for benchmark in selection(only)[1]:
        if benchmark.warm is not None:
            planned = left(benchmark, SETTINGS)
            yield from ({"benchmarks": [benchmark.name, case]} for case in dict.fromkeys(row.case for row in planned))


def _tune_requests(only: Sequence[str]) -> Iterator[Json]:
    for name in tunable.ops():
        for case in registry.op(name).tagged(tune.TAG) if not only or name in only else ():
            yield from ({"tune": [name, case.name, part]} for part in range(_TUNE_PARTS))


_REQUESTS: dict[str, Callable[[Sequence[str]], Iterator[Json]]] = {
    "smoke": _smoke_requests,
    "tests": _test_requests,
    "benchmarks": _benchmark_requests,
    "tune": _tune_requests,
}


# --- the processes ----------------------------------------------------------------------------------------------------


def _serve() -> None:
    faults: list[str] = []
    stand_in.install(stand_in.TARGET, lambda kernel, error: faults.append(f"{kernel}: {error}"))

    def answer(request: Json) -> Json:
        faults.clear()
        stand_in.counts.clear()
        ((phase, what),) = request.items()
        with _Untouched():
            said = _WORK[phase](*what) or {}
        return {"counts": stand_in.counts, "faults": faults} | said

    workers.serve(answer)


class _Untouched(TorchDispatchMode):
    """Leaves unwritten what torch's own ops would compute of large tensors: models' shapes take gigabytes and hours."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        large = any(tensor.numel() > _LARGE for tensor in tensors)
        aliases = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
        if func.namespace != "aten" or torch.Tag.data_dependent_output in func.tags:
            return func(*args, **kwargs)
        if func._opname == "randn" and math.prod(args[0]) > _LARGE:
            kwargs.pop("generator", None)
            return torch.ops.aten.empty.memory_format(*args, **kwargs)
        if large and aliases and aliases[0].is_write and func._opname.endswith("_"):
            return args[0]
        if large and not aliases:
            with torch.device("meta"):
                shapes = func(*_on_meta(args), **_on_meta(kwargs))
            return tree_map_only(torch.Tensor, _unwritten, shapes)
        return func(*args, **kwargs)


def _on_meta(values: Any) -> Any:
    found = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)
    return tree_map_only(torch.device, lambda device: torch.device("meta"), found)


def _unwritten(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def _smoke(op: str, case: str) -> None:
    spec, chosen = registry.op(op), _case(op, case)
    spec.run(spec.make_inputs(chosen, SETTINGS.device, 0), chosen, "triton")


def _case(op: str, name: str) -> registry.Case:
    return next(case for case in registry.op(op).cases if case.name == name)


def _test(path: str) -> Json:
    environment = {name: value for name, value in os.environ.items() if name != "SHARDFUSE_IMPL"}
    command = [*test_command(OP_SUITE), "-p", f"{__package__}.stand_in_tests", path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603 - this package's own
    said = journal.said(done.stdout.splitlines()[-1]) if done.stdout else None
    return said or {"faults": [f"pytest exited with {done.returncode}"]}


def _benchmark(name: str, case: str) -> None:
    benchmark = find(name)
    for module in [module for module in sys.modules.values() if getattr(module, "check_outputs", None) is _compared]:
        module.check_outputs = lambda ours, **others: [Verdict(name, 0.0, 1.0) for name in ours]  # type: ignore[attr-defined]
    virtual_ranks.share_of = _share
    assert benchmark.warm is not None
    benchmark.warm(SETTINGS, case)
    list(benchmark.check(SETTINGS, [case]))


_compared = gate.check_outputs


def _share(device: torch.device, size: int) -> int:
    return max(1, (virtual_ranks.chips.program_slots(device) - virtual_ranks.SPARE) // size)


def _tune(op: str, case: str, part: int) -> None:
    pairs = [
        (call, config)
        for call in tunable.calls_of(op, _case(op, case), SETTINGS.device, stand_in.TARGET)
        for config in call.candidates(stand_in.TARGET)[: tune.TOP]
    ]
    for call, config in pairs[part::_TUNE_PARTS]:
        with contextlib.suppress(stand_in.Claimed):
            tunable.faults_of(call.request(config, stand_in.TARGET))


_WORK: dict[str, Callable[..., Json | None]] = {
    "smoke": _smoke,
    "tests": _test,
    "benchmarks": _benchmark,
    "tune": _tune,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.bench.gpu.ahead", description="Compile on a CPU what a GPU run launches."
    )
    parser.add_argument("--out", type=Path, help=f"the GPU run's directory, for {ARCHIVE}")
    parser.add_argument("--phases", default=",".join(PHASES), help="separated by commas (default: %(default)s)")
    parser.add_argument("--only", default="", help="ops, separated by commas: only these and their benchmarks")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if dispatch.triton_version() is None:
        parser.error("compiling kernels needs Triton, which is not installed here (pip install triton; Linux only)")
    if options.worker:
        _serve()
        return 0
    phases, only = (tuple(name for name in text.split(",") if name) for text in (options.phases, options.only))
    if options.out is None or set(phases) - set(PHASES):
        parser.error(f"--out DIR is missing, or a phase is not one of {', '.join(PHASES)}")
    try:
        wanted = Options(options.out, phases, only, options.jobs, options.limit)
        outcome = compile_ahead(wanted, lambda line: print(line, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
