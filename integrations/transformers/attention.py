"""The attention function that layers of an enabled model call, and the masks that go with it.

transformers selects a function by its name. The name must contain "flash", so that continuous batching builds no masks,
and no number, which would make it look for a package of flash attention. Each of the two stock attentions that a model
may use outside of continuous batching has its own name.

Letters: T tokens of a step, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..pages import PagedLayer, count
from . import models, step
from .cache import as_rows, gather, layer_pages
from .step import Keys

_modeling: Any = importlib.import_module("transformers.modeling_utils")
_masking: Any = importlib.import_module("transformers.masking_utils")
_stock_sdpa = _modeling.ALL_ATTENTION_FUNCTIONS["sdpa"]
_eager_of: dict[type, Callable[..., Any]] = {}  # the modeling file's eager attention, by class of layers

_HOST = "transformers"  # the host's name in the counts
NAMES = {"sdpa": "shardfuse_flash", "eager": "shardfuse_flash_or_eager"}


def register(stock: str, layers: Iterable[Any], *, paged_prefix: bool = False) -> str:
    """Register our function with transformers and return its name; a second call changes nothing.

    Args:
        stock: the attention outside of continuous batching, "sdpa" or "eager".
        layers: the layers that will call it.
        paged_prefix: up to 5.17 continuous batching accepts only names that start with "paged|".
    """
    if stock == "eager":
        _eager_of.update({type(layer): models.eager_attention(type(layer)) for layer in layers})
    name = f"paged|{NAMES[stock]}" if paged_prefix else NAMES[stock]
    _modeling.AttentionInterface.register(name, _sdpa if stock == "sdpa" else _eager)
    _masking.AttentionMaskInterface.register(name, _sdpa_mask if stock == "sdpa" else _eager_mask)
    return name


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


def _sdpa(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
    if given.get("cache") is not None:
        return _with_cache(module, query, key, value, **given)
    return _stock_sdpa(module, query, key, value, attention_mask, **given)


def _eager(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
    if given.get("cache") is not None:
        return _with_cache(module, query, key, value, **given)
    return _eager_of[type(module)](module, query, key, value, attention_mask, **given)


@torch.compiler.disable  # the function writes the cache in place, through views that a compiled graph would copy
def _with_cache(module: Any, query: Any, key: Any, value: Any, **given: Any) -> Any:
    if isinstance(given["cache"], models.Probe):
        return given["cache"].attend(module, query, key, value)
    return paged(module, query, key, value, **given)


def _sdpa_mask(*args: Any, **kwargs: Any) -> Any:
    """The stock mask; None in continuous batching, where lengths and block tables define it."""
    return _masking.sdpa_mask(*args, **kwargs) if step.current() is None else None


def _eager_mask(*args: Any, **kwargs: Any) -> Any:
    return _masking.eager_mask(*args, **kwargs) if step.current() is None else None
