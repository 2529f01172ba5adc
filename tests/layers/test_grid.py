"""Layers and a decoder over a grid: every number of one process, and refusals that name what would fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from grid_case import SEED, alone, batches, config, differences, train

from shardfuse.layers.grid.transformer import GridTransformer
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize


class Case(NamedTuple):
    """A grid, and how it trains."""

    grid: tuple[int, ...]
    depth: int = 1
    style: str = "gated"
    overlap: str = "auto"
    dp: int = 1
    zero: int = 0
    recompute: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.depth * torch.Size(self.grid).numel()

    def __str__(self) -> str:
        said = ["x".join(map(str, self.grid)), self.style, self.overlap]
        said += [f"{name}{getattr(self, name)}" for name in ("depth", "dp", "zero") if getattr(self, name) != 1]
        return "-".join(said + ["recompute"] * self.recompute)


def _train_body(rank: int, world: int, fields: tuple[Any, ...]) -> list[str]:
    case = Case(*fields)
    mesh = init_mesh(dp=case.dp, grid=case.grid, depth=case.depth)
    with torch.device("meta"):
        model = GridTransformer(config(case.style), mesh=mesh, dtype=torch.float64, overlap=case.overlap)
    spread = parallelize(model, mesh, seed=SEED, zero=case.zero, recompute=case.recompute)
    share = mesh.get_local_rank("dp")

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return spread.step(tokens.chunk(case.dp)[share], targets.chunk(case.dp)[share])

    ours = train(model, step, 3, {})
    logits = model.gather_logits(spread(batches()[0][0])).detach()
    return differences(ours | {"logits": logits}, alone(case.style))


CHOSEN = [
    Case((2, 2)),
    Case((2, 2), style="gelu", overlap="summa"),
    Case((1, 2, 2), style="gelu"),
    Case((2, 1, 2), recompute=True),
    Case((2, 2, 2), style="gelu"),
    Case((2, 2), depth=2, overlap="summa"),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_grid_trains_as_one_process_does(ranks: Any, case: Case):
    assert ranks(case.world, _train_body, tuple(case)) == [[]] * case.world
