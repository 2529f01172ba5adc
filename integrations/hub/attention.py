"""The attention of a build: ``set_attn_implementation`` finds it by the two names that it looks for in a kernel.

In continuous batching it attends over transformers' pages, as ``shardfuse.integrations.transformers`` does; elsewhere
with torch's SDPA. ``stats("transformers")`` counts the calls of the paged kernel.

Letters: B sequences, T queries and S keys of each, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..transformers.paged import paged


def supports_flash_attn() -> bool:
    """True. transformers asks whether a kernel has the name, and does not call it."""
    return True


def flash_attn_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, with the arguments of transformers' ``AttentionInterface``.

    Args:
        query: [B, N, T, H]; in continuous batching [1, N, T, H], all sequences' queries one after another.
        key, value: [B, K, S, H].
        attention_mask: None or [B, 1, T, S], bool (True: seen) or added to the scores. Without one, several queries see
            the keys up to their own where ``is_causal``, or else the module, says so.
        dropout: of the weights.
        scaling: of the scores; None: 1 / sqrt(H).
        softcap, s_aux: as ``softcap`` and ``sinks`` of ``paged_attention``; in continuous batching only.
        cache: transformers' ``PagedAttentionCache`` in continuous batching.
        given: what else transformers passes, windows included: masks hold them, outside of continuous batching.

    Returns [B, T, N, H], and None for the weights.

    Raises ValueError for a softcap or sinks outside of continuous batching.
    """
    if cache is not None:
        return _paged(
            module, query, key, value, cache=cache, scaling=scaling, softcap=softcap, s_aux=s_aux, **given
        )  # fmt: skip
    if softcap is not None or s_aux is not None:
        name = "softcap" if softcap is not None else "s_aux"
        raise ValueError(
            f"flash_attn_forward: {name} is given outside of continuous batching, where SDPA has none; use "
            'generate_batch, or attn_implementation="eager"'
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


# As torch.compiler.disable, which imports the whole compiler: the cache is written in place, through views that a
# compiled graph would copy.
@torch._disable_dynamo
def _paged(module: Any, query: Any, key: Any, value: Any, **given: Any) -> tuple[torch.Tensor, None]:
    return paged(module, query, key, value, **given)
