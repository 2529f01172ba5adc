"""``shardfuse bench compare``: its verdict is calibrated, and it refuses what must not be compared."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardfuse.bench.harness import timing
from shardfuse.bench.harness.benchmark import Measurement, Work
from shardfuse.bench.harness.compare import Options, compare, compare_implementations, compare_rows
from shardfuse.bench.harness.least import work_of
from shardfuse.bench.harness.report import Row
from shardfuse.bench.harness.shift import ROUNDS, balanced_order, compare_times, hodges_lehmann, mann_whitney
from shardfuse.bench.harness.timing import Ceilings, Timing
from shardfuse.bench.page.history import read_history
from shardfuse.kernels.dev import registry

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "amd-zen5"
ROW = Row("case", "us", 100.0, 150.0, "peer", 1.5, None, None, noise=0.01)


def _times(generator: random.Random, slowdown: float) -> tuple[list[float], list[float]]:
    """Rounds of both sides on one busy machine: its speed drifts, and disturbances only ever lengthen a sample."""
    samples: tuple[list[float], list[float]] = ([], [])
    walk, phase = 0.0, generator.uniform(0, 2 * math.pi)
    for number, order in enumerate(balanced_order(ROUNDS, generator)):
        for side in order:
            walk += generator.gauss(0, 0.003)
            drift = 0.05 * math.sin(phase + 2 * math.pi * number / ROUNDS) + walk
            noise = generator.gammavariate(2.0, 0.012)
            if generator.random() < 0.08:
                noise += generator.expovariate(1 / 0.2)
            samples[side].append(100.0 * math.exp(drift + noise + (math.log1p(slowdown) if side else 0.0)))
    return samples


def _verdicts(slowdown: float, count: int) -> list[str]:
    generator = random.Random(20)
    return [compare_times(*_times(generator, slowdown)).verdict for _ in range(count)]


def test_at_most_one_in_a_hundred_comparisons_of_a_version_with_itself_is_called_different():
    assert sum(verdict != "noise" for verdict in _verdicts(0.0, 1000)) <= 10


@pytest.mark.parametrize(("slowdown", "verdict"), [(0.05, "slower"), (1 / 1.05 - 1, "faster")])
def test_a_difference_of_five_percent_is_found(slowdown: float, verdict: str):
    assert _verdicts(slowdown, 400).count(verdict) >= 380


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    generator = random.Random(21)
    intervals = [compare_times(*_times(generator, 0.05)).between for _ in range(400)]
    assert sum(low <= 1 / 1.05 <= high for low, high in intervals) >= 370


def test_u_test_agrees_with_published_values():
    """Against scipy.stats.mannwhitneyu(method="asymptotic"), without and with ties, and for samples all equal."""
    assert mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(0.012185780355344913)
    assert mann_whitney([1, 1, 2, 2], [1, 2, 3, 3, 3]) == mann_whitney([1, 2, 3, 3, 3], [1, 1, 2, 2])
    assert mann_whitney([5.0] * 10, [5.0] * 10) == 1.0


def test_shift_is_the_median_difference():
    estimate, low, high = hodges_lehmann([0.0, 1.0, 2.0] * 5, [3.0, 4.0, 5.0] * 5)
    assert estimate == 3.0
    assert 1.0 <= low < 3.0 < high <= 5.0


def test_order_is_random_and_balanced():
    order = balanced_order(40, random.Random(1))
    assert order.count((0, 1)) == 20
    assert order != balanced_order(40, random.Random(2))


@pytest.mark.parametrize(("a", "b"), [([1.0] * 9, [1.0] * 9), ([1.0] * 10, [1.0] * 11), ([0.0] * 10, [1.0] * 10)])
def test_samples_too_few_or_empty_are_refused(a: list[float], b: list[float]):
    with pytest.raises(ValueError, match="sample"):
        compare_times(a, b)


@pytest.mark.parametrize(
    ("change", "absolute", "verdict"),
    [
        ({"ours": 110.0, "ratio": 150 / 110}, True, "slower"),
        ({"ours": 90.0, "ratio": 150 / 90}, True, "faster"),
        ({"ours": 101.0, "ratio": 150 / 101}, True, "noise"),
        ({"ours": 110.0, "ratio": 150 / 110, "noise": 0.2}, True, "noise"),
        ({"ours": 110.0, "peer": 165.0}, False, "noise"),  # a slower machine, not a slower version
    ],
)
def test_rows_of_two_records(change: dict, absolute: bool, verdict: str):
    assert compare_rows(ROW, dataclasses.replace(ROW, **change), absolute=absolute).verdict == verdict


def test_a_row_above_the_roofline_is_refused():
    """200 GFLOP in 100 us are 2,000 TFLOP/s, twice what the device's own product reaches."""
    honest = dataclasses.replace(ROW, work=Work(10**11, 10**6), ceilings=Ceilings(1e15, 1e12))
    claimed = dataclasses.replace(honest, work=Work(2 * 10**11, 10**6))
    assert compare_rows(honest, honest, absolute=True).verdict == "noise"
    found = compare_rows(honest, claimed, absolute=True)
    assert (found.verdict, found.why) == ("refused", "B claims 200% of the peak that was measured beside it")


