"""What a GPU run does when processes, cases, rows and tests go wrong, and which it chooses."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardfuse.bench.gpu import gpu_run, plan, summary
from shardfuse.bench.gpu.journal import Events
from shardfuse.bench.gpu.plan import Step
from shardfuse.bench.gpu.suite import Suite
from shardfuse.bench.harness import provenance, runner
from shardfuse.bench.harness.report import Row
from shardfuse.kernels.dev import registry

pytestmark = pytest.mark.interpret

OP = "dropout"
CASES = ("a", "faults", "b", "ends", "c", "hangs", "d")


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """``faulty(script)``: a run whose processes execute ``script``."""

    def faulty(script: str) -> gpu_run.GpuRun:
        file = tmp_path / "script.py"
        file.write_text(script)
        run = gpu_run.GpuRun(gpu_run.Options(tmp_path / "out", ("smoke",), (OP,), dry=True, quiet_s=2.0))
        run.jobs, run.log = 1, (tmp_path / "log.txt").open("w")
        watch, ask_all = run._watch, gpu_run.workers.ask_all

        def watched(command: list[str], *arguments: Any, **options: Any) -> Any:
            asked_for.append(json.loads(Path(command[-1]).read_text())["rows"])
            return watch([sys.executable, str(file), command[-1]], *arguments, **options)

        def asked(requests: Any, command: list[str], *arguments: Any, **options: Any) -> Any:
            return ask_all(requests, [sys.executable, str(file)], *arguments, **options)

        asked_for: list[Any] = []
        run.asked_for = asked_for
        monkeypatch.setattr(run, "_watch", watched)
        monkeypatch.setattr(gpu_run.workers, "ask_all", asked)
        monkeypatch.setattr(gpu_run, "STARTUP_S", 4.0)
        return run

    return faulty


def test_a_case_that_ends_its_process_costs_no_other_case(faulty, monkeypatch):
    run = faulty(
        "import os, time\n"
        "from shardfuse.kernels.dev import workers\n"
        "def answer(request):\n"
        "    case = request['case']\n"
        "    if case == 'ends': os.abort()\n"
        "    if case == 'hangs': time.sleep(60)\n"
        "    return {'ok': case != 'faults', 'detail': case}\n"
        "workers.serve(answer)\n"
    )
    cases = [dataclasses.replace(registry.op(OP).cases[0], name=name) for name in CASES]
    spec = dataclasses.replace(registry.op(OP), cases=tuple(cases))
    monkeypatch.setattr(gpu_run.registry, "op", lambda name: spec)
    monkeypatch.setattr(type(spec), "tagged", lambda self, tag: self.cases)
    monkeypatch.setattr(gpu_run.shutil, "which", lambda name: sys.executable)
    run.options = dataclasses.replace(run.options, dry=False)
    monkeypatch.setattr(run, "_environment", lambda: {"TRITON_INTERPRET": "1"})
    run._smoke()
    run.journal.close()
    said = [(e["case"], e["ok"]) for e in run.journal.of("smoke")]
    assert said == [(name, len(name) == 1) for name in CASES]
    details = {e["case"]: e["detail"] for e in run.journal.of("smoke")}
    assert "ended with exit code" in details["ends"]
    assert "was killed after" in details["hangs"]
    again = [(e["with"].partition("=")[0], e["case"]) for e in run.journal.of("again")]
    red = ("faults", "ends")  # not what was killed for its time
    assert again == [(name, case) for name in ("CUDA_LAUNCH_BLOCKING", "TRITON_PTXAS_PATH") for case in red]


def test_rows_go_on_after_a_crash_and_a_benchmark_that_hangs_is_left_out(faulty):
    run = faulty(
        "import json, os, sys, time\n"
        "for bench, case, metric, peer in json.load(open(sys.argv[1]))['rows']:\n"
        "    print(json.dumps({'event': 'start', 'bench': bench, 'key': [case, metric, peer]}), flush=True)\n"
        "    if case == 'ends': os.abort()\n"
        "    if case == 'hangs': time.sleep(60)\n"
        "    row = {'case': case, 'metric': metric, 'peer_name': peer, 'ours': 1.0, 'peer': 1.0, 'ratio': 1.0}\n"
        "    print(json.dumps({'event': 'row', 'bench': bench} | row | EMPTY), flush=True)\n"
        "print(json.dumps({'event': 'end'}))\n".replace("EMPTY", repr(_EMPTY))
    )
    run.benchmarks = [dataclasses.replace(runner.find(OP), name=name) for name in ("norm", "rope")]
    wanted = [(bench, case, "us", "peer") for bench in ("norm", "rope") for case in CASES if case != "faults"]
    steps = [Step(name, 1.0, 0.1, name[1], 0.1) for name in wanted if name[:2] != ("rope", "hangs")]
    run._measure(steps, time.monotonic() + 60)
    run.journal.close()
    rows = [(e["bench"], e["case"]) for e in run.journal.of("row")]
    assert rows == [("norm", "a"), ("norm", "b"), ("norm", "c")] + [("rope", name) for name in "abcd"]
    assert [e["key"][0] for e in run.journal.of("failed")] == ["ends", "ends"]
    assert [e["key"][0] for e in run.journal.of("hung")] == ["hangs"]
    assert len(run.asked_for) == 4 == run.processes


def test_rows_of_a_check_that_ends_its_process_are_lost_with_it(faulty):
    """Not of one that was right before; and a benchmark's second loss counts, whichever phase it is in."""
    run = faulty(
        "import json, os, sys\n"
        "for bench, case, metric, peer in json.load(open(sys.argv[1]))['rows']:\n"
        "    key = {'bench': bench, 'key': [case, metric, peer]}\n"
        "    print(json.dumps({'event': 'start', **key}), flush=True)\n"
        "    if case == 'checked':\n"
        "        verdict = {'bench': bench, 'case': case, 'name': 'y', 'error': 0.0, 'budget': 1.0, 'ok': True}\n"
        "        print(json.dumps({'event': 'verdict', **verdict}), flush=True)\n"
        "    os.abort()\n"
    )
    run.benchmarks = [dataclasses.replace(runner.find(OP), name="norm")]
    names = [("norm", case, metric, "peer") for case in ("dies", "checked", "third") for metric in ("forward", "both")]
    steps = [Step(name, 1.0, 0.1, name[1], 0.1) for name in names]
    run._measure(steps[:2], time.monotonic() + 60)
    assert {tuple(e["key"][:2]) for e in run.journal.of("failed")} == {("dies", "forward"), ("dies", "both")}
    run._measure(steps, time.monotonic() + 60)
    run.journal.close()
    assert [tuple(e["key"][:2]) for e in run.journal.of("failed")][2:] == [("checked", "forward")]
    assert len(run.asked_for) == 2


