"""Attention of rows to pages that lie together, on a CPU: what ``cpu.py`` makes its way with.

Products run on torch's FlashAttention for CPUs, in the cache's own dtype. Quantised caches and mixed dtypes are
converted to fp32, a few pages at a time; soft-caps and values of another head size are computed in plain torch.

Letters as in ``reference.py``, and E pages, R rows that attend to each: the grouped heads of some queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..runtime.dtypes import QUANTISED
from . import reference
from .options import AttentionOptions

CPU = torch.device("cpu")  # whatever the default is
_CONVERTED_BYTES = 2 << 20  # of pages in fp32 at a time: they stay in a core's cache

Partial = tuple[torch.Tensor, torch.Tensor]  # out [E, K, R, Hv] and lse [E, K, R] over some of the keys


class Pages(NamedTuple):
    """Pages of keys and values, and their scales."""

    k: torch.Tensor  # [E, K, B, H]
    v: torch.Tensor  # [E, K, B, Hv]
    k_scale: torch.Tensor | None  # one element, or [E, K, B]
    v_scale: torch.Tensor | None

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Pages:
        """``fn`` of whatever has an entry per slot."""
        scales = (x if x is None or x.numel() == 1 else fn(x) for x in (self.k_scale, self.v_scale))
        return Pages(fn(self.k), fn(self.v), *scales)

    def at(self, *where: slice) -> Pages:
        """A view of what ``where`` selects of pages, heads and slots."""
        return self.map(lambda x: x[where])


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Partial:
    """torch's FlashAttention, which takes the last dimension for contiguous without a look."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    found: Partial = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, **options)
    return found


def at(x: torch.Tensor | None, where: slice | torch.Tensor) -> torch.Tensor | None:
    return None if x is None else x[where]


def flashes(pool: Pages, options: AttentionOptions) -> bool:
    """Whether torch's FlashAttention does the products."""
    return options.softcap is None and pool.k.shape[-1] == pool.v.shape[-1]


def attend(q: torch.Tensor, pages: Pages, bias: torch.Tensor | None, options: AttentionOptions) -> Partial:
    """q [E, K, R, H] over pages [E, K, B, ...], each over its own -> out [E, K, R, Hv], lse [E, K, R].

    ``bias`` [E, 1 or K, 1 or R, B] is added to the scores.
    """
    if not pages.k.dtype == pages.v.dtype == q.dtype:
        step = max(1, _CONVERTED_BYTES // ((pages.k[0].numel() + pages.v[0].numel()) * q.element_size()))
        parts = []
        for i in range(0, len(q), step):
            some = slice(i, i + step)
            parts.append(attend(q[some], converted(pages.at(some), q.dtype), at(bias, some), options))
        outs, lses = zip(*parts)
        return torch.cat(outs), torch.cat(lses)
    if flashes(pages, options):
        out, lse = flash(q, pages.k, pages.v, attn_mask=bias, scale=options.scale)
    else:
        scores = reference.scores(q @ pages.k.mT, options)
        scores = scores if bias is None else scores + bias
        lse = torch.logsumexp(scores, -1)
        out = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_() @ pages.v
    if bias is None or (bias.shape[2] == 1 and options.tree_mask is None):
        return out, lse
    # FlashAttention says 0, not -inf, of a row that sees nothing. A single query, but for one of a tree, always sees
    # something of a page that is visited for it.
    return out, lse.masked_fill(bias.amax(-1) == float("-inf"), float("-inf"))


def bias_of(
    seen: torch.Tensor, distance: torch.Tensor, heads: tuple[int, int], dtype: torch.dtype, options: AttentionOptions
) -> torch.Tensor | None:
    """What masks and ALiBi add to scores: seen and distance [E, Q, B], (N, K) heads -> [E, 1 or K, G * Q, B].

    With one query and no ALiBi [E, 1, 1, B], and None where there is nothing to add.
    """
    if options.alibi_slopes is None and seen.all():
        return None
    bias = torch.zeros(seen.shape, dtype=dtype, device=CPU).masked_fill_(~seen, float("-inf"))
    bias = bias[:, None, None]  # [E, 1, 1, Q, B]
    if options.alibi_slopes is not None:
        bias = bias - options.alibi_slopes.to(dtype).view(heads[1], -1, 1, 1) * distance.abs()[:, None, None]
    elif seen.shape[1] > 1:
        bias = bias.expand(-1, -1, heads[0] // heads[1], -1, -1)
    return bias.flatten(2, 3)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """fp8 as int8: torch neither indexes nor fills it."""
    return x.view(torch.int8) if x.dtype in QUANTISED else x


def converted(pages: Pages, dtype: torch.dtype) -> Pages:
    """The same pages in ``dtype``, times their scales."""
    if pages.k.dtype == pages.v.dtype == dtype:
        return pages
    return Pages(_values(pages.k, pages.k_scale, dtype), _values(pages.v, pages.v_scale, dtype), None, None)


def _values(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[E, K, B, H] times scale, one element or [E, K, B]."""
    factor: torch.Tensor | float = 1.0 if scale is None else scale.to(dtype)
    if isinstance(factor, torch.Tensor) and factor.numel() > 1:
        factor = factor.unsqueeze(-1)
    if x.dtype == torch.float8_e4m3fn:
        # Its bits are those of an fp16 number 2^8 times smaller: torch's own conversion takes several times as long.
        bits = (x.view(torch.int8).to(torch.int16) << 7) & ~0x4000
        values = bits.view(torch.float16).to(dtype).mul_(factor * 256.0)
        magnitude = bits & 0x3F80
        return values.masked_fill_(magnitude == 0x3F80, float("nan")) if magnitude.amax() == 0x3F80 else values
    return x.to(dtype) if scale is None else x.to(dtype).mul_(factor)
