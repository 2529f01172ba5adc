"""The attention function that layers of an enabled model call, and the masks that go with it.

transformers takes a function by its name. The name has to say "flash", which keeps continuous batching from making
masks, and no number, which would have it look for a package of flash attention. There is a name for each of the two
stock attentions that a model falls back to outside of continuous batching.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import models, step
from .paged import paged

_modeling: Any = importlib.import_module("transformers.modeling_utils")
_masking: Any = importlib.import_module("transformers.masking_utils")
_stock_sdpa = _modeling.ALL_ATTENTION_FUNCTIONS["sdpa"]
_eager_of: dict[type, Callable[..., Any]] = {}  # the modeling file's eager attention, by class of layers

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
