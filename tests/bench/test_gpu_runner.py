"""``make gpu DRY=1``: the whole path of a GPU run on a CPU, resumed after a cut and with a benchmark that hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.bench.gpu import gpu_run, journal, kernels, order, predictions
from shardfuse.bench.gpu.suite import Suite
from shardfuse.bench.harness import provenance, runner
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.report import Row
from shardfuse.kernels.dev import carried, registry

pytestmark = pytest.mark.interpret

OP = "dropout"
SOME = [OP]  # and what measures it: every phase, for a twentieth of what all ops take


@pytest.fixture(scope="module")
def finished(
    own_interpreter: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A dry run of some ops from the command line, and its directory."""
    return _rehearse(tmp_path_factory.mktemp("gpu") / "out", "--only", ",".join(SOME))


def _rehearse(out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    command = [sys.executable, "-m", "shardfuse.bench.gpu", "--dry", "--out", str(out), *options]
    environment = os.environ | {"SHARDFUSE_COMMIT": "abc123", "SHARDFUSE_DIRTY": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment), out


def _events(out: Path, event: str, **content: Any) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [e for e in lines if e["event"] == event and all(e[name] == value for name, value in content.items())]


def test_every_phase_runs_and_is_green(finished):
    _check_green(*finished, *gpu_run.selection(SOME))


@pytest.mark.nightly(seconds=100)
def test_every_op_and_benchmark_is_green(own_interpreter, tmp_path):
    _check_green(*_rehearse(tmp_path / "out"), *gpu_run.selection(()))


def _check_green(
    done: subprocess.CompletedProcess[str], out: Path, ops: list[str], benchmarks: list[gpu_run.Benchmark]
) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert [e["name"] for e in _events(out, "phase")] == [*gpu_run.PHASES, "rehearsal"]
    assert {e["op"] for e in _events(out, "smoke", ok=True)} == set(ops)
    assert [e["lane"] for e in _events(out, "tests", ok=True)] == ["tests"]
    assert len(_events(out, "test", outcome="passed")) > 10
    assert [e["what"] for e in _events(out, "rehearsed", ok=True)] == [
        *["tests"] * 2,
        "kernels that come along",
        "a red case",
    ]
    assert {e["bench"] for e in _events(out, "row")} == {benchmark.name for benchmark in benchmarks}
    assert [e["good"] for e in _events(out, "finished")] == [True]


def test_kernels_are_compiled_before_any_row(finished):
    _, out = finished
    kinds = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    last_compiled = max(i for i, kind in enumerate(kinds) if kind == "compiled")
    assert last_compiled < kinds.index("row")


def test_at_most_eight_files_and_a_table_at_the_end(finished):
    done, out = finished
    assert len(list(out.iterdir())) <= 8
    assert "numbers mean nothing" in done.stdout
    assert (out / "summary.txt").read_text().rstrip() in done.stdout


def test_results_carry_their_origin_and_are_not_filed(finished, tmp_path, capsys):
    _, out = finished
    found = json.loads((out / "results.json").read_text())[OP]
    assert (found["dry"], found["gate"], found["origin"]["commit"]) == (True, "green", "abc123")
    assert found["origin"]["dirty"] is False
    assert gpu_run.accept(out, tmp_path) == 1
    assert "dry run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly(seconds=80)
def test_cut_run_is_resumed_and_a_hanging_benchmark_is_killed(finished, tmp_path):
    """Three rows are there from a call that was cut short; the first process of this call stops after one row."""
    _, out = finished
    (tmp_path / "events.jsonl").write_text("".join(_cut(out, rows=3)))
    stopped: list[int] = []

    def stop_once(event: dict[str, Any]) -> None:
        if event["event"] == "row" and not stopped:
            stopped.append(list(run.journal.of("started"))[-1]["pid"])
            os.kill(stopped[0], signal.SIGSTOP)

    options = gpu_run.Options(tmp_path, ("compile", "benchmarks", "slow"), (OP,), dry=True, quiet_s=10.0)
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
    lines = (out / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    of_op = [i for i, e in enumerate(events) if e["event"] == "row" and e["bench"] == OP]
    return [*lines[: of_op[rows - 1] + 1], '{"event": "ro']


def _key(event: dict[str, Any]) -> tuple[str, str, str]:
    return Row.from_record(event).key


def _lost(out: Path) -> set[tuple[str, ...]]:
    return {tuple(e["key"]) for e in _events(out, "hung") if e["key"]}


# --- the parts, without a run -----------------------------------------------------------------------------------------


def _row(key: tuple[str, str, str], **changes: Any) -> dict[str, Any]:
    row = Row(key[0], key[1], 1.0, 2.0, key[2], 2.0, None, None).record()
    return {"bench": OP, "source": "s1"} | row | changes


CASES = ("a", "faults", "b", "ends", "c", "hangs", "d")


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """``faulty(module, script)``: a run whose processes of ``module`` execute ``script`` on their file of work."""

    def faulty(script: str) -> gpu_run.GpuRun:
        (tmp_path / "script.py").write_text(script)
        run = gpu_run.GpuRun(gpu_run.Options(tmp_path / "out", ("smoke",), (OP,), dry=True, quiet_s=2.0))
        run.jobs, run.log = 1, (tmp_path / "log.txt").open("w")
        watch = run._watch

        def instead(command: list[str], *arguments: Any, **options: Any) -> Any:
            started.append(json.loads(Path(command[-1]).read_text()))
            return watch([sys.executable, str(tmp_path / "script.py"), command[-1]], *arguments, **options)

        started: list[Any] = []
        run.started = started
        monkeypatch.setattr(run, "_watch", instead)
        monkeypatch.setattr(gpu_run, "STARTUP_S", 2.0)
        return run

    return faulty


def test_a_case_that_ends_its_process_costs_no_other_case(faulty, monkeypatch):
    run = faulty(
        "import json, os, sys, time\n"
        "for op, case in json.load(open(sys.argv[1])):\n"
        "    if case == 'ends': os.abort()\n"
        "    if case == 'hangs': time.sleep(60)\n"
        "    print(json.dumps({'op': op, 'case': case, 'ok': case != 'faults', 'detail': ''}), flush=True)\n"
        "    if case == 'faults': sys.exit(1)\n"
    )
    cases = [dataclasses.replace(registry.op(OP).cases[0], name=name) for name in CASES]
    spec = dataclasses.replace(registry.op(OP), cases=tuple(cases))
    monkeypatch.setattr(gpu_run.registry, "op", lambda name: spec)
    monkeypatch.setattr(type(spec), "tagged", lambda self, tag: self.cases)
    run.options = dataclasses.replace(run.options, dry=False)
    monkeypatch.setattr(run, "_environment", dict)
    run._smoke()
    run.journal.close()
    said = [(e["case"], e["ok"]) for e in run.journal.of("smoke")]
    assert said == [(name, len(name) == 1) for name in CASES]
    assert [len(cases) for cases in run.started] == [7, 5, 3, 1]


def test_rows_go_on_after_a_crash_and_a_benchmark_that_hangs_is_left_out(faulty):
    run = faulty(
        "import json, os, sys, time\n"
        "for bench, case, metric, peer in json.load(open(sys.argv[1])):\n"
        "    print(json.dumps({'event': 'start', 'bench': bench, 'key': [case, metric, peer]}), flush=True)\n"
        "    if case == 'ends': os.abort()\n"
        "    if case == 'hangs': time.sleep(60)\n"
        "    row = {'case': case, 'metric': metric, 'peer_name': peer, 'ours': 1.0, 'peer': 1.0, 'ratio': 1.0}\n"
        "    print(json.dumps({'event': 'row', 'bench': bench} | row | EMPTY), flush=True)\n"
        "print(json.dumps({'event': 'end'}))\n".replace("EMPTY", repr(_EMPTY))
    )
    run.benchmarks = [dataclasses.replace(runner.find(OP), name=name) for name in ("norm", "rope")]
    wanted = [(bench, case, "us", "peer") for bench in ("norm", "rope") for case in CASES if case != "faults"]
    run._measure([row for row in wanted if row[:2] != ("rope", "hangs")], time.monotonic() + 60)
    run.journal.close()
    rows = [(e["bench"], e["case"]) for e in run.journal.of("row")]
    assert rows == [("norm", "a"), ("norm", "b"), ("norm", "c")] + [("rope", name) for name in "abcd"]
    assert [e["key"][0] for e in run.journal.of("failed")] == ["ends", "ends"]
    assert [e["key"][0] for e in run.journal.of("hung")] == ["hangs"]
    assert len(run.started) == 4


_EMPTY = {
    name: value
    for name, value in Row("a", "us", 1.0, 1.0, "peer", 1.0, None, None).record().items()
    if name not in ("case", "metric", "peer_name", "ours", "peer", "ratio")
}


def test_the_headlines_come_first_and_what_may_hang_last(tmp_path):
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, dry=True))
    run.settings = Settings(torch.device("cuda"), short=True)
    planned = run._planned(slow=False)
    run.journal.close()
    found = order.ordered(planned)
    assert found[: len(order.HEADLINES)] == list(order.HEADLINES)
    names = [name for name, *_ in found[len(order.HEADLINES) :]]
    assert set(names[min(map(names.index, order.SPIN)) :]) == set(order.SPIN)
    assert len(found) == len(set(found)) == len(planned) > 150