@pytest.mark.parametrize(
    ("op", "case", "least"),
    [
        ("rms_norm", "t9-d80-fp32", 5 * 9 * 80 * 4),  # bytes of five passes over x, at one a microsecond
        ("linear_act", "t33-d40-f72-fp32-identity", 6 * 33 * 40 * 72),  # FLOP of three products, at one a microsecond
    ],
)
@pytest.mark.parametrize(("claimed", "verdict"), [(0.4, "refused"), (0.6, "noise")])
def test_an_implementation_faster_than_the_roofline_is_refused(op, case, least, claimed, verdict, monkeypatch):
    """On a CPU only one that claims less than half of the least time: its ceilings may be measured while it is busy."""
    ceilings = Ceilings(1e6, 1e18) if op == "linear_act" else Ceilings(1e18, 1e6)
    monkeypatch.setattr(timing, "sampler", lambda sides, device: lambda side: claimed * least)
    monkeypatch.setattr(timing, "ceilings", lambda device: ceilings)
    (row,) = compare_implementations(op, "impl:reference", "impl:reference", [case], torch.device("cpu"), 0)
    assert row.verdict == verdict
    assert row.why.startswith("reference claims") == (verdict == "refused")


def test_an_op_that_does_not_say_its_work_has_to_write_its_outputs():
    spec = registry.op("dropout")
    case = next(case for case in spec.cases if case.name == "r9-c40-fp32-p0.1-residual")
    inputs = spec.make_inputs(case, torch.device("cpu"), 0)
    out = torch.empty(9, 40)
    assert work_of(spec, case, inputs, {"y": out, "same": inputs["x"].detach()}) == Work(0, 9 * 40 * 4)


def test_an_honest_implementation_is_slower_than_the_measured_ceilings_allow():
    (row,) = compare_implementations(
        "linear_act", "impl:reference", "impl:reference", ["t100-d64-f64-bf16-identity-nobias"], torch.device("cpu"), 0
    )
    assert row.verdict != "refused"


def test_calls_rotate_over_input_sets_on_a_device_with_a_cache(monkeypatch):
    """A working set that stays in the cache would be timed at the cache's speed."""
    seen: list[int] = []

    def sampler(sides, device):
        seen.extend(map(len, sides))
        return lambda side: 100.0

    monkeypatch.setattr(timing, "input_sets", lambda size, device: 4 if size > 1000 else 1)
    monkeypatch.setattr(timing, "sampler", sampler)
    monkeypatch.setattr(timing, "ceilings", lambda device: Ceilings(1e18, 1e18))
    list(
        compare_implementations("rms_norm", "impl:reference", "impl:reference", ["t9-d80-fp32"], torch.device("cpu"), 0)
    )
    assert seen == [4, 4]


def test_a_noisy_implementation_is_not_called_slower_or_faster():
    """Of the same speed at its best, but up to three times as slow, at random."""
    generator = random.Random(22)
    quiet = [100.0 * math.exp(generator.gauss(0, 0.01)) for _ in range(ROUNDS)]
    noisy = [100.0 * math.exp(generator.choice((-1.0, 1.0)) * generator.uniform(0, 1.1)) for _ in range(ROUNDS)]
    assert compare_times(quiet, noisy).verdict == "noise"
    assert compare_times(noisy, quiet).verdict == "noise"


