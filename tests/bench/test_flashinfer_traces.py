"""``bench report --trace``: a dataset that FlashInfer-Bench reads, with nothing in it that the results do not hold.

Where flashinfer_bench is installed its own ``TraceSet`` reads the folder. Elsewhere the fields, types and rules below
stand for it: those of flashinfer-bench 0.1.2, modules ``data/definition.py``, ``solution.py``, ``workload.py``,
``trace.py`` and ``trace_set.py`` of https://pypi.org/project/flashinfer-bench/0.1.2/.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardfuse.bench.harness.benchmark import Work
from shardfuse.bench.harness.flashinfer_traces import export
from shardfuse.bench.harness.report import Row
from shardfuse.bench.harness.stale import RESULTS
from shardfuse.bench.harness.timing import Ceilings
from shardfuse.cli import app

# Each object's fields: those that must be there, and those that may be.
DEFINITION = {"name": str, "op_type": str, "axes": dict, "inputs": dict, "outputs": dict, "reference": str}
DEFINITION_MORE = {"tags": list, "description": str, "constraints": list}
SOLUTION = {"name": str, "definition": str, "author": str, "spec": dict, "sources": list}
SOLUTION_MORE = {"description": str}
SPEC = {"language": str, "target_hardware": list, "entry_point": str}
SPEC_MORE = {"dependencies": list, "destination_passing_style": bool, "binding": str}
WORKLOAD = {"axes": dict, "inputs": dict, "uuid": str}
EVALUATION = {"status": str, "environment": dict, "timestamp": str}
EVALUATION_MORE = {"log": str, "correctness": dict, "performance": dict}
ERRORS = ("max_relative_error", "max_absolute_error")
PERFORMANCE = {"latency_ms": float, "reference_latency_ms": float, "speedup_factor": float}
LANGUAGES = {"python", "triton", "cpp", "cuda", "tilelang"}
# What evaluation must and must not hold by its status, of those that we write.
HOLDS = {"PASSED": {"correctness", "performance"}, "INCORRECT_NUMERICAL": {"correctness"}}

ORIGIN = {
    "date": "2031-05-01T00:00:00+00:00",
    "commit": "0123456789abcdef",
    "dirty": False,
    "shardfuse": "0.3.0",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "liger": None,
    "cuda": "13.0",
    "gpu": {"driver_version": "580.1"},
}
METRIC = "forward, us"


def _row(case: str, metric: str = METRIC, against: str = "eager", **changes: Any) -> Row:
    return dataclasses.replace(Row(case, metric, 50.0, 75.0, against, 1.5, 1.0, True, noise=0.01), **changes)


def _verdict(case: str, error: float = 1e-7, budget: float = 1e-6) -> dict[str, Any]:
    return {"case": case, "name": "y", "error": error, "budget": budget, "ok": error <= budget}


def _record(*rows: Row, **changes: Any) -> dict[str, Any]:
    record = {"bench": "mlp", "device": "Some GPU", "gate": "green", "dry": False, "origin": ORIGIN, "missing": []}
    verdicts = [_verdict(case) for case in dict.fromkeys(row.case for row in rows)]
    record |= {"verdicts": verdicts, "sources": {"layers/mlp.py": "0123"}, "source_hash": "4567"}
    return record | {"rows": [row.record() for row in rows]} | changes


def _export(folder: Path, *records: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The objects of an export by kind ("traces"), once they are found to be of the format."""
    paths = [folder / f"{number}.json" for number in range(len(records))]
    for path, record in zip(paths, records):
        path.write_text(json.dumps(record))
    return _objects(export(paths, folder / "out"))


