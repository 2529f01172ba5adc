"""Documents packed in rows of a foreign model: kept apart by its own masks, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from documents_case import POSITIONS, apart, batch, differences, grads_of

from shardfuse import fuse, init_mesh, parallelize
from shardfuse.parallel.core.mesh import data_coordinate

pytest.importorskip("transformers")

RISING = POSITIONS[:4]  # by 1 within each document
TIGHT, LOOSE = 1e-11, 1e-5  # stock code that computes in fp32
KINDS = {
    "llama": TIGHT,
    "gpt2": TIGHT,
    "gemma2": LOOSE,
    "mistral": TIGHT,
    "phi3": TIGHT,
    "gptj": TIGHT,
    "cohere": LOOSE,
}
OFTEN = ("llama", "gpt2", "gemma2")
REFUSED = "positions that restart start documents, and .* does not keep those of one row apart: "


def _spread(kind: str, mesh: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    from foreign import foreign, without_dropout

    model = fuse(without_dropout(foreign(kind, dtype)), mesh)
    return parallelize(model, mesh, device=None if mesh is not None else "cpu", **options)


def _expected(kind: str) -> Any:
    """(loss, gradients) of one document per row."""
    spread = _spread(kind)
    tokens, targets, positions = apart(*batch(RISING))
    return float(spread.step(tokens, targets, positions=positions)), grads_of(spread)


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_masks_keep_documents_apart(kind: str):
    (tokens, targets, positions), expected = batch(RISING), _expected(kind)
    for microbatches in (1, 3):
        spread = _spread(kind, microbatches=microbatches)
        loss = float(spread.step(tokens, targets, positions=positions))
        assert not differences((loss, grads_of(spread)), expected, KINDS[kind])
        assert float(spread.evaluate(tokens, targets, positions=positions)) == pytest.approx(loss, rel=KINDS[kind])
        ours = float(spread(tokens, targets, positions=positions).detach())
        assert ours == pytest.approx(loss, rel=KINDS[kind])
        assert float(spread.evaluate(tokens, targets)) != pytest.approx(loss, rel=1e-4)


def test_positions_that_all_rows_share():
    spread, (tokens, targets, _) = _spread("llama"), batch(RISING)
    shared = float(spread.step(tokens, targets, positions=RISING[0]))
    rows = RISING[0].repeat(4, 1)
    for loss in (spread.evaluate(tokens, targets, positions=rows), spread(tokens, targets, positions=RISING[0])):
        assert float(loss.detach()) == pytest.approx(shared, rel=TIGHT)


@pytest.mark.parametrize("kind", ["opt", "gpt_oss"])
def test_a_model_whose_masks_know_no_documents(kind: str):
    spread, (tokens, targets, positions) = _spread(kind, dtype=torch.float32), batch(RISING)
    for call in (spread.step, spread.evaluate, spread):
        with pytest.raises(ValueError, match=REFUSED + "its layers get no mask that separates them; pass one document"):
            call(tokens, targets, positions=positions)
    rising = RISING[1].repeat(4, 1)
    assert float(spread.step(tokens, targets, positions=rising)) > 0
    assert float(spread.step(tokens, targets, positions=rising * 2)) > 0  # no documents here


def test_attention_that_takes_no_mask():
    spread, (tokens, targets, positions) = _spread("llama"), batch(RISING)
    loss = float(spread.evaluate(tokens, targets, positions=positions))
    spread.module.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2'; set_attn_implementation\('sdpa'\) may help"):
        spread.step(tokens, targets, positions=positions)
    spread.module.config._attn_implementation = "sdpa"
    assert float(spread.evaluate(tokens, targets, positions=positions)) == pytest.approx(loss, rel=TIGHT)


def test_layers_that_mix_tokens_without_a_mask():
    spread, (tokens, targets, positions) = _spread("llama"), batch(RISING)
    spread.module.model.layers[1].mixer = torch.nn.Conv1d(2, 2, 3)
    with pytest.raises(ValueError, match=REFUSED + "its layers mix tokens by a Conv1d"):
        spread.step(tokens, targets, positions=positions)


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[1] * 2], ids=["restarts", "none"])
def test_gaps_start_documents_in_transformers(positions: torch.Tensor):
    spread, (tokens, targets, _) = _spread("llama"), batch()
    with pytest.raises(ValueError, match=r"positions that rise by more than 1: \w+ starts a document there"):
        spread.step(tokens, targets, positions=positions)


# ---------------------------------------------------------------------------------------------------------- over ranks


def _body(rank: int, world: int, degrees: dict[str, int], options: dict[str, Any]) -> list[str]:
    mesh = init_mesh(**degrees, device_type="cpu")
    expected = _expected("llama")
    spread = _spread("llama", mesh, **options)
    share, readers = data_coordinate(mesh)
    tokens, targets, positions = (part.tensor_split(readers)[share] for part in batch(RISING))
    losses = [float(spread.step(tokens, targets, positions=positions))]
    found = differences((losses[0], grads_of(spread)), expected, TIGHT)
    losses.append(float(spread.evaluate(tokens, targets, positions=positions)))
    return found + ["evaluation"] * (losses[1] != pytest.approx(losses[0], rel=TIGHT))


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"dp": 2}, {"zero": 3}),
        ({"pp": 2}, {"schedule": "1f1b", "microbatches": 3}),
        pytest.param({"tp": 2}, {"microbatches": 2}, marks=pytest.mark.nightly),
        pytest.param({"pp": 2}, {"schedule": "zbv"}, marks=pytest.mark.nightly),
        pytest.param({"pp": 2, "tp": 2}, {"schedule": "dualpipev"}, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "tp": 2}, {"zero": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_over_ranks(ranks: Any, degrees: dict[str, int], options: dict[str, Any]):
    world = torch.tensor(list(degrees.values())).prod().item()
    assert ranks(world, _body, degrees, options) == [[]] * world


def _refused(rank: int, world: int) -> str:
    """What each rank's step raises where only the last one's positions restart."""
    mesh = init_mesh(dp=2, device_type="cpu")
    spread = _spread("opt", mesh)
    tokens, targets, positions = (part[:2] if rank else part[1:2] for part in batch(RISING))
    with pytest.raises(ValueError) as raised:
        spread.step(tokens, targets, positions=positions)
    return str(raised.value)


def test_a_refusal_reaches_every_rank(ranks: Any):
    first, last = ranks(2, _refused)
    assert "1 of 2 ranks that read data refused their batch" in first
    assert "does not keep those of one row apart" in last
