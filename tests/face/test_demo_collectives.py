"""The demo's agreement check notices every collective: with any single one left out, it is red."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from train_case import settings
from wire import omit, sites_seen

from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.training.checks import compare_with_unsharded
from shardfuse.training.settings import RunSettings
from shardfuse.training.trainer import Trainer

pytestmark = pytest.mark.ranks

STEPS = 8


def _first_steps(rank: int, world: int, run: RunSettings, omitted: list[str | None]) -> dict[str | None, Any]:
    """Losses of the first steps with each site of ``omitted`` left out (None: nothing), and the sites that ran."""
    mesh = init_mesh(tp=world, device_type="cpu")
    found = {}
    for site in omitted:
        trainer = Trainer(run, mesh)
        collectives.reset_counts()
        with omit(site) if site else contextlib.nullcontext():
            losses = [float(trainer.train_step().loss) for _ in range(STEPS)]
        found[site] = losses, sites_seen()
        trainer.close()
    return found


@pytest.mark.parametrize(
    ("sequence_parallel", "style"),
    [
        pytest.param(False, "gated", id="tp-gated"),
        pytest.param(True, "gelu", id="sp-gelu"),
        pytest.param(False, "gelu", id="tp-gelu", marks=pytest.mark.nightly),
        pytest.param(True, "gated", id="sp-gated", marks=pytest.mark.nightly),
    ],
)
def test_check_is_red_without_any_one_collective(ranks: Any, tmp_path: Path, sequence_parallel: bool, style: str):
    run = settings(
        tmp_path,
        2,
        model={"style": style, "num_layers": 2},
        optimizer={"lr": 2e-3, "warmup": 0},
        parallel={"tp": 2, "sequence_parallel": sequence_parallel},
    )
    losses, sites = ranks(2, _first_steps, run, [None])[0][None]
    whole = compare_with_unsharded(losses, run)
    assert whole.ok, whole

    expected = {"embedding", "attention.out", "mlp.out", "loss.max", "loss.sum", "clip.norm"}
    assert expected <= set(sites)
    assert ("norm.grad" in sites) == sequence_parallel
    for rank in ranks(2, _first_steps, run, sites):
        assert sites == list(rank)
        for site, (losses, seen) in rank.items():
            assert site not in seen
            without = dataclasses.replace(whole, sharded=tuple(losses))
            assert not without.ok, f"left out {site}: {without.difference:.1e} is within {without.budget:.1e}"
