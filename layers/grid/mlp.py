"""The feed-forward layer over a grid."""

from __future__ import annotations

from functools import partial

import torch

from ...kernels.linear import apply_activation
from ...parallel.core.first_calls import compare_call
from ..mlp import ParallelMLP
from ..options import LayerOptions
from .linear import GridLinear, grid_project


class GridMLP(ParallelMLP):
    """:class:`~shardfuse.layers.mlp.ParallelMLP` over a grid: x and the result are [T/i/k, D/j], or [T/i, D/k] over two
    axes. Parameters and arguments are the same, except ``recompute``, ``sequence_parallel`` and
    ``fuse_wgrad_accumulation``.

    Raises ValueError for sizes that the grid cannot divide.
    """

    takes_grid = True
    column = GridLinear
    row = partial(GridLinear, turned=True)

    def check_sizes(self, hidden_size: int, ffn_size: int, shared: LayerOptions) -> None:
        shared.grid.check_width("hidden_size", hidden_size)
        shared.grid.check_width("ffn_size", ffn_size, turned=True)
        if self.recompute:
            raise ValueError(
                f"recompute={self.recompute} (mlp_recompute of a model): over a grid the MLP keeps its activations; "
                "recompute=True of the block or the model keeps none of them"
            )

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``residual``, of the result's layout, is added to it."""
        compare_call(self, self.group, x=x)
        *first, last = self._layers()
        if len(first) == 1:
            return last(first[0](x), residual=residual)
        gate, up = grid_project(x, *first)
        return last(apply_activation(gate, self.activation) * up, residual=residual)
