"""Dropout whose mask is a function of where an element is, in plain torch.

The word that decides on element (row, column) is one of the four that Philox4x32-10 makes (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011) of the counter (column // 4, row, row >> 32, stream) under a 64-bit key,
the rng_key. Nothing is stored: backward, a recomputed forward and every rank that holds the element draw it again, and
ranks that hold different parts of a tensor draw different parts of one mask, which is the same at every degree of
tensor parallelism. The kernels (``triton.py``) draw bit for bit the same mask.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_CHUNK = 1 << 18  # words drawn at once: their arithmetic stays in the cache


def threshold(p: float) -> int:
    """An element is kept where its word, of 32 bits, is at least this."""
    return min(round(p * 2**32), _WORD)


def keep_mask(
    rng_key: torch.Tensor,
    p: float,
    rows: int,
    cols: int,
    *,
    stream: int = 0,
    row_start: int = 0,
    col_start: int = 0,
) -> torch.Tensor:
    """True where an element stays: bool [rows, cols] on the device of ``rng_key`` (int64 [1]).

    The tensor's rows and columns are those from ``row_start`` and ``col_start``, a multiple of 4, of the whole.
    """
    on = rng_key.device
    quads = torch.arange(col_start // 4, col_start // 4 + -(-cols // 4), device=on)
    mask = torch.empty(rows, len(quads), 4, dtype=torch.bool, device=on)
    step = max(1, _CHUNK // max(1, 4 * len(quads)))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        row = torch.arange(row_start + first, row_start + first + count, device=on)[:, None]
        counter = [quads[None, :].expand(count, -1), row & _WORD, row >> 32, torch.full_like(row, stream)]
        for i, word in enumerate(philox(counter, rng_key)):
            mask[first : first + count, :, i] = word >= threshold(p)
    return mask.view(rows, 4 * len(quads))[:, :cols]


def philox(counter: list[torch.Tensor], key: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32-10: four counters and a key of 64 bits -> four words of 32 bits, all held in int64 and broadcast."""
    a, b, c, d = counter
    low, high = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The product of two words fills 64 bits: as int64 it may turn negative, but no bit is lost.
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = ((q >> 32) & _WORD) ^ b ^ low, q & _WORD, ((p >> 32) & _WORD) ^ d ^ high, p & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return [a, b, c, d]


def dropout(x: torch.Tensor, keep: torch.Tensor, p: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x where ``keep``, scaled by 1 / (1 - p), else 0; plus ``residual``. Rounded once; differentiable."""
    wide = x if x.dtype == torch.float64 else x.float()
    y = torch.where(keep, wide * (1 / (1 - p)), 0)
    return (y if residual is None else y + residual).to(x.dtype)
