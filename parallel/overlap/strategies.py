"""Run a linear layer's product and the collective beside it: three strategies with the same three methods.

    method                  collective       the product                           returns
    all_gather_linear       all-gather       of rows as they arrive                its results [T, F_i], the rows [T, D]
    linear_reduce_scatter   reduce-scatter   of rows, those of other ranks first   this rank's rows of the sum [T/R, N]
    linear_all_reduce       all-reduce       of rows, from the first to the last   the sum [T, N]

    Plain      the whole collective, then the whole product, or the other way round; a started sum travels while the
               caller does other work, until it waits
    Chunked    rows in pieces, each in a message of its own (``core/pieces.py``): any transport, any device
    InKernel   the product's own tiles wait for the rows they need, or send their rows to the owners, through symmetric
               memory (``memory/``): requires that all ranks reach each other's memory

A product is a value (``kernels/linear/product.py``); a strategy replaces its rows and decides when it runs. Under each
strategy a collective counts once, with the same payload at the same site, and every row goes through its product once.
T, the strategy and the order of calls are the same on all ranks; a call may begin before others have finished.

If a product fails (memory runs out, say), the strategy waits for the transfers under way and then raises the error. If
all ranks fail alike, the next call works normally. If only some fail, the others wait until the process group's or the
memory pool's timeout, and the step is void on every rank.

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

from ...kernels.comm import all_reduce_shape, compute_gathered, reduce_scatter_shape, scatter_sum, transport
from ...kernels.linear import Product
from ...kernels.runtime import alloc
from ...kernels.runtime.signals import ExchangeTimeout
from ..core import collectives
from ..core.mesh import Group
from ..core.pieces import GatherPieces, ReducePieces, ScatterPieces
from .memory.pool import Channel, SymmetricMemoryPool

GATHER, REDUCE = "gather", "reduce"  # the channels of InKernel: for gathered rows, and for partial sums


class Pending:
    """A collective under way; :meth:`wait`, called once, returns its result, plus the ``bias``."""

    __slots__ = ("_bias", "_finish")

    def __init__(self, finish: Callable[[], torch.Tensor], bias: torch.Tensor | None = None) -> None:
        self._finish, self._bias = finish, bias

    def wait(self) -> torch.Tensor:
        y = self._finish()
        return y if self._bias is None else y.add_(self._bias)


class InFlight:
    """Collectives that start in a ``with`` block and are waited for there.

    If an error leaves the block, the block first waits for the other collectives, so that none of them holds memory or
    meets the next collective. After an ExchangeTimeout it does not wait, because the missing peer would not arrive
    either.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: list[Pending] = []

    def add(self, pending: Pending) -> Pending:
        """Register ``pending``, to be waited for once in the block, and return it."""
        if torch.compiler.is_compiling():  # Dynamo cannot trace this, and a captured collective is not under way yet
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
    """The interface of the three strategies. ``site`` names the collective."""

    def all_gather_linear(
        self, product: Product, *, site: str, keep: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gather the product's rows [T/R, D] from all ranks and compute it on them: (results, the rows [T, D]).

        The operands of its epilogue have all T rows. Without ``keep`` the next gather in this group may overwrite the
        rows.
        """
        ...

    def linear_reduce_scatter(self, product: Product, *, bias: torch.Tensor | None = None, site: str) -> Pending:
        """Compute this rank's partial sum [T, N] and start to reduce it: this rank's rows [T/R, N], plus ``bias``.

        Raises ValueError unless T divides by the group's size.
        """
        ...

    def linear_all_reduce(
        self, product: Product, *, bias: torch.Tensor | None = None, site: str, async_op: bool = True
    ) -> Pending:
        """As :meth:`linear_reduce_scatter`, for the whole sum [T, N] on all ranks. ``async_op=False`` waits at once."""
        ...


@dataclass(frozen=True)
class Plain:
    """The collective and the product one after the other."""

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
    """Each rank's shard travels in up to ``pieces`` pieces; in an all-reduce, all rows do."""

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
                for out in outs:
                    out[part] = results.pop(0)  # a piece's memory is free for the next one
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

    An exchange begins after the previous one on its channel has been read, in the order of the stream on which both
    run. It always ends, even after an error. Gathered rows have been pushed before their product is formed, so a
    failing product leaves rows that only have to be waited for. Partial sums that were never formed cannot be waited
    for: their exchange is abandoned, and the ranks synchronize before the next one (``Channel.abandon``).

    A collective of no rows runs plainly.
    """

    group: Group

    def all_gather_linear(
        self, product: Product, *, site: str, keep: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        if not product.tokens:
            return Plain(self.group).all_gather_linear(product, site=site)
        x = product.rows[0].contiguous()  # allocates, so not in the middle of an exchange
        collectives.count("all_gather", x.nbytes, site)
        channel, peers, signals = self._begin(GATHER, (x.shape[0] * self.group.size, x.shape[1]), x, site)
        pieces = transport.pieces_for(x.shape[0])
        whole = peers[self.group.rank]
        try:
            outs = compute_gathered(product._replace(rows=(x,)), peers, signals, pieces)
        except Exception:
            _end_after_error(channel, partial(transport.wait_for_rows, signals, pieces))
            raise
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
        tokens, width, like = product.tokens, product.width, product.rows[0]
        everywhere = kind == "all_reduce"
        collectives.count(kind, tokens * width * like.element_size(), site)
        shape = (all_reduce_shape if everywhere else reduce_scatter_shape)(tokens, width, self.group.size)
        channel, peers, signals = self._begin(REDUCE, shape, like, site)
        try:
            add_up = scatter_sum(product, peers, signals, bias=bias, gather=everywhere)
        except Exception:
            channel.abandon()
            raise

        def finish() -> torch.Tensor:
            try:
                (y,) = add_up()
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


def _end_after_error(channel: Channel, wait: Callable[[], None]) -> None:
    """End an exchange whose product failed once all ranks' rows are here; ignore errors meanwhile."""
    try:
        wait()
        channel.end()
    except Exception:
        channel.abandon()