def test_processes_that_end_before_their_row_begins_cost_its_benchmark(faulty):
    """One that cannot start may have met a busy device: it has a second chance."""
    run = faulty(
        "import json, os, sys\n"
        "rows = json.load(open(sys.argv[1]))['rows']\n"
        "if rows[0][0] == 'norm' or not os.path.exists(sys.argv[0] + '.once'):\n"
        "    open(sys.argv[0] + '.once', 'w') if rows[0][0] == 'rope' else None\n"
        "    sys.exit(1)\n"
        "for bench, case, metric, peer in rows:\n"
        "    print(json.dumps({'event': 'start', 'bench': bench, 'key': [case, metric, peer]}), flush=True)\n"
        "    row = {'case': case, 'metric': metric, 'peer_name': peer, 'ours': 1.0, 'peer': 1.0, 'ratio': 1.0}\n"
        "    print(json.dumps({'event': 'row', 'bench': bench} | row | EMPTY), flush=True)\n"
        "print(json.dumps({'event': 'end'}))\n".replace("EMPTY", repr(_EMPTY))
    )
    run.benchmarks = [dataclasses.replace(runner.find(OP), name=name) for name in ("norm", "rope")]
    wanted = [(bench, case, "us", "peer") for bench in ("norm", "rope") for case in "ab"]
    run._measure([Step(name, 1.0, 0.1, name[1], 0.1) for name in wanted], time.monotonic() + 60)
    run.journal.close()
    assert [(e["bench"], e["case"]) for e in run.journal.of("row")] == [("rope", "a"), ("rope", "b")]
    assert [(e["bench"], e["key"]) for e in run.journal.of("failed")] == [("norm", None)]
    assert len(run.asked_for) == 4
    assert not summary.good(run.journal)


def test_smoke_that_is_cut_is_not_right(faulty, monkeypatch):
    run = faulty(
        "import time\n"
        "from shardfuse.kernels.dev import workers\n"
        "workers.serve(lambda request: time.sleep(3) or {'ok': True, 'detail': ''})\n"
    )
    monkeypatch.setattr(gpu_run, "SMOKE_S", 8.0)
    cases = [dataclasses.replace(registry.op(OP).cases[0], name=name) for name in "abcdefghij"]
    spec = dataclasses.replace(registry.op(OP), cases=tuple(cases))
    monkeypatch.setattr(gpu_run.registry, "op", lambda name: spec)
    monkeypatch.setattr(type(spec), "tagged", lambda self, tag: self.cases)
    run.options = dataclasses.replace(run.options, dry=False)
    monkeypatch.setattr(run, "_environment", lambda: {"TRITON_INTERPRET": "1"})
    run._smoke()
    run.journal.close()
    assert re.fullmatch(r"out of time, \d cases not reached", next(run.journal.of("broken"))["how"])
    assert not summary.good(run.journal)


