"""Norms over features that a grid splits: per token, the ranks exchange two numbers each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.norm import layer_norm, rms_norm
from ...kernels.runtime.dispatch import Choice
from ...parallel.core import mappings
from ...parallel.grid.grid import ACROSS, WITHIN
from ...parallel.grid.norm import split_norm
from ..module import Runs
from ..norm import LayerNorm, RMSNorm
from .module import GridModule


class _GridNorm(GridModule):
    """The parameters [D] of both norms, stored as rows of the weights that form x; gradients sum over all tokens."""

    def split(self, name: str) -> Mapping[str, int]:
        return {ACROSS if self.grid.flat else WITHIN: 0}

    def blocks(self, *names: str) -> tuple[Any, ...]:
        """This rank's features of the parameters, [D/j] or over two axes [D/k]."""
        others = [axis for axis in self.grid.rows if self.grid.flat or axis is not self.grid.i]
        blocks = self.summed_local(*names, axes=others, site="norm")
        if self.grid.flat:
            return blocks
        return tuple(
            None if each is None else mappings.all_gather_from(each, self.grid.i, site="norm.weight") for each in blocks
        )


class GridLayerNorm(LayerNorm, _GridNorm):
    """:class:`~shardfuse.layers.norm.LayerNorm` of x [T/i/k, D/j], or [T/i, D/k] over two axes."""

    def _norm(self, x: torch.Tensor, **options: Any) -> Any:
        return _normed(self, x, self.blocks("weight", "bias"), **options)

    def runs(self, device: torch.device) -> Runs:
        return _runs(self) or super().runs(device)


class GridRMSNorm(RMSNorm, _GridNorm):
    """:class:`~shardfuse.layers.norm.RMSNorm`, likewise."""

    def _norm(self, x: torch.Tensor, **options: Any) -> Any:
        return _normed(self, x, self.blocks("weight"), **options)

    def runs(self, device: torch.device) -> Runs:
        return _runs(self) or super().runs(device)


def _runs(norm: Any) -> Runs:
    """What runs where the features are split, else nothing."""
    return [(norm.op, Choice("reference", "the features are split over ranks"))] if norm.grid.hidden.size > 1 else []


def _normed(
    norm: Any, x: torch.Tensor, params: tuple[Any, ...], *, residual: torch.Tensor | None = None, carry: bool = False
) -> Any:
    centre = norm.op == "layer_norm"
    shared: dict[str, Any] = {"eps": norm.eps, "weight_offset": norm.weight_offset}
    if norm.grid.hidden.size == 1:
        shared |= {"impl": norm.impl, "residual": residual, "carry": carry}
        return layer_norm(x, *params, **shared) if centre else rms_norm(x, *params, **shared)
    stream = x if residual is None else residual + x
    y = split_norm(stream, *params, centre=centre, group=norm.grid.hidden, **shared)
    return (y, stream) if carry or residual is not None else y
