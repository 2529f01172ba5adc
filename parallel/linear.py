"""Linear layers with their collectives inside one autograd function.

A composition of :mod:`mappings` and ``linear_act`` computes the same and runs under torch.compile. In these functions,
backward starts to reduce dx and forms dW meanwhile, sums reuse the products' buffers, and autograd sees one node for
each layer, including its sharded parameters. A backward pass forms only the requested gradients, and a later pass over
the same graph repeats no product and no collective (``kernels/runtime/autograd.py``).

    layer    weight     x                  y                  communication in forward, in backward
    column   [F/R, D]   [..., D]           [..., F/R]         nothing, all-reduce of dx
    row      [F, D/R]   [..., D/R]         [..., F]           all-reduce of y, nothing
    with sequence parallelism (tokens are dimension 0):
    column   [F/R, D]   [T/R, D]           [T, F/R]           all-gather of x, reduce-scatter of dx
    row      [F, D/R]   [T, D/R]           [T/R, F]           reduce-scatter of y, all-gather of dy

``overlap`` selects how a collective runs beside its product: "none", one after the other; "chunked" or "kernel", rows
travel while others are computed (:mod:`strategies`); or "auto", the one that :mod:`policy` expects to be fastest. If
the caller requests "chunked" or "kernel", a column layer with sequence parallelism saves its T/R input rows instead of
the T gathered ones; backward gathers them again for the weights' gradients, under the product that forms dx. With
"auto" the layer saves the gathered rows, and backward sums dx under the weights' gradients, as with "none".

A collective in backward counts at ``site + ".grad"``, the second all-gather at ``site + ".again"``. Sources: see
:mod:`mappings`; keeping the shard and gathering again is Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.linear import Product, functional, linear_act
from ..kernels.runtime import autograd
from ..kernels.runtime.dispatch import Choice
from .core import collectives, mappings
from .core.operands import Params, close_grads, open_params
from .core.options import TPOptions
from .core.sharding import local_tensors
from .overlap.policy import check_compiled, column_overlap, row_overlap
from .overlap.strategies import InFlight, Pending, Strategy


def column_linear(
    x: torch.Tensor, weights: Params, biases: Params, options: TPOptions, *, activation: str = "identity"
) -> tuple[torch.Tensor, ...]:
    """act(x @ W_i^T + b_i) for up to three weights [F_i/R, D], which share one collective of x.

    Under torch.compile, which orders the collectives itself, ``overlap`` does not apply. Raises ValueError for operands
    that do not fit, RuntimeError with ``strict`` for an unavailable overlap.
    """
    fused: dict[str, Any] = {
        "fuse_wgrad_accumulation": options.fuse_wgrad_accumulation,
        "pack_weight": options.pack_weight,
        "impl": options.impl,
    }
    if options.group.size == 1:
        return linear_act(x, weights, biases, activation=activation, **fused)
    if not torch.compiler.is_compiling():
        return AllGatherLinear.apply(options.now(), activation, x, *weights, *biases)
    check_compiled(options.overlap, options.strict)
    if options.sequence_parallel:
        x = mappings.all_gather_from(x, options.group, dim=0, site=options.site)
    else:
        x = mappings.copy_to(x, options.group, site=options.site)
    return linear_act(x, local_tensors(*weights), local_tensors(*biases), activation=activation, **fused)


def row_linear(x: torch.Tensor, weight: Any, bias: Any, options: TPOptions) -> torch.Tensor:
    """x @ W^T summed over the ranks, plus b: weight [F, D/R], bias [F], whole on every rank, or None.

    Raises the errors of :func:`column_linear`.
    """
    fused: dict[str, Any] = {
        "fuse_wgrad_accumulation": options.fuse_wgrad_accumulation,
        "pack_weight": options.pack_weight,
        "impl": options.impl,
    }
    if options.group.size == 1:
        return linear_act(x, weight, bias, **fused)
    if not torch.compiler.is_compiling():
        return LinearReduceScatter.apply(options.now(), x, weight, bias)
    check_compiled(options.overlap, options.strict)
    weight, bias = local_tensors(weight, bias)
    y = linear_act(x, weight, **fused)
    if options.sequence_parallel:
        y = mappings.reduce_scatter_to(y, options.group, dim=0, site=options.site)
        (bias,) = mappings.copy_all_to([bias], options.group, site=f"{options.site}.bias")
    else:
        y = mappings.reduce_from(y, options.group, site=options.site)
    return y if bias is None else y + bias.to(y.dtype)


class AllGatherLinear(torch.autograd.Function):
    """A column-parallel layer: y_i = act(z_i), z_i = x @ w_i^T + b_i.

    x_shard, dx_shard     [T/R, D]     this rank's tokens; without sequence parallelism x and dx, [T, D]
    x                     [T, D]       every rank's, gathered
    w_i_shard, dw_i       [F_i/R, D]
    z_i, y_i, dy_i, dz_i  [T, F_i/R]

    forward    x = all_gather(x_shard);  z_i = x @ w_i_shard^T + b_i_shard;  y_i = act(z_i)
    backward   dz_i = dy_i * act'(z_i);  dx_shard = reduce_scatter(sum_i dz_i @ w_i_shard), or dx = all_reduce(...);
               dw_i = dz_i^T @ x;  db_i = sum_T dz_i, while dx travels
    """

    @staticmethod
    def forward(
        ctx: Any, options: TPOptions, activation: str, x_shard: torch.Tensor, *params: Any
    ) -> tuple[torch.Tensor, ...]:
        n = len(params) // 2
        plain = open_params(ctx, x_shard, params, options.fuse_wgrad_accumulation and options.grad)
        dtype, choice = functional.prepare(
            x_shard, plain[:n], plain[n:], activation, options.impl, pack_weight=options.packs
        )
        x_shard, *operands = functional.cast((x_shard, *plain), [dtype] * (1 + len(plain)))
        weights, biases = operands[:n], operands[n:]
        overlap = column_overlap(options, x_shard, weights)

        rows = functional.as_rows(x_shard)
        product = Product.linear_act(rows, weights, biases, activation, choice, save_preact=options.grad)
        lead: tuple[int, ...] = x_shard.shape[:-1]
        if options.sequence_parallel:
            keep = not overlap.gathers_again
            found, x = overlap.forward.all_gather_linear(product, site=options.site, keep=keep)
            lead = (lead[0] * options.group.size, *lead[1:])
        else:
            found, x = product.compute(), rows

        ctx.options, ctx.activation, ctx.choice, ctx.overlap = options, activation, choice, overlap
        ctx.n, ctx.x_shape = n, x_shard.shape
        ctx.save_for_backward(rows if overlap.gathers_again else x, *weights, *found[n:])
        return tuple(functional.shaped(y, lead) for y in found[:n])

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        options, n, site = ctx.options, ctx.n, ctx.options.site
        kept, *rest = ctx.saved_tensors
        weights, zs = rest[:n], rest[n:]
        want = autograd.needed_grads(ctx)
        _, _, want_x, *want_params = want

        dzs, x = autograd.load_saved(ctx, dys) or (None, None)
        if dzs is None:
            dzs = [functional.as_rows(dy) for dy in dys]
            if zs:
                dzs = [functional.act_grad(dz, z, ctx.activation, ctx.choice) for dz, z in zip(dzs, zs)]
        if not ctx.overlap.gathers_again:
            x = kept
        gather = x is None and any(want_params[:n])
        dx_shard = None
        with InFlight() as flights:
            if gather:
                gathering = flights.add(
                    Pending(collectives.start_all_gather(kept, options.group, site=f"{site}.again"))
                )
            if want_x:
                summing = flights.add(sum_input_grad(options, ctx.overlap.backward, dzs, weights, ctx.choice, site))
            if gather:
                x = gathering.wait()
            into = autograd.destinations(ctx, ctx.buffers)
            dws, dbs = functional.param_grads(
                dzs,
                x,
                want_params[:n],
                want_params[n:],
                ctx.choice,
                into=into[:n],
                bias_into=into[n:],
            )
            if want_x:
                dx_shard = summing.wait().view(ctx.x_shape)
        autograd.save_for_next_pass(ctx, dys, (dzs, x if ctx.overlap.gathers_again else None), want, released=zs)
        return None, None, *close_grads(ctx, dx_shard, [*dws, *dbs])


class LinearReduceScatter(torch.autograd.Function):
    """A row-parallel layer: y = sum over ranks of x_shard @ w_shard^T, + b.

    x_shard, dx_shard   [T, D/R]
    w_shard, dw_shard   [F, D/R]
    y_shard, dy_shard   [T/R, F]    this rank's tokens; without sequence parallelism y and dy, [T, F]
    dy                  [T, F]      every rank's, gathered, so the bias needs no collective of its own

    forward    y_shard = reduce_scatter(x_shard @ w_shard^T) + b, or y = all_reduce(...) + b
    backward   dy = all_gather(dy_shard);  dx_shard = dy @ w_shard;  dw_shard = dy^T @ x_shard;  db = sum_T dy
    """

    @staticmethod
    def forward(ctx: Any, options: TPOptions, x_shard: torch.Tensor, *params: Any) -> torch.Tensor:
        plain = open_params(ctx, x_shard, params, options.fuse_wgrad_accumulation and options.grad)
        dtype, choice = functional.prepare(
            x_shard, plain[:1], plain[1:], "identity", options.impl, pack_weight=options.packs
        )
        x_shard, weight, bias = functional.cast((x_shard, *plain), [dtype] * (1 + len(plain)))
        overlap = row_overlap(options, x_shard, weight)

        rows = functional.as_rows(x_shard)
        product = Product.linear_act(rows, [weight], [None], "identity", choice)
        lead: tuple[int, ...] = x_shard.shape[:-1]
        if options.sequence_parallel:
            collectives.check_divides((*lead, weight.shape[0]), 0, options.group, options.site)
            lead = (lead[0] // options.group.size, *lead[1:])
            y = overlap.forward.linear_reduce_scatter(product, bias=bias, site=options.site).wait()
        else:
            y = overlap.forward.linear_all_reduce(product, bias=bias, site=options.site, async_op=False).wait()

        ctx.options, ctx.choice, ctx.overlap, ctx.x_shape = options, choice, overlap, x_shard.shape
        ctx.save_for_backward(rows, weight)
        return functional.shaped(y, lead)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy_shard: torch.Tensor) -> tuple[Any, ...]:
        options = ctx.options
        rows, weight = ctx.saved_tensors
        want = autograd.needed_grads(ctx)
        _, want_x, want_weight, want_bias = want

        dy = autograd.load_saved(ctx, [dy_shard])
        if dy is None and not options.sequence_parallel:
            dy = functional.as_rows(dy_shard)
        product = Product.input_grad([functional.as_rows(dy_shard) if dy is None else dy], [weight], ctx.choice)
        dx_shard = None
        if not want_x:
            product = product.without_results()
        if dy is None:
            keep = autograd.keeps_graph()  # a later pass may need the rows again
            found, dy = ctx.overlap.backward.all_gather_linear(product, site=f"{options.site}.grad", keep=keep)
        else:
            found = product.compute()
        if want_x:
            (dx_shard,) = found
        into, bias_into = autograd.destinations(ctx, ctx.buffers)
        dws, dbs = functional.param_grads(
            [dy], rows, [want_weight], [want_bias], ctx.choice, into=[into], bias_into=[bias_into]
        )
        autograd.save_for_next_pass(ctx, [dy_shard], dy, want)
        return None, *close_grads(ctx, None if dx_shard is None else dx_shard.view(ctx.x_shape), [*dws, *dbs])


def sum_input_grad(
    options: TPOptions,
    strategy: Strategy,
    dzs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    choice: Choice,
    site: str,
) -> Pending:
    """Start a column-parallel layer's dx = sum_i dz_i @ w_i, summed over the ranks: its rows [T, D] or [T/R, D]."""
    product = Product.input_grad(dzs, weights, choice)
    if options.sequence_parallel:
        return strategy.linear_reduce_scatter(product, site=f"{site}.grad")
    return strategy.linear_all_reduce(product, site=f"{site}.grad")
