"""The way of :mod:`strategies` that lies inside the kernels: rows travel through symmetric memory beside the tiles.

A group has one arena (:mod:`pool`), and in it one channel for the rows that are gathered and one for addends. An
exchange of either begins when the one before it has been read, in the order of the stream on which both run.

    gather          copy engines push the shards; the product's tiles wait for the pieces that hold their rows
    start_scatter   the product's tiles go to the owners of their rows; finishing waits for them and adds up
    start_reduce    the same, and the owners' sums go to everyone

An exchange ends whatever fails meanwhile. Rows that are gathered have been pushed before their product is formed, so
one that fails leaves them to be waited for. Addends that were not formed nobody can wait for: their exchange is
abandoned, and ranks meet before the next one (``Channel.abandon``).

``kernels/comm`` has these as ops by themselves. Here the product is whatever ``compute`` makes it, in forward or in
backward, and what is gathered serves the weights' gradients as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...kernels.comm import all_reduce_shape, reduce_scatter_shape, transport
from ...kernels.runtime.signals import Gathered, Scattered
from ..core import collectives
from ..core.mesh import Group
from .memory.pool import Channel, SymmetricArena

GATHER, REDUCE = "gather", "reduce"  # the channels


def gather(
    x: torch.Tensor, group: Group, compute: Callable[..., Sequence[torch.Tensor]], *, site: str, keep: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As :func:`overlap.gather`. Without ``keep`` the rows are those in the slot, until the next exchange begins."""
    tokens, x = x.shape[0] * group.size, x.contiguous()  # which takes memory, so not in the middle of an exchange
    channel, peers, signals = _begin(GATHER, (tokens, x.shape[1]), x, group, site)
    pieces = transport.pieces_for(x.shape[0])
    collectives.note("start", "all_gather", site)
    pushed = transport.start_push(x, peers, signals, pieces)
    arrived = partial(transport.wait_for_rows, signals, pieces)
    whole = peers[group.rank]
    try:
        outs = list(compute(whole, slice(None), Gathered(peers, signals, pieces)))
        if not any(y.numel() for y in outs):  # nothing was computed that would have waited
            arrived()
    except Exception:
        _end_after_error(channel, pushed, arrived)
        raise
    pushed()
    collectives.note("end", "all_gather", site)
    try:
        return outs, whole.clone() if keep else whole
    finally:
        channel.end()


def start_sum(
    tokens: int,
    group: Group,
    compute: Callable[..., Any],
    like: torch.Tensor,
    width: int,
    *,
    bias: torch.Tensor | None,
    everywhere: bool,
    site: str,
) -> Callable[[], torch.Tensor]:
    """As :func:`overlap.start_scatter`, or with ``everywhere`` :func:`overlap.start_reduce`."""
    from ...kernels.comm import reduce  # Triton, only when a kernel runs

    shape = (all_reduce_shape if everywhere else reduce_scatter_shape)(tokens, width, group.size)
    channel, peers, signals = _begin(REDUCE, shape, like, group, site)
    kind = "all_reduce" if everywhere else "reduce_scatter"
    collectives.note("start", kind, site)
    try:
        compute(slice(None), Scattered(peers, signals))
    except Exception:
        channel.abandon()
        raise

    def finish() -> torch.Tensor:
        try:
            (y,) = reduce.reduce_scattered(peers, signals, tokens, width, like.dtype, bias=bias, gather=everywhere)
        except Exception:
            channel.abandon()
            raise
        collectives.note("end", kind, site)
        channel.end()
        return y

    return finish


def _end_after_error(channel: Channel, *steps: Callable[[], None]) -> None:
    """End an exchange whose product failed, by what was still to be done; an error of that is of no interest."""
    try:
        for step in steps:
            step()
        channel.end()
    except Exception:
        channel.abandon()


def unavailable(group: Group, device: torch.device) -> str | None:
    """Why the ranks of ``group`` cannot exchange through symmetric memory on ``device``, or None. Collective."""
    return SymmetricArena.of(group, device=device).probe()


def _begin(name: str, shape: Sequence[int], like: torch.Tensor, group: Group, site: str) -> tuple[Channel, Any, Any]:
    nbytes = torch.Size(shape).numel() * like.element_size()
    channel = SymmetricArena.of(group, device=like.device).channel(name, nbytes)
    return channel, *channel.begin(shape, like.dtype, op=site)