def test_a_plan_that_raises_costs_no_other_benchmark(tmp_path):
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, ("benchmarks",), ("dropout", "rope"), dry=True))
    broken = dataclasses.replace(run.benchmarks[0], plan=lambda settings: 1 / 0)
    run.benchmarks = [broken, *run.benchmarks[1:]]
    assert {name for name, *_ in run._planned(slow=False)} == {each.name for each in run.benchmarks[1:]}
    run.journal.close()
    assert [(e["bench"], e["how"]) for e in run.journal.of("failed")] == [
        (broken.name, "ZeroDivisionError: division by zero")
    ]


def test_journal_forgets_rows_of_other_sources(tmp_path):
    first = journal.Journal(tmp_path / "events.jsonl", dry=False)
    first.add("row", **_row(("a", "b", "c")))
    first.add("row", **_row(("d", "e", "f"), source="s0"))
    first.add("hung", bench=OP, source="s1", key=["g", "h", "i"])
    first.close()
    again = journal.Journal(tmp_path / "events.jsonl", dry=False)
    assert again.done(OP, "s1") == {("a", "b", "c"), ("g", "h", "i")}
    assert again.lost(OP, "s1") == {("g", "h", "i")}
    assert again.done(OP, "s2") == set()
    assert [row.key for row in again.outcome(OP, "s1").rows] == [("a", "b", "c")]
    assert list(again.of("row")) == []  # of this call
    again.close()


