"""``make gpu OUT=dir``: runs all tests and benchmarks that need a GPU, in calls of under nine minutes.

The machine needs no internet and the tree no ``.git``. In order, or the ``--phases`` that are named:

1. ``smoke``: every op's small cases through its kernels against the fp64 oracle;
2. ``tests``: every op's own tests, their kernels compiled instead of interpreted;
3. ``gpu``: the tests marked ``gpu``, which are slower;
4. ``compile``: the benchmarks' kernels that did not come along (``kernels.py``), in parallel before any timing;
5. ``benchmarks``: missing results first, then the stalest.

Every event is on disk as it happens (``events.jsonl``), so an interrupted call loses at most one test or row. The next
call with the same directory goes on: what was green at the same sources does not run again. Each benchmark and each
test file runs in a process group of its own under a watchdog; a test or a row that hangs or crashes is skipped until
its sources change, and a red case loses its own rows only. ``results.json`` holds the finished records. ``--accept
DIR`` files them under bench/results/; it also takes the file of ``bench run --out FILE``.

``--dry`` does the same on a CPU, with tiny shapes interpreted: it tests the path and measures nothing. It also
rehearses what may go wrong (``rehearsal.py``).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...kernels.dev import registry
from ...kernels.runtime.printing import console
from ..harness import provenance, stale
from ..harness.benchmark import Benchmark, Settings
from ..harness.records import left, read_records, record
from ..harness.report import write_json
from . import summary
from .journal import Event, Journal, said
from .kernels import Kernels
from .rehearsal import rehearse
from .selection import OP_SUITE, OP_TESTS, selection
from .suite import Suite
from .watchdog import Ending, watch

HARNESS = f"{provenance.PACKAGE}.bench.harness"

SMOKE_S = 120.0
SMOKE_QUIET_S = 60.0  # a case takes a second or two, its compilation a few more
TESTS_S = 170.0
GPU_TESTS_S = 120.0
COMPILE_S = 75.0
SUMMARY_S = 5.0  # reserved for the end
STARTUP_S = 90.0  # importing torch on a busy machine
GPU_SECONDS_PER_ROW = 0.5
CASES_PER_PROCESS = 4
DRY_TESTS = ("tests/bench/test_stale.py",)
LAST = "test_comm_gpu.py"  # of the tests marked gpu: its ranks wait for each other, so a fault in it costs the most
GPU_SUITE = "gpu and not nightly"
PHASES = ("smoke", "tests", "gpu", "compile", "benchmarks")


@dataclass(frozen=True)
class Options:
    """The options of one call. ``tests`` are the test files to run; empty: all of them, in a dry run a quick one."""

    out: Path
    phases: tuple[str, ...] = PHASES
    only: tuple[str, ...] = ()
    dry: bool = False
    deadline_s: float = 520.0
    quiet_s: float = 90.0
    tests: tuple[str, ...] = ()
    results: Path = stale.RESULTS


@dataclass
class GpuRun:
    """The run itself. ``on_event`` sees every event of the journal."""

    options: Options
    on_event: Callable[[Event], None] = lambda event: None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        options = self.options
        self.until = time.monotonic() + options.deadline_s - SUMMARY_S
        self.root = provenance.package_folder("bench").parent
        self.device = torch.device("cpu" if options.dry else "cuda")
        self.settings = Settings(self.device, short=True, dry=options.dry, seconds=GPU_SECONDS_PER_ROW)
        self.ops, self.benchmarks = selection(options.only)
        self.origin = provenance.describe(self.device)
        self.journal = Journal(
            options.out / "events.jsonl", dry=options.dry, origin=self.origin, on_event=self.on_event
        )
        self.jobs = max(1, (os.cpu_count() or 2) // 2)
        self.kernels = Kernels(options.out)

    def run(self) -> int:
        """Run all phases; 0 if everything that ran was right and nothing hung."""
        self.journal.add("run", origin=self.origin, ops=self.ops, only=self.options.only, phases=self.options.phases)
        given = self.kernels.given
        self.journal.add("kernels", found=given.kernels, refused=given.refused)
        work = {
            "smoke": self._smoke,
            "tests": self._op_tests,
            "gpu": self._gpu_tests,
            "compile": self._compile,
            "benchmarks": self._benchmark_all,
        }
        with (self.options.out / "log.txt").open("a") as self.log:
            try:
                for name in PHASES:
                    if name in self.options.phases:
                        with self._phase(name):
                            work[name]()
                if self.options.dry:
                    with self._phase("rehearsal"):
                        rehearse(self.journal, self._suite, self.settings, self.until)
            finally:
                self._write_results()
                self.kernels.close()
        good = summary.good(self.journal, self.benchmarks)
        self.journal.add("finished", good=good)
        with (self.options.out / "summary.txt").open("w") as file:
            for out in (console(file=file), console()):
                summary.show(out, self.journal, self.benchmarks, dry=self.options.dry)
        self.journal.close()
        return 0 if good else 1

    # --- phases -------------------------------------------------------------------------------------------------------

    def _smoke(self) -> None:
        """Run every op's test cases, a few per process: a crashing kernel loses only the cases in its process."""
        work = []
        sources = {name: provenance.op_hash(name) for name in self.ops}
        for name in self.ops:
            green = {event["case"] for event in self.journal.known("smoke", op=name, source=sources[name], ok=True)}
            cases = [case.name for case in registry.op(name).tagged("test")]
            cases = [case for case in (cases[:2] if self.options.dry else cases) if case not in green]
            work += [(name, part) for part in _parts(cases, CASES_PER_PROCESS)]
        until = self._by(SMOKE_S)

        def smoke(item: tuple[str, list[str]]) -> None:
            name, cases = item
            seen: list[str] = []
            if time.monotonic() >= until:
                return  # the next call's

            def on_line(line: str) -> None:
                event = said(line)
                if event is None:
                    self._note(line)
                else:
                    seen.append(event["case"])
                    self.journal.add("smoke", source=sources[name], **event)

            command = _python("one", name, *cases, "--check", "--json")
            poisoned = {"SHARDFUSE_POISON": "1"}  # elements that a kernel does not write show as NaN
            ending = self._watch(command, on_line, until, SMOKE_QUIET_S, environment=poisoned)
            for case in cases[len(seen) :]:
                lost = {"op": name, "case": case, "ok": False, "detail": f"the process {ending}"}
                self.journal.add("smoke", source=sources[name], **lost)

        self._in_parallel(smoke, work)

    def _compile(self) -> None:
        """Run ours once on every case that is not timed yet and whose kernels did not come along."""
        left = {
            b.name: [case for case in self._cases_left(b) if not self.kernels.has(b, case)]
            for b in self.benchmarks
            if b.warm is not None
        }
        work = [([name], [case]) for name, cases in left.items() for case in cases]
        if self.options.dry and work:  # nothing is compiled, so one process is faster
            work = [(list(left), [case for cases in left.values() for case in cases])]
        until = self._by(COMPILE_S)

        def warm(item: tuple[list[str], list[str]]) -> None:
            names, cases = item
            chosen = [argument for case in cases for argument in ("--warm", case)]
            ending = self._watch(_python("runner", *names, *self._mode(), *chosen), self._note, until)
            self.journal.add("compiled", bench=" ".join(names), cases=cases, ok=ending.ok, how=str(ending))

        self._in_parallel(warm, work)

    def _op_tests(self) -> None:
        """Run the ops' own tests, a few files at a time."""
        until = self._by(TESTS_S)
        # A dry run would interpret what CI interprets anyway: it runs the files that it was given.
        files = [path for path in self._test_files() if self.options.dry or path.name in OP_TESTS]
        markers = "not gpu" if self.options.dry else OP_SUITE
        self._in_parallel(lambda path: self._suite(self.journal).run("tests", markers, path, until), files)

    def _gpu_tests(self) -> None:
        """Run the tests marked ``gpu``, one file after another, because they measure."""
        until = self._by(GPU_TESTS_S)
        for path in sorted(self._test_files(), key=lambda path: (path.name == LAST, path)):
            if "mark.gpu" in path.read_text():
                self._suite(self.journal).run("gpu", GPU_SUITE, path, until)

    def _suite(self, journal: Journal) -> Suite:
        return Suite(journal, self.root, self._watch, self._note)

    def _benchmark_all(self) -> None:
        gpu = provenance.slug(provenance.device_name(self.device))
        order = stale.stalest_first(self.benchmarks, gpu, self.options.results)
        # Rows whose peers compile for most of a minute come last: time may run out for them.
        for slow in (False, True):
            for benchmark in order:
                # After a process that hangs or crashes in a row, another one runs the rows after it.
                while self._cases_left(benchmark, slow=slow) and time.monotonic() < self.until:
                    if not self._benchmark(benchmark, slow=slow):
                        break

    def _benchmark(self, benchmark: Benchmark, *, slow: bool) -> bool:
        """Run one process of one benchmark; returns whether another should run the remaining rows."""
        source = provenance.source_hash(benchmark)
        started: list[tuple[str, ...]] = []

        def on_line(line: str) -> None:
            event = said(line)
            if event is None:
                self._note(line)
                return
            kind = event.pop("event")
            if kind == "start":
                started.append(tuple(event["key"]))
            elif kind == "end":
                ended.append(event["gate"])
            else:
                self.journal.add(kind, source=source, **event)

        before = self.journal.done(benchmark.name, source)
        ended: list[str] = []
        with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
            done = Path(folder) / "done.json"
            write_json(done, sorted(before))
            pace = [] if slow else ["--fast"]
            command = _python("runner", benchmark.name, *self._mode(), *pace, "--stream", "--done", str(done))
            ending = self._watch(
                command,
                on_line,
                self.until,
                self.options.quiet_s,
                on_start=lambda pid: self.journal.add("started", bench=benchmark.name, pid=pid),
            )
        if ending.status in ("out of time", "stopped") or ended:
            return False
        # The row in which it died, unless it died between two rows.
        key = next((key for key in started[-1:] if key not in self.journal.done(benchmark.name, source)), None)
        kind = "hung" if ending.status == "hung" else "failed"
        self.journal.add(kind, bench=benchmark.name, source=source, key=key, how=str(ending))
        return len(self.journal.done(benchmark.name, source)) > len(before)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _write_results(self) -> None:
        """Write every benchmark's record, from all calls with the same directory and the same sources."""
        records = {}
        for benchmark in self.benchmarks:
            outcome = self.journal.outcome(benchmark.name, provenance.source_hash(benchmark))
            if outcome.verdicts:
                records[benchmark.name] = record(benchmark, self.settings, outcome)
        write_json(self.options.out / "results.json", records)

    # --- helpers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started, before = time.monotonic(), self.kernels.compiled()
        yield
        compiled = self.kernels.compiled() - before
        self.journal.add("phase", name=name, seconds=round(time.monotonic() - started, 1), compiled=compiled)

    def _by(self, seconds: float) -> float:
        """The earlier of ``seconds`` from now and the end of the call."""
        return min(time.monotonic() + seconds, self.until)

    def _mode(self) -> list[str]:
        return ["--short", "--seconds", str(self.settings.seconds), *(["--dry"] if self.options.dry else [])]

    def _cases_left(self, benchmark: Benchmark, *, slow: bool = True) -> list[str]:
        done = self.journal.done(benchmark.name, provenance.source_hash(benchmark))
        return list(dict.fromkeys(row.case for row in left(benchmark, self.settings, done=done, slow=slow)))

    def _test_files(self) -> list[Path]:
        chosen = self.options.tests or (DRY_TESTS if self.options.dry else ())
        if chosen:
            return [self.root / path for path in chosen]
        # Not the test of this run itself, which would start another run.
        return [path for path in sorted((self.root / "tests").rglob("test_*.py")) if path.name != "test_gpu_runner.py"]

    def _watch(
        self,
        command: list[str],
        on_line: Callable[[str], None],
        until: float,
        quiet_s: float = math.inf,
        *,
        environment: dict[str, str] | None = None,
        on_start: Callable[[int], None] = lambda pid: None,
    ) -> Ending:
        return watch(
            command,
            on_line=on_line,
            until=until,
            quiet_s=quiet_s,
            startup_s=max(STARTUP_S, quiet_s),
            env=os.environ | self._environment() | (environment or {}),
            cwd=self.root,
            stop=self._stop,
            on_start=on_start,
        )

    def _environment(self) -> dict[str, str]:
        common = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(self.kernels.folder)}
        if self.options.dry:
            # The last, because some virtual machines announce AMX and then refuse its instructions.
            isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
            common |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            common["ONEDNN_MAX_CPU_ISA"] = isa
        return common

    def _in_parallel(self, work: Callable[..., None], items: Sequence[object]) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for future in [pool.submit(work, item) for item in items]:
                    future.result()
            except BaseException:
                self._stop.set()
                raise

    def _note(self, text: str) -> None:
        self.log.write(text + "\n")
        self.log.flush()


