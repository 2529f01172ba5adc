"""Runs a benchmark: correctness first, then the timing, row by row.

``shardfuse bench list``, ``shardfuse bench run NAME [--json] [--out FILE [--resume]]``, ``make bench``; the GPU run
starts ``python -m shardfuse.bench.harness.runner --stream FILE`` and reads one JSON event a line.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.workers import end_with_the_parent
from ...kernels.runtime import dispatch
from ...kernels.runtime.names import expected
from ...kernels.runtime.printing import Sheet, console, prose, unbroken
from .. import suites
from . import provenance
from .benchmark import Benchmark, Measurement, Settings
from .progress import Progress
from .records import Outcome, RowKey, check_place, earlier, header, left, record, skipped
from .report import DRY_NOTE, Row, last_line, show_red, show_rows, write_json
from .timing import KNOWN_CEILINGS, Ceilings, ceilings
from .virtual_ranks import open_queues

LOST_ROWS = 2  # of a benchmark, after which a GPU run's call leaves its others out; a hang counts as so many


@functools.cache
def benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by name: the modules of ``bench/suites`` that define ``BENCHMARK``."""
    found: dict[str, Benchmark] = {}
    for module in pkgutil.iter_modules(suites.__path__):
        benchmark = getattr(importlib.import_module(f"{suites.__name__}.{module.name}"), "BENCHMARK", None)
        if benchmark is not None:
            found[benchmark.name] = benchmark
    return found


def find(name: str) -> Benchmark:
    """The benchmark called ``name``; ValueError, with the known ones, if there is none."""
    if name not in benchmarks():
        raise ValueError(f"no benchmark called {name!r}: {expected(name, benchmarks(), 'known are')}")
    return benchmarks()[name]


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run(
    benchmark: Benchmark,
    settings: Settings,
    *,
    outcome: Outcome | None = None,
    only: Sequence[RowKey] | None = None,
    on_verdict: Callable[[str, Verdict], None] = lambda case, verdict: None,
    on_start: Callable[[Measurement], None] = lambda planned: None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_error: Callable[[Sequence[Measurement], Exception], None] | None = None,
) -> Outcome:
    """Measure the plan's rows, each case checked just before its first; a red case is not measured.

    ``outcome`` is an earlier run's, to be resumed: its cases and rows are neither checked nor measured again, and rows
    that failed in it come last. ``only`` names the rows to measure and their order; without it that is the plan's. A
    row that raises ends the run, unless ``on_error`` handles it; then a check that raises loses that case's rows.
    """
    outcome = outcome or Outcome()
    plan = whole = left(benchmark, settings, done=[row.key for row in outcome.rows])
    if only is not None:
        planned_rows = {planned.key: planned for planned in plan}
        plan = [planned_rows[key] for key in only if key in planned_rows]
    plan.sort(key=lambda planned: planned.key in outcome.failed)
    checked = {case for case, _ in outcome.verdicts}
    measured = settings.cuda and not settings.dry and any(planned.work for planned in plan)
    for planned in plan:
        if planned.gate in outcome.raised | outcome.red:
            continue
        on_start(planned)
        try:
            if planned.gate not in checked:
                _check(benchmark, settings, planned.gate, outcome, on_verdict)
                checked.add(planned.gate)
            if planned.gate in outcome.red:
                continue
            best = ceilings(settings.device) if measured else None
            before = dispatch.counts.copy()
            ours, peer = planned.run()
            ran = sorted(f"{op}={impl}" for op, impl in dispatch.counts - before)
            outcome.rows.append(Row.of(planned, ours, peer, best, ran=" ".join(ran)))
        except Exception as error:
            if on_error is None:
                raise
            if planned.gate in checked:
                on_error([planned], error)
            else:
                outcome.raised.add(planned.gate)
                on_error([each for each in whole if each.gate == planned.gate], error)
        else:
            on_row(outcome.rows[-1])
    return outcome


def _check(
    benchmark: Benchmark,
    settings: Settings,
    case: str,
    outcome: Outcome,
    on_verdict: Callable[[str, Verdict], None],
) -> None:
    """Add the case's verdicts to ``outcome``; of a check that raises only the red ones, since it must be repeated."""
    found: list[tuple[str, Verdict]] = []
    try:
        for name, verdict in benchmark.check(settings, [case]):
            found.append((name, verdict))
            on_verdict(name, verdict)
    except Exception:
        outcome.verdicts += [(name, verdict) for name, verdict in found if not verdict.ok]
        raise
    if not found:
        raise RuntimeError(
            f"benchmark {benchmark.name} compared nothing with the oracle for {case}: a case without a check is not "
            "timed"
        )
    outcome.verdicts += found


def list_benchmarks() -> list[Benchmark]:
    """Every benchmark, by name. ``show_list`` prints them."""
    return list(benchmarks().values())


