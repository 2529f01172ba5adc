"""Dropout whose mask is a function of position, drawn again wherever it is needed."""

from .op import dropout, new_ticket

__all__ = ["dropout", "new_ticket"]
