"""Rotary position embedding: q and k rotated together, in place or not."""

from .op import apply_rope, rope_choice

__all__ = ["apply_rope", "rope_choice"]
