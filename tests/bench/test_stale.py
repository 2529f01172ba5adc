"""Which results are stale: missing, older than their sources, or fresh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.bench.gpu import summary
from shardfuse.bench.harness import provenance, stale
from shardfuse.bench.harness.benchmark import Benchmark
from shardfuse.kernels.dev import registry

GPU = "NVIDIA H100 80GB HBM3"
FOLDER = "nvidia-h100-80gb-hbm3"
CLEAN = {"date": "2031-05-01T00:00:00+00:00", "commit": "abc123", "dirty": False, "environment": {}}


def _benchmark(name: str, **changes: Any) -> Benchmark:
    """A benchmark whose only sources are its own file and one that certainly exists."""
    return Benchmark(
        name, "", {}, lambda settings: [], lambda s, cases: iter(()), sources=("bench/harness/gate.py",), **changes
    )


BOTH = [_benchmark("mlp"), _benchmark("linear_act")]


def _record(benchmark: Benchmark, date: str = "2031-05-01T00:00:00+00:00", **changes: Any) -> dict[str, Any]:
    return {
        "bench": benchmark.name,
        "device": GPU,
        "gate": "green",
        "dry": False,
        "short": False,
        "rows": [{}],
        "missing": [],
        "origin": CLEAN | {"date": date},
        "sources": provenance.source_hashes(benchmark),
    } | changes


def _states(results: Path, benchmarks: list[Benchmark]) -> list[tuple[str, str, str]]:
    found = stale.survey(results, benchmarks)
    return [(item.gpu, item.name, item.state) for item in found if item.state != "unmeasured"]


def test_without_any_result_everything_is_missing(tmp_path, capsys):
    nowhere = tmp_path / "nothing"
    assert _states(nowhere, BOTH) == [(stale.ANY_GPU, "linear_act", "missing"), (stale.ANY_GPU, "mlp", "missing")]
    assert stale.show(json=True, results=nowhere) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {item["name"] for item in listed} >= {"linear_act", "mlp"}
    assert "tp_dtensor" not in {item["name"] for item in listed}  # it runs on a CPU, where nothing is stale


def test_results_of_a_cpu_are_no_gpus(tmp_path):
    (tmp_path / "cpu").mkdir()
    assert _states(tmp_path, BOTH[:1]) == [(stale.ANY_GPU, "mlp", "missing")]


def test_filed_result_is_fresh_until_a_source_changes(tmp_path):
    path = stale.accept(_record(BOTH[0]), tmp_path)
    assert path == tmp_path / FOLDER / "mlp.json"
    assert _states(tmp_path, BOTH[:1]) == [(FOLDER, "mlp", "fresh")]

    record = json.loads(path.read_text())
    record["sources"]["kernels/tuned/x86_64-amd-avx2-mkl.json"] = "0" * 16  # which no GPU reads
    path.write_text(json.dumps(record))
    assert _states(tmp_path, BOTH[:1]) == [(FOLDER, "mlp", "fresh")]
    record["sources"]["kernels/tuned/sm_90.json"] = "0" * 16
    path.write_text(json.dumps(record))
    assert _states(tmp_path, BOTH[:1]) == [(FOLDER, "mlp", "stale")]
    del record["sources"]["kernels/tuned/sm_90.json"]
    record["sources"]["bench/harness/gate.py"] = "0" * 16
    path.write_text(json.dumps(record))
    (item,) = (item for item in stale.survey(tmp_path, BOTH[:1]) if item.name == "mlp")
    assert item.state == "stale"
    assert "bench/harness/gate.py" in item.why
    assert "bench/suites/mlp.py" not in item.why


def test_result_that_lacks_rows_is_incomplete(tmp_path):
    stale.accept(_record(BOTH[0], missing=[["t64", "forward, us", "eager"]]), tmp_path)
    (item,) = (item for item in stale.survey(tmp_path, BOTH[:1]) if item.name == "mlp")
    assert item.state == "incomplete"
    assert item.why == "rows not measured: t64 | forward, us | eager"


def test_result_with_a_red_case_keeps_its_other_rows(tmp_path):
    red = _record(BOTH[0], gate="red", missing=[["t64", "forward, us", "eager"]])
    assert stale.accept(red, tmp_path) == tmp_path / FOLDER / "mlp.json"
    assert _states(tmp_path, BOTH[:1]) == [(FOLDER, "mlp", "incomplete")]


def test_short_result_stays_short_and_never_replaces_a_whole_one(tmp_path):
    short = _record(BOTH[0], short=True)
    path = stale.accept(short, tmp_path)
    assert _states(tmp_path, BOTH[:1]) == [(FOLDER, "mlp", "short")]
    stale.accept(short, tmp_path)
    stale.accept(_record(BOTH[0]), tmp_path)
    assert _states(tmp_path, BOTH[:1]) == [(FOLDER, "mlp", "fresh")]
    before = path.read_text()
    with pytest.raises(ValueError, match=r"short plan, and .* the whole one"):
        stale.accept(short, tmp_path)
    assert path.read_text() == before


def test_stalest_comes_first(tmp_path):
    old, new = BOTH
    never = _benchmark("tp_dtensor")
    changed = {"bench/harness/gate.py": "changed"}
    stale.accept(_record(old, "2031-01-01T00:00:00+00:00", sources=changed), tmp_path)
    stale.accept(_record(new, "2031-02-01T00:00:00+00:00", sources=changed), tmp_path)
    order = [benchmark.name for benchmark in stale.stalest_first([new, never, old], FOLDER, tmp_path)]
    assert order == ["tp_dtensor", "mlp", "linear_act"]


def test_ops_without_a_benchmark_are_named(tmp_path):
    measured = _benchmark("linear_act", ops=("linear_act",))
    unmeasured = {item.name for item in stale.survey(tmp_path, [measured]) if item.state == "unmeasured"}
    assert unmeasured == registry.ops().keys() - {"linear_act"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dry": True}, "dry run"),
        ({"gate": "red", "rows": []}, "gate is red"),
        ({"device": "cpu"}, "ran on a CPU"),
        ({"rows": []}, "no rows"),
        ({"origin": CLEAN | {"dirty": True}}, "dirty, abc123 with changes; commit them"),
        ({"origin": CLEAN | {"dirty": None}}, "it is unknown whether .* DIRTY=0"),
        ({"origin": CLEAN | {"environment": {"SHARDFUSE_IMPL": "reference"}}}, "ran under SHARDFUSE_IMPL=reference"),
        ({"origin": CLEAN | {"environment": {"SHARDFUSE_TUNED": "/mine.json"}}}, "ran under SHARDFUSE_TUNED"),
        ({"origin": CLEAN | {"commit": "unknown", "dirty": None}}, "commit is unknown; .* COMMIT="),
    ],
    ids=["dry", "red", "cpu", "no rows", "dirty", "perhaps dirty", "reference", "own table", "no commit"],
)
def test_what_is_no_result_is_not_filed(tmp_path, change, reason):
    with pytest.raises(ValueError, match=reason):
        stale.accept(_record(BOTH[0], **change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_benchmark_names_sources_that_exist():
    for benchmark in stale.benchmarks().values():
        assert f"bench/suites/{benchmark.name}.py" in provenance.source_hashes(benchmark)


def test_what_picks_the_configuration_makes_results_stale(tmp_path, monkeypatch):
    names = {
        "bench/harness/report.py",
        "kernels/runtime/chips.py",
        "kernels/linear/tuned.py",
        "kernels/tuned/__init__.py",
    }
    assert names <= provenance.source_hashes(_benchmark("mlp", ops=("linear_act",))).keys()
    paged = provenance.source_hashes(stale.benchmarks()["paged_decode"])
    assert {"kernels/paged_attention/tuned.py", "kernels/runtime/chips.py", "kernels/tuned/__init__.py"} <= paged.keys()
    assert "parallel/zero/main_grad.py" in provenance.source_hashes(stale.benchmarks()["mlp"])
    for file in ("here.json", "here.py", "notes.txt"):
        (tmp_path / file).touch()
    monkeypatch.setattr(provenance, "package_folder", lambda floor: tmp_path)
    assert [name for name, _ in provenance._expand(["kernels/"])] == ["kernels//here.json", "kernels//here.py"]


def test_environment_is_told(monkeypatch):
    monkeypatch.setenv("SHARDFUSE_IMPL", "reference")
    monkeypatch.setenv("SHARDFUSE_COMMIT", "abc")
    found = provenance.describe(torch.device("cpu"))["environment"]
    assert found["SHARDFUSE_IMPL"] == "reference"
    assert "SHARDFUSE_COMMIT" not in found


def test_wrong_source_name_is_an_error():
    with pytest.raises(RuntimeError, match="kernels/nonsense"):
        provenance.source_hashes(
            Benchmark("mlp", "", {}, lambda s: [], lambda s, c: iter(()), sources=("kernels/nonsense.py",))
        )


def test_fewer_rows_of_the_same_sources_replace_no_result(tmp_path):
    path = stale.accept(_record(BOTH[0], rows=[{}, {}]), tmp_path)
    before = path.read_text()
    with pytest.raises(ValueError, match="holds more rows of the same sources"):
        stale.accept(_record(BOTH[0]), tmp_path)
    assert path.read_text() == before


@pytest.mark.parametrize("whole", [True, False], ids=["a run's results", "one record"])
def test_finished_results_are_filed(tmp_path, capsys, whole):
    record = _record(BOTH[0], missing=[["t64", "forward, us", "eager"]])
    (tmp_path / "results.json").write_text(json.dumps({"mlp": record} if whole else record))
    assert summary.accept(tmp_path / "results.json", tmp_path / "filed") == 0
    assert json.loads((tmp_path / "filed" / FOLDER / "mlp.json").read_text()) == record
    assert "planned rows missing: 1" in capsys.readouterr().out
