"""Autograd functions with the collectives of tensor parallelism inside.

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3, call the first pair f and g; the sequence-parallel pair is
Korthikanti et al., "Reducing Activation Recomputation" (arXiv:2205.05198), section 4.2.2. The functions of a pair are
transposes of each other, so the pairs compose to exact gradients.

    function            forward            backward           x -> result, along dim n
    copy_to (f)         identity           all-reduce         [n] replicated -> [n] replicated
    reduce_from (g)     all-reduce         identity           [n] partial    -> [n] replicated
    all_gather_from     all-gather         reduce-scatter     [n/R]          -> [n] replicated, partial gradient
    reduce_scatter_to   reduce-scatter     all-gather         [n] partial    -> [n/R]
    gather_from         all-gather         local slice        [n/R]          -> [n] replicated, replicated gradient
    split_to            local slice        all-gather         [n] replicated -> [n/R]
    exchange_rows       all-to-all         all-to-all         [n/R]          -> [n/R], other rows

"Partial" means that the ranks hold partial sums. A collective in backward counts at ``site + ".grad"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import collectives
from .mesh import Group


def copy_to(x: torch.Tensor, group: Group, *, site: str) -> torch.Tensor:
    """Enter a region where each rank computes a part: identity forward, all-reduce backward (Megatron's f)."""
    return x if group.size == 1 else _CopyTo.apply(x, group, site)


def copy_all_to(tensors: Sequence[Any], group: Group, *, site: str) -> tuple[Any, ...]:
    """:func:`copy_to` of several small tensors of one dtype, whose gradients share one all-reduce; None stays None."""
    if group.size == 1:
        return tuple(tensors)
    copies = iter(_CopyAllTo.apply(group, site, *(x for x in tensors if x is not None)))
    return tuple(None if x is None else next(copies) for x in tensors)


def reduce_from(x: torch.Tensor, group: Group, *, site: str) -> torch.Tensor:
    """Leave such a region by summing the ranks' parts: all-reduce forward, identity backward (Megatron's g)."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group, site)


def all_gather_from(x: torch.Tensor, group: Group, *, dim: int = 0, site: str) -> torch.Tensor:
    """Enter such a region from shards: all-gather along ``dim`` forward, reduce-scatter backward."""
    return x if group.size == 1 else _AllGatherFrom.apply(x, group, dim, site)


def reduce_scatter_to(x: torch.Tensor, group: Group, *, dim: int = 0, site: str) -> torch.Tensor:
    """Leave such a region into shards: reduce-scatter along ``dim`` forward, all-gather backward.

    Raises ValueError where ``dim`` does not divide by the group's size.
    """
    return x if group.size == 1 else _ReduceScatterTo.apply(x, group, dim, site)


def gather_from(x: torch.Tensor, group: Group, *, dim: int, site: str) -> torch.Tensor:
    """Gather shards along ``dim`` for a computation that all ranks repeat; backward keeps this rank's slice."""
    return x if group.size == 1 else _GatherFrom.apply(x, group, dim, site)


def split_to(x: torch.Tensor, group: Group, *, dim: int, site: str) -> torch.Tensor:
    """Keep this rank's slice along ``dim`` of a replicated tensor; backward gathers the slices' gradients.

    Raises ValueError where ``dim`` does not divide by the group's size.
    """
    return x if group.size == 1 else _SplitTo.apply(x, group, dim, site)


def exchange_rows(x: torch.Tensor, rows: RowExchange, *, site: str) -> torch.Tensor:
    """The rows of a :class:`RowExchange`, from a tensor [n, ...] that is split evenly over the ranks."""
    return _ExchangeRows.apply(x, rows, site)


class RowExchange:
    """The rows that each rank needs of a tensor [n, ...] of which rank r holds the r-th n/R: ``wanted[r]``, ascending.

    Raises ValueError unless ``wanted`` divides all rows into equal parts.
    """

    def __init__(self, wanted: Sequence[Sequence[int]], group: Group) -> None:
        total, size = sum(map(len, wanted)), len(wanted[0])
        every = sorted(row for rows in wanted for row in rows)
        if len(wanted) != group.size or every != list(range(total)) or any(len(rows) != size for rows in wanted):
            raise ValueError(f"wanted: expected {group.size} parts of equal length, of all of {total} rows")
        if any(list(rows) != sorted(rows) for rows in wanted):
            raise ValueError("wanted: expected ascending rows")
        first = group.rank * size
        owned = range(first, first + size)
        by_rank = [[row - first for row in rows if row in owned] for rows in wanted]
        self.group = group
        self.order = [row for rows in by_rank for row in rows]  # the order in which this rank sends its rows
        self.sent = [len(rows) for rows in by_rank]
        self.received = [sum(row // size == source for row in wanted[group.rank]) for source in range(group.size)]
        self._index: dict[torch.device, torch.Tensor] = {}

    def index(self, device: torch.device) -> torch.Tensor:
        if device not in self._index:
            self._index[device] = torch.tensor(self.order, device=device)
        return self._index[device]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, site: str) -> torch.Tensor:
        ctx.group, ctx.site = group, site
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return collectives.all_reduce(grad, ctx.group, site=ctx.site + ".grad"), None, None


class _CopyAllTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, site: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.site = group, site
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        flat = collectives.all_reduce(flat, ctx.group, site=ctx.site + ".grad", inplace=True)
        sums = flat.split([grad.numel() for grad in grads])
        return None, None, *(total.view(grad.shape) for total, grad in zip(sums, grads))


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, site: str) -> torch.Tensor:
        return collectives.all_reduce(x, group, site=site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _AllGatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, site: str) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.site = group, dim, site
        return collectives.all_gather(x, group, dim=dim, site=site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return collectives.reduce_scatter(grad, ctx.group, dim=ctx.dim, site=ctx.site + ".grad"), None, None, None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, site: str) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.site = group, dim, site
        return collectives.reduce_scatter(x, group, dim=dim, site=site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return collectives.all_gather(grad, ctx.group, dim=ctx.dim, site=ctx.site + ".grad"), None, None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, site: str) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.all_gather(x, group, dim=dim, site=site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return collectives.local_slice(grad, ctx.group, ctx.dim), None, None, None


class _SplitTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, site: str) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.site = group, dim, site
        collectives.check_divides(x.shape, dim, group, site)
        return collectives.local_slice(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return collectives.all_gather(grad, ctx.group, dim=ctx.dim, site=ctx.site + ".grad"), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: RowExchange, site: str) -> torch.Tensor:
        ctx.rows, ctx.site = rows, site
        x = x.index_select(0, rows.index(x.device))
        return collectives.all_to_all(x, rows.group, sent=rows.sent, received=rows.received, site=site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows = ctx.rows
        back = {"sent": rows.received, "received": rows.sent, "site": ctx.site + ".grad"}
        grad = collectives.all_to_all(grad, rows.group, **back)
        return torch.empty_like(grad).index_copy_(0, rows.index(grad.device), grad), None, None
