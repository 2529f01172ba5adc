"""Views of a layer's pages in transformers' paged cache, in our kernels' layout, for the tested versions.

From 5.18 on an allocator for each kind of layer puts its pages into one tensor; up to 5.17 every layer of a group has
its own tensors. Both store a page as ``[page size, KV heads, head size]``, keys separate from values.

Letters: P page size, K KV heads, H head size, T tokens of a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class LayerPages(NamedTuple):
    """The location of a layer's keys and values."""

    group: int  # the number of the layer's group in the read and write indices
    layer_type: str  # "full_attention" or "sliding_attention": a ring of as many tokens as the window has
    pages: Pair  # keys and values, [pages, P, K, H] each
    sentinel: int  # the read index that means a token of this step
    trash: int  # the write index that means no place

    @property
    def page_size(self) -> int:
        return self.pages[0].shape[1]

    @property
    def blocks(self) -> Pair:
        """[pages, K, P, H] each: pages as our kernels name their dimensions."""
        keys, values = self.pages
        return keys.transpose(1, 2), values.transpose(1, 2)

    @property
    def rows(self) -> Pair:
        """[pages * P, K, 1, H] each: a page for each token."""
        keys, values = self.pages
        return as_rows(keys.flatten(0, 1), values.flatten(0, 1))


def as_rows(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    """Tokens [T, K, H] as pages of one token, [T, K, 1, H]."""
    return keys.unsqueeze(2), values.unsqueeze(2)


def layer_pages(cache: Any, layer: int) -> LayerPages:
    """The location of a layer's keys and values in a ``PagedAttentionCache``."""
    if hasattr(cache, "layer_to_allocator"):
        own = cache.layer_to_allocator[layer]
        return LayerPages(
            own.index, own.layer_type, own._kv_page_views[layer], own.sentinel_index, own.write_trash_index
        )
    group, at = cache.layer_index_to_group_indices[layer]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    pages = cache.key_cache[at].view(shape), cache.value_cache[at].view(shape)
    layer_type = "sliding_attention" if cache.sliding_windows[layer] > 1 else "full_attention"
    return LayerPages(group, layer_type, pages, cache.sentinel_index, cache.write_trash_index)


def gather(cache: Any, layer: int, keys: torch.Tensor, values: torch.Tensor, step: dict[str, Any]) -> Pair:
    """Let transformers write a step's keys and values [1, K, T, H] and copy those that it reads: [tokens, K, H]."""
    if hasattr(cache, "layer_to_allocator"):
        found = cache.update(keys, values, layer, dict(step))  # transformers changes its arguments
        return found[0][0].transpose(0, 1), found[1][0].transpose(0, 1)
    return cache.update(keys, values, layer, step["read_index"], step["write_index"])