def _parts(items: Sequence[str], size: int) -> list[list[str]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{HARNESS}.{module}", *arguments]


def accept(out: Path, results: Path = stale.RESULTS) -> int:
    """File the results of a finished run (its directory) or of one ``bench run`` (its file) under bench/results/, a
    CPU's too.

    It prints the reason for each record that it refuses.
    """
    refused = 0
    for found in read_records(out / "results.json" if out.is_dir() else out):
        try:
            path, missing = stale.accept(found, results), len(found["missing"])
            print(f"{found['bench']}: {path}" + (f", planned rows missing: {missing}" if missing else ""))
        except ValueError as error:
            refused += 1
            print(f"error: {error}", file=sys.stderr)
    return 1 if refused else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.bench.gpu", description="Test and measure on a GPU machine."
    )
    parser.add_argument("--out", type=Path, help="directory for the results; an earlier call's is resumed")
    parser.add_argument(
        "--phases", default=",".join(PHASES), help="those to run, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="ops, separated by commas: run only these and their benchmarks")
    parser.add_argument("--dry", action="store_true", help="do the same on a CPU, with tiny shapes, no measurement")
    parser.add_argument("--deadline", type=float, default=Options.deadline_s, help="seconds for the whole call")
    parser.add_argument("--quiet", type=float, default=Options.quiet_s, help="seconds without output that mean hung")
    parser.add_argument(
        "--tests",
        nargs="*",
        default=(),
        help="test files, from the root of the tree; default: all, or a quick one in a dry run",
    )
    parser.add_argument("--accept", type=Path, metavar="PATH", help="file DIR's or FILE's results under bench/results/")
    options = parser.parse_args(argv)
    if options.accept is not None:
        return accept(options.accept)
    if options.out is None:
        parser.error("--out DIR is missing: where the results go")
    if not options.dry and not torch.cuda.is_available():
        print("error: this machine has no GPU that torch can use; --dry does the same without one", file=sys.stderr)
        return 2
    only = tuple(name for name in options.only.split(",") if name)
    phases = tuple(name for name in options.phases.split(",") if name)
    if unknown := set(phases) - set(PHASES):
        parser.error(f"--phases: no phase is called {', '.join(sorted(unknown))}; there are {', '.join(PHASES)}")
    try:
        run = GpuRun(
            Options(options.out, phases, only, options.dry, options.deadline, options.quiet, tuple(options.tests)),
            on_event=_progress,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends its processes, too
    try:
        return run.run()
    except KeyboardInterrupt:
        return 130


def _progress(event: Event) -> None:
    """Print one line for each notable event while the run is under way."""
    shown = {
        "kernels": ("found", "refused"),
        "phase": ("name", "seconds", "compiled"),
        "tests": ("lane", "file", "how"),
        "row": ("bench", "case", "metric", "peer_name", "ratio"),
        "hung": ("bench", "key"),
        "failed": ("bench", "key", "how"),
    }
    if event["event"] in shown:
        said = "  ".join(str(event[name]) for name in shown[event["event"]])
        print(f"{event['at_s']:7.1f} s  {event['event']:<7} {said}", flush=True)
