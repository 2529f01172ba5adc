"""The cross-entropy of a vocabulary projection without its logits: what a rank does alone.

The public functions, which know about ranks, are in ``parallel/cross_entropy.py``.
"""
