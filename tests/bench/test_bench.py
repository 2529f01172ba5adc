"""The benchmark runner: its contract with scripts, the gate before every number, two ranks, one case alone."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from wire import omit

from shardfuse.bench import gpu
from shardfuse.bench.harness import gate, one, runner
from shardfuse.bench.harness.benchmark import Benchmark, Measurement, Settings
from shardfuse.bench.harness.report import CONTRACT, NOISE_LIMIT, Row
from shardfuse.bench.harness.timing import Timing
from shardfuse.bench.suites import linear_act, tp_dtensor
from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import Verdict
from shardfuse.kernels.dev.shapes import Projection

CPU = torch.device("cpu")
TIMES = {"ours": Timing(2.0, 0.01), "peer": Timing(3.0, 0.02)}


def _fake(*, error: float = 0.0, checked: bool = True, **changes: object) -> Benchmark:
    """Two rows of one case, already measured, behind one comparison that makes ``error`` of an allowed 1."""

    def plan(settings: Settings) -> list[Measurement]:
        return [
            Measurement("small", "time, us", "rival", 1.25, lambda: (TIMES["ours"], TIMES["peer"])),
            Measurement("small", "tokens/s", "rival", None, lambda: (TIMES["ours"], TIMES["peer"]), True),
        ]

    def check(settings: Settings, cases: list[str]):
        return iter([(case, Verdict("y", error, 1.0)) for case in cases if checked])

    fake = Benchmark("mlp", "a fake under a name whose sources exist", {"small": 1.25}, plan, check)
    return dataclasses.replace(fake, **changes)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """``install(benchmark)`` makes it the only one there is."""

    def install(benchmark: Benchmark) -> None:
        monkeypatch.setattr(runner, "benchmarks", lambda: {benchmark.name: benchmark})

    return install


# --- the contract with scripts ----------------------------------------------------------------------------------------


def test_finds_the_benchmarks_by_walking_the_folder():
    linear = {"linear_act", "linear_backward", "gated", "mlp", "small_m"}
    assert linear | {"tp_dtensor"} <= {benchmark.name for benchmark in runner.list_benchmarks()}


def test_last_line_is_the_contract(install, capsys):
    install(_fake())
    assert runner.run_benchmark("mlp", json=True, device="cpu") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line.keys() == {"bench", "gate", "device", "rows"}
    assert (line["bench"], line["gate"], line["device"]) == ("mlp", "green", "cpu")
    time, rate = line["rows"]
    assert tuple(time) == tuple(rate) == CONTRACT
    assert (time["ratio"], time["target"], time["met"]) == (1.5, 1.25, True)
    assert (rate["ratio"], rate["target"], rate["met"]) == (2 / 3, None, None)


def test_ratio_just_under_its_target_is_not_met():
    planned = Measurement("small", "time, us", "rival", 1.5, lambda: (Timing(2.01), Timing(3.0)))
    assert Row.of(planned, *planned.run()).met is False


@pytest.mark.parametrize("side", ["ours", "peer"])
@pytest.mark.parametrize(("noise", "met"), [(NOISE_LIMIT, True), (NOISE_LIMIT + 0.01, False)], ids=["quiet", "noisy"])
def test_noisy_row_meets_no_target(side, noise, met):
    times = TIMES | {side: dataclasses.replace(TIMES[side], noise=noise)}
    row = Row.of(Measurement("small", "time, us", "rival", 1.25, lambda: tuple(times.values())), *times.values())
    assert (row.ratio, row.noise, row.met) == (1.5, noise, met)
    untargeted = Row.of(Measurement("small", "time, us", "rival", None, lambda: tuple(times.values())), *times.values())
    assert untargeted.met is None


def test_table_on_a_cpu_shows_ratios_only(install, capsys):
    install(_fake())
    assert runner.run_benchmark("mlp", device="cpu") == 0
    out = capsys.readouterr().out
    assert "1.500" in out
    assert "ours " not in out.replace("ours is better", "")


def test_record_tells_where_it_comes_from(install, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFUSE_COMMIT", "abc123")
    monkeypatch.setenv("SHARDFUSE_DIRTY", "1")
    runner.provenance.revision.cache_clear()
    install(_fake())
    path = tmp_path / "new" / "mlp.json"
    assert runner.run_benchmark("mlp", json=True, device="cpu", out=path) == 0
    runner.provenance.revision.cache_clear()
    found = json.loads(path.read_text())
    origin = found["origin"]
    assert (origin["commit"], origin["dirty"], origin["torch"]) == ("abc123", True, torch.__version__)
    assert origin["date"]
    assert found["sources"].keys() == {"bench/suites/mlp.py", *runner.provenance.HARNESS}
    assert [row["noise"] for row in found["rows"]] == [0.02, 0.02]
    assert found["missing"] == []


def test_record_names_the_planned_rows_it_lacks():
    settings = Settings(CPU)
    first, second = (row.key for row in _fake().plan(settings))
    outcome = runner.run(_fake(), settings, only=[second])
    assert runner.record(_fake(), settings, outcome)["missing"] == [first]
    assert [row.key for row in outcome.rows] == [second]


@pytest.mark.parametrize(("name", "device"), [("nonsense", "cpu"), ("mlp", "cuda")])
def test_nothing_to_run_is_exit_code_2(install, capsys, name, device):
    install(_fake(devices=("cpu",)))
    assert runner.run_benchmark(name, json=True, device=device) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err


@pytest.mark.parametrize("place", ["/proc/nowhere/mlp.json", "file/mlp.json", "."])
def test_an_unwritable_out_is_refused_before_anything_is_measured(install, tmp_path, capsys, monkeypatch, place):
    (tmp_path / "file").touch()
    install(_fake())
    monkeypatch.setattr(runner, "run", None)
    assert runner.run_benchmark("mlp", json=True, device="cpu", out=tmp_path / place) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: --out {tmp_path / place}: " in said
    assert ("cannot be written to" in said) != ("it is a folder; name a file" in said)


def test_dry_run_interprets_its_kernels_by_itself(install, monkeypatch, tmp_path, capsys):
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(runner.os, "execve", lambda path, command, environment: started.append((command, environment)))
    monkeypatch.setattr(runner.dispatch, "interpreting", lambda: False)
    install(_fake(ops=("linear_act",)))
    out = tmp_path / "mlp.json"
    runner.run_benchmark("mlp", device="cpu", dry=True, short=True, json=True, out=out)
    ((command, environment),) = started
    assert command[:4] == [sys.executable, "-m", "shardfuse.bench.harness.runner", "mlp"]
    assert (environment["TRITON_INTERPRET"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    # There the same call is understood, and not started over again.
    out.unlink()
    monkeypatch.setattr(runner.dispatch, "interpreting", lambda: True)
    capsys.readouterr()
    assert runner.main(command[3:]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "mlp"
    found = json.loads(out.read_text())
    assert (found["dry"], len(started)) == (True, 1)

    monkeypatch.setattr(runner.dispatch, "interpreting", lambda: False)
    monkeypatch.setattr(runner.dispatch, "triton_version", lambda: None)
    assert runner.run_benchmark("mlp", device="cpu", dry=True) == 2
    assert "needs Triton" in capsys.readouterr().err


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_row_says_which_implementation_ran(impl):
    def measure() -> tuple[Timing, Timing]:
        runner.dispatch.count("linear_act", impl)
        return TIMES["ours"], TIMES["peer"]

    plan = [Measurement("small", metric, "rival", None, measure) for metric in ("time, us", "host time, us")]
    rows = runner.run(_fake(plan=lambda settings: plan), Settings(CPU)).rows
    assert [row.ran for row in rows] == [f"linear_act={impl}"] * 2


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [1.5, math.nan], ids=["large", "nan"])
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_red_gate_shows_no_number(install, capsys, tmp_path, error, as_json):
    timed: list[str] = []

    def plan(settings: Settings) -> list[Measurement]:
        return [Measurement("small", "time, us", "rival", None, lambda: timed.append("yes") or tuple(TIMES.values()))]

    install(_fake(error=error, plan=plan))
    assert runner.run_benchmark("mlp", json=as_json, device="cpu", out=tmp_path / "mlp.json") == 1
    captured = capsys.readouterr()
    assert timed == []
    assert json.loads((tmp_path / "mlp.json").read_text())["rows"] == []
    assert "small: y" in captured.err
    if as_json:
        assert json.loads(captured.out.splitlines()[-1]) == {
            "bench": "mlp",
            "gate": "red",
            "device": "cpu",
            "rows": [],
        }
    else:
        assert captured.out == ""


def test_red_case_loses_its_own_rows_only(install, capsys, tmp_path):
    def plan(settings: Settings) -> list[Measurement]:
        return [Measurement(case, "us", "rival", None, lambda: tuple(TIMES.values())) for case in ("a", "b", "c")]

    def check(settings: Settings, cases: list[str]):
        return iter([(case, Verdict("y", 2.0 if case == "b" else 0.0, 1.0)) for case in cases])

    install(_fake(plan=plan, check=check))
    assert runner.run_benchmark("mlp", json=True, device="cpu", out=tmp_path / "mlp.json") == 1
    captured = capsys.readouterr()
    record = json.loads((tmp_path / "mlp.json").read_text())
    assert [row["case"] for row in record["rows"]] == ["a", "c"]
    assert (record["gate"], record["missing"]) == ("red", [["b", "us", "rival"]])
    assert [row["case"] for row in json.loads(captured.out.splitlines()[-1])["rows"]] == ["a", "c"]
    assert "nothing was timed of b" in captured.err


def _two_cases(events: list[str], *, raises: str = "") -> Benchmark:
    """Two rows for each of "a" and "b"; the check of the case ``raises`` does so after one right verdict."""

    def measure(case: str) -> tuple[Timing, Timing]:
        events.append(f"time {case}")
        return TIMES["ours"], TIMES["peer"]

    def plan(settings: Settings) -> list[Measurement]:
        return [
            Measurement(case, metric, "rival", None, lambda case=case: measure(case))
            for metric in ("forward, us", "backward, us")
            for case in "ab"
        ]

    def check(settings: Settings, cases: list[str]):
        for case in cases:
            events.append(f"check {case}")
            yield case, Verdict("y", 0.0, 1.0)
            if case == raises:
                raise RuntimeError("out of memory")

    return _fake(plan=plan, check=check)


def test_case_is_checked_just_before_its_first_row():
    events: list[str] = []
    runner.run(_two_cases(events), Settings(CPU))
    assert events == ["check a", "time a", "check b", "time b", "time a", "time b"]


def test_check_that_raises_loses_its_case_alone(install, capsys, tmp_path):
    events: list[str] = []
    install(_two_cases(events, raises="a"))
    path = tmp_path / "mlp.json"
    assert runner.run_benchmark("mlp", device="cpu", out=path) == 1
    assert events == ["check a", "check b", "time b", "time b"]
    found = json.loads(path.read_text())
    why = "RuntimeError: out of memory"
    assert found["failed"] == [["a", metric, "rival", why] for metric in ("forward, us", "backward, us")]
    assert [row["case"] for row in found["rows"]] == ["b", "b"]
    assert {verdict["case"] for verdict in found["verdicts"]} == {"b"}  # so that a resumed run checks a again
    assert "failed (2 rows): RuntimeError: out of memory" in capsys.readouterr().err


def test_case_without_a_check_is_refused():
    with pytest.raises(RuntimeError, match="compared nothing with the oracle for small"):
        runner.run(_fake(checked=False), Settings(CPU))


def _streamed(rows: Sequence[Sequence[str]], capsys: Any) -> tuple[int, list[dict[str, Any]]]:
    work = {"rows": rows, "ceilings": {"flops": 1e12, "bandwidth": 1e11}}
    code = runner._stream(work, Settings(CPU))
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_stream_measures_the_named_rows_in_their_order(install, capsys):
    install(_fake())
    first, second = (("mlp", *row.key) for row in _fake().plan(Settings(CPU)))
    code, events = _streamed([second, first, second, ("mlp", "small", "no such metric", "rival")], capsys)
    assert code == 0
    assert (
        [(e["event"], e.get("key")) for e in events]
        == [
            ("start", list(second[1:])),
            ("verdict", None),  # once for the case
            ("row", None),
            ("start", list(first[1:])),
            ("row", None),
            ("end", None),
        ]
    )
    assert [e["metric"] for e in events if e["event"] == "row"] == [second[2], first[2]]


def test_rows_that_raise_cost_a_stream_no_other_benchmark(install, monkeypatch, capsys):
    """Of the broken benchmark the third row isn't tried."""
    rows = [Measurement(f"case {i}", "us", "rival", None, lambda: (Timing(1 / 0),) * 2) for i in range(3)]
    broken = dataclasses.replace(
        _fake(plan=lambda settings: rows),
        name="broken",
        check=lambda settings, names: iter([(names[0], Verdict("y", 0.0, 1.0))]),
    )
    monkeypatch.setattr(runner, "benchmarks", lambda: {"mlp": _fake(), "broken": broken})
    good = [("mlp", *row.key) for row in _fake().plan(Settings(CPU))]
    code, events = _streamed([*(("broken", *row.key) for row in rows), *good], capsys)
    assert code == 0
    failed = [(e["key"][0], e["how"]) for e in events if e["event"] == "failed"]
    assert failed == [(f"case {i}", "ZeroDivisionError: division by zero") for i in range(2)]
    assert [e["bench"] for e in events if e["event"] == "row"] == ["mlp", "mlp"]
    assert events[-1] == {"event": "end"}


