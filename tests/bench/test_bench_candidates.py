"""The benchmark of candidate configurations: each has a row of its own, and runs in its configuration."""

from __future__ import annotations

import json

import pytest
import torch

from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.suites import candidates, paged
from shardfuse.kernels.linear import config as gemms
from shardfuse.kernels.linear.gemm import GemmConfig
from shardfuse.kernels.paged_attention import config as tiles
from shardfuse.kernels.paged_attention.config import AttentionConfig

ON_A_GPU = Settings(torch.device("cuda"), short=True)
DRY = Settings(torch.device("cpu"), dry=True)


def test_every_candidate_has_a_row_and_a_check_of_its_own():
    for settings in (ON_A_GPU, DRY):
        rows = candidates.plan(settings)
        assert len({row.case for row in rows}) == len(rows) == len(candidates.GEMMS) + len(candidates.ATTENTION)
        assert {row.case for row in rows} == {case.name for case in candidates.cases(settings)}


def test_a_candidate_runs_in_its_configuration_and_its_peer_in_todays(monkeypatch):
    seen = []

    def called(*args: object, **options: object) -> torch.Tensor:
        seen.append((gemms.forced.config, tiles.forced.config))
        return torch.empty(0)

    monkeypatch.setattr(candidates, "linear_act", called)
    monkeypatch.setattr(paged, "ours", lambda operands, impl: called)
    found = candidates.cases(DRY)
    product = next(case for case in found if isinstance(case, candidates.Product))
    attention = next(case for case in found if isinstance(case, candidates.Attention) and case.config is not None)
    product.row(DRY).run()
    attention.row(DRY).run()
    assert seen == [(product.config, None), (None, None), (None, attention.config), (None, None)]


def test_pages_are_compared_in_todays_configuration(monkeypatch):
    pages: list[int] = []
    monkeypatch.setattr(paged, "ours", lambda operands, impl: pages.append(operands.step.page) or (lambda: None))
    [case] = [each for each in candidates.cases(DRY) if each.name.endswith("pages-of-128")]
    case.row(DRY).run()
    assert pages == [128, 16]


def test_a_file_adds_candidates(monkeypatch, tmp_path):
    before = candidates.plan(ON_A_GPU)
    fields = {"block_m": 64, "block_n": 256, "block_k": 64, "num_warps": 4, "num_stages": 4, "use_tma": True}
    attention = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "per_sm": 2}
    file = tmp_path / "more.json"
    file.write_text(json.dumps([["up", fields], ["decode", attention]]))
    monkeypatch.setenv(candidates.ADDED, str(file))
    added = {row.case for row in candidates.plan(ON_A_GPU)} - {row.case for row in before}
    assert added == {
        f"llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16 {GemmConfig(**fields)}",
        f"s64-l8192-n32k8h128-page16-bf16 {AttentionConfig(**attention)}-per_sm2",
    }
    file.write_text('[["down", {}]]')
    with pytest.raises(ValueError, match=r"SHARDFUSE_CANDIDATES=.*expected a JSON list of .name, fields.*up, qkv"):
        candidates.plan(ON_A_GPU)
