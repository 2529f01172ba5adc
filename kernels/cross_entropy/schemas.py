"""The passes of ``chunks.py`` as torch ops, with their shape functions: what torch.compile and opcheck see.

A pass is one op, loop included, so that a compiled graph serves any number of tokens and no compiler unrolls chunks.
``parallel/cross_entropy.py`` puts them together in autograd functions. A gradient that is not wanted comes back empty.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import library
from ..runtime.dispatch import Choice
from . import chunks
from .reference import STATISTICS, Loss, accumulator

_OPERANDS = "Tensor rows, Tensor weight, Tensor? bias, Tensor targets"
_LOSS = (
    "SymInt vocab_size, SymInt first, SymInt columns, int ignore_index, float label_smoothing, float z_loss, "
    "float? softcap"
)


def _choice(impl: str) -> Choice:
    return Choice(impl, "chosen by the caller")


def _or_empty(found: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if found is None else found


def _statistics(rows: Any, weight: Any, bias: Any, targets: Any, *rest: Any) -> torch.Tensor:
    *loss, chunk, impl = rest
    return chunks.statistics(rows, weight, bias, targets, Loss(*loss), _choice(impl), chunk)


def _statistics_fake(rows: Any, weight: Any, bias: Any, targets: Any, *rest: Any) -> torch.Tensor:
    return rows.new_empty((STATISTICS, rows.shape[0]), dtype=accumulator(rows.dtype))


def _once(rows: Any, weight: Any, bias: Any, targets: Any, *rest: Any) -> Any:
    *loss, chunk, want, impl = rest
    losses, *grads = chunks.once(rows, weight, bias, targets, Loss(*loss), _choice(impl), want, chunk)
    return (losses, *(_or_empty(grad, rows) for grad in grads))


def _once_fake(rows: Any, weight: Any, bias: Any, targets: Any, *rest: Any) -> Any:
    want, wide = rest[-2], accumulator(rows.dtype)
    kinds = ((rows, rows.dtype), (weight, wide), (weight[:, 0], wide))
    grads = (rows.new_empty(t.shape, dtype=dtype) if w else rows.new_empty(0) for (t, dtype), w in zip(kinds, want))
    return (rows.new_empty(rows.shape[:1], dtype=wide), *grads)


def _again(rows: Any, weight: Any, bias: Any, targets: Any, stats: Any, gain: Any, *rest: Any) -> Any:
    *loss, chunk, want, impl = rest
    grads = chunks.again(rows, weight, bias, targets, stats, gain, Loss(*loss), _choice(impl), want, chunk)
    return tuple(_or_empty(grad, rows) for grad in grads)


def _again_fake(rows: Any, weight: Any, bias: Any, targets: Any, stats: Any, gain: Any, *rest: Any) -> Any:
    shapes = rows.shape, weight.shape, weight.shape[:1]
    return tuple(rows.new_empty(shape if w else 0) for shape, w in zip(shapes, rest[-2]))


statistics = library.register(
    f"linear_cross_entropy_statistics({_OPERANDS}, {_LOSS}, SymInt? chunk, str impl) -> Tensor",
    _statistics,
    _statistics_fake,
)
once = library.register(
    f"linear_cross_entropy_once({_OPERANDS}, {_LOSS}, SymInt? chunk, bool[] want, str impl)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _once,
    _once_fake,
)
again = library.register(
    f"linear_cross_entropy_again({_OPERANDS}, Tensor stats, Tensor gain, {_LOSS}, SymInt? chunk, bool[] want, "
    "str impl) -> (Tensor, Tensor, Tensor)",
    _again,
    _again_fake,
)
