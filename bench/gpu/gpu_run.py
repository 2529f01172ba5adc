"""``make gpu OUT=dir``: runs all tests and benchmarks that need a GPU, in calls of under nine minutes.

The machine needs no internet and the tree no ``.git``. In order, or the ``--phases`` that are named:

1. ``smoke``: every op's small cases through its kernels against the fp64 oracle;
2. ``compile``: the benchmarks' kernels that did not come along (``kernels.py``), in parallel before any timing;
3. ``benchmarks``: the rows in the order of ``order.py``, one process after another, as long as time for tests is left;
4. ``tests``: every op's own tests, their kernels compiled instead of interpreted;
5. ``gpu``: the tests marked ``gpu``, which are slower;
6. ``slow``: the rows whose peers compile for most of a minute.

Every event is on disk as it happens (``events.jsonl``), so an interrupted call loses at most one test or row. The next
call with the same directory goes on: what was green at the same sources does not run again. Processes live long, each
in a group of its own under a watchdog: a case, a test or a row that hangs or crashes costs its process and is skipped
until its sources change, and a red case loses its own rows only. ``results.json`` holds the finished records.
``--accept DIR`` files them under bench/results/; it also takes the file of ``bench run --out FILE``.

``--dry`` does the same on a CPU: smoke's kernels are compiled for the GPU and emulated, all others interpreted at tiny
shapes. It tests the path and measures nothing. It also rehearses what may go wrong (``rehearsal.py``).
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...kernels.dev import registry, stand_in, stub_cuda
from ...kernels.runtime.printing import console
from ..harness import provenance, stale
from ..harness.benchmark import Benchmark, Settings
from ..harness.records import left, read_records, record
from ..harness.report import write_json
from . import order, summary
from .journal import Event, Journal, said
from .kernels import Kernels
from .rehearsal import rehearse
from .selection import OP_SUITE, OP_TESTS, selection
from .suite import Suite
from .watchdog import Ending, watch

HARNESS = f"{provenance.PACKAGE}.bench.harness"

SMOKE_S = 120.0
QUIET_S = 30.0  # a case or a row takes a second or two, its compilation a few more
TESTS_S = 90.0
GPU_TESTS_S = 60.0
COMPILE_S = 75.0
SUMMARY_S = 5.0  # reserved for the end
STARTUP_S = 90.0  # importing torch on a busy machine
GPU_SECONDS_PER_ROW = 0.5
SLOW_QUIET_S = 120.0  # of a row whose peer is compiled
EMULATED_S = 90.0  # of a case that is emulated, on a busy machine
LOST_ROWS = 2  # of a benchmark, after which a call leaves its other rows out; a hang counts as so many
DRY_TESTS = ("tests/bench/test_stale.py",)
LAST = "test_comm_gpu.py"  # of the tests marked gpu: its ranks wait for each other, so a fault in it costs the most
GPU_SUITE = "gpu and not nightly"
PHASES = ("smoke", "compile", "benchmarks", "tests", "gpu", "slow")


@dataclass(frozen=True)
class Options:
    """The options of one call. ``tests`` are the test files to run; empty: all of them, in a dry run a quick one."""

    out: Path
    phases: tuple[str, ...] = PHASES
    only: tuple[str, ...] = ()
    dry: bool = False
    deadline_s: float = 520.0
    quiet_s: float = QUIET_S
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
            "benchmarks": self._benchmarks,
            "slow": self._slow_benchmarks,
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
        """Run every op's test cases in a few processes; what a case does to its process costs no other case."""
        work: list[tuple[str, str]] = []
        sources = {name: provenance.op_hash(name) for name in self.ops}
        for name in self.ops:
            green = {event["case"] for event in self.journal.known("smoke", op=name, source=sources[name], ok=True)}
            cases = [case.name for case in registry.op(name).tagged("test")]
            work += [(name, case) for case in (cases[:2] if self.options.dry else cases) if case not in green]
        until = self._by(SMOKE_S)

        def smoke(cases: list[tuple[str, str]]) -> None:
            while cases and time.monotonic() < until:
                seen: list[Event] = []

                def on_line(line: str, seen: list[Event] = seen) -> None:
                    event = said(line)
                    if event is None:
                        self._note(line)
                    else:
                        seen.append(event)
                        self.journal.add("smoke", source=sources[event["op"]], **event)

                environment = {"SHARDFUSE_POISON": "1"}  # elements that a kernel does not write show as NaN
                options, quiet_s = [], self.options.quiet_s
                if self.options.dry:
                    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": _cache()}
                    options, quiet_s = ["--emulate", stand_in.TARGET], max(quiet_s, EMULATED_S)
                ending = self._run(
                    f"{__package__}.smoke", cases, on_line, until, quiet_s, options=options, environment=environment
                )
                # A fault that ends the process may come to light after the case's own event.
                lost = cases[len(seen)] if len(seen) < len(cases) and (not seen or seen[-1]["ok"]) else None
                if lost is not None:
                    said_of_it = {"op": lost[0], "case": lost[1], "ok": False, "detail": f"the process {ending}"}
                    self.journal.add("smoke", source=sources[lost[0]], **said_of_it)
                cases = cases[len(seen) + (lost is not None) :]

        self._in_parallel(smoke, [work[i :: self.jobs] for i in range(self.jobs) if work[i:]])

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

    def _benchmarks(self) -> None:
        """Measure the rows whose peers are ready at once."""
        later = sum({"tests": TESTS_S, "gpu": GPU_TESTS_S}.get(name, 0.0) for name in self.options.phases)
        remaining = self.until - time.monotonic()
        self._measure(order.ordered(self._planned(slow=False)), self._by(max(remaining - later, remaining / 2)))

    def _slow_benchmarks(self) -> None:
        self._measure(self._planned(slow=True), self.until, SLOW_QUIET_S)

    def _planned(self, *, slow: bool) -> list[order.Name]:
        """The short plans' rows that are ``slow``, or the others. A plan that raises costs no other benchmark."""
        found: list[order.Name] = []
        for benchmark in self.benchmarks:
            try:
                found += [(benchmark.name, *row.key) for row in left(benchmark, self.settings) if row.slow is slow]
            except Exception as error:
                self._lose(benchmark.name, None, f"{type(error).__name__}: {error}")
        return found

    def _lose(self, bench: str, key: Sequence[str] | None, how: str, kind: str = "failed") -> None:
        source = next(provenance.source_hash(each) for each in self.benchmarks if each.name == bench)
        self.journal.add(kind, bench=bench, source=source, key=key, how=how)

    def _measure(self, wanted: Sequence[order.Name], until: float, quiet_s: float = 0.0) -> None:
        """Measure rows in their order. After a process that hangs or crashes in a row another one goes on."""
        sources = {benchmark.name: provenance.source_hash(benchmark) for benchmark in self.benchmarks}
        lost: Counter[str] = Counter()
        more = True
        while more and time.monotonic() < until:
            done = {name: self.journal.done(name, source) for name, source in sources.items()}
            wanted = [row for row in wanted if row[1:] not in done[row[0]] and lost[row[0]] < LOST_ROWS]
            more = bool(wanted) and self._measure_in_one(wanted, until, quiet_s, sources, lost)

    def _measure_in_one(
        self, wanted: Sequence[order.Name], until: float, quiet_s: float, sources: Mapping[str, str], lost: Counter[str]
    ) -> bool:
        """Run one process; returns whether another should go on after the row in which it ended."""
        running: tuple[str, list[str]] | None = None
        ended, told = False, 0

        def on_line(line: str) -> None:
            nonlocal running, ended, told
            event = said(line)
            if event is None:
                self._note(line)
                return
            told += 1
            kind = event.pop("event")
            if kind == "start":
                running = event["bench"], event["key"]
            elif kind == "end":
                ended = True
            else:
                if kind != "verdict":
                    running = None
                lost[event["bench"]] += kind == "failed"
                self.journal.add(kind, source=sources[event["bench"]], **event)

        ending = self._run(
            f"{HARNESS}.runner",
            wanted,
            on_line,
            until,
            max(quiet_s, self.options.quiet_s),
            options=[*self._mode(), "--stream"],
            on_start=lambda pid: self.journal.add("started", rows=len(wanted), pid=pid),
        )
        if ended or ending.status in ("out of time", "stopped"):
            return False
        kind = "hung" if ending.status == "hung" else "failed"
        if running is not None:
            lost[running[0]] += LOST_ROWS if kind == "hung" else 1
            self._lose(*running, str(ending), kind)
        elif told == 0:
            self._lose(wanted[0][0], None, str(ending), kind)
        return told > 0

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

    def _cases_left(self, benchmark: Benchmark) -> list[str]:
        done = self.journal.done(benchmark.name, provenance.source_hash(benchmark))
        return list(dict.fromkeys(row.case for row in left(benchmark, self.settings, done=done)))

    def _test_files(self) -> list[Path]:
        chosen = self.options.tests or (DRY_TESTS if self.options.dry else ())
        if chosen:
            return [self.root / path for path in chosen]
        # Not the test of this run itself, which would start another run.
        return [path for path in sorted((self.root / "tests").rglob("test_*.py")) if path.name != "test_gpu_runner.py"]

    def _run(
        self,
        module: str,
        work: Sequence[Sequence[str]],
        on_line: Callable[[str], None],
        until: float,
        quiet_s: float,
        *,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        on_start: Callable[[int], None] = lambda pid: None,
    ) -> Ending:
        """Run a module of the package whose last argument is a file with ``work``, watched."""
        with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
            file = Path(folder) / "work.json"
            write_json(file, work)
            command = [sys.executable, "-m", module, *options, str(file)]
            return self._watch(command, on_line, until, quiet_s, environment=environment, on_start=on_start)

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


def _cache() -> str:
    """Triton's cache outside of a run: what is emulated is no kernel that a GPU could use."""
    from triton import knobs

    return str(knobs.cache.dir)


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
    if options.dry and stub_cuda.compiler() is None:
        print("error: --dry emulates smoke's kernels, which needs a C compiler: install gcc", file=sys.stderr)
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
