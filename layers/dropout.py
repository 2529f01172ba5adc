"""Dropout where a layer's branch joins the stream beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.dropout import dropout, new_ticket
from ..parallel.mesh import Group


class Dropout(NamedTuple):
    """What decides on the masks of one forward: one ticket, from which each ``stream`` takes a mask of its own.

    Rows are the tokens of the whole batch, so a mask does not depend on who holds which of them.
    """

    p: float
    ticket: torch.Tensor
    row_start: int

    def apply(self, x: torch.Tensor, stream: int, residual: torch.Tensor | None = None, *, impl: str) -> torch.Tensor:
        """dropout(x) [+ residual], x [..., D] in rows of tokens."""
        if residual is not None and residual.dtype != x.dtype:  # under autocast
            return dropout(x, self.p, self.ticket, stream=stream, row_start=self.row_start, impl=impl) + residual
        return dropout(x, self.p, self.ticket, residual=residual, stream=stream, row_start=self.row_start, impl=impl)


def draw(p: float, x: torch.Tensor, group: Group, *, sequence_parallel: bool, training: bool) -> Dropout | None:
    """Masks for ``x`` [..., D], whose tokens are this rank's part with ``sequence_parallel``; None for none."""
    if not training or p == 0:
        return None
    row_start = group.rank * x.shape[:-1].numel() if sequence_parallel else 0
    return Dropout(p, new_ticket(x.device), row_start)
