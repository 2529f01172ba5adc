"""Seeds and masks that ranks agree on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import (
    ParallelTransformer,
    TransformerConfig,
    init_mesh,
    load_checkpoint,
    manual_seed,
    save_checkpoint,
    tp_group,
)
from shardfuse.kernels.dropout import new_rng_key
from shardfuse.parallel.core.random import check_alike
from shardfuse.parallel.zero.clip import GradientClipper

CPU = torch.device("cpu")


def test_seeds_depend_on_seed_and_step_alone():
    seeds = {(seed, step): manual_seed(seed, step=step) for seed in (0, 1) for step in (0, 1, 2)}
    assert len(set(seeds.values())) == 6
    first = [int(new_rng_key(CPU)) for _ in range(2)]
    manual_seed(1, step=2)
    assert [int(new_rng_key(CPU)) for _ in range(2)] == first
    assert first[0] != first[1]
    assert all(manual_seed(*key[:1], step=key[1]) == seed for key, seed in seeds.items())


def _drawn_body(rank: int, world: int, tp: int) -> tuple[int, str]:
    mesh = init_mesh(dp=world // tp, tp=tp)
    manual_seed(7, mesh, step=3)
    check_alike(tp_group(mesh), CPU)
    rng_key = int(new_rng_key(CPU))
    check_alike(tp_group(mesh), CPU)
    if rank == 1:
        new_rng_key(CPU)
    try:
        check_alike(tp_group(mesh), CPU)
    except RuntimeError as error:
        return rng_key, str(error)
    return rng_key, ""


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_of_a_tensor_parallel_group_draw_alike_and_replicas_do_not(ranks: Any, tp: int):
    (first, one), (second, other) = ranks(2, _drawn_body, tp)
    assert (first == second) == (tp == 2)
    expected = r"tensor-parallel ranks [1] would draw other random numbers than rank 0"
    assert [expected in message for message in (one, other)] == [tp == 2] * 2


CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, residual_dropout=0.3,
    embedding_dropout=0.2,
)  # fmt: skip


def _steps(mesh: Any, style: str, dtype: torch.dtype = torch.float64, **options: Any) -> list[float]:
    """Losses and gradient norms of two steps of training, then the loss of an evaluation."""
    config = dataclasses.replace(CONFIG, style=style, bias=None)
    model = ParallelTransformer(config, mesh=mesh, dtype=dtype, **options)
    model.init_weights(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(24).view(2, 12) * 7 % 40
    found = []
    for step in range(2):
        manual_seed(11, mesh, step=step)
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        found += [loss.item(), GradientClipper(model.parameters(), 1.0, model.group).clip().item()]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return [*found, model(tokens, tokens.roll(-1, 1)).item()]


def _steps_body(rank: int, world: int, style: str, options: dict[str, Any]) -> list[float]:
    return _steps(init_mesh(tp=world), style, **options)


@pytest.mark.parametrize("style", ["gelu", "gated"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"recompute": True}], ids=str)
def test_training_with_dropout_does_not_depend_on_the_number_of_ranks(ranks: Any, style: str, options: dict[str, Any]):
    alone = _steps(None, style)
    for found in ranks(2, _steps_body, style, options):
        assert found == pytest.approx(alone, rel=1e-9)


def test_a_resumed_run_draws_what_the_whole_one_drew(tmp_path: Path):
    tokens = torch.arange(24).view(2, 12) * 7 % 40

    def run(steps: range, folder: Path | None, into: Path | None) -> list[float]:
        torch.manual_seed(len(steps))  # whatever was drawn before
        model = ParallelTransformer(CONFIG, dtype=torch.float64)
        model.init_weights(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if folder is not None:
            load_checkpoint(folder, model, optimizer)
        losses = []
        for step in steps:
            manual_seed(11, step=step)
            loss = model(tokens, tokens.roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if into is not None:
            save_checkpoint(into, model, optimizer)
        return losses

    whole = run(range(4), None, None)
    assert run(range(2), None, tmp_path / "half") + run(range(2, 4), tmp_path / "half", None) == whole
    assert run(range(3, 5), tmp_path / "half", None)[0] != whole[2]  # another step, another mask


def test_dropout_drops_in_training_only():
    with_dropout = _steps(None, "gelu")
    plain = dataclasses.replace(CONFIG, residual_dropout=0.0, embedding_dropout=0.0)
    model = ParallelTransformer(plain, dtype=torch.float64)
    model.init_weights(5)
    tokens = torch.arange(24).view(2, 12) * 7 % 40
    first = model(tokens, tokens.roll(-1, 1)).item()
    assert with_dropout[0] != pytest.approx(first, rel=1e-4)
    dropping = ParallelTransformer(CONFIG, dtype=torch.float64).eval()
    dropping.init_weights(5)
    assert dropping(tokens, tokens.roll(-1, 1)).item() == first


@pytest.mark.interpret
def test_kernels_draw_what_the_reference_draws():
    reference = _steps(None, "gated", torch.float32, impl="reference")
    assert _steps(None, "gated", torch.float32, impl="triton") == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize("name", ["residual_dropout", "embedding_dropout"])
def test_rates_that_are_none_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}=1.0: expected at least 0 and less than 1"):
        dataclasses.replace(CONFIG, **{name: 1.0})
