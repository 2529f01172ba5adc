"""Attention over transformers' paged cache: what the layers of an enabled model run in continuous batching.

It takes from transformers nothing but its arguments, so that a build for the kernel hub can hold it (``hub/build.py``).

Letters: T tokens of a step, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from typing import Any

import torch

from ..pages import PagedLayer, count
from . import step
from .cache import as_rows, gather, layer_pages
from .step import Keys

_HOST = "transformers"  # in the counts


def paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cache: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's keys and values into their pages, and attend over those.

    Args:
        query: [1, N, T, H], all sequences' queries one after another.
        key, value: [1, K, T, H].
        cache: transformers' ``PagedAttentionCache``.
        sliding_window: a query sees itself and the ``sliding_window - 1`` keys before it.
        s_aux: [N], sinks.
        given: ``read_index``, ``write_index`` and the lengths of the step: see ``step.py``.

    Returns [1, T, N, H], and None for the weights.
    """
    assert given.get("block_table") is None, "only a name with flash attention's number gets one"
    pages = layer_pages(cache, module.layer_idx)
    tables = (step.current() or step.Step()).tables(pages, given)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = PagedLayer(_HOST, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))  # [T, heads, H]
    if tables.keys is Keys.COPIED:
        over = as_rows(*gather(cache, module.layer_idx, key, value, given))
        count(_HOST, "copied_pages")
    else:
        layer.write_(pages.blocks, k, v, tables.slots)
        over = {Keys.PAGES: pages.blocks, Keys.RING: pages.rows, Keys.FRESH: as_rows(k, v)}[tables.keys]
    return layer.attend(q, over, tables.batch).unsqueeze(0), None
