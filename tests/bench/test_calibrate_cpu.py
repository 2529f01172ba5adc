"""``shardfuse bench calibrate --cpu``: what it writes and refuses, and the benchmark of what is chosen by it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardfuse.bench import calibrate_cpu
from shardfuse.bench.calibrate_cpu import Ratio, threshold
from shardfuse.bench.harness import fast_mkl
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.runner import run_benchmark
from shardfuse.bench.suites import onednn as suite
from shardfuse.cli import app
from shardfuse.kernels.linear import cpu, cpu_tables, linear_act
from shardfuse.kernels.runtime import dispatch, onednn, processor, tuning
from shardfuse.training.launch import Stopped

WHY_NOT = onednn.why_not(torch.float32)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

RESULT = Path(suite.__file__).parents[1] / "results" / "cpu" / "amd-zen5" / "onednn.json"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({1: 2.0, 8: 1.5, 64: 1.1}, 1),
        ({1: 2.0, 8: 0.9, 64: 1.1}, 64),
        ({1: 2.0, 8: 1.5, 64: 1.01}, 1),
        ({1: 1.02, 8: 1.06, 64: 1.0}, 8),
        ({1: 2.0, 8: 1.5, 64: 0.99}, 0),
        ({1: 1.04, 64: 1.04}, 0),
        ({1: 0.5, 8: 1.06, 64: 3.0}, 8),
    ],
)
def test_it_wins_from_where_on_it_never_loses(ratios: dict[int, float], expected: int):
    assert threshold(ratios) == expected


@pytest.mark.parametrize("path", sorted(tuning.SHIPPED.glob("x86_64-*.json")), ids=lambda path: path.stem)
def test_what_ships_follows_from_what_was_measured(path: Path):
    for entry in tuning.read(path).entries:
        ratios = entry.measured["stock over oneDNN, by tokens"]
        assert entry.config == {"from_tokens": threshold({int(tokens): ratio for tokens, ratio in ratios.items()})}


def measured(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict:
    """A whole run with tiny sizes and a clock of its own: oneDNN is twice as fast from four tokens on."""
    ratio = lambda kind, tokens, features, depth, seconds: 2.0 if tokens >= 4 and kind != "packed" else 0.5
    monkeypatch.setattr(calibrate_cpu, "_ratio", lambda *call: Ratio(ratio(*call), (ratio(*call), ratio(*call))))
    monkeypatch.setattr(calibrate_cpu.Known, "spread", lambda self: 0.1)
    done = CliRunner().invoke(app, ["bench", "calibrate", "--cpu", "--out", str(path), "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_auto_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "mine.json"
    said = measured(path, monkeypatch)
    assert said["arch"] == processor.architecture()
    assert said["table"] == str(path)
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    tuning.forget()
    try:
        for tokens, pack, impl in ((3, False, "reference"), (4, False, "onednn"), (4, True, "reference")):
            dispatch.counts.clear()
            with torch.no_grad():
                linear_act(torch.randn(tokens, 8), torch.randn(8, 8), pack_weight=pack)
            assert list(dispatch.counts) == [("linear_act", impl)]
        assert cpu.fingerprint() != f"{processor.architecture()}, oneDNN, table none"
    finally:
        monkeypatch.delenv(tuning.VARIABLE)
        tuning.forget()


def test_a_table_of_another_processor_says_so_and_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = measured(tmp_path / "other.json", monkeypatch, "--arch", "x86_64-other-avx2-mkl")
    assert said["arch"] == "x86_64-other-avx2-mkl"
    assert all(entry["source"].endswith("standing for x86_64-other-avx2-mkl") for entry in said["entries"])
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "other.json"))
    assert all(not path.endswith("other.json") for path in tuning.tables(processor.architecture()))


def test_the_path_with_real_calls_and_a_table_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibrate_cpu, "TOKENS", (1, 3))
    monkeypatch.setattr(calibrate_cpu, "SIDES", ((8, 8), (16, 8)))
    path = tmp_path / "dry.json"
    done = CliRunner().invoke(app, ["bench", "calibrate", "--cpu", "--dry", "--out", str(path)])
    assert done.exit_code == 0, done.output
    table = json.loads(path.read_text())
    assert len(table["entries"]) == 2 * len(cpu_tables.KINDS)
    assert all(min(entry["measured"]["stock over oneDNN, by tokens"].values()) > 0 for entry in table["entries"])
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    with pytest.raises(ValueError, match="written by a dry run"):
        tuning.tables(processor.architecture())


def test_a_disturbed_row_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And the known product's figure of what counted is kept."""
    spreads = itertools.chain([0.1, 0.1, 9.0, 3.0, 0.2], itertools.repeat(0.1))
    calls: list[tuple[str, int]] = []

    def ratio(kind: str, tokens: int, *_: object) -> Ratio:
        calls.append((kind, tokens))
        return Ratio(1.0, (1.0, 1.0))

    monkeypatch.setattr(calibrate_cpu, "_ratio", ratio)
    monkeypatch.setattr(calibrate_cpu.Known, "spread", lambda self: next(spreads))
    path = tmp_path / "mine.json"
    done = CliRunner().invoke(app, ["bench", "calibrate", "--cpu", "--out", str(path)])
    assert done.exit_code == 0, done.output
    rows = len(cpu_tables.KINDS) * len(calibrate_cpu.SIDES)
    assert len(calls) == (rows + 2) * len(calibrate_cpu.TOKENS)
    table = json.loads(path.read_text())
    assert table["origin"]["spread"] == 0.2
    assert len(table["entries"]) == rows


