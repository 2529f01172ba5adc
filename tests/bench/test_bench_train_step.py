"""The benchmark of whole training steps: its rows, its gate, and what a step does."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import records, runner
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.rivals import Rival
from shardfuse.bench.harness.stand_in import OnCpu
from shardfuse.bench.harness.timing import Ceilings
from shardfuse.bench.suites import fuse, train_step

CPU = torch.device("cpu")
DRY = Settings(CPU, dry=True)
GPU = OnCpu(CPU, short=True, seconds=0.01)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "SIZES", {**fuse.SIZES, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64})


def test_every_row_is_measured():
    outcome = runner.run(train_step.BENCHMARK, DRY)
    assert outcome.green
    expected = [case.name for case in train_step.DRY]
    if importlib.util.find_spec("transformers") is None:
        expected.remove(train_step.LLAMA)
    assert [row.case for row in outcome.rows] == expected
    assert all(row.ratio > 0 for row in outcome.rows)


@pytest.mark.parametrize("case", train_step.DRY[:3], ids=lambda case: case.name)
def test_a_layer_that_computes_something_else_is_not_timed(case: train_step.Case, monkeypatch: pytest.MonkeyPatch):
    layers = train_step._layers

    def disturbed(case: train_step.Case) -> Any:
        ours, stock = layers(case)
        with torch.no_grad():
            next(ours.parameters()).mul_(1.001)
        return ours, stock

    monkeypatch.setattr(train_step, "_layers", disturbed)
    monkeypatch.setattr(train_step, "DRY", (case,))
    outcome = runner.run(train_step.BENCHMARK, DRY)
    assert not outcome.green
    assert outcome.rows == []


@pytest.mark.parametrize("case", train_step.DRY[:3], ids=lambda case: case.name)
def test_a_step_moves_every_parameter_of_either_side(case: train_step.Case):
    for side in train_step.sides(case, DRY)[:2]:
        before = {name: param.detach().clone() for name, param in side.model.named_parameters()}
        side.step()()
        for name, param in side.model.named_parameters():
            assert not torch.equal(param, before[name]), name
            assert param.grad is None, name


def test_without_a_compiler_the_compiled_rows_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    train_step.no_compiler.cache_clear()
    try:
        settings = Settings(CPU)
        record = records.record(train_step.BENCHMARK, settings, records.Outcome())
    finally:
        train_step.no_compiler.cache_clear()
    assert {peer for _, _, peer in record["missing"]} == {train_step.STOCK}
    assert [(case, peer) for case, _, peer, _ in record["skipped"]] == [
        (case.name, train_step.COMPILED) for case in train_step.cases(settings)
    ]
    assert all("install g++" in why for *_, why in record["skipped"])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's model with narrow layers."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(train_step, "_8B", dataclasses.replace(train_step._8B, D=64, F=128, N=4, K=2, H=16))
    monkeypatch.setattr(train_step, "WORDS", 96)
    monkeypatch.setattr(train_step, "GPU", (train_step.Case(train_step.LARGE, 24),))


def test_the_rows_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(Rival, "missing", lambda self, device: f"{self.distribution} lacks {device}")
    case, rows = "llama3-8b-2-layers-t4096-bf16", train_step.plan(GPU)
    assert [(row.key, row.target, row.slow, row.skip) for row in rows] == [
        ((case, train_step.METRIC, "stock torch"), 1.0, False, ""),
        ((case, train_step.METRIC, "Liger"), None, False, "liger-kernel lacks cuda"),
        ((case, "peak bytes", "stock torch"), None, False, ""),
        ((case, "peak bytes", "Liger"), None, False, "liger-kernel lacks cuda"),
        ((case, train_step.METRIC, "torch.compile"), None, True, ""),
    ]
    work = rows[0].work
    assert work is not None
    assert (work.flops / 1e12, work.bytes / 16e9) == (pytest.approx(24.5, rel=0.01), pytest.approx(1.487, rel=0.001))


def test_the_rows_of_a_gpu_are_measured(tiny: None, monkeypatch: pytest.MonkeyPatch):
    called = list[str]()
    monkeypatch.setattr(Rival, "missing", lambda self, device: "")
    monkeypatch.setattr(train_step.liger, "llama", lambda model: called.append(train_step.LIGER) or model)
    monkeypatch.setattr(runner, "ceilings", lambda device: Ceilings(1e15, 1e13))
    planned = [row for row in train_step.plan(GPU) if not row.slow]
    outcome = runner.run(train_step.BENCHMARK, GPU, only=[row.key for row in planned])
    assert outcome.green
    assert [row.key for row in outcome.rows] == [row.key for row in planned]
    assert called == [train_step.LIGER] * 2


def test_a_fused_model_that_computes_something_else_is_not_timed(tiny: None, monkeypatch: pytest.MonkeyPatch):
    large = train_step._large

    def disturbed(case: train_step.Case, settings: Settings) -> Any:
        ours, stock, tokens = large(case, settings)
        with torch.no_grad():
            ours.lm_head.weight.mul_(1.1)
        return ours, stock, tokens

    monkeypatch.setattr(train_step, "_large", disturbed)
    red = {verdict.name for _, verdict in train_step.check(GPU, [train_step.GPU[0].name]) if not verdict.ok}
    assert {"d_model.norm", "d_model.embed_tokens"} <= red


@pytest.mark.nightly
def test_the_compiled_peer_is_measured(monkeypatch: pytest.MonkeyPatch):
    if train_step.no_compiler():
        pytest.skip(train_step.no_compiler())
    monkeypatch.setattr(train_step, "SHORT", train_step.DRY[:1])
    monkeypatch.setattr(train_step, "ROUNDS", 2)
    outcome = runner.run(train_step.BENCHMARK, Settings(CPU, short=True))
    assert [row.peer_name for row in outcome.rows] == [train_step.STOCK, train_step.COMPILED]
