"""A decoder-only transformer over a grid.

tokens [B, S] -> embedding -> x [T/i/k, D/j] (T = B*S; over two axes [T/i, D/k]) -> blocks -> norm -> head
-> logits [T/i/j, V/k] -> loss over the vocabulary on k, summed over the tokens' axes
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.cross_entropy.op import check_targets
from ...parallel.core import mappings
from ...parallel.cross_entropy import IGNORE_INDEX
from ...parallel.documents import Documents
from ...parallel.grid.grid import Grid, check_grid_overlap, local_rows, size_of
from ..block import ParallelBlock
from ..config import TransformerConfig
from ..loss import vocab_parallel_cross_entropy
from ..options import LayerOptions, ModelKwargs, Unpack
from ..transformer import Decoder, ParallelTransformer, TransformerStage
from .attention import GridAttention
from .embedding import GridEmbedding
from .linear import GridLinear
from .mlp import GridMLP
from .norm import GridLayerNorm, GridRMSNorm


class GridBlock(ParallelBlock):
    """:class:`~shardfuse.layers.block.ParallelBlock` over a grid."""

    takes_grid = True
    attention = GridAttention
    feed_forward = GridMLP
    norms = (GridLayerNorm, GridRMSNorm)


class GridDecoder(Decoder):
    """Embedding, blocks and the last norm over a grid."""

    takes_grid = True
    embedding = GridEmbedding
    block = GridBlock
    norms = (GridLayerNorm, GridRMSNorm)


class _OnGrid(ParallelTransformer):
    """What differs from one axis: which tokens a rank has, and where."""

    grid: Grid

    def _loss(self, y: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        mine = local_rows(targets, self.grid.sequences).long()
        size = None if self.grid.k.size == 1 else self.config.vocab_size  # a replaced head may have gathered
        loss = vocab_parallel_cross_entropy(self.lm_head(y), mine, self.grid.k, reduction="sum", vocab_size=size)
        for axis in self.grid.sequences:
            loss = mappings.reduce_from(loss, axis, site="loss.tokens")
        return loss if reduction == "sum" else loss / (targets != IGNORE_INDEX).sum()

    def _logits(self, y: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(y)
        for axis in reversed(self.grid.sequences):
            logits = mappings.gather_from(logits, axis, dim=0, site="head.tokens")
        return logits

    def _local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        return positions if positions.dim() == 1 else local_rows(positions, self.grid.sequences)

    @property
    def _token_ranks(self) -> int:
        return size_of(self.grid.rows)

    def _check_batch(
        self, tokens: torch.Tensor, targets: torch.Tensor | None, positions: torch.Tensor | None = None
    ) -> tuple[int, int]:
        batch, length = super()._check_batch(tokens, targets, positions)
        self.grid.check_batch(batch, length)
        if targets is not None:  # a rank sees its own sequences' later, and would raise alone
            check_targets("cross-entropy", targets, self.config.vocab_size, IGNORE_INDEX)
        return batch, length

    def documents(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Documents | None:
        if super().documents(tokens, positions) is not None:
            raise ValueError(
                "positions that restart start documents, and attention over a grid cannot keep those of one row apart "
                "(nor see, while torch.compile traces, whether positions restart): pass one document per row, padded "
                "with targets of -100, or use dp, tp or pp instead of a grid"
            )
        return None

    def _check_packed(self, *_: Any) -> int:
        raise ValueError("cu_seqlens: a grid divides a batch into whole sequences of one length; pass tokens [B, S]")

    def _serve(self, *_: Any) -> torch.Tensor:
        raise ValueError(
            "a cache wants a model over tp: load the grid's checkpoint into a ParallelTransformer to serve"
        )

    def _check_overlap(self, overlap: str) -> None:
        check_grid_overlap(overlap, self.grid, self.lm_head.strict)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V/k] -> [..., V] on every rank."""
        return mappings.gather_from(logits, self.grid.k, dim=-1, site="head.gather")

    def boundary(self, batch: int, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.grid.check_batch(batch, length, "micro-batch")
        whole = super().boundary(batch, length, dtype)
        return whole.new_empty(len(whole) // self._token_ranks, whole.shape[1] // self.grid.hidden.size)

    def stage(self, parts: range) -> GridStage:
        return GridStage(self, parts)


class GridTransformer(_OnGrid):
    """:class:`~shardfuse.layers.transformer.ParallelTransformer` over the grid of ``mesh`` (``init_mesh(grid=...)``).

    Parameters have the same names, the same seeds give the same weights, and checkpoints load in any layout. Logits
    [B, S, V/k] of a call without targets are gathered over the tokens' axes. Differences: no dropout, no packed
    batches, no positions that restart within a row, no cache, no ``sequence_parallel``, ``fuse_wgrad_accumulation`` or
    ``mlp_recompute``; the logits of a loss are stored, [T/i/j, V/k].

    Raises ValueError for a config that the grid cannot divide, with the sizes next to it that it can, and, in forward,
    for such a batch.
    """

    takes_grid = True
    decoder = GridDecoder
    head = GridLinear

    def __init__(
        self,
        config: TransformerConfig,
        *,
        recompute: bool = False,
        mlp_recompute: int = 0,
        **options: Unpack[ModelKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, ModelKwargs)
        grid = shared.grid
        dropped = [name for name in ("embedding", "residual", "attention") if getattr(config, f"{name}_dropout")]
        if dropped:
            raise ValueError(f"{dropped[0]}_dropout: a grid has no dropout; set it to 0 in the config")
        grid.check_width("hidden_size", config.hidden_size)
        grid.check_width("intermediate_size", config.intermediate_size, turned=True)
        grid.check_width("num_heads * head_dim", config.num_heads * config.head_dim, turned=True)
        super().__init__(config, recompute=recompute, mlp_recompute=mlp_recompute, **shared.kwargs(ModelKwargs))
        self.grid = grid


class GridStage(TransformerStage, _OnGrid):
    """A pipeline stage of a model over a grid."""

    def __init__(self, whole: Any, parts: range) -> None:
        super().__init__(whole, parts)
        self.grid = whole.grid