def show_list() -> int:
    """Print the benchmarks that can run here: name, what it measures, targets, devices."""
    columns = (unbroken("name"), prose("measures"), prose("devices", least=5), prose("targets"))
    caption = "a target is the least that a ratio should be; > 1: ours is better"
    table = Sheet(*columns, title="benchmarks", caption=caption)
    for benchmark in list_benchmarks():
        targets = "\n".join(f"{what}: >= {ratio:.3g}" for what, ratio in benchmark.targets.items())
        table.add(benchmark.name, benchmark.summary, ", ".join(benchmark.devices), targets)
    console().print(table)
    return 0


def run_benchmark(
    name: str,
    *,
    json: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    short: bool = False,
    dry: bool = False,
    device: str | None = None,
    seconds: float = Settings.seconds,
) -> int:
    """Run one benchmark for a person or (``json``) a script; returns the process's exit code.

    0 if the gate was green and every row was measured, 1 if not, 2 if nothing can run: an unknown name, a benchmark
    that does not run on this device, a file that cannot be resumed. ``out`` is a file for the full record, as kept
    under bench/results/; it is complete after every row, and with ``resume`` a run continues from its rows.
    """
    errors = console(stderr=True)
    open_queues()
    try:
        benchmark = find(name)
        settings = Settings(_device(device), short=short, dry=dry, seconds=seconds)
        _require(benchmark, settings)
        if _wants_the_interpreter(benchmark, settings):
            _interpret_instead(name, json=json, out=out, resume=resume, short=short, device=device, seconds=seconds)
        if out is not None:
            check_place(Path(out))
        outcome = earlier(benchmark, settings, out, resume)
    except ValueError as error:
        errors.print("[red]error:[/]", end=" ")
        errors.print(str(error), markup=False)
        return 2

    where = provenance.device_name(settings.device)
    errors.print(f"{name} on {where}: checking correctness, then timing", markup=False)
    if outcome.rows:
        errors.print(f"  resuming after {len(outcome.rows)} rows that {out} holds", markup=False)
    for (case, metric, peer_name), why in skipped(benchmark, settings).items():
        errors.print(f"  skipped: {case}: {metric}, against {peer_name}: {why}", markup=False, soft_wrap=True)
    head = header(benchmark, settings)

    def keep() -> None:
        if out is not None:
            write_json(Path(out), record(benchmark, settings, outcome, head))

    try:
        total = len(left(benchmark, settings, done=[row.key for row in outcome.rows]))
        with Progress(errors, total, outcome.failed, keep) as progress:
            run(
                benchmark,
                settings,
                outcome=outcome,
                on_verdict=progress.on_verdict,
                on_start=progress.on_start,
                on_row=progress.on_row,
                on_error=progress.on_error,
            )
    except BaseException:
        if out is not None and outcome.rows:
            errors.print(f"stopped; {out} holds {len(outcome.rows)} rows, and --resume continues it", markup=False)
        raise
    if not outcome.green:
        show_red(errors, name, outcome.verdicts)
    if outcome.rows and not json:
        title = f"{name} on {where}" + (DRY_NOTE if dry else "")
        show_rows(console(), title, outcome.rows, absolute=settings.cuda)
    keep()
    if json:
        print(last_line(name, outcome.green, where, outcome.rows), flush=True)
    return 0 if outcome.green and not outcome.failed else 1


def _device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r}: expected cpu, cuda or cuda:0") from None


def _require(benchmark: Benchmark, settings: Settings) -> None:
    if settings.device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"benchmark {benchmark.name}: this machine has no GPU that torch can use; pass device cpu")
    if settings.device.type not in benchmark.devices and not settings.dry:
        raise ValueError(
            f"benchmark {benchmark.name} runs on {' or '.join(benchmark.devices)}, not on {settings.device.type}"
        )


def _wants_the_interpreter(benchmark: Benchmark, settings: Settings) -> bool:
    """Whether the run needs Triton's interpreter: a dry run requires the kernels, which a CPU can only interpret."""
    return settings.dry and not settings.cuda and bool(benchmark.ops) and not dispatch.interpreting()


def _interpret_instead(
    name: str,
    *,
    json: bool,
    out: str | Path | None,
    resume: bool,
    short: bool,
    device: str | None,
    seconds: float,
) -> None:
    """Restart a dry run in a Python with interpreted kernels, which is fixed at its start; does not return.

    Raises ValueError without Triton.
    """
    if dispatch.triton_version() is None:
        raise ValueError("a dry run needs Triton, which is not installed here (pip install triton; Linux only)")
    given = {"--json": json, "--resume": resume, "--short": short}
    arguments = [name, "--dry", "--seconds", str(seconds), *(flag for flag, is_set in given.items() if is_set)]
    arguments += ["--out", str(out)] if out is not None else []
    arguments += ["--device", device] if device is not None else []
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", __spec__.name, *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.execve(sys.executable, command, environment)  # noqa: S606 - this program again, with the user's own arguments


