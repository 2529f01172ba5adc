"""What follows from a row, runs that go on where they stopped, and the report of committed or given results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import publish, runner
from shardfuse.bench.harness.benchmark import Benchmark, Measurement, Settings, Work
from shardfuse.bench.harness.report import DRY_NOTE, Row
from shardfuse.bench.harness.timing import Ceilings, Timing
from shardfuse.bench.suites import serve
from shardfuse.kernels.dev.accuracy import Verdict

CPU = torch.device("cpu")
BEST = Ceilings(flops=800e12, bandwidth=4e12)
# 40 us at the peak, 10 us at the bandwidth; the peer's extra bytes take 4 us.
WORK = Work(flops=32e9, bytes=40e6, extra=16e6)
CASES = ("a", "b", "c")


def _row(ours: float = 50.0, peer: float = 52.0, **changes: Any) -> Row:
    planned = Measurement("a", "forward, us", "eager", 1.0, lambda: (Timing(ours), Timing(peer)), work=WORK)
    return Row.of(dataclasses.replace(planned, **changes), Timing(ours, 0.01, 9.0), Timing(peer, 0.02, 8.0), BEST)


# --- what follows from a row ------------------------------------------------------------------------------------------


def test_rates_are_of_our_time():
    found = _row().rates()
    assert found["tflops"] == pytest.approx(640.0)
    assert found["of_peak"] == pytest.approx(0.8)
    assert found["gb_s"] == pytest.approx(800.0)
    assert found["of_copy"] == pytest.approx(0.2)
    assert found["bound"] == pytest.approx(0.1)
    assert found["won"] == pytest.approx(0.4)  # 52 / 50 of at most 44 / 40


def test_other_precisions_are_not_held_against_bf16_ceilings():
    row = _row(bf16=False)
    assert row.rates().keys() == {"tflops", "gb_s"}
    assert publish.roofline.draw("Some GPU", {"scaled_linear": [row]}) is None
    dry = Settings(CPU, dry=True)
    assert not any(planned.bf16 for planned in runner.find("scaled_linear").plan(dry))
    assert all(planned.bf16 for planned in runner.find("linear_act").plan(dry))


def test_rows_without_work_or_passes_have_no_rates_to_show():
    assert _row(work=None).rates() == {}
    assert _row(work=None).ceilings is None
    assert "bound" not in _row(work=dataclasses.replace(WORK, extra=0.0)).rates()


@pytest.mark.parametrize("row", [_row(), _row(work=None)], ids=["with work", "without"])
def test_row_survives_its_record(row):
    record = json.loads(json.dumps(row.record()))
    assert Row.from_record(record) == row
    assert record.get("tflops") == row.rates().get("tflops")


@pytest.mark.parametrize("dry", [True, False])
def test_ceilings_are_measured_on_a_gpu_only(monkeypatch, dry):
    monkeypatch.setattr(runner, "ceilings", lambda device: BEST)
    rows = runner.run(_benchmark([]), Settings(torch.device("cuda"), dry=dry)).rows
    assert [row.ceilings for row in rows] == [None if dry else BEST] * len(CASES)


# --- runs that go on --------------------------------------------------------------------------------------------------


def _benchmark(log: list[str], *, stop_at: str = "", raise_at: tuple[str, ...] = (), error: float = 0.0) -> Benchmark:
    """One row for each case; ``log`` sees each check and each timing, and Ctrl-C comes at ``stop_at``."""

    def step(what: str) -> None:
        if what == stop_at:
            raise KeyboardInterrupt
        if what in raise_at:
            raise RuntimeError("out of memory\nand a long story")
        log.append(what)

    def run(case: str) -> tuple[Timing, Timing]:
        step(f"time {case}")
        return Timing(50.0, 0.01), Timing(52.0, 0.01)

    def plan(settings: Settings) -> list[Measurement]:
        return [Measurement(case, "forward, us", "eager", 1.0, lambda c=case: run(c), work=WORK) for case in CASES]

    def check(settings: Settings, cases: list[str]):
        for case in cases:
            step(f"check {case}")
            yield case, Verdict("y", error, 1.0)
            step(f"check {case} on")
            yield case, Verdict("dx", error, 1.0)

    return Benchmark("mlp", "a fake under a name whose sources exist", {"eager": 1.0}, plan, check)


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``go(**how)`` runs the fake benchmark into a file; its log, its exit code (130: stopped) and the record."""

    def go(*, resume: bool = True, dry: bool = False, **how: Any) -> tuple[list[str], int, dict[str, Any]]:
        log: list[str] = []
        benchmark = _benchmark(log, **how)
        monkeypatch.setattr(runner, "benchmarks", lambda: {"mlp": benchmark})
        path = tmp_path / "mlp.json"
        try:
            code = runner.run_benchmark("mlp", device="cpu", out=path, resume=resume, dry=dry)
        except KeyboardInterrupt:
            code = 130
        assert {file.name for file in tmp_path.iterdir()} <= {"mlp.json"}
        return log, code, json.loads(path.read_text())

    return go


