"""A linear layer over a grid, as one autograd function; :mod:`grid` names the axes and the layouts.

    x, dx     [T/i/k, K/j]    with spare = 1: [T/i, K/k]
    w_n, dw_n [N_n/k, K/j/i]  turned: one weight [N/j/i, K/k], and its bias [N/j/i], gathered with it
    b_n, db_n [N_n/k]
    y_n, dy_n [T/i/j, N_n/k]

    forward    x = all_gather(x, outer);  w = all_gather(w, tokens);  y = reduce_scatter(x @ w^T, inner) + b
    backward   dy = all_gather(dy, inner);  w, x gathered again
               dx = reduce_scatter(dy @ w, outer)
               dw = reduce_scatter(dy^T @ x, tokens), all-reduced over depth;  db = sum_T dy over tokens and depth

Only what a rank stores is kept for backward. A pass over a graph that an earlier pass has walked forms what is missing,
and repeats no product and no collective. Weights that share x (q, k and v, gate and up) travel and multiply as one.
The gather or the sum of rows runs under the product that follows or precedes it where ``overlap`` says so
(``parallel/overlap/``); where a product has both, the sum does. W travels beside rows that are gathered before the
product. In backward, where neither dy nor the sum of dx can travel under a product, W travels under the product of dW,
and dW under that of dx.

A collective in backward counts at ``site + ".grad"``, a gather for the second time at ``site + ".again"``. Not under
torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.linear import Product, functional
from ...kernels.runtime import autograd
from ...kernels.runtime.dispatch import Choice
from ..core import collectives
from ..core.mesh import SINGLE, Group
from ..core.operands import Params, close_grads, open_params
from ..overlap.policy import select
from ..overlap.strategies import InFlight, Pending, Plain, Strategy
from . import summa
from .grads import bias_grad, weight_grad
from .grid import SUMMA, Axes, GridOptions


def grid_linear(x: torch.Tensor, weights: Params, biases: Params, options: GridOptions) -> tuple[torch.Tensor, ...]:
    """x @ W_n^T + b_n, laid out as above. Raises ValueError for operands that do not fit, before anything is sent."""
    return GridLinearFunction.apply(options, len(weights), x, *weights, *biases)


class GridLinearFunction(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, options: GridOptions, n: int, x: torch.Tensor, *params: Any) -> tuple[torch.Tensor, ...]:
        plain = open_params(ctx, x, params, False)
        _check(x, plain[:n], options)
        dtype = functional.autocast_dtype(x) or x.dtype
        x, *operands = functional.cast((x, *plain), [dtype] * (1 + len(plain)))
        weight, bias = _joined(operands[:n]), _joined(operands[n:])
        assert n == 1 or options.axes.weight_dim == 1
        choice = _choose(x, weight, options)
        y = (summa.forward if options.overlap == SUMMA else _forward)(x, weight, bias, options, choice)
        ctx.options, ctx.choice, ctx.n, ctx.rows = options, choice, n, [each.shape[0] for each in operands[:n]]
        ctx.save_for_backward(x, *operands[:n])
        return (y,) if n == 1 else tuple(part.contiguous() for part in y.split(ctx.rows, 1))

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        options, n = ctx.options, ctx.n
        x, *weights = ctx.saved_tensors
        wanted = autograd.needed_grads(ctx)
        _, _, want_x, *want = wanted
        dy = autograd.load_saved(ctx, dys)
        if dy is None:
            dy = _joined(list(dys), dim=1)
        else:  # an earlier pass has gathered it
            options = options._replace(axes=options.axes._replace(inner=SINGLE))
        run = summa.backward if options.overlap == SUMMA else _backward
        needs = want_x, any(want[:n]), any(want[n:])
        dx, dw, db, dy = run(x, _joined(weights), dy, options, ctx.choice, needs)
        autograd.save_for_next_pass(ctx, dys, dy, wanted)
        dws = [None] * n if dw is None else dw.split(ctx.rows, 0)
        dbs = [None] * n if db is None else db.split(ctx.rows, 0)
        grads = [grad if asked else None for grad, asked in zip((*dws, *dbs), want)]
        return None, None, *close_grads(ctx, dx, grads)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: GridOptions, choice: Choice
) -> torch.Tensor:
    axes, site = options.axes, options.site
    with InFlight() as flights:
        arriving = _start_weight(weight, axes, f"{site}.weight", flights)
        if bias is not None and axes.weight_dim == 0:
            bias = collectives.all_gather(bias, axes.tokens, site=f"{site}.bias")

        def product(rows: torch.Tensor) -> Product:
            return Product.linear_act(rows, [arriving.wait()], [None], "identity", choice)

        sites, width = (f"{site}.in", f"{site}.out"), _gathered_shape(weight, axes)[0]
        y, _ = _run(x, product, width, axes.outer, axes.inner, options, sites, bias)
        return y.wait()


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    options: GridOptions,
    choice: Choice,
    want: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The gradients of x, the weight and the bias, None where ``want`` is False, and dy gathered."""
    axes, site = options.axes, options.site
    want_x, want_weight, want_bias = want
    dx = dw = db = None
    with InFlight() as flights:
        if want_x:
            arriving = _start_weight(weight, axes, f"{site}.weight.again", flights)
        if want_weight:
            again = collectives.start_all_gather(x, axes.outer, dim=axes.spare, site=f"{site}.in.again")
            gathered_x = flights.add(Pending(again))

        def product(rows: torch.Tensor) -> Product:
            return Product.input_grad([rows], [arriving.wait()], choice)

        # dx is formed first where its sum, or the rows of dy, travel under a product; else W travels under that of dW.
        last = axes.outer.size == 1 and (axes.inner.size == 1 or options.overlap == "none")
        if want_x and not last:
            sites = f"{site}.out.grad", f"{site}.in.grad"
            width = _gathered_shape(weight, axes)[1]
            dx_sum, dy = _run(dy, product, width, axes.inner, axes.outer, options, sites)
            summing = flights.add(dx_sum)
        else:
            dy = collectives.all_gather(dy, axes.inner, dim=axes.spare, site=f"{site}.out.grad")
        if want_weight:
            dw = weight_grad(dy, gathered_x.wait(), choice)
            scatter = collectives.start_reduce_scatter(dw, axes.tokens, dim=axes.weight_dim, site=f"{site}.weight.grad")
            scattering = flights.add(Pending(scatter))
        if want_x and last:
            (dx,) = product(dy).compute()
        if want_weight:
            dw = collectives.all_reduce(scattering.wait(), axes.depth, site=f"{site}.depth.grad", inplace=True)
        if want_bias:
            db = bias_grad(dy, axes, site)
        if want_x and not last:
            dx = summing.wait()
    return dx, dw, db, dy