def test_a_busy_machine_writes_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibrate_cpu, "_ratio", lambda *call: Ratio(1.0, (1.0, 1.0)))
    monkeypatch.setattr(calibrate_cpu.Known, "spread", lambda self: 2.0)
    path = tmp_path / "mine.json"
    command = ["bench", "calibrate", "--cpu", "--out", str(path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "took 3.0 times as long as the fastest, and 1.5 is allowed; nothing was written" in done.output
    assert not path.exists()
    assert CliRunner().invoke(app, [*command, "--busy"]).exit_code == 0
    assert json.loads(path.read_text())["origin"]["busy"] is True


def test_the_known_product_tells_other_work_from_none(monkeypatch: pytest.MonkeyPatch):
    """By a clock of its own: of ten samples one is delayed, or three are."""
    for delayed, expected in ((1, 0.0), (3, 4.0)):
        samples = itertools.cycle([5e-3] * delayed + [1e-3] * (10 - delayed))
        monkeypatch.setattr(calibrate_cpu, "_timed", lambda call, calls=1, samples=samples: next(samples))
        assert calibrate_cpu.Known().spread() == pytest.approx(expected)


def test_a_machine_that_became_slow_as_a_whole_is_busy(monkeypatch: pytest.MonkeyPatch):
    """The fastest sample so far counts, not that of the moment."""
    now = [1e-3]
    monkeypatch.setattr(calibrate_cpu, "_timed", lambda call, calls=1: now[0])
    known = calibrate_cpu.Known()
    assert known.spread() == pytest.approx(0.0)
    now[0] = 3e-3
    assert known.spread() == pytest.approx(2.0)
    now[0] = 1e-3
    assert known.spread() == pytest.approx(0.0)


def test_the_worse_of_cache_and_memory_counts(monkeypatch: pytest.MonkeyPatch):
    """Outside an engine; within one the weights come from memory, and a training step has one of each."""
    by_count = {1: Ratio(0.5, (0.4, 0.6)), 64: Ratio(2.0, (1.9, 2.1))}
    monkeypatch.setattr(calibrate_cpu, "_call", lambda kind, impl, tokens, features, depth, count: count)
    monkeypatch.setattr(calibrate_cpu, "_ratio_of", lambda sides, seconds: by_count[sides[0]])
    found = {kind: calibrate_cpu._ratio(kind, 4, 128, 128, 1.0).median for kind in cpu_tables.KINDS}
    assert found == {"train": 0.5, "packed": 0.5, "packed_act": 0.5, "served": 2.0, "served_act": 2.0}


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--arch", "a"), 1, "processor 'a': expected a machine, a vendor"),
        (("--out", "."), 2, "is a folder; name a file in it with --out"),
        (("--out", "{file}/mine.json"), 2, "cannot be written"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    options: tuple[str, str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(calibrate_cpu, "_measured", lambda *_: pytest.fail("it measured"))
    given = [option.format(file=file) for option in options]
    done = CliRunner().invoke(app, ["bench", "calibrate", "--cpu", *given])
    assert done.exit_code == code
    assert says in done.output.replace("\n", " ") + str(done.exception)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_earlier_table(signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not sent: a stop signal is ignored for the rest of the process that had one."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def stop(*_: object) -> Ratio:
        assert signal.getsignal(signum) is not before[signum]
        raise Stopped(signum)

    path = tmp_path / "mine.json"
    measured(path, monkeypatch)
    written = path.read_bytes()
    monkeypatch.setattr(calibrate_cpu, "_ratio", stop)
    done = CliRunner().invoke(app, ["bench", "calibrate", "--cpu", "--out", str(path)])
    assert done.exit_code == 128 + signum
    assert "nothing was written, and the earlier table is as it was" in done.output
    assert path.read_bytes() == written
    assert list(tmp_path.iterdir()) == [path]
    assert {each: signal.getsignal(each) for each in before} == before


def test_it_says_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Against the table in force: here one that calls oneDNN faster from four tokens on, but for packed weights."""
    path = tmp_path / "mine.json"
    measured(path, monkeypatch)
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    tuning.forget()
    try:
        before = cpu_tables.in_force(processor.architecture())
        entries = list(tuning.read(path).entries)
        assert "It says what" in str(calibrate_cpu._changes(before, entries))
        row = next(each for each in entries if each.bucket == cpu_tables.bucket("served", 512 * 512))
        entries[entries.index(row)] = dataclasses.replace(row, config={"from_tokens": 32})
        changes = calibrate_cpu._changes(before, entries)
        assert changes.caption.startswith("1 of 35 rows differ")
        assert [*map(str, *changes.rows)] == ["served", "512 x 512", "from 4 tokens", "from 32 tokens"]
    finally:
        monkeypatch.delenv(tuning.VARIABLE)
        tuning.forget()


def test_another_files_content_is_kept(tmp_path: Path):
    path = tmp_path / "notes.json"
    for content, why in (("[1, 2]", "is no table of measurements"), (_gpu_table(), "holds a table of sm_90 for gemm")):
        path.write_text(content)
        done = CliRunner().invoke(app, ["bench", "calibrate", "--cpu", "--dry", "--out", str(path)])
        assert done.exit_code == 2
        assert why in " ".join(done.output.split())
        assert path.read_text() == content


def _gpu_table() -> str:
    table = {"format": 2, "arch": "sm_90", "dry": False, "origin": {}, "sources": {"gemm": []}, "entries": []}
    return json.dumps(table)


def test_the_processors_name_is_for_the_cpu_alone():
    done = CliRunner().invoke(app, ["bench", "calibrate", "--arch", "x"])
    assert done.exit_code == 2
    assert "--arch goes with --cpu" in done.output


def test_the_benchmark_runs_dry(tmp_path: Path):
    path = tmp_path / "result.json"
    assert run_benchmark("onednn", dry=True, device="cpu", out=path) == 0
    assert [row["peer_name"] for row in json.loads(path.read_text())["rows"]] == [suite.STOCK] * len(suite.DRY)


@pytest.mark.skipif(not fast_mkl.available(), reason="stock torch is fast here, or there is no gcc")
def test_the_other_process_runs_the_case_and_ends():
    forced = fast_mkl.Forced(suite.__name__, suite.DRY[0].name)
    child = forced._child
    assert 0 < forced.sample(2) < 1e6
    del forced
    assert child.wait(60) != 0


# What the committed result misses, as docs/cpu.md tells.
MISSED = ["mlp-inference-t4-d256-f1024", "mlp-inference-t8-d256-f1024"]


def test_the_committed_result_meets_its_targets_but_those_told():
    """Each row with a target on the processor it was measured on, and MKL's fast path beside every one of them."""
    content = json.loads(RESULT.read_text())
    rows = content["rows"]
    judged = [row for row in rows if row["target"] is not None]
    cases = {row["case"] for row in judged}
    assert cases == {case.name for case in (*suite.AMD, *suite.FEW_TOKENS)}
    assert [row["case"] for row in judged if not row["met"]] == MISSED
    assert {row["case"] for row in rows if row["peer_name"] == fast_mkl.NAME} == cases
    assert Settings(torch.device("cpu")).impl == "auto"