def test_journal_keeps_dry_rows_apart(tmp_path):
    dry = journal.Journal(tmp_path / "events.jsonl", dry=True)
    dry.add("row", **_row(("a", "b", "c")))
    dry.close()
    with contextlib.closing(journal.Journal(tmp_path / "events.jsonl", dry=False)) as again:
        assert again.done(OP, "s1") == set()


ORIGIN = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.9.0", "triton": "3.5.0", "date": "2031-05-01"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "NVIDIA H200"}, "H100 80GB HBM3 with torch 2.9.0 .* NVIDIA H200 with torch 2.9.0"),
        ({"torch": "2.10.0"}, "torch 2.9.0 .* torch 2.10.0"),
        ({"triton": "3.6.0"}, "triton 3.5.0, .* triton 3.6.0"),
    ],
    ids=["device", "torch", "triton"],
)
def test_resume_on_another_machine_is_refused(tmp_path, change, told):
    path = tmp_path / "events.jsonl"
    first = journal.Journal(path, dry=False, origin=ORIGIN)
    first.add("run", origin=ORIGIN)
    first.close()
    before = path.read_text()
    with pytest.raises(ValueError, match=f"{told}.*choose another place"):
        journal.Journal(path, dry=False, origin=ORIGIN | change)
    assert path.read_text() == before
    journal.Journal(path, dry=True, origin=ORIGIN | change).close()  # dry rows are kept apart anyway
    journal.Journal(path, dry=False, origin=ORIGIN | {"date": "2031-05-02"}).close()


def test_what_was_green_does_not_run_again(finished, tmp_path, monkeypatch):
    _, out = finished
    (tmp_path / "events.jsonl").write_text((out / "events.jsonl").read_text())
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, gpu_run.PHASES, (OP,), dry=True))
    monkeypatch.setattr(run, "_watch", lambda command, *args, **options: pytest.fail(f"{command} ran again"))
    monkeypatch.setattr(gpu_run, "rehearse", lambda *args: None)
    assert run.run() == 0
    assert [e["name"] for e in run.journal.of("phase")] == [*gpu_run.PHASES, "rehearsal"]
    assert json.loads((tmp_path / "results.json").read_text())[OP]["rows"]


