"""Attention over a paged KV cache."""

from .op import merge_attention, paged_attention, plan_attention

__all__ = ["merge_attention", "paged_attention", "plan_attention"]
