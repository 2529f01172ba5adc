"""Small models for tests of serving and of its cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardfuse.layers.config import TransformerConfig
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.testing import tiny_model

STYLES = ("gelu", "gated")


def build(style: str, mesh: Any = None, dtype: torch.dtype = torch.float64, **config: Any) -> ParallelTransformer:
    return tiny_model(style, mesh=mesh, dtype=dtype, **{"vocab_size": 32, "max_positions": 64, **config})


def config_of(style: str) -> TransformerConfig:
    return exact(style).config


@functools.cache
def exact(style: str) -> ParallelTransformer:
    """The unsharded model in fp64."""
    return build(style)
