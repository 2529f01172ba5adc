"""Fused causal language models under ``parallelize``: their parts and stages."""
