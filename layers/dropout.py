"""Dropout where a layer's branch joins the stream beside it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from ..kernels.dropout import dropout, new_rng_key
from ..parallel.core.mesh import Group


class Dropout(NamedTuple):
    """What decides on the masks of one forward: one rng_key, from which each ``stream`` takes a mask of its own.

    Rows are the tokens of the whole batch, so a mask does not depend on who holds which of them.
    """

    p: float
    rng_key: torch.Tensor
    row_start: int

    def apply(self, x: torch.Tensor, stream: int, residual: torch.Tensor | None = None, *, impl: str) -> torch.Tensor:
        """dropout(x) [+ residual], x [..., D] in rows of tokens."""
        if residual is not None and residual.dtype != x.dtype:  # under autocast
            return dropout(x, self.p, self.rng_key, stream=stream, row_start=self.row_start, impl=impl) + residual
        return dropout(x, self.p, self.rng_key, residual=residual, stream=stream, row_start=self.row_start, impl=impl)


class RngOffset(NamedTuple):
    """Where a layer's masks come from where the batch reaches it in pieces: its rng_key, and the piece's first row."""

    rng_key: torch.Tensor
    first_row: int


class RngState:
    """What decides on the masks of a step in which micro-batches go through a model that lies on several ranks.

    The rng_keys are those that the model draws in one forward of the whole batch, one for each part, None for parts
    that drop nothing, and rows are counted over the whole batch: the masks are the same. Ranks that were seeded alike
    draw the same rng_keys.
    """

    def __init__(self, rates: list[float], device: torch.device) -> None:
        self._rng_keys = [new_rng_key(device) if rate else None for rate in rates]
        if not any(rates):  # something else drops, by torch's own draws, and is to drop something else in every step
            new_rng_key(device)
        self._rows: Counter[int] = Counter()

    def pass_by(self, stage: int, rows: int) -> int:
        """The first row of a stage's next micro-batch, of so many; micro-batches come in their order."""
        first = self._rows[stage]
        self._rows[stage] += rows
        return first

    def place(self, part: int, first_row: int) -> RngOffset | None:
        rng_key = self._rng_keys[part]
        return None if rng_key is None else RngOffset(rng_key, first_row)


def draw(
    p: float, x: torch.Tensor, group: Group, *, sequence_parallel: bool, training: bool, place: RngOffset | None = None
) -> Dropout | None:
    """Masks for ``x`` [..., D], whose tokens are this rank's part with ``sequence_parallel``; None for none."""
    if not training or p == 0:
        return None
    row_start = group.rank * x.shape[:-1].numel() if sequence_parallel else 0
    if place is None:
        return Dropout(p, new_rng_key(x.device), row_start)
    return Dropout(p, place.rng_key, place.first_row + row_start)
