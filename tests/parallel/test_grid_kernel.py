"""A layer over a grid whose rows travel inside the kernel, or in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.grid.linear import GridLinear
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import gather

T, K, N = 32, 32, 48


def _kernel_body(rank: int, world: int, grid: tuple[int, int, int], turned: bool) -> list[str]:
    torch.manual_seed(0)
    mesh = init_mesh(grid=grid)
    layer = GridLinear(K, N, turned=turned, mesh=mesh, overlap="kernel", strict=True, impl="triton")
    x, dy = torch.randn(T, K), torch.randn(T, N)
    axes = layer.axes

    def mine(whole: torch.Tensor, rows: list[Any], columns: Any) -> torch.Tensor:
        for axis in rows:
            whole = whole.chunk(axis.size)[axis.rank]
        return whole.chunk(columns.size, 1)[columns.rank]

    x_here = mine(x, [axes.tokens, axes.outer], axes.inner).requires_grad_()
    dispatch.counts.clear()
    y = layer(x_here)
    y.backward(mine(dy, [axes.tokens, axes.inner], axes.outer))
    assert dispatch.counts["linear_act", "triton"] == 1
    ours = {
        "y": y.detach(),
        "dx": x_here.grad,
        "dw": gather(layer.weight.grad),
        "db": gather(layer.bias.grad),
    }

    def stock(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [
            each.detach().to(dtype).requires_grad_() for each in (x, gather(layer.weight.data), gather(layer.bias.data))
        ]
        out = F.linear(*leaves)
        out.backward(dy.to(dtype))
        dx, dw, db = (leaf.grad for leaf in leaves)
        assert dx is not None
        return {
            "y": mine(out.detach(), [axes.tokens, axes.inner], axes.outer),
            "dx": mine(dx, [axes.tokens, axes.outer], axes.inner),
            "dw": dw,
            "db": db,
        }

    low, oracle = stock(torch.float32), stock(torch.float64)
    found = [accuracy.judge(name, out, low[name], oracle[name], terms=T + K + N) for name, out in ours.items()]
    return [str(verdict) for verdict in found if not verdict.ok]


@pytest.mark.interpret
@pytest.mark.skipif(not dispatch.interpreting(), reason="CPU tensors: the kernels must be interpreted")
@pytest.mark.parametrize("turned", [False, True], ids=["from the width", "turned"])
@pytest.mark.parametrize("grid", [(1, 1, 2), (1, 2, 2)], ids=["gather", "sum"])
def test_rows_travel_inside_the_kernel(ranks: Any, grid: tuple[int, int, int], turned: bool):
    """Of a product's gather and its sum, the only one that the grid has, or the sum."""
    world = grid[1] * grid[2]
    assert ranks(world, _kernel_body, grid, turned) == [[]] * world
