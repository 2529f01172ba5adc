"""The documents of a batch whose rows hold several: derived from positions that restart.

A token starts a document at the beginning of a row, and wherever its position is not above its predecessor's::

    positions   0 1 2 0 1 5 6 3        documents  [0 1 2] [0 1 5 6] [3]

Attention never crosses documents. Layers take them as ``cu_seqlens`` of a size that two numbers bound, so every stage
and micro-batch computes its own on the device, and the host waits for the device once in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Documents:
    """Bounds, on the host: the most documents of any row, and the tokens of the longest document."""

    count: int
    longest: int

    @classmethod
    def of(cls, positions: torch.Tensor | None, shape: Sequence[int]) -> Documents | None:
        """The documents of a batch of ``shape`` (B, S) with ``positions`` [S] or [B, S]; None if no row restarts.

        Positions cannot be read while torch.compile traces or a CUDA graph is captured, and have no values on meta: the
        result is then the bound that holds for all of them, S documents of up to S tokens.
        """
        rows, length = shape
        if positions is None:
            return None
        if not _readable(positions):
            return cls(length, length)
        if rows == 0 or length < 2:
            return None
        starts = document_starts(positions)
        index = torch.arange(length, device=positions.device)
        begins = torch.where(starts, index, 0).cummax(-1).values  # of each token's document
        bounds = torch.stack((starts.sum(-1).max(), (index - begins).max() + 1))
        count, longest = bounds.tolist()  # on a GPU, the only wait
        return None if count == 1 else cls(count, longest)


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """Whether each token of ``positions`` [..., S] starts a document: bool [..., S]."""
    return F.pad(positions[..., 1:] <= positions[..., :-1], (1, 0), value=True)


def cu_seqlens(positions: torch.Tensor, documents: Documents) -> torch.Tensor:
    """The start of each document of ``positions`` [B, S] among T = B*S tokens: int32 [B * documents.count + 1].

    The entries behind the last document are T, empty documents, so the size does not depend on the positions and
    nothing is read by the host.
    """
    before = document_starts(positions).flatten().cumsum(0)  # documents begun up to each token
    nth = torch.arange(1, positions.shape[0] * documents.count + 2, device=positions.device)
    return torch.searchsorted(before, nth, out_int32=True)


def pad_rows(positions: torch.Tensor, missing: int) -> torch.Tensor:
    """``positions`` [B, S] with ``missing`` more rows: copies of the first, so that no bound of the batch's documents
    changes, or 0 to S - 1 for an empty batch."""
    if not missing:
        return positions
    row = positions[:1] if len(positions) else torch.arange(positions.shape[1]).to(positions)[None]
    return torch.cat((positions, row.expand(missing, -1)))


def _readable(positions: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or positions.is_meta:
        return False
    return not (positions.is_cuda and torch.cuda.is_current_stream_capturing())
