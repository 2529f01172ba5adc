"""The attention function and the mask function that transformers' models look up by our name.

A name is registered once and changes no other. Only a pass of an engine has configurations ask for it; in a thread that
computes none, the functions do what the configuration asked for before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...layers.fuse.view import View
from ...layers.hf.attention import eager_attention
from . import step

NAME = "shardfuse_pages"
ASKED = "_attn_implementation_internal"  # where a configuration keeps the name
_WINDOW = "_shardfuse_window"  # of a mask of ours: the window that it stands for


def register() -> None:
    """Make both functions known to transformers, as often as one likes."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(NAME, _attend)
    masking.AttentionMaskInterface.register(NAME, _mask)


@torch.compiler.disable  # the cache is written in place, and the step is a matter of this thread
def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
    """query [1, N/R, T, H], key [1, K/R, T, H], value [1, K/R, T, Hv] -> [1, T, N/R, Hv], and None for the weights."""
    here = step.current()
    if here is None or here.batch is None:
        wide = here is not None and here.wide
        states = (x.float() if wide else x for x in (query, key, value))
        out, weights = _stock(module, here)(module, *states, attention_mask, **given)
        return out.to(query.dtype) if wide else out, weights
    scale = given.get("scaling")
    causal = given.get("is_causal", getattr(module, "is_causal", True))
    marked = hasattr(attention_mask, _WINDOW)
    if here.learning and not marked and (causal is False or attention_mask is not None):
        here.unlike_causal = True
    out = here.attend(
        *(_viewed(module), query, key, value),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=getattr(attention_mask, _WINDOW) if marked else given.get("sliding_window"),
        softcap=given.get("softcap") or None,
        sinks=given.get("s_aux"),
    )
    return out, None


def _mask(
    *args: Any, mask_function: Callable[..., Any] | None = None, local_size: int | None = None, **given: Any
) -> Any:
    """A mask of one element that says its window; within a pass the lengths and block tables say the rest."""
    here = step.current()
    if here is None or here.batch is None:
        masking: Any = importlib.import_module("transformers.masking_utils")
        known, name = masking.ALL_MASK_ATTENTION_FUNCTIONS, "eager"
        if here is None:
            name = step.before(given.get("config"), ASKED) or "eager"
        if name not in known:
            return None
        extra = {} if mask_function is None else {"mask_function": mask_function}
        return known[name](*args, **extra, **given, **({} if local_size is None else {"local_size": local_size}))
    if here.learning and not (mask_function is None or _is_causal(mask_function, local_size)):
        here.unlike_causal = True
    device, dtype = given.get("device", "cpu"), given.get("dtype", torch.float32)
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    setattr(mask, _WINDOW, local_size)
    return mask


def _stock(module: Any, here: step.Pass | None) -> Callable[..., Any]:
    """What the module calls outside of passes; in a pass to compare with, the file's own eager attention."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    eager: Any = eager_attention(type(_viewed(module)))
    name = "eager" if here is not None else step.before(_viewed(module.config), ASKED) or "eager"
    found: Callable[..., Any] = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return found


def _viewed(module: Any) -> Any:
    """What ``module`` is, or what it is a view of: fused attention passes views of itself on."""
    while isinstance(module, View):
        module = module.__dict__["_module"]
    return module


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a query sees the keys up to its own, and of these the last ``window``: at the edges of both."""
    edge = window or 8
    at = torch.tensor(sorted({0, 1, 2, max(edge - 1, 0), edge, edge + 1, 2 * edge, 2 * edge + 1}))
    q, k = (x.flatten() for x in torch.meshgrid(at, at, indexing="ij"))
    zero = torch.zeros_like(q)
    try:
        seen = mask_function(zero, zero, q, k)
    except Exception:  # a mask that reads tensors of the batch
        return False
    expected = (k <= q) if window is None else (k <= q) & (q - k < window)
    return bool((torch.as_tensor(seen).expand_as(expected) == expected).all())
