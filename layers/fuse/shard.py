"""A fused module split over the ranks of a tensor-parallel group, in place: its parameters become DTensors.

The layers before an activation, and projections of queries, keys and values, are split by columns (each rank has some
of the features, or heads), the layer behind them by rows. Everything else is whole on every rank and computes the same
there, so all ranks must get the same batch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...parallel.core.mesh import Group
from ..style import ColumnParallel, RowParallel
from . import products


def why_whole(first: list[Any], last: Any, group: Group, sizes: list[int]) -> str | None:
    """Why layers ``first`` and the layer ``last`` behind them cannot be split over ``group``, or None.

    ``sizes`` are the numbers of what the ranks share out: features, heads.
    """
    for layer in (*first, last):
        if not isinstance(layer, nn.Linear) or not products.is_linear(layer):
            return f"a {type(layer).__name__} is not split"
    uneven = [size for size in sizes if size % group.size]
    return f"{uneven[0]} does not divide into {group.size} equal parts" if uneven else None


def split(first: list[Any], last: Any, group: Group) -> None:
    """Split them; every rank calls this, and gets its part of rank 0's values."""
    assert group.mesh is not None
    for layer in (*first, last):
        layer.__class__ = nn.Linear  # subclasses that compute the same
    for layer in first:
        ColumnParallel()._apply(layer, group.mesh)
    RowParallel()._apply(last, group.mesh)