def test_stopped_run_goes_on_after_its_last_row(go, capsys):
    log, code, record = go(stop_at="time c")
    assert (code, log[-3:]) == (130, ["time b", "check c", "check c on"])
    assert [row["case"] for row in record["rows"]] == ["a", "b"]
    assert record["missing"] == [["c", "forward, us", "eager"]]
    told = capsys.readouterr().err
    assert "3 of 3" in told
    assert "--resume continues it" in told

    log, code, record = go()
    # The last case that was checked has no row yet: its check may have been cut short.
    assert (code, log) == (0, ["check c", "check c on", "time c"])
    assert [row["case"] for row in record["rows"]] == ["a", "b", "c"]
    assert (record["missing"], len(record["verdicts"])) == ([], 6)
    assert "1 of 1" in capsys.readouterr().err
    assert go()[0] == []  # nothing is left to do


def test_half_checked_case_is_checked_again(go):
    go(stop_at="check b on")
    log, code, _ = go()
    assert (code, log[:3]) == (0, ["check b", "check b on", "time b"])


def test_stopped_run_is_not_overwritten_by_a_slip(go, capsys):
    _, _, before = go(stop_at="time c")
    log, code, after = go(resume=False)
    assert (log, code, after) == ([], 2, before)
    assert "--resume continues it" in " ".join(capsys.readouterr().err.split())


def test_without_resume_a_finished_run_starts_again(go):
    go()
    assert go(resume=False)[0].count("time a") == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bench": "gated"}, "holds a run of gated on cpu"),
        ({"dry": True}, "holds a dry run of mlp"),
        ({"device": "NVIDIA H100"}, "holds a run of mlp on NVIDIA H100"),
        ({"rows": None}, "is not the record"),
    ],
    ids=["benchmark", "dry", "device", "no record"],
)
def test_something_else_is_not_overwritten(go, tmp_path, capsys, change, told):
    _, _, record = go()
    (tmp_path / "mlp.json").write_text(json.dumps(record | change))
    log, code, after = go(resume=False)
    assert (log, code, after) == ([], 2, record | change)
    assert told in " ".join(capsys.readouterr().err.split())


def test_finished_run_on_a_gpu_is_not_overwritten(go, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner.provenance, "device_name", lambda device: "NVIDIA H100")
    _, _, before = go()
    assert go(resume=False)[1:] == (2, before)
    assert "finished: choose another --out" in " ".join(capsys.readouterr().err.split())


def test_row_that_raises_is_left_out_and_comes_last_the_next_time(go, capsys):
    log, code, record = go(raise_at=("time a",))
    assert (code, [what for what in log if what.startswith("time")]) == (1, ["time b", "time c"])
    assert record["failed"] == [["a", "forward, us", "eager", "RuntimeError: out of memory"]]
    assert record["missing"] == [["a", "forward, us", "eager"]]
    assert "failed: RuntimeError: out of memory" in capsys.readouterr().err
    log, code, record = go()
    assert (log, code, record["failed"], record["missing"]) == (["time a"], 0, [], [])


def test_failed_rows_come_last(go):
    go(raise_at=("time a",), stop_at="time c")
    assert [what for what in go()[0] if what.startswith("time")] == ["time c", "time a"]


