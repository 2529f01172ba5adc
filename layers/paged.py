"""The paged KV cache as layers see it: storage for every layer, and one step's batch laid out over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..kernels import alloc
from ..kernels.paged_attention import paged_attention, write_kv_


class PagedKVCache:
    """Keys and values of all layers on this rank, in blocks of ``block_size`` token slots.

    ``data`` is [layers, num_blocks, K/R, block_size, 2H], K and V side by side: per layer vLLM's layout. Which block
    belongs to whom is not known here; a block that nobody has written to holds whatever memory held.

    Args:
        num_layers, num_blocks, block_size: of the storage; ``block_size`` a power of two.
        kv_heads: this rank's KV heads, K/R.
        head_dim: H.
        dtype, device: the model's.

    Raises ValueError for a size below 1 or a block size that is no power of two.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks, kv_heads, block_size, 2 * head_dim)
        if min(shape) < 1:
            raise ValueError(
                f"PagedKVCache: num_layers={num_layers}, num_blocks={num_blocks}, kv_heads={kv_heads}, "
                f"block_size={block_size}, head_dim={head_dim}: expected all to be at least 1"
            )
        if block_size & (block_size - 1):
            raise ValueError(f"PagedKVCache: block_size={block_size}: expected a power of two, such as 16")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.data = alloc.empty(shape, dtype, torch.device(device))

    def layer(self, index: int) -> torch.Tensor:
        """[num_blocks, K/R, block_size, 2H] of one layer, a view."""
        return self.data[index]

    @property
    def nbytes(self) -> int:
        """Bytes of storage on this rank."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence that a step computes: positions ``start`` to ``start + length``.

    ``blocks`` is the sequence's block table and reaches at least to the end of the span. Positions before ``start``
    are in the cache already. ``logits`` says whether the logits of the span's last token are wanted.
    """

    blocks: Sequence[int]
    start: int
    length: int
    logits: bool = True


@dataclass(frozen=True)
class PagedBatch:
    """One step of several sequences, their tokens one after another; attention layers call :meth:`attend`.

    T tokens of S sequences; the shapes are those of ``paged_attention`` and ``write_kv_``, plus ``positions`` [T] and
    ``logit_indices``, the tokens whose logits are wanted. ``impl`` is handed to both ops.
    """

    cache: PagedKVCache
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    logit_indices: torch.Tensor
    impl: str = "auto"

    @classmethod
    def of(cls, cache: PagedKVCache, spans: Sequence[Span], *, impl: str = "auto") -> PagedBatch:
        """Lay ``spans`` out over ``cache``, in this order.

        Raises ValueError for an empty span, or one that its blocks do not cover.
        """
        size, on = cache.block_size, cache.data.device
        for span in spans:
            if span.length < 1 or span.start < 0:
                raise ValueError(f"a span of {span.length} tokens from position {span.start}: expected at least one")
            if span.start + span.length > len(span.blocks) * size:
                raise ValueError(
                    f"a span to position {span.start + span.length} has {len(span.blocks)} blocks of {size}: "
                    "allocate blocks up to its end first"
                )
        width = max((len(span.blocks) for span in spans), default=0)
        ends = list(accumulate(span.length for span in spans))
        positions = [range(span.start, span.start + span.length) for span in spans]
        slots = [span.blocks[p // size] * size + p % size for span, where in zip(spans, positions) for p in where]

        def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(on, non_blocking=True)

        tables = [block for span in spans for block in (*span.blocks, *([-1] * (width - len(span.blocks))))]
        return cls(
            cache,
            block_tables=tensor(tables, torch.int32).view(len(spans), width),
            seq_lens=tensor([span.start + span.length for span in spans], torch.int32),
            query_start_loc=tensor([0, *ends], torch.int32),
            slot_mapping=tensor(slots, torch.int64),
            positions=tensor([p for where in positions for p in where], torch.int64),
            logit_indices=tensor([end - 1 for span, end in zip(spans, ends) if span.logits], torch.int64),
            impl=impl,
        )

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Store this step's keys and values, then attend over all of each sequence's.

        q [T, N/R, H], k and v [T, K/R, H], k already rotated -> [T, N/R, H].
        """
        pages = self.cache.layer(layer_index)
        write_kv_(pages, k, v, self.slot_mapping, impl=self.impl)
        return paged_attention(
            q, pages, self.block_tables, self.seq_lens, self.query_start_loc, scale=scale, impl=self.impl
        )
