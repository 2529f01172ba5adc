"""Unwrap the operands of the autograd functions of ``linear.py`` and ``mlp.py``, and wrap their gradients.

A function takes (call, x, *params): its options, an activation [..., D], and parameters as modules hold them: DTensors,
plain tensors or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.linear.functional import cast
from ...kernels.runtime import autograd
from .sharding import unwrap, wrap_grads

Params = Sequence[Any]


def open_params(ctx: Any, x: torch.Tensor, params: Params, fuse_wgrad_accumulation: bool) -> list[Any]:
    """This rank's plain tensors of ``params``. Stores on ``ctx`` what :func:`close_grads` needs."""
    plain, ctx.specs = unwrap(params)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, *plain)]
    ctx.buffers = autograd.main_grads(params, plain) if fuse_wgrad_accumulation else [None] * len(plain)
    return plain


def close_grads(ctx: Any, dx: torch.Tensor | None, grads: Params) -> tuple[Any, ...]:
    """The return value of backward: gradients in the dtype and layout of x and the parameters."""
    dx, *grads = cast((dx, *grads), ctx.dtypes)
    return dx, *wrap_grads(grads, ctx.specs)
