"""Dropout of a layer's branch where it joins the residual stream."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from ..kernels.dropout import dropout, new_rng_key
from ..parallel.core.mesh import Group


class Dropout(NamedTuple):
    """The dropout of one forward: a rate and an rng_key, from which each ``stream`` draws its own mask.

    Rows are counted over the whole batch, so a mask does not depend on how the ranks divide the tokens.
    """

    p: float
    rng_key: torch.Tensor
    row_start: int

    def apply(self, x: torch.Tensor, stream: int, residual: torch.Tensor | None = None, *, impl: str) -> torch.Tensor:
        """dropout(x) [+ residual], x [..., D] in rows of tokens."""
        if residual is not None and residual.dtype != x.dtype:  # autocast makes the dtypes differ
            return dropout(x, self.p, self.rng_key, stream=stream, row_start=self.row_start, impl=impl) + residual
        return dropout(x, self.p, self.rng_key, residual=residual, stream=stream, row_start=self.row_start, impl=impl)


class RngOffset(NamedTuple):
    """The rng_key of a layer's masks, and the first row of the piece of the batch that the layer processes now."""

    rng_key: torch.Tensor
    first_row: int


class RngState:
    """The dropout masks of a step whose micro-batches pass through a pipeline.

    Each part with dropout gets the rng_key that it would draw in one forward of the whole batch, and rows are counted
    over the whole batch, so the masks are the same as without a pipeline. Ranks with the same seed draw the same
    rng_keys.
    """

    def __init__(self, rates: list[float], device: torch.device) -> None:
        self._rng_keys = [new_rng_key(device) if rate else None for rate in rates]
        if not any(rates):  # attention alone drops, from torch's generator, which must advance between steps
            new_rng_key(device)
        self._rows: Counter[int] = Counter()

    def pass_by(self, stage: int, rows: int) -> int:
        """The first row of a stage's next micro-batch, which has ``rows`` rows; micro-batches pass in order."""
        first = self._rows[stage]
        self._rows[stage] += rows
        return first

    def place(self, part: int, first_row: int) -> RngOffset | None:
        rng_key = self._rng_keys[part]
        return None if rng_key is None else RngOffset(rng_key, first_row)


def draw(
    p: float, x: torch.Tensor, group: Group, *, sequence_parallel: bool, training: bool, place: RngOffset | None = None
) -> Dropout | None:
    """The dropout of ``x`` [..., D], this rank's tokens with ``sequence_parallel``; None where nothing is dropped."""
    if not training or p == 0:
        return None
    row_start = group.rank * x.shape[:-1].numel() if sequence_parallel else 0
    if place is None:
        return Dropout(p, new_rng_key(x.device), row_start)
    return Dropout(p, place.rng_key, place.first_row + row_start)
