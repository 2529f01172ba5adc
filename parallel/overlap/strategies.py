"""Collectives that travel while the products beside them run: one signature for each, several ways to go.

    operation        collective        the product                              what comes out
    gather           all-gather        of rows as they arrive                   its results [T, F_i], the rows [T, D]
    start_scatter    reduce-scatter    of rows, those of other ranks first      this rank's rows of the sum [T/R, N]
    start_reduce     all-reduce        of rows, from the first to the last      the sum [T, N]

A :class:`links.Path` says which way:

    plain      the whole collective, then the whole product, or the other way round; what a start began still travels
               under whatever the caller does before it finishes
    chunked    rows in pieces, each sent by a message of its own (:mod:`collectives`): any transport, any device
    kernel     the product's own tiles wait for the rows they need, or send what they have formed to its owner
               (:mod:`in_kernel`): where all ranks reach each other's memory

The caller's ``compute`` makes the product of some rows. It gets ``part``, the slice of the T rows that they are
(:data:`ALL` for all of them), to cut what else goes into the product (:func:`cut`). On every way a collective counts as
one, with the same payload at the same site, and every row goes through its product once. On all ranks T, the path and
the order of calls are the same; a call may begin before others have finished.

Where a product fails (memory runs out, say), what travels at the time is waited for, and the error then goes on
(:class:`InFlight`). If all ranks fail alike, the next call finds everything in order. If some do, the others wait for
them in vain, for as long as the process group's or the arena's timeout lets them, and the step is void on every rank.

Cutting the transfer so that the product starts before its end is the decomposition of Wang et al., "Overlap
Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from ...kernels.runtime import alloc
from ...kernels.runtime.signals import ExchangeTimeout
from ..core import collectives
from ..core.mesh import Group
from . import in_kernel
from .policy import Path

PLAIN = Path()
ALL = slice(None)

# (rows [n, D], part, remote) -> results [n, F_i]; and (part, remote) -> this rank's addend to those rows [n, N].
# ``remote`` is None unless the product itself is to receive or send its rows.
ComputeGathered = Callable[[torch.Tensor, slice, Any], Sequence[torch.Tensor]]
ComputeAddend = Callable[[slice, Any], torch.Tensor]
Finish = Callable[[], torch.Tensor]
Result = TypeVar("Result")


class InFlight:
    """What was started in a ``with`` block and is still to be finished there.

    An error that leaves the block finishes it first, so that it neither holds memory nor meets the next collective, and
    goes on. Not after an ExchangeTimeout: a peer that did not come would only be waited for again.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: list[Callable[[], Any]] = []

    def add(self, finish: Callable[[], Result]) -> Callable[[], Result]:
        """``finish``, to be called once in the block."""
        if torch.compiler.is_compiling():  # which cannot follow what comes, and of what it captures nothing travels yet
            return finish
        self._pending.append(finish)

        def once() -> Result:
            self._pending.remove(finish)
            return finish()

        return once

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ExchangeTimeout):
            for finish in self._pending:
                with suppress(Exception):  # of interest is what failed first
                    finish()


