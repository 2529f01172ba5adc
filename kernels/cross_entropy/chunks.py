"""The way through the logits in chunks, of which one (two, where ranks talk meanwhile) is in memory at a time.

Rows [T, D] (hidden states), weight [V/R, D], bias [V/R] or None, targets [T]: this rank's, in the dtype to compute in.
Three ways:

    statistics   the logits once, in chunks of tokens: what a loss without gradients, or one loss per token, needs
    once         loss and gradients in one pass over chunks of tokens: the three products of a linear layer, no more.
                 The weight's gradient is summed over the chunks, in fp32, in the products' epilogue
    again        gradients from gradients of every token's loss and the saved statistics: the logits are formed anew,
                 in blocks of the vocabulary, so that a block of the weight's gradient is one whole product and only
                 the hidden states' is summed over blocks

A chunk's softmax wants the whole vocabulary's statistics before its gradient can be formed, and that gradient is gone
when the next chunk comes: with several ranks, ``once`` must exchange statistics chunk by chunk (one exchange for all
would mean forming the logits again, a fourth product). The exchange of one chunk runs while the next one's logits are
formed, so its latency is hidden; the price is a second chunk in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..linear import Product, functional
from ..runtime import alloc
from ..runtime.dispatch import Choice
from . import reference
from .reference import STATISTICS, Loss, accumulator

SHARE = 8  # at most this part of the logits is in memory at a time, but for the least chunks
MOST_BYTES = 256 * 2**20  # and at most this much
LEAST = 64  # rows; chunks are multiples of it
LEAST_BYTES = 4 * 2**20  # less is over sooner than it is launched

# (this rank's statistics [4, t]) -> what waits for and returns all ranks', [R, 4, t].
Exchange = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
Want = Sequence[bool]  # which gradients: of the rows, the weight, the bias


def chunk_size(length: int, width: int, depth: int, itemsize: int, *, summed: bool, in_flight: int = 1) -> int:
    """Rows in a chunk [rows, width] of a product [length, width] over ``depth``, of which ``in_flight`` exist at once.

    ``summed``: each chunk is multiplied into an fp32 sum [width, depth], which is read and written every time. Chunks
    have depth/4 rows there, even where that is more than their share: fewer would make that traffic the longest part of
    the work, and in 16 bits such a chunk is an eighth of the sum.
    """
    row_bytes = max(width, 1) * itemsize
    rows = max(length // (SHARE * in_flight), LEAST_BYTES // row_bytes, depth // 4 if summed else 0)
    rows = min(rows, MOST_BYTES // (in_flight * row_bytes))
    return max(LEAST, rows // LEAST * LEAST)


def statistics(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    loss: Loss,
    choice: Choice,
    chunk: int | None = None,
) -> torch.Tensor:
    """[4, T] of this rank's columns."""
    T, D = rows.shape
    found = alloc.empty((STATISTICS, T), accumulator(rows.dtype), rows.device)
    for span in _spans(T, chunk or chunk_size(T, len(weight), D, rows.element_size(), summed=False)):
        logits = _logits(rows[span], weight, bias, choice)
        _statistics(logits, targets[span], loss, choice, found[:, span])
        del logits  # before the next chunk's exist
    return found


