"""Linear layers with their collectives inside one autograd function.

Composed of :mod:`functional` and ``linear_act``, as they are under torch.compile, they would compute the same. Here
backward starts to reduce dx and forms dW while that is under way, sums land in the buffers that the products made, and
autograd sees one node for each layer, its sharded parameters included.

    layer    weight     x                  y                  crosses ranks in forward, in backward
    column   [F/R, D]   [..., D]           [..., F/R]         nothing, all-reduce of dx
    row      [F, D/R]   [..., D/R]         [..., F]           all-reduce of y, nothing
    with sequence parallelism (tokens are dimension 0):
    column   [F/R, D]   [T/R, D]           [T, F/R]           all-gather of x, reduce-scatter of dx
    row      [F, D/R]   [T, D/R]           [T/R, F]           reduce-scatter of y, all-gather of dy

A collective in backward is counted at ``site + ".grad"``. Sources: see :mod:`functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..kernels.linear import linear_act, parts
from . import collectives, functional
from .mesh import Group
from .sharding import local_tensors, unwrap, wrap_grads

Params = Sequence[Any]  # parameters as a module holds them, DTensors or plain, or None


def column_linear(
    x: torch.Tensor,
    weights: Params,
    biases: Params,
    group: Group,
    *,
    activation: str = "identity",
    sequence_parallel: bool = False,
    impl: str = "auto",
    site: str,
) -> tuple[torch.Tensor, ...]:
    """act(x @ W_i^T + b_i) for up to three weights [F_i/R, D], which share x's one collective.

    Raises ValueError for operands that do not fit.
    """
    if group.size == 1:
        return linear_act(x, weights, biases, activation=activation, impl=impl)
    if not torch.compiler.is_compiling():
        return _Column.apply(_Call(group, activation, sequence_parallel, impl, site), x, *weights, *biases)
    if sequence_parallel:
        x = functional.all_gather_from(x, group, dim=0, site=site)
    else:
        x = functional.copy_to(x, group, site=site)
    return linear_act(x, local_tensors(*weights), local_tensors(*biases), activation=activation, impl=impl)


def row_linear(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    group: Group,
    *,
    sequence_parallel: bool = False,
    impl: str = "auto",
    site: str,
) -> torch.Tensor:
    """x @ W^T summed over the ranks, plus b: weight [F, D/R], bias [F], whole on every rank, or None.

    Raises ValueError for operands that do not fit.
    """
    if group.size == 1:
        return linear_act(x, weight, bias, impl=impl)
    if not torch.compiler.is_compiling():
        return _Row.apply(_Call(group, "identity", sequence_parallel, impl, site), x, weight, bias)
    weight, bias = local_tensors(weight, bias)
    y = linear_act(x, weight, impl=impl)
    if sequence_parallel:
        y = functional.reduce_scatter_to(y, group, dim=0, site=site)
        (bias,) = functional.copy_all_to([bias], group, site=f"{site}.bias")
    else:
        y = functional.reduce_from(y, group, site=site)
    return y if bias is None else y + bias.to(y.dtype)


class _Call(NamedTuple):
    """The options of one call."""

    group: Group
    activation: str
    sequence_parallel: bool
    impl: str
    site: str


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> tuple[torch.Tensor, ...]:
        n = len(params) // 2
        plain, ctx.specs = unwrap(params)
        dtype, ctx.choice = parts.prepare(x, plain[:n], plain[n:], call.activation, call.impl)
        ctx.call, ctx.n, ctx.dtypes = call, n, _dtypes(x, *plain)
        x, *operands = _autocast((x, *plain), dtype)
        if call.sequence_parallel:
            x = collectives.all_gather(x, call.group, site=call.site)
        rows, weights = _rows(x), operands[:n]
        ys, zs = parts.forward(rows, weights, operands[n:], call.activation, ctx.choice)
        ctx.x_shape = x.shape
        ctx.save_for_backward(rows, *weights, *zs)
        return tuple(_shaped(y, x) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        call, n = ctx.call, ctx.n
        rows, *rest = ctx.saved_tensors
        weights, zs = rest[:n], rest[n:]
        _, want_x, *want = ctx.needs_input_grad

        dzs = [_rows(dy) for dy in dys]
        if zs:
            dzs = [parts.activation_grad(dz, z, call.activation, ctx.choice) for dz, z in zip(dzs, zs)]
        if want_x:
            dx = parts.input_grad(dzs, weights, ctx.choice).view(ctx.x_shape)
            start = collectives.start_reduce_scatter if call.sequence_parallel else collectives.start_all_reduce
            finish = start(dx, call.group, site=f"{call.site}.grad")
        dws, dbs = parts.param_grads(dzs, rows, want[:n], want[n:], ctx.choice)
        dx, *grads = _cast((finish() if want_x else None, *dws, *dbs), ctx.dtypes)
        return None, dx, *wrap_grads(grads, ctx.specs)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> torch.Tensor:
        plain, ctx.specs = unwrap(params)
        dtype, ctx.choice = parts.prepare(x, plain[:1], plain[1:], "identity", call.impl)
        ctx.call, ctx.x_shape, ctx.dtypes = call, x.shape, _dtypes(x, *plain)
        x, weight, bias = _autocast((x, *plain), dtype)
        rows = _rows(x)
        (y,), _ = parts.forward(rows, [weight], [None], "identity", ctx.choice)
        y = _shaped(y, x)
        if call.sequence_parallel:
            y = collectives.reduce_scatter(y, call.group, site=call.site)
        else:
            y = collectives.all_reduce(y, call.group, site=call.site, inplace=True)
        ctx.save_for_backward(rows, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        rows, weight = ctx.saved_tensors
        _, want_x, want_weight, want_bias = ctx.needs_input_grad
        if call.sequence_parallel:  # every token's gradient: the bias then needs no collective of its own
            dy = collectives.all_gather(dy, call.group, site=f"{call.site}.grad")
        dys = [_rows(dy)]
        dx = parts.input_grad(dys, [weight], ctx.choice).view(ctx.x_shape) if want_x else None
        dws, dbs = parts.param_grads(dys, rows, [want_weight], [want_bias], ctx.choice)
        dx, *grads = _cast((dx, *dws, *dbs), ctx.dtypes)
        return None, dx, *wrap_grads(grads, ctx.specs)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [T, D]."""
    return x.reshape(-1, x.shape[-1])


def _shaped(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``rows`` [T, F] in the leading dimensions of ``like``; itself, not a view, where these are [T] already."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[-1])


def _dtypes(*tensors: torch.Tensor | None) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _autocast(tensors: Params, dtype: torch.dtype) -> Params:
    """What autocast does to operands; without it a mixture stays one, and is refused."""
    return _cast(tensors, [dtype] * len(tensors)) if torch.is_autocast_enabled(tensors[0].device.type) else tensors


def _cast(tensors: Params, dtypes: Sequence[torch.dtype | None]) -> list[Any]:
    """Each tensor in its dtype; None stays None."""
    return [
        tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)
        for tensor, dtype in zip(tensors, dtypes)
    ]
