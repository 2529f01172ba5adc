"""Rotary position embedding in plain torch: the specification."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Tables = tuple[torch.Tensor, torch.Tensor]


def apply_rope(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [..., N, H] and k [..., K, H] with the first P elements of every head rotated; cos and sin [..., P/2].

    Element i of the first half goes with element i of the second one, or with ``interleaved`` 2i with 2i + 1:
    (a, b) -> (a cos - b sin, b cos + a sin). In the wider of the two precisions, rounded once to q's. Differentiable
    by torch's own autograd.
    """
    tables = spread(cos, sin, interleaved)
    return _rotated(q, tables, interleaved), None if k is None else _rotated(k, tables, interleaved)


def apply_rope_(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """The same, written over what was rotated."""
    tables = spread(cos, sin, interleaved)
    for x in (q,) if k is None else (q, k):
        head = x[..., : tables[0].shape[-1]]
        head.copy_(_rotated(head, tables, interleaved))


def spread(cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Tables:
    """What every element is multiplied with, and its partner: cos and -sin or sin, [..., 1, P].

    A model rotates in every layer by the same tables, and where tokens are few these copies would be a good part of
    the work: on a CPU they are kept as long as ``cos`` is. (A graph, be it a compiler's or CUDA's, must see them made.)
    """
    if not cos.is_cpu or torch.compiler.is_compiling() or cos.requires_grad or sin.requires_grad:
        return _spread_anew(cos, sin, interleaved)
    if torch.is_inference_mode_enabled() or cos.is_inference() or sin.is_inference():  # whose changes nobody counts
        return _spread_anew(cos, sin, interleaved)
    kept = _kept.get(cos)
    if kept is not None:
        of_sin, state, tables = kept
        if of_sin is sin and state == (cos._version, sin._version, interleaved):
            return tables
    tables = _spread_anew(cos, sin, interleaved)
    if type(tables[0]) is torch.Tensor:  # no stand-in of one
        _kept[cos] = sin, (cos._version, sin._version, interleaved), tables
    return tables


_kept = WeakTensorKeyDictionary()


def _spread_anew(cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Tables:
    if interleaved:
        cos, sin = (torch.stack(pair, dim=-1).flatten(-2) for pair in ((cos, cos), (-sin, sin)))
    else:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def _rotated(x: torch.Tensor, tables: Tables, interleaved: bool) -> torch.Tensor:
    cos, sin = tables
    rotary = cos.shape[-1]
    head = x if rotary == x.shape[-1] else x[..., :rotary]
    rotated = (head * cos).addcmul_(partners(head, interleaved), sin).to(x.dtype)
    return rotated if head is x else torch.cat((rotated, x[..., rotary:]), dim=-1)


def partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """For each element of x [..., P] the one that it makes a pair with."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, dims=-1)
