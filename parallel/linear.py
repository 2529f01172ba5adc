"""Linear layers with their collectives inside one autograd function.

Composed of :mod:`functional` and ``linear_act``, as they are under torch.compile, they would compute the same. Here
backward starts to reduce dx and forms dW while that is under way, sums land in the buffers that the products made, and
autograd sees one node for each layer, its sharded parameters included. A pass of backward forms what it is asked for,
and one that follows it over the same graph repeats no product and no collective (``kernels/autograd.py``).

    layer    weight     x                  y                  crosses ranks in forward, in backward
    column   [F/R, D]   [..., D]           [..., F/R]         nothing, all-reduce of dx
    row      [F, D/R]   [..., D/R]         [..., F]           all-reduce of y, nothing
    with sequence parallelism (tokens are dimension 0):
    column   [F/R, D]   [T/R, D]           [T, F/R]           all-gather of x, reduce-scatter of dx
    row      [F, D/R]   [T, D/R]           [T/R, F]           reduce-scatter of y, all-gather of dy

A collective in backward is counted at ``site + ".grad"``. Sources: see :mod:`functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels import autograd
from ..kernels.linear import linear_act, parts
from . import collectives, functional
from .mesh import Group
from .operands import Params, autocast, close_grads, open_params
from .sharding import local_tensors


def column_linear(
    x: torch.Tensor,
    weights: Params,
    biases: Params,
    group: Group,
    *,
    activation: str = "identity",
    sequence_parallel: bool = False,
    fuse_wgrad_accumulation: bool = False,
    impl: str = "auto",
    site: str,
) -> tuple[torch.Tensor, ...]:
    """act(x @ W_i^T + b_i) for up to three weights [F_i/R, D], which share x's one collective.

    ``fuse_wgrad_accumulation`` adds the parameters' gradients to their ``main_grad`` instead of returning them.
    Raises ValueError for operands that do not fit.
    """
    fused: dict[str, Any] = {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "impl": impl}
    if group.size == 1:
        return linear_act(x, weights, biases, activation=activation, **fused)
    if not torch.compiler.is_compiling():
        return _Column.apply(_Call.now(group, activation, sequence_parallel, site=site, **fused), x, *weights, *biases)
    if sequence_parallel:
        x = functional.all_gather_from(x, group, dim=0, site=site)
    else:
        x = functional.copy_to(x, group, site=site)
    return linear_act(x, local_tensors(*weights), local_tensors(*biases), activation=activation, **fused)


def row_linear(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    group: Group,
    *,
    sequence_parallel: bool = False,
    fuse_wgrad_accumulation: bool = False,
    impl: str = "auto",
    site: str,
) -> torch.Tensor:
    """x @ W^T summed over the ranks, plus b: weight [F, D/R], bias [F], whole on every rank, or None.

    ``fuse_wgrad_accumulation`` and what is raised are as in :func:`column_linear`.
    """
    fused: dict[str, Any] = {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "impl": impl}
    if group.size == 1:
        return linear_act(x, weight, bias, **fused)
    if not torch.compiler.is_compiling():
        return _Row.apply(_Call.now(group, "identity", sequence_parallel, site=site, **fused), x, weight, bias)
    weight, bias = local_tensors(weight, bias)
    y = linear_act(x, weight, **fused)
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
    fuse_wgrad_accumulation: bool
    impl: str
    site: str
    grad: bool  # whether autograd is on: inside a function's forward it never is

    @classmethod
    def now(cls, group: Group, activation: str, sequence_parallel: bool, **options: Any) -> _Call:
        return cls(group, activation, sequence_parallel, grad=torch.is_grad_enabled(), **options)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> tuple[torch.Tensor, ...]:
        n = len(params) // 2
        plain = open_params(ctx, x, params, call.fuse_wgrad_accumulation and call.grad)
        dtype, ctx.choice = parts.prepare(x, plain[:n], plain[n:], call.activation, call.impl)
        x, *operands = autocast((x, *plain), dtype)
        if call.sequence_parallel:
            x = collectives.all_gather(x, call.group, site=call.site)
        rows, weights = parts.as_rows(x), operands[:n]
        ys, zs = parts.forward(rows, weights, operands[n:], call.activation, ctx.choice, save=call.grad)
        ctx.call, ctx.n, ctx.x_shape = call, n, x.shape
        ctx.save_for_backward(rows, *weights, *zs)
        return tuple(parts.shaped(y, x) for y in ys)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        call, n = ctx.call, ctx.n
        rows, *rest = ctx.saved_tensors
        weights, zs = rest[:n], rest[n:]
        want = autograd.wanted(ctx)
        _, want_x, *want_params = want

        dzs = autograd.recall(ctx, dys)
        if dzs is None:
            dzs = [parts.as_rows(dy) for dy in dys]
            if zs:
                dzs = [parts.activation_grad(dz, z, call.activation, ctx.choice) for dz, z in zip(dzs, zs)]
        if want_x:
            dx = parts.input_grad(dzs, weights, ctx.choice).view(ctx.x_shape)
            finish = reduce_input_grad(dx, call.group, call.sequence_parallel, call.site)
        into = autograd.destinations(ctx, ctx.buffers)
        dws, dbs = parts.param_grads(
            dzs, rows, want_params[:n], want_params[n:], ctx.choice, into=into[:n], bias_into=into[n:]
        )
        autograd.remember(ctx, dys, dzs, want)
        return None, *close_grads(ctx, finish() if want_x else None, [*dws, *dbs])


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> torch.Tensor:
        plain = open_params(ctx, x, params, call.fuse_wgrad_accumulation and call.grad)
        dtype, ctx.choice = parts.prepare(x, plain[:1], plain[1:], "identity", call.impl)
        ctx.call, ctx.x_shape = call, x.shape
        x, weight, bias = autocast((x, *plain), dtype)
        rows = parts.as_rows(x)
        (y,), _ = parts.forward(rows, [weight], [None], "identity", ctx.choice)
        y = reduce_output(parts.shaped(y, x), bias, call.group, call.sequence_parallel, call.site)
        ctx.save_for_backward(rows, weight)
        return y

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        rows, weight = ctx.saved_tensors
        want = autograd.wanted(ctx)
        _, want_x, want_weight, want_bias = want
        whole = autograd.recall(ctx, [dy])
        if whole is None:
            whole = gather_output_grad(dy, call.group, call.sequence_parallel, call.site)
        dys = [parts.as_rows(whole)]
        dx = parts.input_grad(dys, [weight], ctx.choice).view(ctx.x_shape) if want_x else None
        into, bias_into = autograd.destinations(ctx, ctx.buffers)
        dws, dbs = parts.param_grads(
            dys, rows, [want_weight], [want_bias], ctx.choice, into=[into], bias_into=[bias_into]
        )
        autograd.remember(ctx, [dy], whole, want)
        return None, *close_grads(ctx, dx, [*dws, *dbs])


def reduce_output(
    y: torch.Tensor, bias: torch.Tensor | None, group: Group, sequence_parallel: bool, site: str
) -> torch.Tensor:
    """The end of a row-parallel product, in place: ``y``, this rank's addend, summed over the ranks, plus the bias."""
    if sequence_parallel:
        y = collectives.reduce_scatter(y, group, site=site)
    else:
        y = collectives.all_reduce(y, group, site=site, inplace=True)
    return y if bias is None else y.add_(bias)


def gather_output_grad(dy: torch.Tensor, group: Group, sequence_parallel: bool, site: str) -> torch.Tensor:
    """Every token's output gradient: with it the bias needs no collective of its own."""
    return collectives.all_gather(dy, group, site=f"{site}.grad") if sequence_parallel else dy


def reduce_input_grad(dx: torch.Tensor, group: Group, sequence_parallel: bool, site: str) -> Callable[[], torch.Tensor]:
    """Begin to sum a column-parallel layer's ``dx`` over the ranks; what is returned waits and gives the sum."""
    start = collectives.start_reduce_scatter if sequence_parallel else collectives.start_all_reduce
    return start(dx, group, site=f"{site}.grad")
