"""``make gpu OUT=dir``: tests and measures the kernels on a GPU, in calls of minutes, of which nothing is lost.

``smoke``       every op's small cases through its kernels against the fp64 oracle; what is red runs again, alone
``benchmarks``  the rows in the order of ``plan.py``, in one process, as long as time for tests is left
``tests``       every op's own tests, their kernels compiled instead of interpreted
``candidates``  other configurations against today's (``bench/suites/candidates.py``)
``slow``        the rows whose peers compile for most of a minute
``gpu``         the tests marked ``gpu``, which are slower

Every event is on disk as it happens (``journal.py``); summary and records are made from it after each phase. The next
call goes on: what was green at the same sources does not run again. Processes live long, each in a group of its own
under a watchdog: a case, a test or a row that hangs or crashes costs its process, and the latter two are skipped until
their sources change. ``--dry`` rehearses on a CPU: smoke's kernels are compiled for the GPU and emulated, rows launch
in Triton's binder at the GPU's shapes and compute nothing (``bench/harness/stand_in.py``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...kernels.dev import registry, stand_in, stub_cuda, workers
from ...kernels.dev.carried_cache import Kernels
from ...kernels.dev.watchdog import Ending, watch
from ...kernels.runtime import device
from ..harness import provenance, stale
from ..harness.benchmark import Measurement, Settings
from ..harness.records import filed_rows, is_short, left, skipped
from ..harness.report import write_json
from ..harness.runner import LOST_ROWS
from ..harness.stand_in import OnCpu, age
from . import ahead, plan, summary
from .journal import FILE, Event, Journal, card_folder, said
from .suite import OP_SUITE, OP_TESTS, Suite

SMOKE_S = 120.0
QUIET_S = 30.0  # of a case, a row or a test once kernels came along: they take a second or two
COMPILING_S = 90.0  # where today's did not
TESTS_S = 75.0
GPU_TESTS_S = 60.0
AGAIN_S = 15.0  # of red cases that run again, under each of two settings
SUMMARY_S, PACK_S = 5.0, 20.0  # reserved for the end, without and with kernels to pack
STARTUP_S = 90.0  # importing torch on a busy machine
GPU_SECONDS_PER_ROW = 0.5
SLOW_QUIET_S = 120.0  # of a row whose peer is compiled
EMULATED_S = 90.0  # of a case that is emulated, on a busy machine
BARREN = 2  # processes in a row that end before they say anything, after which the next benchmark is left out
PROCESSES = 8
PTXAS = Path("/usr/local/cuda/bin/ptxas")  # where PATH has none
CANDIDATES = "candidates"  # a benchmark
DRY_TESTS = ("tests/bench/test_stale.py",)
LAST = "test_comm_gpu.py"  # of the tests marked gpu: its ranks wait for each other, so a fault in it costs the most
GPU_SUITE = "gpu and not nightly"
PHASES = ("smoke", "benchmarks", "tests", "candidates", "slow", "gpu")
PLANS = {"first": PHASES[:3], "second": PHASES[3:5]}


@dataclass(frozen=True)
class Options:
    """The options of one call. ``tests`` are the test files to run; empty: all of them, in a dry run a quick one."""

    out: Path
    phases: tuple[str, ...] = PHASES
    only: tuple[str, ...] = ()
    dry: bool = False
    deadline_s: float = 520.0
    quiet_s: float | None = None
    tests: tuple[str, ...] = ()
    pace: float = 0.0
    spent_s: float = 0.0  # since the process began, before the run is made


@dataclass
class GpuRun:
    """The run itself. ``on_event`` sees every event of the journal."""

    options: Options
    on_event: Callable[[Event], None] = lambda event: None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        options = self.options
        self.started = time.monotonic() - options.spent_s
        self.root = provenance.package_folder("bench").parent
        self.device = torch.device("cpu" if options.dry else "cuda")
        kind = OnCpu if options.dry else Settings
        self.settings = kind(self.device, short=True, seconds=GPU_SECONDS_PER_ROW)
        self.ops, self.benchmarks = plan.selection(options.only)
        self.origin = provenance.describe(self.device)
        self.folder = card_folder(options.out, self.origin)
        self.journal = Journal(self.folder / FILE, self.on_event, self.started)
        self.jobs = min(PROCESSES, workers.cores())
        arch = stand_in.TARGET if options.dry else device.architecture(self.device)
        self.kernels = Kernels(options.out, arch, provenance.package_hash())
        self.until = self.started + options.deadline_s - (PACK_S if self.kernels.adds else SUMMARY_S)
        self.lost = Counter[str]()  # rows, by benchmark
        self.ceilings: dict[str, float] | None = None
        self.processes = 0

    def run(self) -> int:
        """Run all phases; 0 if everything that ran was right and nothing hung."""
        self.journal.add("run", origin=self.origin, dry=self.options.dry, phases=self.options.phases)
        self.journal.add("kernels", found=self.kernels.given.kernels, refused=self.kernels.given.refused)
        work = {
            "smoke": self._smoke,
            "benchmarks": lambda: self._measure(self._steps("benchmarks"), self._but_for_tests()),
            "tests": self._op_tests,
            "candidates": lambda: self._measure(self._steps("candidates"), self.until),
            "slow": lambda: self._measure(self._steps("slow"), self.until, SLOW_QUIET_S),
            "gpu": self._gpu_tests,
        }
        with (self.folder / "log.txt").open("a") as self.log:
            try:
                self.planned = dict(self._rows())
                for name in PHASES:
                    if name in self.options.phases:
                        with self._phase(name):
                            work[name]()
            finally:
                self._safely(self.kernels.close)
            good = summary.good(self.journal)
            self.journal.add("finished", good=good, processes=self.processes)
            self._safely(lambda: summary.write(self.folder, self.journal))
        self.journal.close()
        return 0 if good else 1

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[plan.Name, Measurement]]:
        """The short plans' rows, each benchmark's told to the journal. A plan that raises costs no other benchmark."""
        for benchmark in self.benchmarks:
            try:
                rows, source = left(benchmark, self.settings), provenance.source_hash(benchmark)
                told = {"sources": provenance.source_hashes(benchmark), "short": is_short(benchmark, self.settings)}
                told["planned"] = [row.key for row in rows]
                told["skipped"] = [[*key, why] for key, why in skipped(benchmark, self.settings).items()]
                self.journal.add("benchmark", bench=benchmark.name, source=source, **told)
                yield from (((benchmark.name, *row.key), row) for row in rows)
            except Exception as error:
                self._lose(benchmark.name, None, f"{type(error).__name__}: {error}")

    def _steps(self, phase: str) -> list[plan.Step]:
        def wanted(name: plan.Name, row: Measurement) -> bool:
            return ("slow" if row.slow else "candidates" if name[0] == CANDIDATES else "benchmarks") == phase

        filed = filed_rows(stale.RESULTS / provenance.slug(self.origin["device"]))
        rows = {name: row for name, row in self.planned.items() if wanted(name, row)}
        return plan.steps(rows, self.settings.seconds, filed)

    def _but_for_tests(self) -> float:
        """When the rows end, so that the tests have time, but for half of what is left."""
        now, later = time.monotonic(), {"tests": TESTS_S, "gpu": GPU_TESTS_S}
        reserved = sum(seconds for name, seconds in later.items() if name in self.options.phases)
        return max(self.until - reserved, (now + self.until) / 2)

    # --- phases -------------------------------------------------------------------------------------------------------

    def _smoke(self) -> None:
        """Run every op's test cases in a few processes; what a case does to its process costs no other case."""
        work: list[tuple[str, str]] = []
        sources = {name: provenance.op_hash(name) for name in self.ops}
        spin = {op for benchmark in self.benchmarks if benchmark.name in plan.SPIN for op in benchmark.ops}
        for name in sorted(self.ops, key=lambda name: name in spin):  # those that may wait for ever come last
            green = {event["case"] for event in self.journal.known("smoke", op=name, source=sources[name], ok=True)}
            cases = [case.name for case in registry.op(name).tagged("test")]
            work += [(name, case) for case in (cases[:2] if self.options.dry else cases) if case not in green]
        red = []
        for op, case, found in self._ask(work, self.jobs, {}, self._by(SMOKE_S)):
            self.journal.add("smoke", op=op, case=case, source=sources[op], **found)
            red += [(op, case)] if not found["ok"] and "late" not in found else []
        if missing := len(work) - len(list(self.journal.of("smoke"))):
            self.journal.add("broken", phase="smoke", how=f"out of time, {missing} cases not reached")
        # Alone and one launch at a time the fault is the case's own; another assembler may show that it is ptxas's.
        settings, ptxas = [{"CUDA_LAUNCH_BLOCKING": "1"}], shutil.which("ptxas") or str(PTXAS)
        if Path(ptxas).is_file():  # its kernels are kept apart from the others
            cache = str(self.kernels.folder / "again")
            settings.append({"TRITON_PTXAS_PATH": ptxas, "TRITON_CACHE_DIR": cache})
        for setting in settings if not self.options.dry else ():
            name, value = next(iter(setting.items()))
            for op, case, found in self._ask(red, 1, setting, self._by(AGAIN_S)):
                self.journal.add("again", op=op, case=case, **{"with": f"{name}={value}"}, **found)

    def _ask(
        self, cases: Sequence[tuple[str, str]], jobs: int, environment: dict[str, str], until: float
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(op, case, what is found) as they come, until ``until``; no element that a kernel leaves unwritten is 0."""
        command = [sys.executable, "-m", f"{__package__}.smoke"]
        environment = {**os.environ, **self._environment(), **environment, "SHARDFUSE_POISON": "1"}
        limits = workers.Limits(self._quiet_s("smoke"), STARTUP_S, until)
        if self.options.dry:
            from triton import knobs  # what is emulated is no kernel that a GPU could use

            command += ["--emulate", stand_in.TARGET, "--start", str(plan.PROCESS_S * self.options.pace)]
            environment["TRITON_CACHE_DIR"], limits = str(knobs.cache.dir), limits._replace(answer_s=EMULATED_S)
        self.processes += min(jobs, len(cases))
        requests = [{"op": op, "case": case} for op, case in cases]
        for index, answer in workers.ask_all(requests, command, environment, jobs, limits=limits):
            if time.monotonic() > until:
                return
            self.processes += "error" in answer
            error = {"ok": False, "detail": answer.pop("error")} if "error" in answer else {}
            yield (*cases[index], error | answer)

    def _op_tests(self) -> None:
        """Run the ops' own tests, a few files in each of a few processes."""
        until = self._by(TESTS_S)
        # A rehearsal would interpret what CI interprets anyway: it runs the files that it was given.
        files = [path for path in self._test_files() if self.options.dry or path.name in OP_TESTS]
        files.sort(key=lambda path: -path.stat().st_size)
        markers = "not gpu" if self.options.dry else OP_SUITE
        shares = [files[n :: self.jobs] for n in range(min(self.jobs, len(files)))]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for future in [pool.submit(self._test, "tests", markers, share, until) for share in shares]:
                    future.result()
            except BaseException:
                self._stop.set()
                raise

    def _gpu_tests(self) -> None:
        """Run the tests marked ``gpu`` one after another, because they measure."""
        found = [path for path in self._test_files() if "mark.gpu" in path.read_text()]
        found.sort(key=lambda path: (path.name == LAST, path))
        if found:
            self._test("gpu", GPU_SUITE, found, self._by(GPU_TESTS_S))

    def _test(self, lane: str, markers: str, files: Sequence[Path], until: float) -> None:
        Suite(self.journal, self.root, self._watch, self._note).run(lane, markers, files, until, self._quiet_s(lane))

    def _lose(self, bench: str, key: Sequence[str] | None, how: str, kind: str = "failed") -> None:
        source = next(provenance.source_hash(each) for each in self.benchmarks if each.name == bench)
        self.journal.add(kind, bench=bench, source=source, key=key, how=how)

    def _measure(self, wanted: Sequence[plan.Step], until: float, quiet_s: float = 0.0) -> None:
        """Measure rows in their order. After a process that hangs or crashes in a row another one goes on."""
        sources = {benchmark.name: provenance.source_hash(benchmark) for benchmark in self.benchmarks}

        def left() -> list[plan.Step]:
            done = {name: self.journal.done(name, source) for name, source in sources.items()}
            red = {name: self.journal.outcome(name, source).red for name, source in sources.items()}
            of = [(step, step.name[0]) for step in wanted if self.lost[step.name[0]] < LOST_ROWS]
            return [step for step, bench in of if step.name[1:] not in done[bench] and step.gate not in red[bench]]

        rows, start_s = left(), time.monotonic() - self.started
        self.expected = {step.name: plan.clock(at) for step, at in zip(rows, plan.begins(rows, start_s))}
        self.journal.add("plan", until=plan.clock(until - self.started), rows=list(plan.lines(rows, start_s)))
        more, barren = True, 0
        while more and rows and time.monotonic() < until:
            before = len(self.journal.events)
            more = self._measure_in_one(rows, until, max(quiet_s, self._quiet_s("benchmarks")), sources)
            told = {event["event"] for event in self.journal.events[before:]} - {"started", "ceilings"}
            barren = 0 if told or not more else barren + 1
            if barren == BARREN and self.ceilings is None and not self.options.dry:
                raise RuntimeError(f"{BARREN} processes ended before they had measured the ceilings: see log.txt")
            if barren == BARREN:  # it would end so again
                self.lost[rows[0].name[0]], barren = LOST_ROWS, 0
                self._lose(rows[0].name[0], None, f"{BARREN} processes ended before its row began: see log.txt")
            rows = left()

    def _measure_in_one(
        self, wanted: Sequence[plan.Step], until: float, quiet_s: float, sources: dict[str, str]
    ) -> bool:
        """Run one process; returns whether another should go on after the row in which it ended."""
        running: tuple[str, list[str]] | None = None
        ended, checked = False, set[tuple[str, str]]()

        def on_line(line: str) -> None:
            nonlocal running, ended
            event = said(line)
            if event is None or "event" not in event:
                self._note(line)
                return
            kind, bench = event.pop("event"), event.get("bench")
            if kind == "start":
                running = event["bench"], event["key"]
            elif kind == "end":
                ended = True
            elif kind == "ceilings":
                self.ceilings = {name: event[name] for name in ("flops", "bandwidth")}
                self.journal.add(kind, **self.ceilings)
            else:
                running = running if kind == "verdict" and event["ok"] else None
                if kind == "verdict":
                    checked.add((str(bench), event["case"]))
                self.lost[str(bench)] += kind == "failed" and event.pop("first", True)
                self.journal.add(kind, source=sources[str(bench)], **event)

        work: dict[str, Any] = {"rows": [step.name for step in wanted], "ceilings": self.ceilings, "lost": self.lost}
        if self.options.dry:
            seconds = [each * self.options.pace for each in (plan.PROCESS_S, *plan.whole(wanted))]
            work["rehearsal"] = {"start": seconds[0], "rows": seconds[1:]}
        with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
            file = Path(folder) / "work.json"
            write_json(file, work)
            module, mode = f"{provenance.PACKAGE}.bench.harness.runner", ["--seconds", str(self.settings.seconds)]
            command = [sys.executable, "-m", module, "--short", *mode, "--stream", str(file)]
            started = partial(self.journal.add, "started", rows=len(wanted))
            ending = self._watch(command, on_line, until, quiet_s, on_start=lambda pid: started(pid=pid))
        if ended or ending.status in ("out of time", "stopped"):
            return False
        if running is not None:
            kind = "hung" if ending.status == "hung" else "failed"
            bench, key = running
            self.lost[bench] += LOST_ROWS if kind == "hung" else 1
            gate = next(step.gate for step in wanted if step.name == (bench, *key))
            others = [step.name[1:] for step in wanted if (step.name[0], step.gate) == (bench, gate)]
            for lost in [key] if (bench, gate) in checked else others:  # its check would end the next process, too
                self._lose(bench, lost, str(ending), kind)
        return True

    # --- helpers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started, before, processes = time.monotonic(), self.kernels.compiled(), self.processes
        try:
            yield
        except Exception as error:  # a mistake in one phase costs no other
            self._note(traceback.format_exc())
            self.journal.add("broken", phase=name, how=f"{type(error).__name__}: {error}")
        told = {"compiled": self.kernels.compiled() - before, "processes": self.processes - processes}
        self.journal.add("phase", name=name, seconds=round(time.monotonic() - started, 1), **told)
        self._safely(lambda: summary.write(self.folder, self.journal))

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # the journal has it all
            self._note(traceback.format_exc())

    def _quiet_s(self, phase: str) -> float:
        """Seconds without a line that mean hung, longer where kernels have to be compiled."""
        return self.options.quiet_s or (QUIET_S if self.options.dry or phase in self.kernels.fresh else COMPILING_S)

    def _by(self, seconds: float) -> float:
        """The earlier of ``seconds`` from now and the end of the call."""
        return min(time.monotonic() + seconds, self.until)

    def _test_files(self) -> list[Path]:
        chosen = self.options.tests or (DRY_TESTS if self.options.dry else ())
        if chosen:
            return [self.root / path for path in chosen]
        # Not the test of this run itself, which would start another run.
        return [path for path in sorted((self.root / "tests").rglob("test_*.py")) if path.name != "test_gpu_runner.py"]

    def _watch(
        self, command: list[str], on_line: Callable[[str], None], until: float, quiet_s: float, **options: Any
    ) -> Ending:
        self.processes += 1
        options |= {"env": os.environ | self._environment(), "cwd": self.root, "stop": self._stop}
        startup_s = max(STARTUP_S, quiet_s)
        return watch(command, on_line=on_line, until=until, quiet_s=quiet_s, startup_s=startup_s, **options)

    def _environment(self) -> dict[str, str]:
        common = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(self.kernels.folder)}
        if self.options.dry:
            common |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
            common["SHARDFUSE_IMPL"] = "triton"  # "auto" takes kernels for tensors on a CPU too
        return common

    def _note(self, text: str) -> None:
        self.log.write(text + "\n")
        self.log.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.bench.gpu", description="Test and measure on a GPU.")
    parser.add_argument("--out", type=Path, help="directory for the results; an earlier call's is resumed")
    parser.add_argument("--plan", choices=PLANS, help="; ".join(f"{name}: {', '.join(PLANS[name])}" for name in PLANS))
    parser.add_argument("--phases", help=f"those to run, separated by commas (default: {','.join(PHASES)})")
    parser.add_argument("--only", default="", help="ops, separated by commas: run only these and their benchmarks")
    parser.add_argument("--kernels", action="store_true", help="on a CPU: compile what a run launches, into OUT")
    parser.add_argument("--dry", action="store_true", help="rehearse on a CPU: smoke emulated, launches do nothing")
    parser.add_argument("--pace", type=float, default=0.0, help="of a rehearsal: 1 takes the time that a GPU should")
    parser.add_argument("--deadline", type=float, default=Options.deadline_s, help="seconds for the whole call")
    parser.add_argument("--accept", type=Path, metavar="PATH", help="file DIR's or FILE's results under bench/results/")
    parser.add_argument("--summary", type=Path, metavar="DIR", help="say what a run found, finished or not")
    options = parser.parse_args(argv)
    try:
        if options.accept is not None:
            return summary.accept(options.accept)
        if options.summary is not None:
            return summary.summarise(options.summary)
        return _run(parser, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.out is None:
        parser.error("--out DIR is missing: where the results go")
    if options.plan and options.phases:
        parser.error("--plan names the phases, and so does --phases: pass one of them")
    only = tuple(name for name in options.only.split(",") if name)
    every = tuple(ahead.REQUESTS) if options.kernels else PHASES
    phases = PLANS[options.plan] if options.plan else tuple((options.phases or ",".join(every)).split(","))
    if unknown := set(phases) - set(every):
        parser.error(f"--phases: no phase is called {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    if options.kernels:
        say = partial(print, flush=True)
        return 1 if ahead.compile_ahead(options.out, phases, only, workers.cores(), say)["wrong"] else 0
    if not options.dry and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that torch can use; --dry rehearses without one")
    commit, dirty = provenance.revision()
    if not options.dry and (commit == "unknown" or dirty is None):
        raise ValueError("no result could be filed: say what this tree is, make gpu COMMIT=<its hash> DIRTY=0 (or 1)")
    if options.dry and stub_cuda.compiler() is None:
        raise ValueError("--dry emulates smoke's kernels, which needs a C compiler: install gcc")
    wanted = Options(options.out, phases, only, options.dry, options.deadline, pace=options.pace, spent_s=age())
    run = GpuRun(wanted, on_event=lambda event: _progress(run, event))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends its processes, too
    code = run.run()
    print((run.folder / "summary.txt").read_text(), end="")
    return code


def _progress(run: GpuRun, event: Event) -> None:
    """Print one line for each notable event while the run is under way."""
    shown = {
        "kernels": ("found", "refused"),
        "phase": ("name", "seconds", "compiled"),
        "tests": ("lane", "how"),
        "row": ("bench", "case", "metric", "peer_name", "ratio"),
        "hung": ("bench", "key"),
        "failed": ("bench", "key", "how"),
        "broken": ("phase", "how"),
    }
    at = f"{plan.clock(event['at_s']):>5}"
    if event["event"] == "plan":
        print("\n".join([f"{at}  plan, until {event['until']}: clock, seconds, worth", *event["rows"]]), flush=True)
    elif event["event"] in shown:
        told = "  ".join(str(event[name]) for name in shown[event["event"]])
        if event["event"] == "row":
            name = (event["bench"], event["case"], event["metric"], event["peer_name"])
            told += f"  (expected to begin at {run.expected[name]})"
        print(f"{at}  {event['event']:<7} {told}", flush=True)
