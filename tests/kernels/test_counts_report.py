"""Kernels run in the emulator with its counters: what ``shardfuse inspect --run`` prints, and the committed record."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest
from typer.testing import CliRunner

from shardfuse.cli import app
from shardfuse.kernels.dev import counting, counts_report, registry, run_inspection
from shardfuse.kernels.dev.counts_report import Excuse, Launch
from shardfuse.kernels.dev.ptx import models
from shardfuse.kernels.runtime import dispatch
from shardfuse.kernels.runtime.dispatch import triton_version

VERSION = triton_version() or ""
RECORD = counts_report.read(VERSION)
# Cheap cases of the record, of kernels that differ: counted again in `make test`.
NORM = "sm_90 rms_norm t8192-d4096-bf16"
SAMPLE = (NORM, "sm_90 copy_blocks 256x8x16-fp32-n64", "sm_90 write_kv t64-k8-h128-p16-bf16")

needs_emulator = pytest.mark.skipif(
    triton_version() is None or shutil.which("gcc") is None,
    reason="Triton is not installed, or gcc, which compiles the stub of CUDA's driver",
)


# --------------------------------------------------------------------------------------------------- shardfuse inspect


@pytest.fixture(scope="module")
def sample() -> dict[str, dict[str, Any]]:
    questions = [counts_report._question(name) for name in SAMPLE]
    return dict(zip(SAMPLE, counting.count(questions, "sm_90", jobs=1, machine=True)))


@pytest.fixture
def norm(sample: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """RMSNorm of 13 rows of 4096, with its backward."""
    assert not sample[NORM].get("error"), sample[NORM]["error"]
    return sample[NORM]


@pytest.mark.codegen
@needs_emulator
def test_a_norm_by_hand(norm: dict[str, Any]):
    """A block of 256 threads has a row: 8192 bytes, in loads of 16 bytes by each thread, twice."""
    forward, backward, _ = norm["launches"]
    row, stats = 13 * 4096 * 2, 13 * 4
    assert forward["kernel"] == "_norm_fwd_kernel"
    assert (forward["grid"], forward["threads"], forward["elements"]) == ([13, 1, 1], 256, 13 * 4096)
    # x, the weight once, y and a statistic of each row; each block asks for the weight, and a statistic is a sector.
    assert forward["needed"] == row + 8192 + row + stats
    assert forward["asked"] == row + 13 * 8192 + row + stats
    assert forward["moved"] == forward["by_block"] == 3 * row + 13 * 32
    # Two loads of a row and two of the weight, each by the 8 warps of 13 blocks: 32 lanes of 16 bytes are 16 sectors.
    wide = [each for each in forward["lines"] if each["opcode"] == "ld.global.v4.b32"]
    assert [(each["requests"], each["sectors"]) for each in wide] == [(2 * 8 * 13, 2 * 8 * 13 * 16)] * 2
    # A thread takes a reciprocal square root, and divides by the row's length.
    assert forward["ratios"]["mufu"] * 13 * 4096 <= 3 * 13 * 256
    assert (forward["ratios"]["loads"], forward["ratios"]["stores"]) == (1.0, 1.0)
    # Of its machine code, as many accesses: four loads and three stores of a warp, 7 x 32 threads x 8 warps a row.
    assert forward["machine"]["global memory"] == 7 * 256 / 4096
    assert forward["machine"]["fp32"] >= forward["units"]["fp32"]
    # dy, x, the weight once; dx, and the sum of each of 6 programs for the weight's gradient; the statistics again.
    assert backward["grid"] == [6, 1, 1]
    assert backward["needed"] == row + row + 8192 + row + 6 * 4096 * 4 + stats


@pytest.mark.codegen
@needs_emulator
def test_what_is_printed(norm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "200")
    asked: list[Any] = []

    def count(questions: Any, arch: str, *, on_answer: Any, **others: Any) -> list[dict[str, Any]]:
        asked.append((questions, arch))
        on_answer(0, norm)
        return [norm]

    monkeypatch.setattr(counting, "count", count)
    assert run_inspection.inspect("rms_norm", None, "t8192-d4096-bf16") == 0
    assert [(question.case, arch) for (question,), arch in asked] == [("t8192-d4096-bf16", "sm_90")]
    out, err = capsys.readouterr()
    for words in (
        "_norm_fwd_kernel\n",
        "rms_norm t8192-d4096-bf16 for sm_90, grid 13 x 1 x 1, blocks of 256 threads\n",
        "221,236 are necessary; asked 319,540, moved 319,904 in sectors: 1.45 of the necessary",
        "used by main loads 100.0%, by main stores 100.0%",
        "by public rates, no prediction: device memory",
        "argument 0 (13, 4096)",
        "by element, as ptxas makes it: fp32 ",
        "what runs most often is a loop's steady state",
    ):
        assert words in out
    assert "ran rms_norm t8192-d4096-bf16" in err  # progress off a terminal
    assert "1 case for sm_90" in err
    assert "Instructions by line of source" not in out
    assert run_inspection.inspect("rms_norm", "sm_90", "t8192-d4096-bf16", verbose=True) == 0
    out = capsys.readouterr().out
    assert "Instructions by line of source" in out
    assert "Barriers, and branches at which the threads of a warp part" in out
    assert run_inspection.inspect("rms_norm", "sm_90", "t8192-d4096-bf16", json=True) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["op"], found["case"], found["target"]) == ("rms_norm", "t8192-d4096-bf16", "sm_90")
    assert found["launches"] == json.loads(json.dumps(norm["launches"]))
    faulty = {**norm, "faults": ["race: of two warps"]}
    monkeypatch.setattr(counting, "count", lambda *_, **__: [faulty])
    assert run_inspection.inspect("rms_norm", None, "t8192-d4096-bf16") == 1
    assert "race: of two warps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        ({"op": "nonesuch", "target": None}, "no op called 'nonesuch': known are all_gather_linear"),
        ({"op": None, "target": None}, "--run takes one op at a time: name one of all_gather_linear"),
        ({"op": "rope", "target": None, "all_ops": True}, "--run takes one op at a time: name one of all_gather"),
        (
            {"op": "rope", "target": "gfx942"},
            "target='gfx942': what kernels do is counted for sm_80, sm_86, sm_89, sm_90",
        ),
        ({"op": "rope", "target": "sm_100"}, "target='sm_100': what kernels do is counted for sm_80"),
        ({"op": "scaled_linear", "target": "sm_80"}, "target='sm_80': scaled_linear is for fp8"),
        ({"op": "rope", "target": "sm_91"}, "target='sm_91': what kernels do is counted for sm_80"),
        ({"op": "rope", "target": None, "case": "none"}, "case='none': rope has no case whose name holds that, but "),
    ],
)
def test_inspect_refuses_what_makes_no_sense(question: dict[str, Any], complaint: str, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert run_inspection.inspect(**question) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {complaint}")


def test_inspect_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_version", lambda: None)
    assert run_inspection.inspect("rope", None) == 2
    assert "pip install triton" in capsys.readouterr().err
    monkeypatch.setattr(dispatch, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run_inspection.inspect("rope", None) == 2
    assert "needs a C compiler, for the stub of CUDA's driver: install gcc" in capsys.readouterr().err


def test_a_case_goes_with_run():
    found = CliRunner().invoke(app, ["inspect", "rope", "--case", "x"])
    assert found.exit_code == 2
    assert "only --run runs cases" in found.output


def test_run_is_asked_for_by_its_options(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(run_inspection, "inspect", lambda *given, **named: asked.append((given, named)) or 3)
    words = ["inspect", "rope", "--run", "--case", "h80", "--target", "sm_80", "--json", "--verbose"]
    assert CliRunner().invoke(app, words).exit_code == 3
    assert asked == [(("rope", "sm_80", "h80"), {"all_ops": False, "json": True, "verbose": True})]


# ---------------------------------------------------------------------------------------------------------- the record


def _launch(kernel: str = "_cast_kernel", op: str = "scaled_linear", **ratios: float | None) -> Launch:
    return Launch("sm_90", op, "a-case", kernel, dict.fromkeys(counts_report.COLUMNS) | ratios)


def test_gates_and_excuses(monkeypatch: pytest.MonkeyPatch):
    excuse = Excuse("loads", "_cast_kernel", ("sm_90", "a-case"), "by bytes")
    monkeypatch.setattr(counts_report, "EXCUSES", (excuse,))
    poor, whole = _launch(loads=0.89), _launch(loads=0.9, stores=1.0, conflicts=1.0, mufu_computed=3.0, by_block=1.5)
    assert counts_report.problems([poor, whole]) == []
    # A kernel that is mended no longer needs its excuse.
    assert counts_report.problems([whole]) == [
        "_cast_kernel sm_90 a-case is excused from loads (by bytes) but passes: drop the excuse"
    ]
    # Tiles of products are read for several others.
    assert counts_report.problems([poor, _launch("_gemm_kernel", by_block=2.0)]) == []
    others = [_launch("_amax_kernel", loads=0.89), _launch(stores=0.5), _launch(conflicts=1.0001)]
    for other in [*others, _launch(mufu_computed=3.01), _launch(by_block=1.51)]:
        [problem] = counts_report.problems([poor, other])
        assert problem.startswith(f"sm_90 scaled_linear a-case: {other.kernel}: ")
        assert problem.endswith("or counts_report.EXCUSES says why not")


def test_every_gate_is_a_column():
    assert set(counts_report.GATES) <= set(counts_report.COLUMNS)
    assert {excuse.gate for excuse in counts_report.EXCUSES} <= set(counts_report.GATES)


recorded = pytest.mark.skipif(
    not counts_report.path(VERSION).is_file(), reason=f"no record of Triton {VERSION or 'is installed'}"
)


@recorded
def test_the_record_passes_the_gates():
    assert counts_report.problems(list(counts_report.launches(RECORD))) == []
    assert {launch.arch for launch in counts_report.launches(RECORD)} == set(counts_report.ARCHS)


@recorded
@pytest.mark.parametrize("arch", counts_report.ARCHS)
def test_every_case_of_a_model_is_recorded(arch: str):
    specs = [spec for spec in registry.ops().values() if (arch, spec.name) != ("sm_80", "scaled_linear")]
    cases = {f"{arch} {spec.name} {small.name}" for spec in specs for small in models.cases(spec)}
    assert {name for name in RECORD if name.startswith(f"{arch} ")} == cases


@recorded
@pytest.mark.codegen
@needs_emulator
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_as_recorded(name: str, sample: dict[str, dict[str, Any]]):
    _, *recorded = RECORD[name]
    assert counts_report.compared(name, recorded, sample[name]) == []
    # What differs is told.
    [kernel, loads, *others], *rest = recorded
    [line] = counts_report.compared(name, [[kernel, loads / 2, *others], *rest], sample[name])
    assert line.startswith(f"{name}: {{'kernel': '{kernel}', 'loads': 1.0, ")
    [line] = counts_report.compared(name, [*recorded, recorded[0]], sample[name])
    assert line.endswith(f"{len(recorded)} different launches, {len(recorded) + 1} recorded: make codegen")
    assert counts_report.compared(name, recorded, {"error": "it ended"}) == [f"{name}: it ended"]


@recorded
@pytest.mark.codegen(seconds=15)
@needs_emulator
def test_the_record_is_of_todays_kernels():
    assert counts_report.stale(VERSION, jobs=1) == []


def test_counting_again_tells_what_is_not_as_recorded(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(counts_report, "read", lambda version: {"sm_90 rope a": ["s", ["k"]], "sm_80 rope a": ["s"]})
    monkeypatch.setattr(counts_report, "stale", lambda version, archs, jobs: [f"stale: {archs}"])
    monkeypatch.setattr(counts_report.codegen, "require_compiler", lambda: None)
    monkeypatch.setattr(counting, "count", lambda asked, arch, jobs: [{"error": f"{arch} {each}"} for each in asked])
    assert counts_report.main(["--recount", "sm_90"]) == 1
    question = counting.Question("rope", "a")
    assert capsys.readouterr().out.splitlines() == ["stale: ['sm_90']", f"sm_90 rope a: sm_90 {question}"]


def test_what_is_stale_is_told(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(counts_report.codegen_report, "FOLDER", tmp_path)
    [line] = counts_report.stale("1.2.3")
    assert line.startswith("there is no counts-triton-1.2.3.json")
    questions = [counting.Question("rope", each) for each in ("as it was", "changed", "new")]
    monkeypatch.setattr(counting, "recorded", lambda arch: questions)
    monkeypatch.setattr(counting, "sources", lambda asked, arch, jobs: [{"source": each.case} for each in asked])
    rows = {"sm_90 rope as it was": ["as it was"], "sm_90 rope changed": ["once"], "sm_90 rope gone": ["gone"]}
    record = {"columns": list(counts_report.COLUMNS), "cases": rows}
    counts_report.path("1.2.3").write_text(json.dumps(record))
    assert counts_report.stale("1.2.3", ["sm_90"]) == [
        "sm_90 rope new is not in it",
        "sm_90 rope changed was counted of other sources",
        "sm_90 rope gone is no case any more",
    ]


def test_writing_counts_what_changed(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    counted: list[str] = []

    def count(questions: Any, arch: str, *, on_answer: Any, **others: Any) -> list[dict[str, Any]]:
        counted.extend(f"{arch} {each.case}" for each in questions)
        ratios = dict.fromkeys(counts_report.COLUMNS, 1.0)
        each = {"launches": [{"kernel": "k", "ratios": ratios}] * 2, "faults": []}
        for index, _ in enumerate(questions):
            on_answer(index, each)
        return [each] * len(questions)

    monkeypatch.setattr(counts_report.codegen_report, "FOLDER", tmp_path)
    monkeypatch.setattr(counts_report, "EXCUSES", ())
    monkeypatch.setattr(counting, "recorded", lambda arch: [counting.Question("rope", "one")])
    monkeypatch.setattr(counting, "sources", lambda asked, arch, jobs: [{"source": source}])
    monkeypatch.setattr(counting, "count", count)
    source = "first"
    assert counts_report.write() == 0
    assert counted == ["sm_90 one", "sm_80 one"]
    assert counts_report.read(VERSION)["sm_80 rope one"] == ["first", ["k", *[1.0] * len(counts_report.COLUMNS)]]
    assert counts_report.write() == 0
    assert len(counted) == 2
    assert counts_report.write(everything=True) == 0
    assert len(counted) == 4
    source = "second"
    assert counts_report.write() == 0
    assert len(counted) == 6
    assert "2 cases, 2 of them counted, 0 problems" in capsys.readouterr().out.splitlines()[-1]
    assert os.listdir(tmp_path) == [f"counts-triton-{VERSION}.json"]