def test_a_device_that_fails_on_and_on_ends_the_run(go, tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        go(raise_at=("time a", "time b", "time c"))
    assert len(json.loads((tmp_path / "mlp.json").read_text())["failed"]) == 3


def test_red_result_is_measured_anew(go):
    assert go(error=2.0)[1] == 1
    log, code, record = go()
    assert (code, len(record["rows"]), log.count("check a")) == (0, 3, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"source_hash": "0" * 16}, "have changed since"),
        ({"dry": True}, "holds a dry run of mlp"),
        ({"bench": "gated"}, "holds a run of gated"),
        ({"short": True}, "holds a run of the short plan"),
        ({"origin": {"device": "NVIDIA H200", "torch": "1", "triton": "1"}}, "was measured on NVIDIA H200"),
        ({"origin": None}, "is not the record"),
    ],
    ids=["sources", "dry", "benchmark", "short", "machine", "no record"],
)
def test_what_must_not_be_mixed_is_refused(go, tmp_path, capsys, change, told):
    _, _, record = go(stop_at="time b")
    path = tmp_path / "mlp.json"
    path.write_text(json.dumps(record | change))
    log, code, after = go()
    assert (log, code) == ([], 2)
    assert after == record | change
    assert told in " ".join(capsys.readouterr().err.split())


def test_resume_needs_a_file(capsys, monkeypatch):
    monkeypatch.setattr(runner, "benchmarks", lambda: {"mlp": _benchmark([])})
    assert runner.run_benchmark("mlp", device="cpu", resume=True) == 2
    assert "--out" in capsys.readouterr().err


def test_dry_run_says_so(go, capsys):
    go(dry=True)
    assert DRY_NOTE.strip(" ()").split(":")[0] in capsys.readouterr().out


# --- the report -------------------------------------------------------------------------------------------------------

ORIGIN = {
    "date": "2031-05-01T00:00:00+00:00",
    "commit": "abc123",
    "dirty": False,
    "torch": "2.13.0",
    "triton": "3.7.1",
    "gpu": {"driver_version": "999.1"},
}


def _record(bench: str = "gated", **changes: Any) -> dict[str, Any]:
    rows = [_row(), _row(peer_name="cuBLAS, doubled width", target=1.5), _row(60, 50, metric="bytes | kept", work=None)]
    record = {"bench": bench, "device": "Some GPU", "gate": "green", "dry": False, "origin": ORIGIN, "missing": []}
    return record | {"rows": [row.record() for row in rows]} | changes


def _publish(tmp_path: Path, *records: dict[str, Any]) -> tuple[list[Path], str]:
    paths = []
    for i, record in enumerate(records):
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(json.dumps(record))
    written = publish.publish(paths, tmp_path / "out")
    return written, (tmp_path / "out" / "report.md").read_text()


def test_report_is_a_table_and_a_plot(tmp_path):
    written, text = _publish(tmp_path, {"gated": _record(), "mlp": _record("mlp")})
    assert [path.name for path in written] == ["report.md", "roofline-some-gpu.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert "![roofline-some-gpu](roofline-some-gpu.png)" in text
    assert "## mlp on Some GPU" in text
    assert "commit abc123, torch 2.13.0, Triton 3.7.1, driver 999.1" in text
    assert "800 TFLOP/s, copy 4,000 GB/s" in text
    assert "Targets met: 1 of 3" in text
    assert "A row with more than 25% noise meets no target." in text
    head, _, first, second, third = [line for line in text.splitlines() if line.startswith("|")][:5]
    assert head.count("|") == first.count("|") == third.count("|") - third.count("\\|")
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        *("a", "forward, us", "eager", "50", "52", "9 / 8", "1.040", "1.000", "yes"),
        *("640 (80%)", "800 (20%)", "10.0% (40%)"),
    ]
    assert "**no**" in second