def _objects(out: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, suffix in (("definitions", "json"), ("solutions", "json"), ("workloads", "jsonl"), ("traces", "jsonl")):
        found[kind] = []
        for file in sorted(out.glob(f"{kind}/**/*.{suffix}")):
            lines = file.read_text().splitlines()
            assert len(lines) == 1 or suffix == "jsonl"
            found[kind] += [json.loads(line, parse_constant=_no_constant) for line in lines]
    assert len([each for each in out.rglob("*") if each.is_file()]) == sum(
        len({*out.glob(f"{k}/**/*.*")}) for k in found
    )
    _check(found)
    if importlib.util.find_spec("flashinfer_bench"):
        _read_back(out, found)
    return found


def _no_constant(name: str) -> None:
    raise AssertionError(f"JSON has no {name}")


def _check_fields(each: dict[str, Any], required: dict[str, type], more: dict[str, type]) -> None:
    assert required.keys() <= each.keys() <= required.keys() | more.keys()
    for name, value in each.items():
        assert isinstance(value, (required | more)[name]), name
        assert value != "" or name == "log"


def _check(found: dict[str, list[dict[str, Any]]]) -> None:
    """The rules of the format's models and of the function that reads a folder."""
    definitions, solutions = ({each["name"]: each for each in found[kind]} for kind in ("definitions", "solutions"))
    assert len(definitions) == len(found["definitions"])  # a name twice is refused
    assert len(solutions) == len(found["solutions"])
    for each in found["definitions"]:
        _check_fields(each, DEFINITION, DEFINITION_MORE)
        functions = [node for node in ast.parse(each["reference"]).body if isinstance(node, ast.FunctionDef)]
        assert [function.name for function in functions] == ["run"]
    for each in found["solutions"]:
        _check_fields(each, SOLUTION, SOLUTION_MORE)
        _check_fields(each["spec"], SPEC, SPEC_MORE)
        assert each["definition"] in definitions
        assert each["spec"]["language"] in LANGUAGES
        assert each["spec"]["target_hardware"]
        file, function = each["spec"]["entry_point"].split("::")
        sources = {source["path"]: source["content"] for source in each["sources"]}
        assert len(sources) == len(each["sources"])
        assert f"def {function}(" in sources[file]
        assert all(sources.values())
        assert not any(".." in Path(path).parts or Path(path).is_absolute() for path in sources)
    for each in (*found["workloads"], *found["traces"]):
        assert each["definition"] in definitions
        _check_fields(each["workload"], WORKLOAD, {})
    assert all(each.keys() == {"definition", "workload"} for each in found["workloads"])
    for each in found["traces"]:
        assert each.keys() == {"definition", "workload", "solution", "evaluation"}
        assert solutions[each["solution"]]["definition"] == each["definition"]
        assert {"definition": each["definition"], "workload": each["workload"]} in found["workloads"]
        evaluation = each["evaluation"]
        _check_fields(evaluation, EVALUATION, EVALUATION_MORE)
        assert evaluation.keys() & {"correctness", "performance"} == HOLDS[evaluation["status"]]
        assert evaluation["environment"].keys() == {"hardware", "libs"}
        assert all(isinstance(version, str) for version in evaluation["environment"]["libs"].values())
        assert evaluation["correctness"].keys() == {*ERRORS, "extra"}
        assert all(math.isnan(float(evaluation["correctness"][name])) for name in ERRORS)
        for name, value in evaluation.get("performance", {}).items():
            assert isinstance(value, PERFORMANCE[name])
            assert value >= 0


def _read_back(out: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Its own reader finds the same objects."""
    from flashinfer_bench import TraceSet

    read = TraceSet.from_path(str(out))
    kinds = {
        "definitions": read.definitions.values(),
        "solutions": [each for several in read.solutions.values() for each in several],
        "workloads": [each for several in read.workloads.values() for each in several],
        "traces": [each for several in read.traces.values() for each in several],
    }
    for kind, objects in kinds.items():
        plain = [json.loads(each.model_dump_json(exclude_unset=True)) for each in objects]
        for line in plain:  # it writes the same number in another way
            if "evaluation" in line:
                line["evaluation"]["correctness"] |= dict.fromkeys(ERRORS, "NaN")
        assert sorted(map(json.dumps, plain)) == sorted(map(json.dumps, found[kind]))
    assert read.summary()["total"] == len(found["traces"])


def test_every_committed_result_is_of_the_format(tmp_path: Path):
    files = sorted(RESULTS.rglob("*.json"))
    done = CliRunner().invoke(app, ["bench", "report", *map(str, files), "--trace", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "out") in "".join(done.output.split())
    found = _objects(tmp_path / "out")
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    timed = [row for row in rows if ", us" in row["metric"] and not Row.from_record(row).beats_peak]
    assert 0 < len(timed) < len(rows)  # shares of the cache, bytes
    assert len(found["traces"]) == len(timed)
    latencies = sorted(each["evaluation"]["performance"]["latency_ms"] for each in found["traces"])
    assert latencies == pytest.approx(sorted(row["ours"] / 1000 for row in timed))


def test_a_row_says_what_was_measured_and_found(tmp_path: Path):
    row = _row("t8", between=(1.4, 1.6), ran="linear_act=triton")
    found = _export(tmp_path, _record(row))
    (definition,), (solution,), (trace,) = found["definitions"], found["solutions"], found["traces"]
    assert (definition["op_type"], definition["axes"], definition["inputs"], definition["outputs"]) == (
        "mlp",
        {},
        {},
        {},
    )
    assert "reference latency is that of the peer: eager" in definition["description"]
    assert trace["workload"] == {"axes": {}, "inputs": {}, "uuid": "t8"}
    evaluation = trace["evaluation"]
    assert evaluation["performance"] == {"latency_ms": 0.05, "reference_latency_ms": 0.075, "speedup_factor": 1.5}
    assert evaluation["correctness"]["extra"] == {
        "relative_frobenius_error_against_fp64": {"y": {"error": 1e-7, "budget": 1e-6}}
    }
    libraries = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0", "shardfuse": "0.3.0", "driver": "580.1"}
    assert evaluation["environment"] == {"hardware": "Some GPU", "libs": libraries}
    assert evaluation["timestamp"] == ORIGIN["date"]
    rest = json.loads(evaluation["log"])
    assert rest == {"gate": "green", "origin": ORIGIN, "row": json.loads(json.dumps(row.record()))}
    assert solution["spec"]["target_hardware"] == ["cuda"]
    assert ORIGIN["commit"] in solution["description"]
    assert json.loads(solution["sources"][1]["content"]) == {"layers/mlp.py": "0123"}


def test_code_that_the_results_do_not_hold_says_so(tmp_path: Path):
    found = _export(tmp_path, _record(_row("t8", against="""a "peer's" \\ own""")))
    for code in (found["definitions"][0]["reference"], found["solutions"][0]["sources"][0]["content"]):
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        with pytest.raises(NotImplementedError, match="results hold no code"):
            namespace["run"]()


def test_wrong_cases_and_rows_without_a_time(tmp_path: Path):
    """A wrong case is a trace without times. What was not measured, or is impossible, is a workload alone."""
    impossible = _row("t16", work=Work(10**12, 10**6), ceilings=Ceilings(1e12, 1e12))
    found = _export(
        tmp_path,
        _record(
            *(_row("t8"), impossible, _row("t32", "peak bytes"), _row("unjudged")),
            verdicts=[*map(_verdict, ("t8", "t16", "t32")), _verdict("wrong", math.inf), _verdict("late")],
            missing=[["wrong", METRIC, "eager"], ["late", METRIC, "eager"], ["late", "peak bytes", "eager"]],
            skipped=[["t8", METRIC, "torch.compile", "there is no C++ compiler"]],
            gate="red",
        ),
    )
    status = {each["workload"]["uuid"]: each["evaluation"]["status"] for each in found["traces"]}
    assert status == {"t8": "PASSED", "wrong": "INCORRECT_NUMERICAL"}
    (wrong,) = (each for each in found["traces"] if each["workload"]["uuid"] == "wrong")
    errors = wrong["evaluation"]["correctness"]["extra"]["relative_frobenius_error_against_fp64"]
    assert errors["y"] == {"error": "Infinity", "budget": 1e-6}
    workloads = sorted((each["workload"]["uuid"], each["definition"]) for each in found["workloads"])
    eager, compiled = "mlp-forward-us-eager", "mlp-forward-us-torch-compile"
    assert workloads == [
        *(("late", eager), ("t16", eager), ("t8", eager), ("t8", compiled), ("unjudged", eager), ("wrong", eager)),
    ]


def test_results_of_several_machines_and_commits_share_a_definition(tmp_path: Path):
    changed = _record(_row("t8"), origin=ORIGIN | {"dirty": True})
    cpu = _record(_row("t8", ours=100.0, peer=150.0), device="cpu", origin=ORIGIN | {"gpu": None, "cpu": "x86_64, AMD"})
    found = _export(tmp_path, _record(_row("t8")), changed, cpu)
    assert [len(found[kind]) for kind in ("definitions", "workloads", "solutions", "traces")] == [1, 1, 3, 3]
    assert {each["evaluation"]["environment"]["hardware"] for each in found["traces"]} == {"Some GPU", "x86_64, AMD"}


def test_names_that_read_alike_stay_two(tmp_path: Path):
    found = _export(tmp_path, _record(_row("t8", against="a-b"), _row("t8", against="a b"), _row("t16", against="a b")))
    names = [each["name"] for each in found["definitions"]]
    assert names == ["mlp-forward-us-a-b-2", "mlp-forward-us-a-b"]
    assert len(found["traces"]) == 3


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_record(_row("t8"), dry=True), "holds a dry run of mlp, which measures nothing"),
        (_record(_row("t8", "peak bytes")), "no row of these results is measured in time"),
        ({"bench": "mlp", "rows": []}, "holds a record that is not of this version"),
        ([], "holds no benchmark's record"),
    ],
)
def test_what_gives_no_traces_is_refused_and_leaves_nothing(tmp_path: Path, record: Any, message: str):
    with pytest.raises(ValueError, match=message):
        _export(tmp_path, record)
    assert [each.name for each in tmp_path.iterdir()] == ["0.json"]


def test_a_folder_that_holds_files_stays_as_it_is(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"--trace .*out: holds files already; name a new folder"):
        _export(tmp_path, _record(_row("t8")))
    (tmp_path / "out" / "thesis.tex").unlink()
    assert len(_export(tmp_path, _record(_row("t8")))["traces"]) == 1
