"""Attention that a module writes out as products and a softmax, run as torch's SDPA."""
