"""``make gpu DRY=1``: a GPU run's whole path on a CPU, resumed, killed, with processes that crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardfuse.bench.gpu import gpu_run, plan, summary
from shardfuse.bench.harness.records import left
from shardfuse.bench.harness.report import Row
from shardfuse.bench.harness.stand_in import SETTINGS

pytestmark = pytest.mark.interpret

OP = "dropout"  # and what measures it: every phase, for a twentieth of what all ops take


@pytest.fixture(scope="module")
def finished(
    own_interpreter: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A rehearsal of an op from the command line, and its directory."""
    return _rehearse(tmp_path_factory.mktemp("gpu") / "out", "--only", OP)


def _command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "shardfuse.bench.gpu", "--dry", "--out", str(out), *options]


ENVIRONMENT = {"SHARDFUSE_COMMIT": "abc123", "SHARDFUSE_DIRTY": "0"}


def _rehearse(out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(_command(out, *options), capture_output=True, text=True, timeout=900, env=environment)
    return done, out


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "cpu" / "events.jsonl").read_text().splitlines()]


def _events(out: Path, event: str, **content: Any) -> list[dict[str, Any]]:
    return [e for e in _lines(out) if e["event"] == event and all(e[name] == value for name, value in content.items())]


def test_every_phase_runs_and_is_green(finished):
    _check_green(*finished, gpu_run.PHASES, *plan.selection([OP]))


@pytest.mark.nightly(seconds=165)
def test_every_op_and_benchmark_is_green_in_few_processes(own_interpreter, tmp_path):
    ops, benchmarks = plan.selection(())
    for name in ("first", "second"):
        done, out = _rehearse(tmp_path / name, "--plan", name, "--deadline", "800")
        first = name == "first"
        candidates = [each for each in benchmarks if each.name == gpu_run.CANDIDATES]
        slow = [each for each in benchmarks if any(row.slow for row in left(each, SETTINGS))]
        measured = [each for each in benchmarks if each not in candidates] if first else candidates + slow
        _check_green(done, out, gpu_run.PLANS[name], ops if first else [], measured)
    processes = {e["name"]: e["processes"] for e in _events(tmp_path / "first", "phase")}
    assert processes["smoke"] + processes["benchmarks"] <= 14
    assert processes["tests"] <= 10


def _check_green(
    done: subprocess.CompletedProcess[str],
    out: Path,
    phases: tuple[str, ...],
    ops: list[str],
    benchmarks: list[gpu_run.Benchmark],
) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert [e["name"] for e in _events(out, "phase")] == list(phases)
    smoked = _events(out, "smoke", ok=True)
    assert {e["op"] for e in smoked} == set(ops)
    assert all(e["launches"] > 0 for e in smoked)
    if "tests" in phases:
        assert {e["lane"] for e in _events(out, "tests", ok=True)} == {"tests"}
        assert len(_events(out, "test", outcome="passed")) > 10
    assert {e["bench"] for e in _events(out, "row")} == {benchmark.name for benchmark in benchmarks}
    assert [e["good"] for e in _events(out, "finished")] == [True]


def test_few_files_and_a_table_at_the_end(finished):
    done, out = finished
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        *("cpu/events.jsonl", "cpu/log.txt", "cpu/results.json", "cpu/summary.txt")
    }
    assert "numbers mean nothing" in done.stdout
    assert (out / "cpu" / "summary.txt").read_text().rstrip() in done.stdout


def test_the_plan_is_printed_with_its_clock(finished):
    done, out = finished
    planned = [row for event in _events(out, "plan") for row in event["rows"]]
    assert len(planned) == len(_events(out, "row")) > 3
    assert all(row in done.stdout for row in planned)
    assert done.stdout.count("expected to begin at") == len(planned)


def test_results_carry_their_origin_and_are_not_filed(finished, tmp_path, capsys):
    _, out = finished
    found = json.loads((out / "cpu" / "results.json").read_text())[OP]
    assert (found["dry"], found["gate"], found["origin"]["commit"]) == (True, "green", "abc123")
    assert found["origin"]["dirty"] is False
    assert summary.accept(out, tmp_path) == 1
    assert "dry run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- cut, killed, resumed ---------------------------------------------------------------------------------------------