def once(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    loss: Loss,
    choice: Choice,
    want: Want,
    chunk: int | None = None,
    exchange: Exchange | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Losses [T] and the gradients of their sum: of the rows in their dtype, of weight and bias in fp32 (fp64).

    None for those that are not in ``want``. The rows' gradient is this rank's addend. ``exchange`` is given where other
    ranks have the rest of the vocabulary.
    """
    T, D = rows.shape
    want_rows, want_weight, want_bias = want
    dtype, device = accumulator(rows.dtype), rows.device
    losses = alloc.empty((T,), dtype, device)
    drows = alloc.empty((T, D), rows.dtype, device) if want_rows else None
    dweight = torch.zeros(weight.shape, dtype=dtype, device=device) if want_weight else None
    dbias = torch.zeros(len(weight), dtype=dtype, device=device) if want_bias else None

    def finish(span: slice, logits: torch.Tensor, stats: Callable[[], torch.Tensor] | None) -> None:
        _gradient_(logits, targets[span], None if stats is None else stats(), None, loss, choice, losses[span])
        if drows is not None:
            (drows[span],) = Product.input_grad([logits], [weight], choice).compute()
        functional.param_grads(
            [logits], rows[span], [want_weight], [want_bias], choice, into=[dweight], bias_into=[dbias]
        )

    in_flight = 1 if exchange is None else 2
    if chunk is None:
        chunk = chunk_size(T, len(weight), D, rows.element_size(), summed=want_weight, in_flight=in_flight)
    started: deque[Any] = deque()
    for span in _spans(T, chunk):
        logits = _logits(rows[span], weight, bias, choice)
        stats = None
        if exchange is not None:
            ours = alloc.empty((STATISTICS, len(logits)), dtype, device)
            _statistics(logits, targets[span], loss, choice, ours)
            stats = exchange(ours)
        started.append((span, logits, stats))
        del logits
        if len(started) == in_flight:
            finish(*started.popleft())
    while started:
        finish(*started.popleft())
    return losses, drows, dweight, dbias


def again(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    stats: torch.Tensor,
    gain: torch.Tensor,
    loss: Loss,
    choice: Choice,
    want: Want,
    chunk: int | None = None,
    into: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of rows, weight and bias, in the rows' dtype, from those of the losses, ``gain`` [T].

    ``stats`` [4, T] are of the whole vocabulary. None for what is not in ``want``, and for weight and bias where
    ``into`` has a buffer, to which they are added. A ``chunk`` of tokens means a block of as many logits.
    """
    (T, D), width = rows.shape, len(weight)
    want_rows, want_weight, want_bias = want
    into_weight, into_bias = into
    drows = torch.zeros(T, D, dtype=accumulator(rows.dtype), device=rows.device) if want_rows else None
    dweight = alloc.empty(weight.shape, rows.dtype, rows.device) if want_weight and into_weight is None else None
    dbias = alloc.empty((width,), rows.dtype, rows.device) if want_bias and into_bias is None else None
    if chunk is None:
        block = chunk_size(width, T, D, rows.element_size(), summed=want_rows)
    else:
        block = -(-min(chunk, T) * width // max(T, 1))
    for span in _spans(width, max(block, 1)):
        part = loss.part(span.start, span.stop - span.start)
        logits = _logits(rows, weight[span], None if bias is None else bias[span], choice)
        _gradient_(logits, targets, stats[None], gain, part, choice, None)
        if drows is not None:
            drows += Product.input_grad([logits], [weight[span]], choice).compute()[0]
        (dw,), (db,) = functional.param_grads(
            [logits],
            rows,
            [want_weight],
            [want_bias],
            choice,
            into=[None if into_weight is None else into_weight[span]],
            bias_into=[None if into_bias is None else into_bias[span]],
        )
        del logits
        if dweight is not None and dw is not None:
            dweight[span] = dw
        if dbias is not None and db is not None:
            dbias[span] = db
    return None if drows is None else drows.to(rows.dtype), dweight, dbias


def _spans(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: Choice) -> torch.Tensor:
    (logits,) = Product.linear_act(rows, [weight], [bias], "identity", choice).compute()
    return logits


def _statistics(logits: torch.Tensor, targets: torch.Tensor, loss: Loss, choice: Choice, out: torch.Tensor) -> None:
    if choice.triton:
        from . import launch  # Triton, only when a kernel runs

        launch.statistics(logits, targets, loss, out)
    else:
        out.copy_(reference.statistics(logits, targets, loss))


def _gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    stats: torch.Tensor | None,
    gain: torch.Tensor | None,
    loss: Loss,
    choice: Choice,
    losses: torch.Tensor | None,
) -> None:
    if choice.triton:
        from . import launch

        launch.gradient_(logits, targets, stats, gain, loss, losses)
    else:
        found = reference.gradient_(logits, targets, stats, gain, loss)
        if losses is not None:
            losses.copy_(found)
