"""The public names of a build for the kernel hub: the ops are those of ``shardfuse``, the counts those of
``shardfuse.integrations``; the rest is for transformers.
"""

from __future__ import annotations

from ...kernels.kv_cache.op import norm_rope_write_kv_, write_kv_
from ...kernels.linear.op import gated_linear, linear_act
from ...kernels.norm.op import layer_norm, rms_norm
from ...kernels.paged_attention.op import merge_attention, paged_attention, plan_attention
from ...kernels.rope.op import apply_rope
from ..pages import reset_stats, stats
from . import layers
from .attention import flash_attn_forward, supports_flash_attn

__all__ = [
    "apply_rope",
    "flash_attn_forward",
    "gated_linear",
    "layer_norm",
    "layers",
    "linear_act",
    "merge_attention",
    "norm_rope_write_kv_",
    "paged_attention",
    "plan_attention",
    "reset_stats",
    "rms_norm",
    "stats",
    "supports_flash_attn",
    "write_kv_",
]