def test_what_came_along_is_not_compiled_again(tmp_path, monkeypatch):
    """The phase that compiles runs the cases whose kernels the archive lacks, or holds of other sources."""
    benchmark = runner.find(OP)
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, ("compile",), (OP,), dry=True))
    cases = run._cases_left(benchmark)
    work: list[tuple[list[str], list[str]]] = []
    monkeypatch.setattr(run, "_in_parallel", lambda warm, items: work.extend(items))
    run._compile()
    assert work == [([OP], cases)]
    given = carried.Carried(3, "", kernels.noted([(OP, case) for case in cases], {}))
    run.kernels.given = given
    work.clear()
    run._compile()
    assert work == []
    monkeypatch.setattr(provenance, "source_hash", lambda benchmark: "another")
    run._compile()
    assert work == [([OP], cases)]
    run.journal.close()


def test_a_run_says_what_came_along_and_keeps_what_it_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(carried, "_triton", lambda: {"version": "3.6.0", "key": "here", "sources": "same"})
    for name in ("FIRST", "SECOND"):
        entry = tmp_path / "cache" / name
        entry.mkdir(parents=True)
        for file in ("kernel.json", "kernel.cubin", "__grp__kernel.json"):
            (entry / file).write_text("{}")
    out = tmp_path / "out"
    carried.pack(tmp_path / "cache", out / kernels.ARCHIVE)
    run = gpu_run.GpuRun(gpu_run.Options(out, ("compile",), (OP,), dry=True))
    monkeypatch.setattr(gpu_run, "rehearse", lambda *args: None)
    environment: list[str] = []

    def compile_one() -> None:
        environment.append(run._environment()["TRITON_CACHE_DIR"])
        shutil.copytree(tmp_path / "cache" / "FIRST", Path(environment[0]) / "THIRD")

    monkeypatch.setattr(run, "_compile", compile_one)
    run.run()
    assert [(e["found"], e["refused"]) for e in _events(out, "kernels")] == [(2, "")]
    assert [(e["name"], e["compiled"]) for e in _events(out, "phase")] == [("compile", 1), ("rehearsal", 0)]
    assert "kernels: 2 came along, 1 compiled anew" in (out / "summary.txt").read_text()
    assert not Path(environment[0]).exists()
    assert carried.unpack(out / kernels.ARCHIVE, tmp_path / "next").kernels == 3


def test_changed_sources_run_again(tmp_path):
    file = tmp_path / "tests" / "test_it.py"
    file.parent.mkdir()
    (file.parent / "conftest.py").write_text("")
    file.write_text("def test_it():\n    pass\n")
    before = provenance.tests_hash(file)
    assert provenance.tests_hash(file) == before
    file.write_text("def test_it():\n    assert True\n")
    assert provenance.tests_hash(file) != before
    assert provenance.op_hash("dropout") != provenance.op_hash("rope")


def test_a_test_that_the_clock_stops_is_told_and_runs_in_the_next_call(tmp_path):
    file = tmp_path / "test_slow.py"
    file.write_text("import time\n\ndef test_first():\n    pass\n\ndef test_slow():\n    time.sleep(60)\n")

    def call(seconds: float) -> list[tuple[str, str]]:
        run = gpu_run.GpuRun(gpu_run.Options(tmp_path / "out", ("tests",), (OP,), dry=True))
        with (tmp_path / "log.txt").open("a") as run.log:
            suite = run._suite(run.journal)
            suite.run("tests", "", file, time.monotonic() + seconds)
        run.journal.close()
        return [(e["test"].rpartition(":")[2], e["outcome"]) for e in run.journal.of("test")]

    assert call(15.0) == [("test_first", "passed"), ("test_slow", "cut")]
    with contextlib.closing(journal.Journal(tmp_path / "out" / "events.jsonl", dry=True)) as again:
        assert {e["test"].rpartition(":")[2]: e["outcome"] for e in again.known("test")}["test_slow"] == "cut"
    file.write_text(file.read_text().replace("sleep(60)", "sleep(0)"))  # another source: both run again
    assert call(60.0) == [("test_first", "passed"), ("test_slow", "passed")]