def test_plot_shows_both_sides_of_every_row_below_the_ceilings(tmp_path):
    axes = publish.roofline.draw("Some GPU", {"gated": [Row.from_record(row) for row in _record()["rows"]]}).axes
    points = {found.get_label(): found.get_offsets().tolist() for found in axes[0].collections}
    assert points.keys() == {"shardfuse", "eager", "cuBLAS, plain GEMM"}
    assert points["shardfuse"] == [pytest.approx([800.0, 640.0])] * 2
    assert points["eager"] == [pytest.approx([800.0, 32e3 / 52])]
    assert (axes[0].get_xscale(), axes[0].get_yscale()) == ("log", "log")
    ceiling = axes[0].lines[-1].get_ydata()
    assert max(ceiling) == 800.0
    assert axes[0].get_ylim()[0] < 32e3 / 52 < max(ceiling) < axes[0].get_ylim()[1]


def test_report_of_a_cpu_has_ratios_only(tmp_path):
    written, text = _publish(tmp_path, _record(device="cpu"))
    assert [path.name for path in written] == ["report.md"]
    assert "| 1.040 |" in text
    assert "TFLOP/s (" not in text
    assert "| 50 |" not in text


@pytest.mark.parametrize(
    ("change", "told"), [({"dry": True}, "a dry run"), ({"gate": "red", "rows": []}, "its gate is red")]
)
def test_report_hides_what_is_no_result(tmp_path, change, told):
    written, text = _publish(tmp_path, _record(**change))
    assert [path.name for path in written] == ["report.md"]
    assert f"Not shown: {told}" in text
    assert "Targets met" not in text
    assert "Ceilings" not in text
    assert "1.040" not in text


def test_missing_matplotlib_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"shardfuse\[bench\]"):
        _publish(tmp_path, _record())
    assert not (tmp_path / "out").exists()
    assert _publish(tmp_path, _record(device="cpu"))[1]  # nothing to draw


@pytest.mark.parametrize("content", ["{}", "[]", '{"bench": "mlp"}', "no json", '{"rows": 3}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        publish.publish([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "why"), [("missing.json", "No such file or directory"), ("", "Is a directory")])
def test_records_that_cannot_be_read_are_named(tmp_path, name, why):
    with pytest.raises(ValueError, match=rf"{name} cannot be read \({why}\): name files that bench run --out wrote"):
        publish.publish([tmp_path / name], tmp_path / "out")


@pytest.mark.parametrize("place", ["/proc/report", "file/below"])
def test_a_report_that_cannot_be_written_says_where(tmp_path, place):
    (tmp_path / "file").touch()
    record = tmp_path / "record.json"
    record.write_text(json.dumps(_record(device="cpu")))
    with pytest.raises(ValueError, match=rf"--out .*{place}/report\.md: cannot be written to \(.*\); choose another"):
        publish.publish([record], tmp_path / place)


def test_without_files_the_committed_results_are_reported(tmp_path, capsys):
    results = tmp_path / "results"
    with pytest.raises(ValueError, match=r"no result in .*results.*bench run NAME --out FILE.*checkout"):
        publish.publish([], tmp_path / "out", results=results)
    (results / "some-gpu").mkdir(parents=True)
    (results / "some-gpu" / "gated.json").write_text(json.dumps(_record()))
    assert publish.publish([], tmp_path / "out", results=results)[0] == tmp_path / "out" / "report.md"


def test_the_page_says_what_the_engines_committed_result_says():
    """The table in docs/cpu.md of the engine against others, and its time to the first token under load."""
    results = Path(serve.__file__).parents[1] / "results" / "cpu" / "amd-zen4" / "serve.json"
    rows = json.loads(results.read_text())["rows"]
    ratios = {row["peer_name"]: row["ratio"] for row in rows if row["metric"] == "all requests, us"}
    page = (Path(__file__).parents[2] / "docs" / "cpu.md").read_text()
    for name, shown in (
        (serve.STATIC, "transformers' `generate`, padded"),
        (serve.BATCH, "transformers' `generate_batch`"),
        (serve.REAL, "vLLM 0.32 for CPUs, offline `LLM`"),
    ):
        assert f"| {shown} | {ratios[name]:.3g} | {ratios[f'{name}, {serve.FORCED}']:.3g} |" in page
    (slow,) = [row["ratio"] for row in rows if row["metric"].startswith("99th percentile at 80%")]
    assert f"(ratio {slow:.2f})" in page
