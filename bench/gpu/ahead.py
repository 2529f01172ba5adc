"""``make gpu-kernels OUT=dir``: compiles on a CPU what a GPU run launches, into ``dir/kernels.zip``.

Processes, one per core, do what the run's phases do while a CPU stands in for the GPU (``bench/harness/stand_in.py``):

- ``smoke``: every op's test cases;
- ``benchmarks``: the short plan's cases, with their checks, those of the headlines first;
- ``tests``: every op's own tests, whose comparisons are skipped.

A GPU run unpacks the file (``kernels.py``) and compiles only what is missing. The same command goes on where an earlier
one was stopped, and compiles what has changed since.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...kernels.dev import carried, registry, workers
from ...kernels.dev import stand_in as launches
from ...kernels.dev.carried_cache import ARCH, ARCHIVE, SOURCES
from ...kernels.runtime import dispatch
from ..harness import provenance, stand_in
from ..harness.records import left
from ..harness.runner import find
from . import journal, plan
from .suite import OP_SUITE, OP_TESTS, test_command

SAID_EVERY_S = 10.0
# With the last, "auto" takes kernels for tensors on a CPU too.
_ENVIRONMENT = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SHARDFUSE_IMPL": "triton"}
Json = dict[str, Any]


def compile_ahead(
    out: Path, phases: Sequence[str], only: Sequence[str], jobs: int, say: Callable[[str], None]
) -> Counter[str]:
    """Compile and pack; what is said of it goes to ``say``, line by line. Returns how many kernels were "compiled" or
    "found" in the archive, and how many requests went "wrong". ValueError without Triton.
    """
    if dispatch.triton_version() is None:
        raise ValueError("compiling kernels needs Triton, which is not installed here (pip install triton; Linux only)")
    started = said = time.monotonic()
    archive = out / ARCHIVE
    requests = [(phase, what) for phase in REQUESTS if phase in phases for what in REQUESTS[phase](only)]
    asked_for = Counter(phase for phase, _ in requests)
    total, by_phase = Counter[str](), {phase: Counter[str]() for phase in phases}
    with tempfile.TemporaryDirectory(prefix="shardfuse-kernels-") as folder:
        sources, noted = provenance.package_hash(), dict[str, str]()
        if archive.is_file():
            before = carried.unpack(archive, Path(folder))
            noted = {phase: made for phase, made in before.notes.get(SOURCES, {}).items() if made == sources}
            say(f"{archive} holds {before.kernels} kernels" + (f"; {before.refused}" if before.refused else ""))
        command = [sys.executable, "-m", f"{__package__}.ahead"]
        environment = os.environ | {"TRITON_CACHE_DIR": folder, **_ENVIRONMENT}
        asked: list[Json] = [{"phase": phase, "what": what} for phase, what in requests]
        try:
            for number, (index, answer) in enumerate(workers.ask_all(asked, command, environment, jobs), 1):
                phase, what = requests[index]
                faults = [*answer.get("faults", []), *([answer["error"]] if "error" in answer else [])]
                found = Counter(answer.get("counts", {})) + Counter(requests="error" not in answer, wrong=len(faults))
                by_phase[phase] += found
                total += found
                for fault in faults:
                    say(f"not compiled: {phase} {' '.join(map(str, what))}: {fault}")
                if time.monotonic() - said > SAID_EVERY_S or number == len(requests):
                    said = time.monotonic()
                    say(f"{said - started:6.0f} s  {number} of {len(requests)}, {total['compiled']} kernels compiled")
        finally:
            done = {each: sources for each in phases if by_phase[each]["requests"] == asked_for[each] and not only}
            notes = {ARCH: launches.TARGET, SOURCES: noted | done}
            size = carried.pack(Path(folder), archive, notes, compression=zipfile.ZIP_LZMA)
    for phase, each in by_phase.items():
        code = f"{each['compiled']} kernels compiled, {each['bytes'] / 2**20:.1f} MB of machine code"
        say(f"{phase}: {each['requests']} cases, {code}")
    taken = f"in {time.monotonic() - started:.0f} s by {jobs} processes"
    say(f"{total['compiled']} kernels compiled {taken}, {total['found']} were there; {archive}: {size / 2**20:.1f} MB")
    return total


# --- what there is to compile -----------------------------------------------------------------------------------------


def _smoke_requests(only: Sequence[str]) -> list[list[str]]:
    return [[name, case.name] for name in plan.selection(only)[0] for case in registry.op(name).tagged("test")]


def _benchmark_requests(only: Sequence[str]) -> list[list[str]]:
    found = dict.fromkeys(
        (benchmark.name, row.case)
        for benchmark in plan.selection(only)[1]
        if benchmark.warm is not None
        for row in left(benchmark, stand_in.SETTINGS)
    )
    headlines = {name[:2] for name in plan.HEADLINES}
    return [list(each) for each in sorted(found, key=lambda each: each not in headlines)]


def _test_requests(only: Sequence[str]) -> list[list[str]]:
    tests = provenance.package_folder("bench").parent / "tests"
    return [] if only else [[str(path)] for name in OP_TESTS for path in tests.rglob(name)]


REQUESTS = {"smoke": _smoke_requests, "benchmarks": _benchmark_requests, "tests": _test_requests}


# --- the processes ----------------------------------------------------------------------------------------------------


def _serve() -> None:
    faults: list[str] = []
    stand_in.install(lambda kernel, error: faults.append(f"{kernel}: {error}"))

    def answer(request: Json) -> Json:
        faults.clear()
        launches.counts.clear()
        with stand_in.Untouched():
            said = _WORK[request["phase"]](*request["what"]) or {}
        return {"counts": launches.counts, "faults": faults} | said

    workers.serve(answer)


def _smoke(op: str, name: str) -> None:
    spec = registry.op(op)
    case = next(case for case in spec.cases if case.name == name)
    spec.run(spec.make_inputs(case, stand_in.SETTINGS.device, 0), case, "triton")


def _benchmark(name: str, case: str) -> None:
    benchmark, settings = find(name), stand_in.SETTINGS
    assert benchmark.warm is not None
    benchmark.warm(settings, case)
    list(benchmark.check(settings, [row.gate for row in left(benchmark, settings) if row.case == case]))


def _test(path: str) -> Json:
    environment = {name: value for name, value in os.environ.items() if name != "SHARDFUSE_IMPL"}
    command = [*test_command(OP_SUITE), "-p", f"{__package__}.stand_in_tests", path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603 - this package's own
    said = journal.said(done.stdout.splitlines()[-1]) if done.stdout else None
    return said or {"faults": [f"pytest exited with {done.returncode}"]}


_WORK: dict[str, Callable[..., Json | None]] = {"smoke": _smoke, "benchmarks": _benchmark, "tests": _test}


if __name__ == "__main__":
    _serve()
