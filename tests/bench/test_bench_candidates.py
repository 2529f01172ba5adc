"""The benchmark of candidate configurations: each has a row of its own, and runs in its configuration."""

from __future__ import annotations

import torch

from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.suites import candidates, paged
from shardfuse.kernels.linear import config as gemms
from shardfuse.kernels.paged_attention import config as tiles

ON_A_GPU = Settings(torch.device("cuda"), short=True)
DRY = Settings(torch.device("cpu"), dry=True)


def test_every_candidate_has_a_row_and_a_check_of_its_own():
    for settings in (ON_A_GPU, DRY):
        rows = candidates.plan(settings)
        assert len({row.case for row in rows}) == len(rows) > len(candidates.GEMMS) + len(candidates.ATTENTION)
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
    attention = next(case for case in found if isinstance(case, candidates.Attention))
    product.row(DRY).run()
    attention.row(DRY).run()
    assert seen == [(product.config, None), (None, None), (None, attention.config), (None, None)]
