"""Self-attention over a grid: heads over k, whole sequences over the axes of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ...parallel.core.first_calls import compare_call
from ...parallel.grid.grid import ACROSS, local_rows, size_of
from ..attention.attention import ParallelAttention
from ..attention.rope import Rope
from .linear import GridLinear, grid_project
from .module import GridModule


class GridAttention(ParallelAttention, GridModule):
    """:class:`~shardfuse.layers.attention.attention.ParallelAttention` over a grid, without dropout, packed batches and
    caches.

    x and the result are [T/i/k, D/j], or [T/i, D/k] over two axes, of B whole sequences. q, k and v are
    [T/i/j, heads/k * H]: the rank attends over B/i/j sequences, so B divides by i*j (and by a depth).

    Raises ValueError for sizes that the grid cannot divide, and for a ``dropout_p`` above 0.
    """

    column = GridLinear
    row = partial(GridLinear, turned=True)

    def check_sizes(self, num_heads: int, num_kv_heads: int) -> None:
        if self.dropout_p:
            raise ValueError(f"dropout_p={self.dropout_p}: attention over a grid has no dropout; leave it at 0")
        self.grid.check_count("num_heads", num_heads)
        self.grid.check_count("num_kv_heads", num_kv_heads)

    def check_widths(self, hidden_size: int, width: int) -> None:
        self.grid.check_width("hidden_size", hidden_size)
        self.grid.check_width("num_heads * head_dim", width, turned=True)

    def split(self, name: str) -> Mapping[str, int]:
        return {ACROSS: 0}  # sinks, one for each head

    def local_sinks(self) -> Any:
        return self.summed_local("sinks", axes=self.grid.sequences, site="attention.sinks")[0]

    def core_attention(
        self,
        x: torch.Tensor,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        rope: Rope | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """This rank's heads of its sequences, side by side: [T/i/j, N/k * H].

        ``batch_size`` is B, of all ranks; ``positions`` [S] or [B*S] are those of the whole batch, ``rope`` the tables
        of this rank's.
        """
        compare_call(self, self.group, x=x)
        given = [name for name, value in unsupported.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: attention over a grid takes whole sequences of one length alone")
        if batch_size is None:
            raise ValueError("attention over a grid wants batch_size=B, the sequences of the whole batch")
        rows, parts = size_of(self.grid.rows), size_of(self.grid.sequences)
        self.grid.check_batch(batch_size, x.shape[0] * rows // max(batch_size, 1))
        q, k, v = grid_project(x, self.q_proj, self.k_proj, self.v_proj)
        if positions is not None and positions.numel() == x.shape[0] * rows and batch_size > 1:
            positions = local_rows(positions.reshape(batch_size, -1), self.grid.sequences)
        return self._attend(q, k, v, batch_size // parts, positions, rope)