def _killed(out: Path, after_s: float, rows: int = 0) -> list[dict[str, Any]]:
    """Start a rehearsal that takes its time, kill it after so many rows and seconds; returns what its journal holds."""
    options = ("--only", OP, "--phases", "smoke,benchmarks,tests,slow", "--pace", "0.3")
    environment = os.environ | ENVIRONMENT | {"PYTHONUNBUFFERED": "1", MARK: str(out)}
    environment.pop("SHARDFUSE_POISON", None)  # under which nothing is filed
    with subprocess.Popen(_command(out, *options), stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        seen = 0
        while seen < rows:
            seen += "  row  " in process.stdout.readline()
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while left := _marked(out):
        assert time.monotonic() < until, f"still run: {left}"
        time.sleep(0.1)
    return _lines_whole(out / "cpu" / "events.jsonl")


MARK = "SHARDFUSE_TEST_RUN"


def _marked(out: Path) -> list[str]:
    """The processes of the run in ``out``."""
    found, mark = [], f"{MARK}={out}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def _check_nothing_is_lost(out: Path, scratch: Path) -> int:
    """--summary and --accept find every row of the journal, as they would of a GPU's; returns how many."""
    path = out / "cpu" / "events.jsonl"
    measured = {(e["bench"], *Row.from_record(e).key) for e in _lines_whole(path) if e["event"] == "row"}
    (out / "cpu" / "summary.txt").unlink(missing_ok=True)
    assert gpu_run.main(["--summary", str(out)]) == 0
    assert re.search(
        rf"rows measured: {len(measured)} of \d+, now: {len(measured)}\n", (out / "cpu" / "summary.txt").read_text()
    )
    text = path.read_text().replace('"dry": true', '"dry": false').replace('"device": "cpu"', '"device": "Some GPU"')
    path.write_text(text)
    assert summary.accept(out, scratch) == 0
    filed = [json.loads(each.read_text()) for each in scratch.rglob("*.json")]
    assert {(record["bench"], *Row.from_record(row).key) for record in filed for row in record["rows"]} == measured
    assert all(len(record["missing"]) + len(record["rows"]) == 5 for record in filed)
    return len(measured)


def _lines_whole(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()] if path.is_file() else []


def test_a_run_that_is_killed_loses_no_row(own_interpreter, tmp_path):
    """Its processes end with it, so that none measures beside the next call's."""
    _killed(tmp_path / "out", 0.1, rows=2)
    assert _check_nothing_is_lost(tmp_path / "out", tmp_path / "scratch") >= 2


@pytest.mark.nightly(seconds=400)
def test_thirty_runs_that_are_killed_lose_no_row(own_interpreter, tmp_path):
    """After any number of rows, and some time: how fast rows come depends on the machine."""
    draw, rows = random.Random(51), []
    for n in range(30):
        before, seconds = n % 6, draw.uniform(0, 12 if n // 6 % 2 else 1)
        if _killed(tmp_path / f"out{n}", seconds, rows=before):
            rows.append(_check_nothing_is_lost(tmp_path / f"out{n}", tmp_path / f"scratch{n}"))
            assert rows[-1] >= before
        print(f"killed {seconds:.1f} s after {before} rows: {rows[-1:]} rows")
    assert len(set(rows)) > 2, rows  # they were killed at different moments


@pytest.mark.nightly(seconds=110)
def test_cut_run_is_resumed_and_a_hanging_benchmark_is_killed(finished, tmp_path):
    """Three rows are there from a call that was cut short; the first process of this call stops after one row."""
    _, out = finished
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "events.jsonl").write_text("".join(_cut(out, rows=3)))
    stopped: list[int] = []

    def stop_once(event: dict[str, Any]) -> None:
        if event["event"] == "row" and not stopped:
            stopped.append(list(run.journal.of("started"))[-1]["pid"])
            os.kill(stopped[0], signal.SIGSTOP)

    options = gpu_run.Options(tmp_path, ("benchmarks", "slow"), (OP,), dry=True, quiet_s=10.0)
    run = gpu_run.GpuRun(options, on_event=stop_once)
    run.benchmarks = [benchmark for benchmark in run.benchmarks if benchmark.name == OP]  # one is enough to be cut
    code = run.run()

    with pytest.raises(ProcessLookupError):
        os.kill(stopped[0], 0)
    assert len(_lost(tmp_path)) == len(list(run.journal.of("hung"))) <= 1  # stopped between two rows, none is lost
    assert code == 1 or not _lost(tmp_path)
    keys = [_key(e) for e in _events(tmp_path, "row", bench=OP)]
    assert len(keys) == len(set(keys)), "a row was measured twice"
    measured = {_key(e) for e in _events(out, "row", bench=OP)}
    if _lost(tmp_path):  # a call leaves a benchmark alone that hung; the next one takes up its other rows
        assert set(keys) < measured
        again = gpu_run.GpuRun(options)
        again.benchmarks = run.benchmarks
        again.run()
        keys = [_key(e) for e in _events(tmp_path, "row", bench=OP)]
    assert set(keys) | _lost(tmp_path) == measured


def _cut(out: Path, *, rows: int) -> list[str]:
    """The first lines of a finished run's events, up to so many rows of OP, and half a line more."""
    lines = (out / "cpu" / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    of_op = [i for i, e in enumerate(events) if e["event"] == "row" and e["bench"] == OP]
    return [*lines[: of_op[rows - 1] + 1], '{"event": "ro']


def _key(event: dict[str, Any]) -> tuple[str, str, str]:
    return Row.from_record(event).key


def _lost(out: Path) -> set[tuple[str, ...]]:
    return {tuple(e["key"]) for e in _events(out, "hung") if e["key"]}


# --- the parts, without a run -----------------------------------------------------------------------------------------


def test_what_was_green_does_not_run_again(finished, tmp_path, monkeypatch):
    _, out = finished
    shutil.copytree(out, tmp_path / "out")
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path / "out", gpu_run.PHASES, (OP,), dry=True))
    monkeypatch.setattr(run, "_watch", lambda command, *args, **options: pytest.fail(f"{command} ran again"))
    monkeypatch.setattr(gpu_run.workers, "ask_all", lambda requests, *args, **options: iter(requests))
    assert run.run() == 0
    assert [e["name"] for e in run.journal.of("phase")] == list(gpu_run.PHASES)
    assert json.loads((tmp_path / "out" / "cpu" / "results.json").read_text())[OP]["rows"]