def test_a_row_above_the_roofline_meets_no_target():
    def met(flops: int) -> bool | None:
        planned = Measurement("case", "us", "peer", 1.0, lambda: (Timing(1.0), Timing(1.0)), work=Work(flops, 10**6))
        return Row.of(planned, Timing(100.0), Timing(150.0), Ceilings(1e15, 1e12)).met

    assert met(10**11)
    assert not met(2 * 10**11)


def _slower(path: Path, factor: float) -> Path:
    """A committed record in which every ratio to the peer is smaller by ``factor``."""
    record = json.loads((RESULTS / "onednn.json").read_text())
    for row in record["rows"]:
        row["ours"] *= factor
        row["ratio"] /= factor
        row["between"] = row["between"] and [each / factor for each in row["between"]]
    path.write_text(json.dumps(record))
    return path


def test_records_a_regression_and_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before, after, history = str(RESULTS / "onednn.json"), str(_slower(tmp_path / "after.json", 10.0)), tmp_path / "h"
    options = Options(fail_on_regression=True, history=history)
    assert compare(before, before, options, json=True) == 0
    same = json.loads(capsys.readouterr().out)["rows"]
    assert {row["verdict"] for row in same} == {"noise"}
    assert compare(before, after, options, json=True) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len(same)
    assert {row["verdict"] for row in rows} == {"slower"}
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["verdict"] for line in lines] == [row["verdict"] for row in (*same, *rows)]
    assert {"date", "commit", "processor", "device", "key", "ratio", "between"} <= lines[0].keys()
    history.write_text(history.read_text() + json.dumps(lines[0] | {"ratio": None, "verdict": "refused"}) + "\n")
    page = read_history(history)
    assert [(each.verdict, each.ratio) for each in page] == [(line["verdict"], line["ratio"]) for line in lines]


def test_a_wrong_implementation_is_refused_and_a_slow_one_found(tmp_path: Path):
    file = tmp_path / "kernel.py"
    file.write_text(
        "from shardfuse.kernels.dev import registry\n"
        "run = registry.op('dropout').run\n"
        "def right(inputs, case):\n    return run(inputs, case, 'reference')\n"
        "def slow(inputs, case):\n    return [right(inputs, case) for _ in range(8)][0]\n"
        "def wrong(inputs, case):\n    return {n: out + 1 for n, out in right(inputs, case).items()}\n"
    )
    case = "r9-c40-fp32-p0.1-residual"
    for name, verdict in (("slow", "slower"), ("wrong", "refused")):
        sides = ("impl:reference", f"{file}:{name}")
        (row,) = compare_implementations("dropout", *sides, [case], torch.device("cpu"), 0)
        assert row.verdict == verdict


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("impl:reference", "impl:onednn", "pass --op OP --case NAME"),
        ("commit:HEAD", "commit:HEAD", "pass --bench NAME"),
        ("commit:HEAD", "impl:onednn", "expected two result files"),
        ("fast", "impl:onednn", "expected two result files"),
        ("missing.json", "missing.json", "missing.json cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(a: str, b: str, message: str, capsys):
    assert compare(a, b, Options()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_history_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path, capsys):
    assert compare("impl:reference", "impl:onednn", Options(history=tmp_path / "missing" / "history")) == 2
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.nightly
def test_real_calls_of_one_version_are_noise_and_a_planted_slowdown_is_found():
    """A loop of 400 additions against itself, and against one of 500: a quarter more of the same work."""

    def loop(count: int) -> Callable[[], int]:
        return lambda: sum(range(count * 20))

    def verdict(count: int) -> str:
        sample = timing.sampler(([loop(400)], [loop(count)]), torch.device("cpu"))
        samples: tuple[list[float], list[float]] = ([], [])
        for order in balanced_order(ROUNDS, random.Random(count)):
            for side in order:
                samples[side].append(sample(side))
        return compare_times(*samples).verdict

    assert [verdict(400) for _ in range(10)].count("noise") >= 9
    assert [verdict(500) for _ in range(10)].count("slower") >= 9
