"""The demo's agreement check notices every collective: with any single one left out, it is red."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest

from shardfuse import TransformerConfig
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import init_mesh
from shardfuse.training import loop
from shardfuse.training.checks import Agreement, compare_with_unsharded
from shardfuse.training.config import TrainConfig
from shardfuse.training.data import load_corpus

pytestmark = pytest.mark.ranks

MODEL = TransformerConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=64,
    init_std=0.05,
)
CORPUS_BYTES = 1 << 17


def _first_steps(rank: int, world: int, config: TrainConfig, omitted: list[str | None]) -> dict[str | None, Any]:
    """Losses of the first steps with each site of ``omitted`` left out (None: nothing), and the sites that ran."""
    mesh = init_mesh(device_type="cpu")
    corpus = load_corpus(seq=config.seq, max_bytes=CORPUS_BYTES)
    found = {}
    for site in omitted:
        collectives.reset_counts()
        with collectives.omit(site) if site else contextlib.nullcontext():
            model = loop.build_model(config, mesh)
            optimizer = loop.build_optimizer(model, config)
            result = loop.train(
                model, optimizer, corpus, config, steps=config.recorded_steps, evaluate_after=site is None
            )
        found[site] = (result.losses, collectives.sites_seen())
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
def test_check_is_red_without_any_one_collective(ranks: Any, sequence_parallel: bool, style: str):
    config = TrainConfig(
        model=dataclasses.replace(MODEL, style=style, bias=None),
        batch=4,
        seq=32,
        time_cap=1000.0,  # so that the clock is asked
        eval_batches=1,
        sequence_parallel=sequence_parallel,
    )
    losses, sites = ranks(2, _first_steps, config, [None])[0][None]
    whole = compare_with_unsharded(losses, config, load_corpus(seq=config.seq, max_bytes=CORPUS_BYTES))
    assert whole.ok, whole

    expected = {"embedding", "attention.out", "mlp.out", "loss.max", "loss.sum", "clip.norm", "train.clock"}
    assert expected <= set(sites)
    assert ("norm.grad" in sites) == sequence_parallel
    for rank in ranks(2, _first_steps, config, sites):
        assert sites == list(rank)
        for site, (losses, seen) in rank.items():
            assert site not in seen
            without = Agreement(tuple(losses), whole.unsharded, whole.exact)
            assert not without.ok, f"left out {site}: {without.difference:.1e} is within {without.budget:.1e}"