@pytest.mark.parametrize(
    ("dry", "lanes"),
    [
        (True, [("not gpu", "test_linear_torch.py")]),
        (False, [(gpu_run.OP_SUITE, "test_linear_torch.py"), (gpu_run.GPU_SUITE, "test_linear_torch.py")]),
    ],
)
def test_the_ops_own_tests_run_on_a_gpu(tmp_path, monkeypatch, dry, lanes):
    tests = ("tests/bench/test_bench.py", "tests/kernels/test_linear_torch.py")[1 if dry else 0 :]
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, gpu_run.PHASES, (OP,), dry=True, tests=tests))
    run.options = dataclasses.replace(run.options, dry=dry)
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(Suite, "run", lambda self, lane, markers, file, until: ran.append((markers, file.name)))
    run._op_tests()
    if not dry:
        run._gpu_tests()
    run.journal.close()
    assert ran == lanes


def test_the_tests_that_may_hang_come_last(tmp_path, monkeypatch):
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, gpu_run.PHASES, (OP,), dry=True))
    run.options = dataclasses.replace(run.options, dry=False)
    ran: list[str] = []
    monkeypatch.setattr(Suite, "run", lambda self, lane, markers, file, until: ran.append(file.name))
    run._gpu_tests()
    run.journal.close()
    assert ran[-1] == "test_comm_gpu.py"
    assert len(ran) > 3


def test_selection_by_op():
    ops, chosen = gpu_run.selection(["linear_act"])
    assert ops == ["linear_act"]
    assert {benchmark.name for benchmark in chosen} == {"candidates", "linear_act", "linear_backward", "mlp", "small_m"}
    assert {benchmark.name for benchmark in gpu_run.selection(["gated_linear"])[1]} == {"gated"}
    with pytest.raises(ValueError, match="no op called 'nonsense'"):
        gpu_run.selection(["nonsense"])


@pytest.mark.parametrize(
    "arguments",
    [[], ["--out", "OUT"], ["--out", "OUT", "--phases", "smoke,tea"]],
    ids=["no directory", "no GPU", "no such phase"],
)
def test_what_cannot_run_says_so(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.setattr(gpu_run.torch.cuda, "is_available", lambda: False)
    try:
        code = gpu_run.main([argument.replace("OUT", str(tmp_path / "out")) for argument in arguments])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert "error:" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_kernel_tests_put_their_tensors_where_the_kernels_run():
    for name in gpu_run.OP_TESTS:
        (file,) = Path(__file__).parents[1].rglob(name)
        text = file.read_text()
        assert "pytest.mark.interpret" in text, name
        assert "torch.cuda.is_available()" in text or 'on_device")' in text, name


# --- predictions ------------------------------------------------------------------------------------------------------


def test_predictions_are_about_rows_of_the_short_plans():
    for each in predictions.PREDICTIONS:
        planned = runner.find(each.bench).plan(Settings(torch.device("cuda"), short=True))
        assert each.key in [row.key for row in planned], each.key
        assert 0 < each.low < each.high


def test_predictions_stand_beside_what_was_found():
    first = predictions.PREDICTIONS[0]
    rows = [Row(*first.key[:2], 1.0, 0.95, first.key[2], ratio, None, None) for ratio in (first.low, first.high + 1)]
    for row, verdict in zip(rows, ("as expected", "above")):
        shown = predictions.table(predictions.compared(first.bench, [row]))
        assert [str(cells[-1]) for cells in shown.rows] == [verdict]
    assert not list(predictions.compared("another", rows))


def test_the_document_lists_the_predictions():
    """SHARDFUSE_WRITE_DOCS=1 writes the table."""
    lines = [
        f"| {each.bench} | {', '.join(each.key[:2])} | {each.key[2]} | {each.low:.2f} to {each.high:.2f} | {each.why} |"
        for each in predictions.PREDICTIONS
    ]
    document = Path(__file__).parents[2] / "docs" / "gpu.md"
    before, _, rest = document.read_text().partition("<!-- predictions -->\n")
    head = "| benchmark | row | peer | expected ratio | because |\n|---|---|---|---|---|\n"
    table, _, after = rest.partition("<!-- /predictions -->")
    wanted = head + "\n".join(lines) + "\n"
    if os.environ.get("SHARDFUSE_WRITE_DOCS") == "1":
        document.write_text(f"{before}<!-- predictions -->\n{wanted}<!-- /predictions -->{after}")
        return
    assert table == wanted
