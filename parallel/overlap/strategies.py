"""How a linear layer's product and the collective beside it run: three strategies with the same three methods.

    method                  collective       the product                           returns
    all_gather_linear       all-gather       of rows as they arrive                its results [T, F_i], the rows [T, D]
    linear_reduce_scatter   reduce-scatter   of rows, those of other ranks first   this rank's rows of the sum [T/R, N]
    linear_all_reduce       all-reduce       of rows, from the first to the last   the sum [T, N]

    Plain      the whole collective, then the whole product, or the other way round; a sum that was started travels
               under whatever the caller does before it waits
    Chunked    rows in pieces, each sent by a message of its own (``core/pieces.py``): any transport, any device
    InKernel   the product's own tiles wait for the rows they need, or go to the owners of their rows, through symmetric
               memory (``memory/``): where all ranks reach each other's

A product is a value (``kernels/linear/product.py``); a strategy replaces its rows and says when it runs. Under each
strategy a collective counts as one, with the same payload at the same site, and every row goes through its product
once. On all ranks T, the strategy and the order of calls are the same; a call may begin before others have finished.

Where a product fails (memory runs out, say), what travels at the time is waited for, and the error then goes on. If all
ranks fail alike, the next call finds everything in order. If some do, the others wait for them in vain, for as long as
the process group's or the memory pool's timeout lets them, and the step is void on every rank.

Cutting the transfer so that the product starts before its end is the decomposition of Wang et al., "Overlap
Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ...kernels.comm import all_reduce_shape, reduce_scatter_shape, transport
from ...kernels.linear import Product
from ...kernels.runtime import alloc
from ...kernels.runtime.signals import ExchangeTimeout, Gathered, Scattered
from ..core import collectives
from ..core.mesh import Group
from ..core.pieces import GatherPieces, ReducePieces, ScatterPieces
from .memory.pool import Channel, SymmetricMemoryPool

GATHER, REDUCE = "gather", "reduce"  # the channels of InKernel: for rows that are gathered, and for addends


class Pending:
    """A collective under way; :meth:`wait`, called once, returns what it came to, plus the ``bias``."""

    __slots__ = ("_bias", "_finish")

    def __init__(self, finish: Callable[[], torch.Tensor], bias: torch.Tensor | None = None) -> None:
        self._finish, self._bias = finish, bias

    def wait(self) -> torch.Tensor:
        y = self._finish()
        return y if self._bias is None else y.add_(self._bias)


class InFlight:
    """What starts in a ``with`` block and is waited for there.

    An error that leaves the block waits for the rest first, so that it neither holds memory nor meets the next
    collective. Not after an ExchangeTimeout: a peer that did not come would only be waited for again.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: list[Pending] = []

    def add(self, pending: Pending) -> Pending:
        """``pending``, to be waited for once in the block."""
        if torch.compiler.is_compiling():  # which cannot follow what comes, and of what it captures nothing travels yet
            return pending

        def once() -> torch.Tensor:
            self._pending.remove(pending)
            return pending.wait()

        self._pending.append(pending)
        return Pending(once)

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ExchangeTimeout):
            for pending in self._pending:
                with suppress(Exception):  # the first failure is the one to report
                    pending.wait()


