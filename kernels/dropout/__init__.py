"""Dropout whose mask is a function of position, drawn again wherever it is needed."""

from .op import dropout, new_rng_key

__all__ = ["dropout", "new_rng_key"]