def test_a_check_that_raises_costs_a_stream_its_gates_rows_once(install, capsys):
    """And no other case's."""
    rows = [Measurement(case, metric, "rival", None, lambda: (Timing(1.0),) * 2) for case in "ab" for metric in "xy"]

    def check(settings: Settings, names: list[str]):
        calls.append(names)
        return iter([(names[0], Verdict("y", 0.0, 1 / (names[0] == "b")))])

    calls: list[list[str]] = []
    install(_fake(plan=lambda settings: rows, check=check))
    code, events = _streamed([("mlp", *row.key) for row in rows], capsys)
    assert code == 0
    assert [e["key"][:2] for e in events if e["event"] == "failed"] == [["a", "x"], ["a", "y"]]
    assert [(e["case"], e["metric"]) for e in events if e["event"] == "row"] == [("b", "x"), ("b", "y")]
    assert calls == [["a"], ["b"]]


def _tiny_spec(factor: float) -> registry.OpSpec:
    """linear_act with one case for the CPU, whose result is off by ``factor`` unless the reference is asked for."""
    real = registry.op("linear_act")
    case = dataclasses.replace(real.tagged("test")[3], tags=frozenset({"bench-cpu", "test", "short"}))

    def run(inputs: dict, case: registry.Case, impl: str) -> dict[str, torch.Tensor]:
        out = real.run(inputs, case, "reference")
        return out if impl == "reference" else {name: value * factor for name, value in out.items()}

    return dataclasses.replace(real, cases=(case,), run=run)


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.001, 1)], ids=["right", "wrong"])
def test_wrong_op_turns_its_benchmark_red(install, monkeypatch, capsys, factor, code):
    right = linear_act.linear_act

    def op(*arguments: object, impl: str, **options: object) -> torch.Tensor:
        y = right(*arguments, impl=impl, **options)
        return y if impl == "reference" else y * factor

    monkeypatch.setattr(linear_act, "linear_act", op)
    monkeypatch.setattr(linear_act, "ON_CPU", (Projection("tiny", "up", 1, 5, 8, (12,)),))
    install(linear_act.BENCHMARK)
    assert runner.run_benchmark("linear_act", json=True, device="cpu", seconds=0.01) == code
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(line["rows"]) == (0 if code else 2)
    assert all(row["ratio"] == pytest.approx(row["peer"] / row["ours"]) for row in line["rows"])


