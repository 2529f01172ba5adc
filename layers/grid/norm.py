"""Norms over features that a grid splits: per token, the ranks exchange two numbers each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.norm import layer_norm, rms_norm
from ...parallel.core.mesh import Group
from ...parallel.grid.norm import split_norm
from ..norm import LayerNorm, RMSNorm
from .module import GridModule


class GridLayerNorm(LayerNorm, GridModule):
    """:class:`~shardfuse.layers.norm.LayerNorm` of x [T/i/k, D/j], or [T/i, D/k] over two axes.

    Parameters [D] are split as x is, and their gradients summed over all tokens.
    """

    def split(self, name: str) -> Sequence[tuple[Group, int]]:
        return [(self.grid.hidden, 0)]

    def _norm(self, x: torch.Tensor, **options: Any) -> Any:
        weight, bias = self.summed_local("weight", "bias", axes=self.grid.rows, site="norm")
        return _normed(self, x, weight, bias, **options)


class GridRMSNorm(RMSNorm, GridModule):
    """:class:`~shardfuse.layers.norm.RMSNorm`, likewise."""

    def split(self, name: str) -> Sequence[tuple[Group, int]]:
        return [(self.grid.hidden, 0)]

    def _norm(self, x: torch.Tensor, **options: Any) -> Any:
        (weight,) = self.summed_local("weight", axes=self.grid.rows, site="norm")
        return _normed(self, x, weight, None, **options)


def _normed(
    norm: Any, x: torch.Tensor, weight: Any, bias: Any, *, residual: torch.Tensor | None = None, carry: bool = False
) -> Any:
    centre = norm.op == "layer_norm"
    shared: dict[str, Any] = {"eps": norm.eps, "weight_offset": norm.weight_offset}
    if norm.grid.hidden.size == 1:
        shared |= {"impl": norm.impl, "residual": residual, "carry": carry}
        return layer_norm(x, weight, bias, **shared) if centre else rms_norm(x, weight, **shared)
    stream = x if residual is None else residual + x
    y = split_norm(stream, weight, bias, centre=centre, group=norm.grid.hidden, **shared)
    return (y, stream) if carry or residual is not None else y
