"""Gradient clipping by a norm that is the same on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..parallel import collectives
from ..parallel.mesh import Group
from ..parallel.sharding import local_tensors, spec_of


class GradientClipper:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``.

    A sharded parameter's gradient is spread over the group, so its squares are summed there; a replicated one is whole
    on every rank and counts once. Clipping each rank by its own norm would let replicated parameters drift apart.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], max_norm: float, group: Group) -> None:
        self._sharded: list[torch.nn.Parameter] = []
        self._replicated: list[torch.nn.Parameter] = []
        for param in parameters:
            (self._replicated if spec_of(param).shard_dim is None else self._sharded).append(param)
        self._max_norm = max_norm
        self._group = group

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Scale the gradients in place; returns the norm before that, a scalar."""
        sharded, replicated = _gradients(self._sharded), _gradients(self._replicated)
        squares = _sum_of_squares(sharded)
        if squares is not None:
            squares = collectives.all_reduce(squares, self._group, site="clip.norm", inplace=True)
        rest = _sum_of_squares(replicated)
        parts = [part for part in (squares, rest) if part is not None]
        if not parts:
            return torch.zeros(())
        norm = torch.stack(parts).sum().sqrt()
        scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(sharded + replicated, scale)
        return norm


def _gradients(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return list(local_tensors(*(param.grad for param in params if param.grad is not None)))


def _sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if not tensors:
        return None
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
