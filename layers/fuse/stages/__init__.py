"""Fused causal language models under ``parallelize``: parts and stages."""
