"""A step on a CPU in invariant mode: the model runs over windows of one fixed number of rows.

The libraries behind torch's products, norms and activations choose algorithms by shape, and may treat the first rows of
a matrix, or the last elements of a tensor, unlike the others. So every call has ``ROWS`` rows, and the token at
position p of a sequence is row p % ROWS of its call, in any batch, chunk or step: it is always the same row of the same
calls, and other rows enter none of its sums. Attention, which does read other tokens, has its own fixed order
(``kernels/paged_attention/cpu_invariant.py``). Rows without a token are padding.

Tokens of several sequences share a window if their rows differ. A foreign model may mix tokens, as routed experts do,
so it gets windows of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from ..layers.attention.paged import PagedBatch
from ..layers.transformer import ParallelTransformer

ROWS = 16


class Piece(NamedTuple):
    """``size`` tokens of a sequence of the step, from ``token`` on, in the rows of a window from ``row`` on."""

    row: int
    size: int
    token: int
    sequence: int
    length: int  # the sequence's length, including these tokens


def logits_of(model: Any, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """The result of ``model`` and its ``gather_logits`` for a step, window by window: tokens [T] -> [T_selected, V]."""
    rows = ROWS if type(model) is ParallelTransformer else 1
    wanted = {token: index for index, token in enumerate(batch.logit_indices.tolist())}
    found: dict[int, torch.Tensor] = {}
    none = tokens.new_empty(0)
    for pieces in cut(batch.query_start_loc.tolist(), batch.seq_lens.tolist(), rows):
        here = {wanted[p.token + i]: p.row + i for p in pieces for i in range(p.size) if p.token + i in wanted}
        window, part = _window(pieces, tokens, batch, rows)
        part = replace(part, logit_indices=torch.arange(rows) if here else none)
        logits = model.gather_logits(model(window, positions=part.positions, cache=part))
        found.update((index, logits[row]) for index, row in here.items())
    if not found:
        return logits
    return torch.stack([found[index] for index in range(len(wanted))])


def cut(starts: Sequence[int], lens: Sequence[int], rows: int) -> list[list[Piece]]:
    """The windows of a step's tokens, in order of computation.

    ``starts`` [S + 1] and ``lens`` [S] are ``query_start_loc`` and ``seq_lens``.
    """
    windows: list[list[Piece]] = []
    taken: list[int] = []  # bits: the rows of each
    for sequence, ((token, end), length) in enumerate(zip(pairwise(starts), lens)):
        window = 0
        while token < end:
            row = (length - end + token) % rows
            count = min(rows - row, end - token)
            bits = ((1 << count) - 1) << row
            while window < len(taken) and taken[window] & bits:
                window += 1
            if window == len(taken):
                windows.append([])
                taken.append(0)
            taken[window] |= bits
            windows[window].append(Piece(row, count, token, sequence, length - end + token + count))
            token, window = token + count, window + 1
    return [sorted(pieces) for pieces in windows]


def _window(
    pieces: Sequence[Piece], tokens: torch.Tensor, batch: PagedBatch, rows: int
) -> tuple[torch.Tensor, PagedBatch]:
    """Tokens [rows] and the batch of one window. A padding sequence of length 0 separates two pieces."""
    parts: list[Piece] = []
    end = 0
    for piece in pieces:
        if piece.row > end:
            parts.append(Piece(end, piece.row - end, 0, 0, 0))
        parts.append(piece)
        end = piece.row + piece.size
    source = torch.zeros(rows, dtype=torch.int64)
    real = torch.zeros(rows, dtype=torch.bool)
    for row, count, token, *_ in pieces:
        source[row : row + count] = torch.arange(token, token + count)
        real[row : row + count] = True
    return torch.where(real, tokens[source], 0), replace(
        batch,
        block_tables=batch.block_tables[[part.sequence for part in parts]],
        seq_lens=torch.tensor([part.length for part in parts], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *accumulate(part.size for part in parts)], dtype=torch.int32),
        slot_mapping=torch.where(real, batch.slot_mapping[source], -1),
        positions=torch.where(real, batch.positions[source], 0),
        min_query_len=min(part.size for part in parts),
        max_query_len=max(part.size for part in parts),
        max_seq_len=max(part.length for part in parts),
    )
