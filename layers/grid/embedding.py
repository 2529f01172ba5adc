"""The embedding over a grid: the vocabulary over k, stored as the head stores its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...parallel.core import mappings
from ...parallel.core.first_calls import compare_call
from ...parallel.core.mesh import Group
from ...parallel.grid.grid import ACROSS, WITHIN, local_rows
from ..embedding import VocabParallelEmbedding, check_tokens, look_up_slice
from .module import GridModule


class GridEmbedding(VocabParallelEmbedding, GridModule):
    """:class:`~shardfuse.layers.embedding.VocabParallelEmbedding` over a grid: tokens [T], the same on all ranks, ->
    [T/i/k, D/j], or [T/i, D/k] over two axes.

    The weight [V, D] is stored as [V/k, D/j/i] and gathered over i, as a head's is, with which it may be tied. A rank
    looks up T/i tokens, and the sum over k is scattered.
    """

    def check_sizes(self, vocab_size: int) -> None:
        self.grid.check_count("vocab_size", vocab_size)

    @property
    def vocab_ranks(self) -> Group:
        return self.grid.k

    def split(self, name: str) -> Mapping[str, int]:
        return {ACROSS: 0, WITHIN: 1}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        compare_call(self, self.group, values=True, tokens=tokens)
        check_tokens(tokens, self.vocab_size)
        grid = self.grid
        (weight,) = self.summed_local("weight", axes=[grid.depth], site="embedding.depth")
        weight = mappings.all_gather_from(weight, grid.i, dim=1, site="embedding.weight")
        x = look_up_slice(local_rows(tokens, (grid.depth, grid.i)), weight, grid.k, self.padding_idx)
        return mappings.reduce_scatter_to(x, grid.k, dim=grid.axes().spare, site="embedding")
