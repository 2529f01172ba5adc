"""The paged KV cache: what writes keys and values into its pages, copies pages, and reads them back."""

from .blocks import copy_blocks_, gather_kv, swap_blocks_
from .op import norm_rope_write_kv_, plan_write, write_kv_

__all__ = ["copy_blocks_", "gather_kv", "norm_rope_write_kv_", "plan_write", "swap_blocks_", "write_kv_"]