def test_gate_gives_each_side_its_own_inputs():
    """Ours spoils what it was given; the two references must not notice."""
    real = _tiny_spec(1.0)

    def run(inputs: dict, case: registry.Case, impl: str) -> dict[str, torch.Tensor]:
        out = real.run(inputs, case, impl)
        if impl != "reference":
            inputs["x"].detach().zero_()
        return out

    for case in (real.cases[0], dataclasses.replace(real.cases[0], dtype=torch.float64)):
        spec = dataclasses.replace(real, run=run)
        assert all(verdict.ok for verdict in gate.check_case(spec, case, CPU, "auto"))


@pytest.mark.parametrize("clobbers", [False, True], ids=["right", "wrong slot"])
def test_gate_notices_a_write_into_another_slot(clobbers):
    real = registry.op("write_kv")
    case = real.tagged("test")[0]

    def run(inputs: dict, case: registry.Case, impl: str) -> dict[str, torch.Tensor]:
        if impl != "reference" and clobbers:
            blocks, _, block_size, _ = inputs["kv_cache"].shape
            written = set(inputs["slot_mapping"].tolist())
            free = next(slot for slot in range(blocks * block_size) if slot not in written)
            inputs["kv_cache"][free // block_size, 0, free % block_size, 0] = 1.0
        return real.run(inputs, case, "reference")

    verdicts = gate.check_case(dataclasses.replace(real, run=run), case, CPU, "auto")
    assert {verdict.name: verdict.ok for verdict in verdicts} == {"k_cache": not clobbers, "v_cache": True}


def test_gate_wants_every_output():
    y = torch.ones(2)
    with pytest.raises(RuntimeError, match="different names"):
        gate.check_outputs({"y": y}, low=lambda: {"y": y}, oracle=lambda: {"y": y.double(), "dx": y.double()})


def test_gate_wants_every_gradient():
    module = torch.nn.Linear(2, 2)
    module.unused = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="no gradient for unused"):
        gate.module_outputs(module, torch.ones(1, 2), torch.ones(1, 2))


