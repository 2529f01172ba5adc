"""Calls of a feed-forward layer in one process like one before: see ``runtime/repeated.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import dispatch, library, repeated
from ..runtime.dispatch import Choice
from .config import forced


class Saved(NamedTuple):
    """What a feed-forward layer's forward kept for backward; None for what that does not read."""

    x: torch.Tensor | None
    h: torch.Tensor | None
    weights: Sequence[torch.Tensor]
    out_weight: torch.Tensor
    zs: Sequence[torch.Tensor]  # [z], or [g, u]


_calls: repeated.Calls[Any] = repeated.Calls()  # settled.FeedForward


def key_of(
    impl: str, x: torch.Tensor, params: tuple[Any, ...], residual: torch.Tensor | None, activation: str, saves: bool
) -> Any:
    """What a call is looked up by, None where it has to be looked at anew. ``params`` as in ``settled.FeedForward``."""
    if forced.config is not None or not dispatch.may_launch(impl, x):
        return None
    return repeated.key_of(impl, (x, residual, *params), (activation, saves))


def find(key: Any) -> Any:
    """The ``settled.FeedForward`` of calls of this kind, or None."""
    return None if key is None else _calls.get(key)


def keep(
    key: Any, choices: tuple[Choice, Choice], x: torch.Tensor, params: tuple[Any, ...], residual: torch.Tensor | None
) -> None:
    """After a call with these choices: settle those of its kind, if launches are all that they need."""
    if key is None or not all(choice.triton for choice in choices) or dispatch.row_invariant():
        return
    activation, saves = key[1]
    biases = params[len(params) // 2 - 1 : -2] + params[-1:]
    dense = all(t is None or (t.is_contiguous() and t.dtype is x.dtype) for t in (residual, *biases))
    plain = dense and residual is not x and all(t is None or t.numel() for t in params)
    if plain and repeated.rows_lie(x) and (len(params) == 6 or activation != "identity"):
        settled = library.imported(f"{__package__}.settled")
        _calls[key] = settled.FeedForward(x, params, residual, activation, saves)
