"""Attention that a module writes out as products and a softmax: torch's SDPA runs it."""