class Strategy(Protocol):
    """What the three have in common. ``site`` names the collective."""

    def all_gather_linear(
        self, product: Product, *, site: str, keep: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gather the product's rows [T/R, D] from all ranks and compute it on them: (results, the rows [T, D]).

        What its epilogue reads is of all T rows. Without ``keep`` the rows may be gone when the next rows are gathered
        in this group.
        """
        ...

    def linear_reduce_scatter(self, product: Product, *, bias: torch.Tensor | None = None, site: str) -> Pending:
        """Compute this rank's addend [T, N] and begin to sum it: this rank's rows of the sum [T/R, N], plus ``bias``.

        Raises ValueError unless T divides by the group's size.
        """
        ...

    def linear_all_reduce(
        self, product: Product, *, bias: torch.Tensor | None = None, site: str, async_op: bool = True
    ) -> Pending:
        """The same for all rows of the sum [T, N], on every rank. ``async_op=False``: the caller waits at once."""
        ...


@dataclass(frozen=True)
class Plain:
    """One after the other."""

    group: Group

    def all_gather_linear(
        self, product: Product, *, site: str, keep: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        whole = collectives.all_gather(product.rows[0], self.group, site=site)
        return product.of(whole).compute(), whole

    def linear_reduce_scatter(self, product: Product, *, bias: torch.Tensor | None = None, site: str) -> Pending:
        (y,) = product.compute()
        return Pending(collectives.start_reduce_scatter(y, self.group, site=site), bias)

    def linear_all_reduce(
        self, product: Product, *, bias: torch.Tensor | None = None, site: str, async_op: bool = True
    ) -> Pending:
        (y,) = product.compute()
        if async_op:
            return Pending(collectives.start_all_reduce(y, self.group, site=site), bias)
        total = collectives.all_reduce(y, self.group, site=site, inplace=True)  # stays on one stream
        return Pending(lambda: total, bias)


@dataclass(frozen=True)
class Chunked:
    """Each rank's shard in up to ``pieces`` pieces; for an all-reduce, all rows in as many."""

    group: Group
    pieces: int

    def all_gather_linear(
        self, product: Product, *, site: str, keep: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        if not product.tokens:
            return Plain(self.group).all_gather_linear(product, site=site)
        gathering = GatherPieces(product.rows[0], self.group, self.pieces, site=site)
        outs: list[torch.Tensor] = []
        with gathering:
            for part in gathering.arriving():
                results = product.of(gathering.whole[part], part).compute()
                if not outs:
                    tokens = len(gathering.whole)
                    outs = [alloc.empty((tokens, *y.shape[1:]), y.dtype, y.device) for y in results]
                for out, y in zip(outs, results):
                    out[part] = y
                del results, y  # a piece's memory serves the next one
        return outs, gathering.whole

    def linear_reduce_scatter(self, product: Product, *, bias: torch.Tensor | None = None, site: str) -> Pending:
        if not product.tokens:
            return Plain(self.group).linear_reduce_scatter(product, bias=bias, site=site)
        return self._sum(ScatterPieces, product, bias, site)

    def linear_all_reduce(
        self, product: Product, *, bias: torch.Tensor | None = None, site: str, async_op: bool = True
    ) -> Pending:
        if not product.tokens:
            return Plain(self.group).linear_all_reduce(product, bias=bias, site=site)
        return self._sum(ReducePieces, product, bias, site)

    def _sum(self, kind: Any, product: Product, bias: torch.Tensor | None, site: str) -> Pending:
        summing = kind(product.tokens, self.group, self.pieces, site=site)
        with summing:
            for part in summing.parts:
                (y,) = product.part(part).compute()
                summing.send(part, y)
        return Pending(summing.wait, bias)


@dataclass(frozen=True)
class InKernel:
    """Inside the kernels, over the channels of the group's memory pool.

    An exchange begins when the one before it on its channel has been read, in the order of the stream on which both
    run, and ends whatever fails meanwhile. Rows that are gathered have been pushed before their product is formed, so
    one that fails leaves them to be waited for. Addends that were not formed nobody can wait for: their exchange is
    abandoned, and ranks meet before the next one (``Channel.abandon``).

    A collective of no rows goes plainly.
    """

    group: Group

    def all_gather_linear(
        self, product: Product, *, site: str, keep: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        if not product.tokens:
            return Plain(self.group).all_gather_linear(product, site=site)
        x = product.rows[0].contiguous()  # which takes memory, so not in the middle of an exchange
        collectives.count("all_gather", x.nbytes, site)
        channel, peers, signals = self._begin(GATHER, (x.shape[0] * self.group.size, x.shape[1]), x, site)
        pieces = transport.pieces_for(x.shape[0])
        pushed = transport.start_push(x, peers, signals, pieces)
        whole = peers[self.group.rank]
        try:
            outs = product.of(whole).compute(Gathered(peers, signals, pieces))
            if not any(y.numel() for y in outs):  # nothing was computed that would have waited
                transport.wait_for_rows(signals, pieces)
        except Exception:
            _end_after_error(channel, pushed, partial(transport.wait_for_rows, signals, pieces))
            raise
        pushed()
        try:
            return outs, whole.clone() if keep else whole
        finally:
            channel.end()

    def linear_reduce_scatter(self, product: Product, *, bias: torch.Tensor | None = None, site: str) -> Pending:
        if not product.tokens:
            return Plain(self.group).linear_reduce_scatter(product, bias=bias, site=site)
        collectives.check_rows(product.tokens, self.group, site)
        return self._sum("reduce_scatter", product, bias, site)

    def linear_all_reduce(
        self, product: Product, *, bias: torch.Tensor | None = None, site: str, async_op: bool = True
    ) -> Pending:
        if not product.tokens:
            return Plain(self.group).linear_all_reduce(product, bias=bias, site=site)
        return self._sum("all_reduce", product, bias, site)

    def _sum(self, kind: str, product: Product, bias: torch.Tensor | None, site: str) -> Pending:
        from ...kernels.comm import reduce  # Triton, only when a kernel runs

        tokens, width, like = product.tokens, product.width, product.rows[0]
        everywhere = kind == "all_reduce"
        collectives.count(kind, tokens * width * like.element_size(), site)
        shape = (all_reduce_shape if everywhere else reduce_scatter_shape)(tokens, width, self.group.size)
        channel, peers, signals = self._begin(REDUCE, shape, like, site)
        try:
            product.send(Scattered(peers, signals))
        except Exception:
            channel.abandon()
            raise

        def finish() -> torch.Tensor:
            try:
                (y,) = reduce.reduce_scattered(peers, signals, tokens, width, like.dtype, bias=bias, gather=everywhere)
            except Exception:
                channel.abandon()
                raise
            channel.end()
            return y

        return Pending(finish)

    def _begin(self, name: str, shape: Sequence[int], like: torch.Tensor, site: str) -> tuple[Channel, Any, Any]:
        nbytes = torch.Size(shape).numel() * like.element_size()
        channel = SymmetricMemoryPool.of(self.group, device=like.device).channel(name, nbytes)
        return channel, *channel.begin(shape, like.dtype, op=site)


def _end_after_error(channel: Channel, *steps: Callable[[], None]) -> None:
    """End an exchange whose product failed: take the steps that are left, and ignore what fails in them."""
    try:
        for step in steps:
            step()
        channel.end()
    except Exception:
        channel.abandon()