def _emit(bench: str, event: str, /, **content: Any) -> None:
    print(json.dumps({"event": event, "bench": bench, **content}), flush=True)


def _emit_verdict(bench: str, case: str, verdict: Verdict) -> None:
    _emit(bench, "verdict", case=case, **vars(verdict), ok=verdict.ok)


def _emit_start(bench: str, planned: Measurement) -> None:
    _emit(bench, "start", key=planned.key)


def _emit_row(bench: str, row: Row) -> None:
    _emit(bench, "row", **row.record())


def _stream(work: dict[str, Any], settings: Settings) -> int:
    """Measure ``work["rows"]`` (benchmark, case, metric, peer) in this order, for the GPU run's watchdog.

    One JSON event a line, flushed: verdicts, the start and the end of each row. A row that raises is an event, too, and
    so are all rows of a gate that does; a benchmark's second (``work["lost"]`` counts earlier ones) costs its others. A
    GPU that answers no more ends the process. ``work["ceilings"]`` are another process's; without any the first event
    tells them. With ``work["rehearsal"]``, the seconds that this process takes to start and each row takes, a CPU
    stands in for the GPU.
    """
    rehearsal, made = work.get("rehearsal"), find
    if rehearsal is not None:
        from . import stand_in

        stand_in.install(lambda kernel, error: None, compiling=False)
        settings, seconds = stand_in.SETTINGS, iter(rehearsal["rows"])
        time.sleep(max(0.0, rehearsal["start"] - stand_in.age()))
        made = lambda name: stand_in.standing(find(name), next(seconds))
    if work.get("ceilings"):
        KNOWN_CEILINGS[settings.device] = Ceilings(**work["ceilings"])
    elif rehearsal is None:
        _emit("", "ceilings", **vars(ceilings(settings.device)))
    outcomes: dict[str, Outcome] = collections.defaultdict(Outcome)
    lost = collections.Counter(work.get("lost", {}))

    def failed(name: str, planned: Sequence[Measurement], error: Exception) -> None:
        traceback.print_exception(error)
        for each in planned:
            how = f"{type(error).__name__}: {error}"[:500]
            _emit(name, "failed", key=each.key, how=how, first=each is planned[0])
        lost[name] += 1
        if settings.device.type == "cuda":
            torch.cuda.synchronize()  # raises again where the fault has ended the context

    before = None
    for name, *key in work["rows"]:
        benchmark = made(name)
        if lost[name] >= LOST_ROWS:
            continue
        if settings.device.type == "cuda" and name != before:
            torch.cuda.empty_cache()
        before = name
        run(
            benchmark,
            settings,
            outcome=outcomes[name],
            only=[tuple(key)],
            on_verdict=functools.partial(_emit_verdict, name),
            on_start=functools.partial(_emit_start, name),
            on_row=functools.partial(_emit_row, name),
            on_error=functools.partial(failed, name),
        )
    print(json.dumps({"event": "end"}), flush=True)
    return 0 if all(outcome.green for outcome in outcomes.values()) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.bench.harness.runner", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", help="benchmarks; all that run on this device if none is given")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON per benchmark")
    parser.add_argument("--short", action="store_true", help="the dozen most important cases")
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes, one call each: tests the path, measures nothing"
    )
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="for the timing of one row")
    parser.add_argument("--device", help="cpu or cuda; default: a GPU if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the full record, of one benchmark")
    parser.add_argument("--resume", action="store_true", help="continue from the rows in FILE")
    parser.add_argument("--stream", metavar="FILE", help="JSON, the work of a GPU run's process: one event a line")
    options = parser.parse_args(argv)

    try:
        return _main(options)
    except KeyboardInterrupt:
        return 130


def _main(options: argparse.Namespace) -> int:
    open_queues()
    device = default_device()
    settings = Settings(device, short=options.short, dry=options.dry, seconds=options.seconds)
    names = options.names or [b.name for b in list_benchmarks() if device.type in b.devices]
    if options.stream:
        end_with_the_parent()
        work = json.loads(Path(options.stream).read_text())
        if device.type != "cuda" and "rehearsal" not in work:
            print("error: this process sees no GPU that torch can use", file=sys.stderr)
            return 2
        return _stream(work, settings)
    if options.out is not None and len(names) != 1:
        print(f"error: --out takes the record of one benchmark, and {len(names)} are to run", file=sys.stderr)
        return 2
    passed_on = ("json", "short", "dry", "seconds", "device", "out", "resume")
    how = {option: getattr(options, option) for option in passed_on}
    return max(run_benchmark(name, **how) for name in names)


if __name__ == "__main__":
    sys.exit(main())
