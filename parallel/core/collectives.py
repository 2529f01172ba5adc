"""Every collective of the project, in one thin layer over torch.distributed.

Each call names its ``site`` ("mlp.out", "loss.max", ...); counters of calls and payload use it as a key. A collective
takes tensors of any layout, including empty ones, and runs in any group; in a group of one it is the identity. It
returns a new tensor, except with ``inplace`` or in a group of one.

Under torch.compile they become torch's functional collectives: torch 2.11 silently replaces the ordinary ones in a
backward with zeros.

Low precision: gloo's all-reduce adds bf16 and fp16 in that type, pair by pair, so a sum over R ranks is rounded R - 1
times. :func:`reduce_scatter` on CPUs rounds once; the reduce-scatter of :mod:`pieces` rounds once on every device.

A failure (a dead peer, a wait past the process group's timeout) raises a CollectiveError that names the site.
:mod:`pieces` has the collectives that travel in pieces of rows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ...kernels.runtime.names import expected
from .mesh import Group, timeout_of

_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG}

# torch 2.13 renamed these two and warns at the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Up to this size two ranks on CPUs exchange whole tensors; above it gloo's ring, which sends less at once, is faster.
EXCHANGE_BYTES = 256 * 1024
# The tag of that exchange; the tags in pieces.py and those of other messages differ.
EXCHANGE_TAG = 0x5F00

# (kind, site) -> calls, and -> bytes of this rank's input (an all-gather's shard, a reduce-scatter's whole tensor).
# Calls that torch.compile captured bypass this module and are not counted.
calls: Counter[tuple[str, str]] = Counter()
payload: Counter[tuple[str, str]] = Counter()

_posting = threading.local()  # its field ``named``: (kind, site) of the collective that this thread is posting


def posting() -> tuple[str, str] | None:
    """(kind, site) of the collective that this thread is posting, or None; audit.py names torch's calls by it."""
    return getattr(_posting, "named", None)


class CollectiveError(RuntimeError):
    """A collective that failed because a rank has ended or did not arrive in time."""


