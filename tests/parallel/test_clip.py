"""Clipping by one norm over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfuse import ParallelTransformer, TransformerConfig, init_mesh
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core.sharding import local_tensor
from shardfuse.parallel.zero.clip import GradientClipper

CONFIG = TransformerConfig(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64, init_std=0.05
)


def _backward(mesh: Any = None, **options: Any) -> ParallelTransformer:
    model = ParallelTransformer(CONFIG, mesh=mesh, **options)
    model.init_weights(0)
    tokens = torch.randint(CONFIG.vocab_size, (4, 33), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return model


def _gradients(mesh: Any, sequence_parallel: bool, max_norm: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The norm that clipping returns, and every whole clipped gradient."""
    model = _backward(mesh, sequence_parallel=sequence_parallel)
    norm = GradientClipper(model.parameters(), max_norm, model.group).clip()
    with torch.no_grad():
        for param in model.parameters():  # so that full_state_dict gathers them
            assert param.grad is not None
            local_tensor(param).copy_(local_tensor(param.grad))
    return norm, full_state_dict(model)


def _clip_body(rank: int, world: int, sequence_parallel: bool, max_norm: float) -> Any:
    return _gradients(init_mesh(device_type="cpu"), sequence_parallel, max_norm)


@pytest.mark.parametrize("max_norm", [0.1, 1e9], ids=["clips", "leaves"])
def test_clipping_equals_torch(max_norm: float):
    model = _backward()
    norm, ours = _gradients(None, False, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.testing.assert_close(norm, expected)
    for name, param in model.named_parameters():
        torch.testing.assert_close(ours[name], param.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_clipping_is_the_same_on_every_rank_and_degree(ranks: Any, sequence_parallel: bool):
    norm, alone = _gradients(None, False, 0.1)
    assert norm > 1.0  # so that clipping does something
    results = ranks(2, _clip_body, sequence_parallel, 0.1)
    assert results[0][0] == results[1][0]
    for rank_norm, gradients in results:
        torch.testing.assert_close(rank_norm, norm)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-6)
