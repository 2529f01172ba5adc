"""``all_gather_linear`` in plain torch: the specification, in two halves that the caller keeps in order.

``peers`` holds each rank's buffer [T, K]. First every rank pushes its rows, then every rank multiplies what it has;
with R ranks in one process these are two loops. ``reduce_reference.py`` has the same for the ops that end in a sum.
"""

from __future__ import annotations

import torch

from ..linear import reference as linear
from ..runtime.signals import rows_of

Peers = list[torch.Tensor]


def push_rows(x: torch.Tensor, peers: Peers, rank: int) -> None:
    """This rank's rows x [T_r, K] to every peer."""
    first, last = rows_of(rank, len(peers), peers[rank].shape[0])
    for peer in peers:
        peer[first:last] = x


def all_gather_linear(
    peers: Peers,
    rank: int,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    activation: str,
    gated: bool,
) -> tuple[torch.Tensor, ...]:
    """act(X @ W_i^T + b_i) of every row, or act(g) * u of two weights."""
    x = peers[rank]
    if gated:
        return (linear.gated_linear(x, weights, biases, activation),)
    return linear.linear_act(x, weights, biases, activation)
