"""Three collectives in pieces of rows, for callers that compute while the pieces travel (``overlap/strategies.py``).

A collective in pieces is counted once, with the same payload as the whole. An error in the caller's products is raised
unchanged, after the posted pieces have arrived, so that the next collective cannot receive them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.runtime import alloc
from .collectives import Flight, check_rows, count, sum_in_place
from .mesh import Group

# The tags of these messages between ranks on CPUs; all other messages have different ones.
GATHER_TAG, SCATTER_TAG = 0x5F01, 0x5F02


class _Swap:
    """One step of a pattern that all ranks follow: send rows to one rank, receive rows from another."""

    def __init__(
        self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, group: Group, tag: int
    ) -> None:
        self.sent = sent  # kept alive until it is sent
        pg: Any = group.pg
        if sent.device.type == "cpu":
            self.receiving, self.sending = [pg.recv([received], source, tag)], [pg.send([sent], to, tag)]
            return
        # NCCL matches messages by order, and sends and receives of one batch cannot deadlock.
        out = dist.P2POp(dist.isend, sent, group=pg, group_peer=to)
        into = dist.P2POp(dist.irecv, received, group=pg, group_peer=source)
        self.receiving, self.sending = dist.batch_isend_irecv([out, into]), []

    def wait(self) -> None:
        for work in self.receiving:
            work.wait()

    def settle(self) -> None:
        for work in self.sending:
            work.wait()


class GatherPieces:
    """An all-gather of the rows of ``x`` [n, ...], n > 0, each shard in up to ``pieces`` pieces: ``whole`` [R n, ...].

    :meth:`arriving` yields slices of the whole's rows as they arrive: this rank's own shard first, then the shards of
    rank + 1, rank + 2, .... After its end, ``x`` may be overwritten. As a context manager it waits for the posted
    pieces if its body fails.
    """

    def __init__(self, x: torch.Tensor, group: Group, pieces: int, *, site: str) -> None:
        n, size, rank = x.shape[0], group.size, group.rank
        others = [(rank + step) % size for step in range(1, size)]
        self._own = slice(rank * n, (rank + 1) * n)
        self._flights: list[tuple[slice, Flight]] = []
        self._arrived: list[Flight] = []
        count("all_gather", x.nbytes, site)
        shard = x.contiguous()
        self.whole = alloc.empty((size * n, *x.shape[1:]), x.dtype, x.device)
        for source in others:
            to = (2 * rank - source) % size  # as far behind this rank as the source is ahead
            for rows in cuts(n, pieces):
                part = slice(source * n + rows.start, source * n + rows.stop)
                post = partial(_Swap, shard[rows], to, self.whole[part], source, group, GATHER_TAG)
                self._flights.append((part, Flight("all_gather", site, post)))
        self.whole[self._own] = shard

    def arriving(self) -> Iterator[slice]:
        yield self._own
        while self._flights:
            part, flight = self._flights.pop(0)  # after a failure, __exit__ must not wait for it again
            self._arrived.append(flight)
            flight.wait()
            yield part
        for flight in self._arrived:
            flight.settle()

    def __enter__(self) -> GatherPieces:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            waiting = [flight for _, flight in self._flights]
            _land(waiting, sent=[*self._arrived, *waiting])


class _SumPieces(ABC):
    """A sum over the ranks of ``tokens`` > 0 rows that the caller computes part by part, in the order of ``parts``.

    :meth:`send` sends one part; :meth:`wait` returns the sum. As a context manager it waits for the posted pieces if
    its body fails.
    """

    parts: list[slice]

    def __init__(self, tokens: int, group: Group, site: str) -> None:
        self.tokens, self.group, self.site = tokens, group, site
        self._flights: list[Flight] = []
        self._out: torch.Tensor | None = None

    @abstractmethod
    def send(self, part: slice, y: torch.Tensor) -> None:
        """Send ``y`` [n, ...], this rank's addend to the rows ``part``."""
        ...

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """The sum, once every part has been sent."""

    def __enter__(self) -> _SumPieces:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            _land(self._flights, sent=self._flights)


class ScatterPieces(_SumPieces):
    """A reduce-scatter: other ranks' shards from rank + 1 on, each in up to ``pieces`` pieces, then this rank's own,
    whole.

    The sum runs in rank order and rounds once. Raises ValueError unless the group's size divides ``tokens``.
    """

    def __init__(self, tokens: int, group: Group, pieces: int, *, site: str) -> None:
        super().__init__(tokens, group, site)
        check_rows(tokens, group, site)
        self._n = n = tokens // group.size
        self.parts = [
            slice(owner * n + rows.start, owner * n + rows.stop)
            for owner in [(group.rank + step) % group.size for step in range(1, group.size + 1)]
            for rows in cuts(n, 1 if owner == group.rank else pieces)
        ]

    def send(self, part: slice, y: torch.Tensor) -> None:
        y, n, rank = y.contiguous(), self._n, self.group.rank
        if self._out is None:  # all ranks' addends to this rank's rows
            count("reduce_scatter", y[:1].nbytes * self.tokens, self.site)
            self._out = alloc.empty((self.group.size, n, *y.shape[1:]), y.dtype, y.device)
        owner = part.start // n
        if owner == rank:
            self._out[rank] = y
        else:
            source = (2 * rank - owner) % self.group.size
            received = self._out[source, part.start - owner * n : part.stop - owner * n]
            post = partial(_Swap, y, owner, received, source, self.group, SCATTER_TAG)
            self._flights.append(Flight("reduce_scatter", self.site, post))

    def wait(self) -> torch.Tensor:
        assert self._out is not None
        for flight in self._flights:
            flight.wait()
        for flight in self._flights:
            flight.settle()
        return self._out.sum(0, dtype=self._out.dtype)


class ReducePieces(_SumPieces):
    """An all-reduce in up to ``pieces`` parts, in order: one part is summed while the caller computes the next."""

    def __init__(self, tokens: int, group: Group, pieces: int, *, site: str) -> None:
        super().__init__(tokens, group, site)
        self.parts = cuts(tokens, pieces)

    def send(self, part: slice, y: torch.Tensor) -> None:
        if self._out is None:
            count("all_reduce", y[:1].nbytes * self.tokens, self.site)
            self._out = alloc.empty((self.tokens, *y.shape[1:]), y.dtype, y.device)
        self._out[part] = y
        post = partial(sum_in_place, self._out[part], self.group, "sum", async_op=True)
        self._flights.append(Flight("all_reduce", self.site, post))

    def wait(self) -> torch.Tensor:
        assert self._out is not None
        for flight in self._flights:
            flight.wait()
        return self._out


def _land(flights: list[Flight], sent: list[Flight]) -> None:
    """After a failure, wait for ``flights`` and for the buffers of ``sent``; ignore errors, to report the first one."""
    for step in [*(flight.wait for flight in flights), *(flight.settle for flight in sent)]:
        with suppress(Exception):
            step()


def cuts(n: int, pieces: int) -> list[slice]:
    """``n`` > 0 rows in up to ``pieces`` non-empty parts, whose sizes differ by at most one."""
    pieces = min(pieces, n)
    return [slice(i * n // pieces, (i + 1) * n // pieces) for i in range(pieces)]
