"""The sums over ranks in plain torch: the specification, in steps that the caller keeps in order.

With R ranks in one process each step is a loop over them:

    all_reduce_rmsnorm, one shot     send_addend;             total, finish
    all_reduce_rmsnorm, two shots    send_addend; send_sums;  sums, finish
    after a GEMM has sent            (send_addend)            total, finish: this rank's rows
    the same, gathered               (send_addend) send_sums; sums, finish

``peers`` holds each rank's slot, laid out as ``reduce_config.py`` says. ``turns`` says who owns which rows where a sum
is formed by one rank: the number of programs, whose rows have owners by turns, or None for ceil(T/R) rows in a row.
"""

from __future__ import annotations

import torch

from ..norm import reference as norms
from ..runtime.signals import rows_of
from .reduce_config import Norm, rows_per_owner

Peers = list[torch.Tensor]


def owned(rank: int, tokens: int, ranks: int, turns: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows that ``rank`` adds up, where their addends are among those of a source)."""
    if turns is None:
        rows = torch.arange(*rows_of(rank, ranks, tokens))
        return rows, torch.arange(len(rows))
    rows = torch.arange(tokens)
    program, number = rows % turns, rows // turns
    mine = (program + number) % ranks == rank
    return rows[mine], (number // ranks * turns + program)[mine]


def send_addend(x: torch.Tensor, peers: Peers, rank: int, *, shots: int = 1, turns: int | None = None) -> None:
    """This rank's addend x [T, D]: in one shot to everyone, in two each row to its owner."""
    for owner, peer in enumerate(peers):
        if shots == 1:
            peer[rank] = x
        else:
            rows, at = (index.to(x.device) for index in owned(owner, len(x), len(peers), turns))
            _addends(peer, len(x), len(peers), turns)[rank, at] = x[rows]


def total(peers: Peers, rank: int, tokens: int, *, shots: int = 1, turns: int | None = None) -> torch.Tensor:
    """The sum of the rows that this rank adds up, in fp32 (fp64 for fp64) and in order of rank."""
    if shots == 1:
        addends = peers[rank]
    else:
        _, at = owned(rank, tokens, len(peers), turns)
        addends = _addends(peers[rank], tokens, len(peers), turns)[:, at.to(peers[rank].device)]
    found = torch.zeros(addends.shape[1:], dtype=_wide(addends.dtype), device=addends.device)
    for addend in addends:
        found = found + addend
    return found


def send_sums(peers: Peers, rank: int, tokens: int, *, turns: int | None = None) -> None:
    """What this rank has added up, rounded to the addends' dtype, to everyone."""
    rows, _ = owned(rank, tokens, len(peers), turns)
    found = total(peers, rank, tokens, shots=2, turns=turns)
    for peer in peers:
        sums(peer, tokens)[rows.to(peer.device)] = found.to(peer.dtype)


def sums(slot: torch.Tensor, tokens: int) -> torch.Tensor:
    """The second part of a slot, [T, D]."""
    return slot[slot.shape[0] - tokens :]


def finish(
    found: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """[y,] s from sums of addends in ``dtype``: s = sum + bias + residual, rounded once; y = norm(s)."""
    s = found.to(_wide(found.dtype))
    if bias is not None:
        s = s + bias
    if residual is not None:
        s = s + residual
        dtype = torch.promote_types(dtype, residual.dtype)
    s = s.to(dtype)
    if norm is None:
        return [s]
    if norm.centred:
        return [norms.layer_norm(s, norm.weight, norm.bias, norm.eps, norm.weight_offset, dtype), s]
    return [norms.rms_norm(s, norm.weight, norm.eps, norm.weight_offset, dtype), s]


def _addends(slot: torch.Tensor, tokens: int, ranks: int, turns: int | None) -> torch.Tensor:
    """The first part of a slot, [R, n, D]; all of one of three dimensions, which is to be scattered and no more."""
    if slot.dim() == 3:
        return slot
    n = -(-tokens // ranks) if turns is None else rows_per_owner(tokens, ranks, turns)
    return slot[: ranks * n].view(ranks, n, slot.shape[1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