def _start_weight(weight: torch.Tensor, axes: Axes, site: str, flights: InFlight) -> Pending:
    return flights.add(Pending(collectives.start_all_gather(weight, axes.tokens, dim=axes.weight_dim, site=site)))


def _run(
    rows: torch.Tensor,
    product: Callable[[torch.Tensor], Product],
    width: int,
    gather: Group,
    scatter: Group,
    options: GridOptions,
    sites: tuple[str, str],
    bias: torch.Tensor | None = None,
) -> tuple[Pending, torch.Tensor]:
    """Gather ``rows`` over one axis, and sum their product, of ``width`` features, over the other: (the sum, the
    gathered rows). ``product``, called once, waits for the weight."""
    gather_site, scatter_site = sites
    spare = options.axes.spare
    if spare == 0 and scatter.size == 1:
        strategy = _strategy("all_gather_linear", gather, rows, rows.shape[0] * gather.size, width, options)
        if not isinstance(strategy, Plain):
            (y,), whole = strategy.all_gather_linear(product(rows), site=gather_site)
            return Pending(lambda: y, bias), whole
    whole = collectives.all_gather(rows, gather, dim=spare, site=gather_site)
    if spare == 0:
        strategy = _strategy("linear_reduce_scatter", scatter, whole, whole.shape[0], width, options)
        return strategy.linear_reduce_scatter(product(whole), bias=bias, site=scatter_site), whole
    (y,) = product(whole).compute()
    return Pending(collectives.start_reduce_scatter(y, scatter, dim=1, site=scatter_site), bias), whole


def _strategy(op: str, group: Group, rows: torch.Tensor, tokens: int, width: int, options: GridOptions) -> Strategy:
    if group.size == 1 or options.overlap == "none":
        return Plain(group)
    return select(
        op,
        group,
        tokens=tokens,
        features_in=rows.shape[1],
        features_out=width,
        dtype=rows.dtype,
        device=rows.device,
        overlap=options.overlap,
        strict=options.strict,
        impl=options.impl,
    ).strategy(group)


def _joined(tensors: Sequence[Any], dim: int = 0) -> Any:
    """One tensor of all; None where there are none (either all layers have a bias, or none has)."""
    return tensors[0] if len(tensors) == 1 or tensors[0] is None else torch.cat(list(tensors), dim)


def _choose(x: torch.Tensor, weight: torch.Tensor, options: GridOptions) -> Choice:
    """What multiplies, by the sizes of the product that this rank will form."""
    axes = options.axes
    tokens = x.shape[0] * (1 if axes.spare else axes.outer.size)
    rows, features = _gathered_shape(weight, axes)
    like, blocks = x.new_empty(1, 1), weight.new_empty(1, 1)
    _, choice = functional.prepare(
        like.expand(tokens, features), [blocks.expand(rows, features)], [None], "identity", options.impl
    )
    return choice


def _gathered_shape(weight: torch.Tensor, axes: Axes) -> tuple[int, int]:
    rows, features = weight.shape
    parts = axes.tokens.size
    return (rows, features * parts) if axes.weight_dim else (rows * parts, features)


def _check(x: torch.Tensor, weights: Sequence[torch.Tensor], options: GridOptions) -> None:
    axes = options.axes
    _, features = _gathered_shape(weights[0], axes)
    wanted = features // axes.outer.size if axes.spare else features
    if x.dim() != 2 or x.shape[1] != wanted:
        raise ValueError(f"{options.site}: x is {list(x.shape)}: expected [T, {wanted}], this rank's tokens")
    if axes.spare == 0:
        collectives.check_rows(x.shape[0] * axes.outer.size, axes.inner, f"{options.site}.out")