def test_a_benchmark_that_raises_in_every_row_costs_two(faulty):
    """The ceilings are measured by the first process, and handed to the next."""
    run = faulty(
        "import json, sys\n"
        "work = json.load(open(sys.argv[1]))\n"
        "if not work['ceilings']:\n"
        "    print(json.dumps({'event': 'ceilings', 'bench': '', 'flops': 2.0, 'bandwidth': 1.0}), flush=True)\n"
        "for bench, case, metric, peer in work['rows'][:1]:\n"
        "    print(json.dumps({'event': 'start', 'bench': bench, 'key': [case, metric, peer]}), flush=True)\n"
        "    end = {'event': 'failed', 'bench': bench, 'key': [case, metric, peer], 'how': 'no'}\n"
        "    print(json.dumps(end), flush=True)\n"
        "sys.exit(1)\n"
    )
    run.benchmarks = [dataclasses.replace(runner.find(OP), name=name) for name in ("norm", "rope")]
    wanted = [(bench, case, "us", "peer") for bench in ("norm", "rope") for case in "abcd"]
    run._measure([Step(name, 1.0, 0.1, name[1], 0.1) for name in wanted], time.monotonic() + 60)
    run.journal.close()
    assert [(e["bench"], e["key"][0]) for e in run.journal.of("failed")] == [
        (bench, case) for bench in ("norm", "rope") for case in "ab"
    ]
    assert [(e["flops"], e["bandwidth"]) for e in run.journal.of("ceilings")] == [(2.0, 1.0)]


_EMPTY = {
    name: value
    for name, value in Row("a", "us", 1.0, 1.0, "peer", 1.0, None, None).record().items()
    if name not in ("case", "metric", "peer_name", "ours", "peer", "ratio")
}


def test_a_plan_that_raises_costs_no_other_benchmark(tmp_path):
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, ("benchmarks",), ("dropout", "rope"), dry=True))
    broken = dataclasses.replace(run.benchmarks[0], plan=lambda settings: 1 / 0)
    run.benchmarks = [broken, *run.benchmarks[1:]]
    assert {name for name, *_ in dict(run._rows())} == {each.name for each in run.benchmarks[1:]}
    run.journal.close()
    assert [(e["bench"], e["how"]) for e in run.journal.of("failed")] == [
        (broken.name, "ZeroDivisionError: division by zero")
    ]


# --- tests on a GPU ---------------------------------------------------------------------------------------------------


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
        run.journal.add("run", origin=run.origin, dry=True)
        with (tmp_path / "log.txt").open("a") as run.log:
            run._test("tests", "", [file], time.monotonic() + seconds)
        run.journal.close()
        return [(e["test"].rpartition(":")[2], e["outcome"]) for e in run.journal.of("test")]

    assert call(15.0) == [("test_first", "passed"), ("test_slow", "cut")]
    known = Events.read(tmp_path / "out" / "cpu").known("test")
    assert {e["test"].rpartition(":")[2]: e["outcome"] for e in known}["test_slow"] == "cut"
    file.write_text(file.read_text().replace("sleep(60)", "sleep(0)"))  # another source: both run again
    assert call(60.0) == [("test_first", "passed"), ("test_slow", "passed")]


FAULTY = """
import os, time
def test_passes(): pass
def test_fails(): raise AssertionError("it fails, and the journal says why")
def test_crashes(): os.abort()
def test_hangs(): time.sleep(3600)
def test_passes_after_all_that(): pass
"""


def test_tests_that_fail_crash_or_hang_cost_no_other(tmp_path):
    """The second call runs again what failed, and nothing else."""
    file = tmp_path / "test_faulty.py"
    file.write_text(FAULTY)
    for expected in (["passed", "failed", "crashed", "hung", "passed"], ["failed"]):
        run = gpu_run.GpuRun(gpu_run.Options(tmp_path / "out", ("tests",), (OP,), dry=True, quiet_s=8.0))
        run.journal.add("run", origin=run.origin, dry=True)
        with (tmp_path / "log.txt").open("a") as run.log:
            run._test("tests", "", [file], time.monotonic() + 60)
        run.journal.close()
        assert [event["outcome"] for event in run.journal.of("test")] == expected


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
    monkeypatch.setattr(
        Suite, "run", lambda self, lane, markers, files, *limits: ran.extend((markers, f.name) for f in files)
    )
    run._op_tests()
    if not dry:
        run._gpu_tests()
    run.journal.close()
    assert ran == lanes


def test_the_tests_that_may_hang_come_last(tmp_path, monkeypatch):
    run = gpu_run.GpuRun(gpu_run.Options(tmp_path, gpu_run.PHASES, (OP,), dry=True))
    run.options = dataclasses.replace(run.options, dry=False)
    ran: list[str] = []
    monkeypatch.setattr(Suite, "run", lambda self, lane, markers, files, *limits: ran.extend(f.name for f in files))
    run._gpu_tests()
    run.journal.close()
    assert ran[-1] == "test_comm_gpu.py"
    assert len(ran) > 3


def test_selection_by_op():
    ops, chosen = plan.selection(["linear_act"])
    assert ops == ["linear_act"]
    several = {"candidates", "linear_act", "linear_backward", "mlp", "small_m", "train_step"}
    assert {benchmark.name for benchmark in chosen} == several
    assert {benchmark.name for benchmark in plan.selection(["gated_linear"])[1]} == {"gated", "train_step"}
    with pytest.raises(ValueError, match="no op called 'nonsense'"):
        plan.selection(["nonsense"])


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
