"""Small models for tests of serving and of its cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardfuse.layers.config import TransformerConfig
from shardfuse.layers.transformer import ParallelTransformer

STYLES = ("gelu", "gated")


def config_of(style: str) -> TransformerConfig:
    return TransformerConfig(
        style=style,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_positions=64,
        init_std=0.3,
    )


def build(style: str, mesh: Any = None, dtype: torch.dtype = torch.float64) -> ParallelTransformer:
    torch.manual_seed(0)
    return ParallelTransformer(config_of(style), mesh=mesh, dtype=dtype).eval()


@functools.cache
def exact(style: str) -> ParallelTransformer:
    """The unsharded model in fp64."""
    return build(style)