def gather(
    x: torch.Tensor, group: Group, compute: ComputeGathered, path: Path, *, site: str, keep: bool = True
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All-gather the rows of ``x`` [T/R, D] and ``compute`` on them: (results, each [T, F_i]; the rows [T, D]).

    Without ``keep`` the rows may be gone when the next rows are gathered in this group.
    """
    if _in_kernel(path, x.shape[0], site):
        collectives.count("all_gather", x.nbytes, site)
        return in_kernel.gather(x, group, partial(product, site, compute), site=site, keep=keep)
    if path.kind == "chunked" and x.shape[0]:
        whole, parts = collectives.start_gather_pieces(x, group, path.pieces, site=site)
        outs: list[torch.Tensor] = []
        with InFlight() as flights:
            flights.add(partial(deque, parts, maxlen=0))  # what is left of them
            for part in parts:
                _place(outs, product(site, compute, whole[part], part, None), part, whole.shape[0])
        return outs, whole
    whole = collectives.all_gather(x, group, site=site)
    return list(product(site, compute, whole, ALL, None)), whole


def start_scatter(
    tokens: int,
    group: Group,
    compute: ComputeAddend,
    path: Path,
    *,
    like: torch.Tensor | None = None,
    width: int = 0,
    bias: torch.Tensor | None = None,
    site: str,
) -> Finish:
    """``compute`` this rank's addend to ``tokens`` rows and begin to sum them; the result waits for the own [T/R, N].

    ``bias`` [N] is added to the sum. The kernel path has to know beforehand the addend's dtype and device, those of
    ``like``, and its ``width`` N. Raises ValueError unless ``tokens`` divide by the group's size.
    """
    if _in_kernel(path, tokens, site):
        if tokens % group.size:
            raise ValueError(f"{site}: {tokens} rows do not divide by the group's {group.size} ranks")
        return _start_sum("reduce_scatter", tokens, group, compute, like, width, bias, site)
    if path.kind == "chunked" and tokens:
        addend = lambda part: product(site, compute, part, None)
        return _then_add(collectives.start_scatter_pieces(tokens, group, path.pieces, addend, site=site), bias)
    return _then_add(collectives.start_reduce_scatter(product(site, compute, ALL, None), group, site=site), bias)


def start_reduce(
    tokens: int,
    group: Group,
    compute: ComputeAddend,
    path: Path,
    *,
    like: torch.Tensor | None = None,
    width: int = 0,
    bias: torch.Tensor | None = None,
    site: str,
) -> Finish:
    """The same for all rows of the sum, [T, N], on every rank."""
    if _in_kernel(path, tokens, site):
        return _start_sum("all_reduce", tokens, group, compute, like, width, bias, site)
    if path.kind == "chunked" and tokens:
        addend = lambda part: product(site, compute, part, None)
        return _then_add(collectives.start_all_reduce_pieces(tokens, group, path.pieces, addend, site=site), bias)
    return _then_add(collectives.start_all_reduce(product(site, compute, ALL, None), group, site=site), bias)


def reduce(tokens: int, group: Group, compute: ComputeAddend, path: Path, *, site: str, **options: Any) -> torch.Tensor:
    """:func:`start_reduce` where nothing is left to do before its end: the plain way then stays on one stream."""
    if path.kind == "plain":
        y = collectives.all_reduce(product(site, compute, ALL, None), group, site=site, inplace=True)
        return _then_add(lambda: y, options.get("bias"))()
    return start_reduce(tokens, group, compute, path, site=site, **options)()


def _in_kernel(path: Path, rows: int, site: str) -> bool:
    """A collective that a test leaves out, and one of no rows, goes the plain way."""
    return path.kind == "kernel" and rows > 0 and not collectives.left_out(site)


def _start_sum(
    kind: str,
    tokens: int,
    group: Group,
    compute: ComputeAddend,
    like: torch.Tensor | None,
    width: int,
    bias: torch.Tensor | None,
    site: str,
) -> Finish:
    assert like is not None, "the kernel's slots are laid out before it has formed anything"
    collectives.count(kind, tokens * width * like.element_size(), site)
    send = partial(product, site, compute)
    return in_kernel.start_sum(tokens, group, send, like, width, bias=bias, everywhere=kind == "all_reduce", site=site)


def _then_add(finish: Finish, bias: torch.Tensor | None) -> Finish:
    return finish if bias is None else lambda: finish().add_(bias)


def product(site: str, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run a product under which the collective of ``site`` may travel, and note when."""
    collectives.note("start", "product", site)
    result = work(*args, **kwargs)
    collectives.note("end", "product", site)
    return result


def cut(x: torch.Tensor, part: slice) -> torch.Tensor:
    """The rows ``part`` of ``x`` [T, ...]; itself where that is all of them."""
    return x if part.start is None else x[part]


def _place(outs: list[torch.Tensor], results: Sequence[torch.Tensor], part: slice, tokens: int) -> None:
    """Put the ``results`` for the rows ``part`` where they belong; the first ones say what there is to hold."""
    if not outs:
        outs += [alloc.empty((tokens, *y.shape[1:]), y.dtype, y.device) for y in results]
    for out, y in zip(outs, results):
        out[part] = y