class Flight:
    """A collective, or a piece of one, in flight: the constructor posts it, :meth:`wait` returns when it arrived."""

    __slots__ = ("kind", "site", "work")

    def __init__(self, kind: str, site: str, post: Callable[[], Any]) -> None:
        self.kind, self.site = kind, site
        _posting.named = kind, site
        try:
            self.work = self._named(post)
        finally:
            _posting.named = None

    def wait(self) -> None:
        if self.work is not None:  # None: the collective finished when it was posted
            self._named(self.work.wait)

    def settle(self) -> None:
        """Wait until the sent buffers may be overwritten, for work whose :meth:`wait` does not guarantee that."""
        settle = getattr(self.work, "settle", None)
        if settle is not None:
            self._named(settle)

    def _named(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except RuntimeError as error:
            raise CollectiveError(
                f"{self.site}: {self.kind} failed: has another rank of the group ended, or not reached this call in "
                f"time? ({error})"
            ) from error


def all_reduce(x: torch.Tensor, group: Group, *, site: str, op: str = "sum", inplace: bool = False) -> torch.Tensor:
    """Combine ``x``, of equal shape on all ranks, by "sum", "max" or "avg". ``inplace`` writes the result to ``x``."""
    if op not in _OPS:
        raise ValueError(f"{site}: op={op!r}: {expected(op, _OPS)}")
    if group.size == 1:
        return x
    _count("all_reduce", x, site)
    if torch.compiler.is_compiling():
        total = functional.all_reduce(x.contiguous(), op, group.pg)
        return x.copy_(total) if inplace else total
    out = x if inplace and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    Flight("all_reduce", site, lambda: sum_in_place(out, group, op)).wait()
    return x.copy_(out) if inplace and out is not x else out


def start_all_reduce(x: torch.Tensor, group: Group, *, site: str) -> Callable[[], torch.Tensor]:
    """Begin to sum a contiguous ``x`` in place; the returned function waits for the sum and returns it."""
    if group.size == 1:
        return lambda: x
    _count("all_reduce", x, site)
    if torch.compiler.is_compiling():
        total = functional.all_reduce(x, "sum", group.pg)
        return lambda: x.copy_(total)
    flight = Flight("all_reduce", site, lambda: sum_in_place(x, group, "sum", async_op=True))

    def finish() -> torch.Tensor:
        flight.wait()
        return x

    return finish


def sum_in_place(x: torch.Tensor, group: Group, op: str, async_op: bool = False) -> Any:
    """Combine ``x`` in place; returns the work to wait for, or None if it is done."""
    if x.device.type != "cpu":
        return dist.all_reduce(x, _OPS[op], group.pg, async_op)
    if group.size == 2 and op == "sum" and x.nbytes <= EXCHANGE_BYTES and not compares_collectives():
        return _Exchange(x, group)
    # gloo's own call: for a small tensor, dist.all_reduce spends most of the time in its wrapper.
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return group.pg.allreduce([x], options)


def compares_collectives() -> bool:
    """Whether torch compares the ranks' collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL), which messages bypass."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


class _Exchange:
    """The sum of a small ``x`` over two ranks on CPUs: each rank sends its whole tensor and adds the other's.

    gloo's ring takes two round trips, through a thread of its own. Both ranks get the same sum, bit for bit.
    """

    def __init__(self, x: torch.Tensor, group: Group) -> None:
        pg: Any = group.pg
        self.x, self.theirs, self.timeout = x, torch.empty_like(x), timeout_of(pg, x.device)
        self.sending = pg.send([x], 1 - group.rank, EXCHANGE_TAG)
        self.receiving = pg.recv([self.theirs], 1 - group.rank, EXCHANGE_TAG)

    def wait(self) -> None:
        # A message alone would use the timeout with which the group was created.
        limit = () if self.timeout is None else (self.timeout,)
        self.receiving.wait(*limit)
        self.sending.wait(*limit)
        self.x.add_(self.theirs)


def all_gather(x: torch.Tensor, group: Group, *, dim: int = 0, site: str) -> torch.Tensor:
    """Concatenate the ranks' ``x``, of equal shape on all ranks, along ``dim``: [..., n/R, ...] -> [..., n, ...]."""
    if group.size == 1:
        return x
    dim = _dimension(x, dim, site)
    _count("all_gather", x, site)
    if torch.compiler.is_compiling():
        out = functional.all_gather_tensor(x.contiguous(), 0, group.pg)
    else:
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        Flight("all_gather", site, lambda: _all_gather_single(out, x.contiguous(), group.pg)).wait()
    return _concatenated(out, group, dim)


def start_all_gather(x: torch.Tensor, group: Group, *, dim: int = 0, site: str) -> Callable[[], torch.Tensor]:
    """Begin :func:`all_gather`; the returned function waits and returns the whole. Eager only."""
    if group.size == 1:
        return lambda: x
    dim = _dimension(x, dim, site)
    _count("all_gather", x, site)
    shard = x.contiguous()  # kept alive until it is sent
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    flight = Flight("all_gather", site, lambda: _all_gather_single(out, shard, group.pg, async_op=True))

    def finish() -> torch.Tensor:
        flight.wait()
        return _concatenated(out, group, dim)

    return finish


def _concatenated(stacked: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' shards, which ``stacked`` holds one after the other, side by side along ``dim``."""
    if dim == 0:
        return stacked
    # [R * a, ..., n/R, ...] -> [a, ..., R, n/R, ...] -> [a, ..., n, ...]
    rows = stacked.shape[0] // group.size
    return stacked.unflatten(0, (group.size, rows)).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: torch.Tensor, group: Group, *, dim: int = 0, site: str) -> torch.Tensor:
    """Sum ``x`` over the ranks and keep this rank's slice along ``dim``: [..., n, ...] -> [..., n/R, ...].

    Raises ValueError where the group's size does not divide the length of ``dim``.
    """
    return start_reduce_scatter(x, group, dim=dim, site=site)()


def start_reduce_scatter(x: torch.Tensor, group: Group, *, dim: int = 0, site: str) -> Callable[[], torch.Tensor]:
    """Begin :func:`reduce_scatter`; the returned function waits for it and returns this rank's slice."""
    if group.size == 1:
        return lambda: x
    dim = _dimension(x, dim, site)
    check_divides(x.shape, dim, group, site)
    _count("reduce_scatter", x, site)
    slices = x.unflatten(dim, (group.size, x.shape[dim] // group.size)).movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        own = functional.reduce_scatter_tensor(slices, "sum", 0, group.pg)[0]
        return lambda: own
    # gloo's reduce-scatter all-reduces the whole tensor. All-to-all moves only the needed slices, and the sum runs in
    # rank order and rounds once.
    exchange = x.device.type == "cpu"
    out = torch.empty_like(slices if exchange else slices[0])
    if exchange:
        post = lambda: dist.all_to_all_single(out, slices, group=group.pg, async_op=True)
    else:
        post = lambda: _reduce_scatter_single(out, slices, group=group.pg, async_op=True)
    flight = Flight("reduce_scatter", site, post)

    def finish() -> torch.Tensor:
        flight.wait()
        return out.sum(0, dtype=x.dtype) if exchange else out

    return finish


def all_to_all(
    x: torch.Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int], site: str
) -> torch.Tensor:
    """Send ``sent[r]`` consecutive rows of ``x`` to each rank r, in order of rank; return the rows received, in that
    order.

    ``received[r]`` is the number of rows from rank r. Only rows that leave this rank are moved; all of ``x`` is
    counted.
    """
    if group.size == 1:
        return x
    _count("all_to_all", x, site)
    if torch.compiler.is_compiling():
        return functional.all_to_all_single(x.contiguous(), list(received), list(sent), group.pg)
    out = x.new_empty((sum(received), *x.shape[1:]))
    splits = list(received), list(sent)
    Flight("all_to_all", site, lambda: dist.all_to_all_single(out, x.contiguous(), *splits, group=group.pg)).wait()
    return out


def broadcast(x: torch.Tensor, group: Group, *, src: int = 0, site: str) -> torch.Tensor:
    """The ``x`` of the group's rank ``src``, on every rank; ``x`` has the same shape and dtype on all."""
    _check_rank("src", src, group, site)
    if group.size == 1:
        return x
    if torch.compiler.is_compiling():
        return functional.broadcast(x.contiguous(), src, group.pg)
    return start_broadcast(x, group, src=src, site=site)()


def start_broadcast(x: torch.Tensor, group: Group, *, src: int, site: str) -> Callable[[], torch.Tensor]:
    """Begin :func:`broadcast`; the returned function waits and returns the tensor. Eager only."""
    _check_rank("src", src, group, site)
    if group.size == 1:
        return lambda: x
    _count("broadcast", x, site)
    out = x.clone(memory_format=torch.contiguous_format)
    flight = Flight("broadcast", site, lambda: dist.broadcast(out, group_src=src, group=group.pg, async_op=True))

    def finish() -> torch.Tensor:
        flight.wait()
        return out

    return finish


def start_reduce(x: torch.Tensor, group: Group, *, dst: int, site: str) -> Callable[[], torch.Tensor | None]:
    """Begin to sum ``x``, which the caller gives up, over the ranks; the returned function waits for it and returns the
    sum on the group's rank ``dst``, None elsewhere. Eager only."""
    _check_rank("dst", dst, group, site)
    if group.size == 1:
        return lambda: x
    _count("reduce", x, site)
    total = x.contiguous()
    flight = Flight("reduce", site, lambda: dist.reduce(total, group_dst=dst, group=group.pg, async_op=True))

    def finish() -> torch.Tensor | None:
        flight.wait()
        return total if group.rank == dst else None

    return finish


def gather_number(value: int, group: Group, *, site: str) -> list[int]:
    """Every rank's ``value``, of 64 bits, in order of rank: a :func:`gather_objects` of one message. Not counted."""
    if group.size == 1:
        return [value]
    devices = group.pg._device_types
    mine = torch.tensor([value], device="cpu" if torch.device("cpu") in devices else devices[0].type)
    values = mine.repeat(group.size)
    Flight("gather_number", site, lambda: _all_gather_single(values, mine, group.pg)).wait()
    return values.tolist()


def gather_objects(value: Any, group: Group, *, site: str) -> list[Any]:
    """Every rank's ``value``, in order of rank, sent as a pickle: for settings and errors, not for data.

    Not counted: agreement between ranks is not part of the computation.
    """
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    Flight("gather_objects", site, lambda: dist.all_gather_object(values, value, group.pg)).wait()
    return values


# ---------------------------------------------------------------------------------------------------- shared


def local_slice(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part of ``x`` along ``dim``, contiguous; no communication."""
    length = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * length, length).contiguous()


def check_divides(shape: Sequence[int], dim: int, group: Group, site: str) -> None:
    """Raise ValueError unless the group's size divides dimension ``dim`` of a tensor of ``shape``."""
    if shape[dim] % group.size:
        raise ValueError(
            f"{site}: dimension {dim} of a tensor of shape {list(shape)} does not divide by the group's "
            f"{group.size} ranks; make it a multiple of {group.size}"
        )


def check_rows(tokens: int, group: Group, site: str) -> None:
    """Raise ValueError unless ``tokens`` rows split evenly over the ranks."""
    if tokens % group.size:
        raise ValueError(
            f"{site}: {tokens} rows do not divide by the group's {group.size} ranks; make them a multiple of "
            f"{group.size}"
        )


def _check_rank(name: str, rank: int, group: Group, site: str) -> None:
    if not 0 <= rank < group.size:
        raise ValueError(f"{site}: {name}={rank} is not a rank of a group of {group.size}")


def _dimension(x: torch.Tensor, dim: int, site: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{site}: dim={dim} is not a dimension of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def count(kind: str, nbytes: int, site: str) -> None:
    """Count a collective of ``nbytes`` at ``site``, for those in :mod:`pieces` and :mod:`strategies`."""
    calls[kind, site] += 1
    payload[kind, site] += nbytes


def _count(kind: str, x: torch.Tensor, site: str) -> None:
    if not torch.compiler.is_compiling():  # a dynamic size has no known number of bytes there
        count(kind, x.nbytes, site)


def reset_counts() -> None:
    calls.clear()
    payload.clear()
