"""What the autograd functions of ``linear.py`` and ``mlp.py`` do with their operands, and with gradients at the end.

A function takes (call, x, *params): its options, an activation [..., D], and parameters as modules hold them, DTensors
or plain, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels import autograd
from .sharding import unwrap, wrap_grads

Params = Sequence[Any]


def open_params(ctx: Any, x: torch.Tensor, params: Params, fuse_wgrad_accumulation: bool) -> list[Any]:
    """This rank's plain tensors of ``params``. Notes on ``ctx`` what :func:`close_grads` wants."""
    plain, ctx.specs = unwrap(params)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, *plain)]
    ctx.buffers = autograd.main_grads(params, plain) if fuse_wgrad_accumulation else [None] * len(plain)
    return plain


def close_grads(ctx: Any, dx: torch.Tensor | None, grads: Params) -> tuple[Any, ...]:
    """What backward returns: gradients in the dtype and layout of x and the parameters."""
    dx, *grads = _cast((dx, *grads), ctx.dtypes)
    return None, dx, *wrap_grads(grads, ctx.specs)


def autocast(tensors: Params, dtype: torch.dtype) -> Params:
    """What autocast does to operands; without it a mixture of dtypes stays one, and is refused."""
    return _cast(tensors, [dtype] * len(tensors)) if torch.is_autocast_enabled(tensors[0].device.type) else tensors


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [T, D]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def shaped(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``rows`` [T, F] in the leading dimensions of ``like``; itself, not a view, where these are [T] already."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[-1])


def _cast(tensors: Params, dtypes: Sequence[torch.dtype | None]) -> list[Any]:
    """Each tensor in its dtype; None stays None."""
    return [
        tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)
        for tensor, dtype in zip(tensors, dtypes)
    ]