def test_layers_join_weight_and_bias():
    weight, bias, y = torch.ones(2, 2), torch.zeros(2), torch.ones(3)
    joined = gate.join_layers({"y": y, "d_a.weight": weight, "d_a.bias": bias})
    assert joined["y"] is y
    assert joined["d_a"].tolist() == [1, 1, 1, 1, 0, 0]


# --- two ranks --------------------------------------------------------------------------------------------------------


def _rig(rank: int, world: int, layer: str, omitted: str | None) -> dict[str, bool]:
    """One small size checked on this rank; which comparisons held."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    rig = tp_dtensor.Rig.of(tp_dtensor.Size(layer, world * tp_dtensor.HEAD_DIM, 6), mesh)
    if omitted is None:
        return {verdict.name: verdict.ok for verdict in rig.check()}
    with omit(omitted):
        return {verdict.name: verdict.ok for verdict in rig.check()}


@pytest.mark.ranks
@pytest.mark.parametrize("layer", ["mlp", "block"])
def test_tp_sides_equal_the_whole_module(ranks, layer):
    for found in ranks(2, _rig, layer, None):
        assert all(found.values())
        assert {"ours.y", "peer.y", "ours.d_x", "peer.d_x"} <= found.keys()


@pytest.mark.ranks
@pytest.mark.parametrize("site", ["mlp.in.grad", "mlp.out"])
def test_tp_gate_notices_a_missing_collective(ranks, site):
    for found in ranks(2, _rig, "mlp", site):
        assert not all(ok for name, ok in found.items() if name.startswith("ours."))
        assert all(ok for name, ok in found.items() if name.startswith("peer."))


@pytest.mark.nightly
@pytest.mark.ranks
def test_tp_launches_its_own_processes(capsys):
    settings = Settings(CPU, dry=True)
    outcome = runner.run(tp_dtensor.BENCHMARK, settings)
    assert outcome.green
    assert [row.case for row in outcome.rows] == [size.name for size in tp_dtensor.DRY_SIZES]
    assert all(row.ratio > 0 for row in outcome.rows)


# --- one case, and uninstalled trees ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.001, 1)], ids=["right", "wrong"])
def test_one_reports_every_case(monkeypatch, capsys, factor, code):
    spec = _tiny_spec(factor)
    monkeypatch.setattr(registry, "op", lambda name: spec)
    assert one.main(["linear_act", "--tag", "test", "--check", "--json"]) == code
    (said,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert said["case"] == spec.cases[0].name
    assert said["ok"] is (code == 0)


def test_one_reports_a_crash_as_a_finding(monkeypatch, capsys):
    def run(*arguments: object) -> dict[str, torch.Tensor]:
        raise RuntimeError("out of registers")

    spec = dataclasses.replace(_tiny_spec(1.0), run=run)
    monkeypatch.setattr(registry, "op", lambda name: spec)
    assert one.main(["linear_act"]) == 1
    assert "out of registers" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nonsense"], ["linear_act", "nonsense"]], ids=["op", "case"])
def test_one_names_what_there_is(capsys, arguments):
    with pytest.raises(SystemExit) as left:
        one.main(arguments)
    assert left.value.code == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["ncu.sh", "sanitize.sh"])
def test_profiler_scripts_say_how_they_are_used(script):
    path = Path(gpu.__file__).with_name(script)
    if not path.exists():
        pytest.skip("an installed wheel has no shell scripts")
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert subprocess.run(["bash", "-n", str(path)], timeout=30).returncode == 0
