"""The attention function and the mask function that transformers' models look up by our name.

The name is registered once, beside the existing ones. Configurations select it only during a pass of an engine; in a
thread without a pass, the functions call the attention that the configuration selected before.
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
ASKED = "_attn_implementation_internal"  # the configuration's attribute for the name
_WINDOW = "_shardfuse_window"  # the attribute of our masks that holds their window


def register() -> None:
    """Register both functions with transformers; a second call changes nothing."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(NAME, _attend)
    masking.AttentionMaskInterface.register(NAME, _mask)


@torch.compiler.disable  # the function writes the cache in place and reads the thread's step
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
    """A mask of one element that carries its window; in a pass, lengths and block tables define all else."""
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
    """The module's attention outside of passes; in a comparison pass, the modeling file's own eager attention."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    eager: Any = eager_attention(type(_viewed(module)))
    name = "eager" if here is not None else step.before(_viewed(module.config), ASKED) or "eager"
    found: Callable[..., Any] = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return found


def _viewed(module: Any) -> Any:
    """The module itself, also if ``module`` is a view: fused attention passes views of itself."""
    while isinstance(module, View):
        module = module._module
    return module


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask is causal with this ``window``, tested at the edges of both."""
    edge = window or 8
    at = torch.tensor(sorted({0, 1, 2, max(edge - 1, 0), edge, edge + 1, 2 * edge, 2 * edge + 1}))
    q, k = (x.flatten() for x in torch.meshgrid(at, at, indexing="ij"))
    zero = torch.zeros_like(q)
    try:
        seen = mask_function(zero, zero, q, k)
    except Exception:  # the mask reads tensors of the batch
        return False
    expected = (k <= q) if window is None else (k <= q) & (q - k < window)
    return bool((torch.as_tensor(seen).expand_as(expected) == expected).all())
