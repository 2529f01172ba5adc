"""Attention over a paged KV cache, and the write that fills its pages."""

from .op import paged_attention, write_kv_

__all__ = ["paged_attention", "write_kv_"]
