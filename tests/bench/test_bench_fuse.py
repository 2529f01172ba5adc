"""The benchmark of fused models: its rows, its gate, and that fusing does not slow training down."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse.bench.harness import runner, stale, timing
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.report import Row
from shardfuse.bench.suites import fuse as suite
from shardfuse.kernels.runtime.dispatch import triton_version

pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "KINDS", ("llama",))
    monkeypatch.setattr(suite, "ROUNDS", 2)
    monkeypatch.setattr(suite, "TOKENS", (1, 8))
    monkeypatch.setattr(suite, "SIZES", {**suite.SIZES, "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64})


@pytest.mark.codegen
@pytest.mark.skipif(
    triton_version() is None or shutil.which("gcc") is None, reason="the stub of CUDA's driver needs Triton and gcc"
)
def test_every_row_is_measured(small: None):
    settings = Settings(CPU, seconds=0.0)
    outcome = runner.run(suite.BENCHMARK, settings)
    assert outcome.green
    assert [row.key for row in outcome.rows] == [planned.key for planned in suite.plan(settings)]
    assert len(outcome.rows) == 1 + 2 * len((*suite.HOST_CALLS, *suite.LONGER, *suite.STEPS))
    assert all(row.ratio > 0 for row in outcome.rows)


@pytest.mark.spoiled
def test_a_model_that_computes_something_else_is_not_timed(small: None, monkeypatch: pytest.MonkeyPatch):
    def disturbed(model: Any) -> nn.Module:
        model.lm_head.weight.data.mul_(1.001)
        return model

    monkeypatch.setattr(suite, "fuse", disturbed)
    outcome = runner.run(suite.BENCHMARK, Settings(CPU, dry=True))
    assert not outcome.green
    assert outcome.rows == []


def test_the_interval_is_of_the_rounds_ratios(monkeypatch: pytest.MonkeyPatch):
    """In their order the 14th and the 27th of 40: fewer than 14 lie below the median in 2 % of all cases."""
    times = {True: iter([2.0] * 40), False: iter(2.0 * (number * 7 % 40 + 1) for number in range(40))}
    monkeypatch.setattr(timing, "_per_call", lambda call, count: next(times[call == 1]))
    ours, peer = timing.compare_rounds(1, 2, rounds=40)  # type: ignore[arg-type]
    assert peer.value / ours.value == 20.5
    assert ours.ratio_between == (14.0, 27.0)


@pytest.mark.parametrize("processor", ["amd-zen4", "amd-zen5"])
def test_the_committed_results_have_these_rows(processor: str):
    record = json.loads((stale.RESULTS / "cpu" / processor / "fuse.json").read_text())
    assert (record["bench"], record["gate"], record["dry"]) == ("fuse", "green", False)
    rows = [Row.from_record(row) for row in record["rows"]]
    assert [row.case for row in rows if row.target == suite.STEP] == list(suite.KINDS)
    own = [*suite.LONGER, *suite.STEPS] if processor == "amd-zen5" else []  # later than the others
    for peer, calls in {"stock module": [], "one bare launch": own}.items():
        found = [row.metric.partition(": ")[2] for row in rows if row.peer_name == peer]
        assert found == [*suite.HOST_CALLS, *calls]


@pytest.mark.nightly(seconds=50)
@pytest.mark.parametrize("kind", suite.KINDS)
def test_training_is_not_slower(kind: str):
    """Within 3 % of the stock model's step, as far as rounds that other load disturbs can tell."""
    ours, _ = suite.compare_steps(kind, Settings(CPU))
    assert ours.ratio_between is not None
    assert ours.ratio_between[1] >= suite.STEP
