"""A transformer's feed-forward layer as one autograd function, with its collectives inside.

    y = act(x @ W1^T + b1) @ W2^T + b2          or, gated,  y = (act(g) * u) @ W2^T + b2,
                                                 g = x @ Wg^T + bg,  u = x @ Wu^T + bu

    x, y [..., D] (with sequence parallelism [T/R, D]); W1, Wg, Wu [F/R, D]; W2 [D, F/R]; b1, bg, bu [F/R]; b2 [D]
    z = x @ W1^T + b1, or g and u, and h = act(z), or act(g) * u: [T, F/R]

One function where two would do, because of what lies between the layers: the gradient of z leaves the product that
would have formed that of h, which is never written, and h need not be kept, since the same product can rebuild it.
Backward sums dx over the ranks while it forms the weights' gradients. What crosses the ranks, and where it is counted,
is what the two layers of :mod:`linear` would send, at ``site + ".in"`` and ``site + ".out"``; level 2, and with
sequence parallelism every level at which rows travel under the products (``overlap``), gathers x once more, at
``site + ".in.again"``.

    recompute   kept for backward                     done again in backward
    0           x (with overlap T/R of it), z, h      with overlap, the all-gather of x
    1           x (with overlap T/R of it), z         the same; h, in the epilogue of a product
    2           x (T/R of it)                         the first product, with sequence parallelism its all-gather

Level 1 is the selective recomputation of Korthikanti et al. (arXiv:2205.05198), section 5, applied to the activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.linear import apply_activation, parts
from ..kernels.runtime import autograd
from ..kernels.runtime.dispatch import Choice
from .core import collectives
from .core.mesh import Group
from .core.operands import Params, autocast, close_grads, open_params
from .linear import (
    NO_OVERLAP,
    Paths,
    column_paths,
    gather_output_grad,
    row_addend,
    row_paths,
    shaped,
    start_input_grad,
    sum_output,
)
from .overlap import strategies

RECOMPUTE = (0, 1, 2)


def fused_mlp(
    x: torch.Tensor,
    weights: Params,
    biases: Params,
    out_weight: Any,
    out_bias: Any,
    group: Group,
    *,
    activation: str,
    sequence_parallel: bool = False,
    recompute: int = 0,
    fuse_wgrad_accumulation: bool = False,
    impl: str = "auto",
    overlap: str = "none",
    strict: bool = False,
    site: str,
    residual: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """The layer above; with two ``weights``, gate and up, it is gated. Parameters are DTensors or plain.

    ``residual``, of the result's shape and dtype, is added in the last product's epilogue: for a group of one only.
    With ``partial``, and without gradients, the result is this rank's addend to y, without b2 (:mod:`partial_sum`).
    ``fuse_wgrad_accumulation``, ``overlap`` and ``strict`` are as in :func:`linear.column_linear`.
    Under torch.compile for a group of one only. Raises ValueError for operands that do not fit.
    """
    options = (activation, sequence_parallel, recompute, fuse_wgrad_accumulation, impl, overlap, strict, site)
    call = _Call(group, *options, n=len(weights), grad=torch.is_grad_enabled(), partial=partial)
    assert not (partial and call.grad), "a sum that waits has no gradient"
    if residual is not None and group.size > 1:
        raise ValueError("residual: what the ranks' products add up to has no epilogue; add it to the result")
    if residual is not None and residual.dtype != (parts.autocast_dtype(x) or x.dtype):
        # Under autocast over a wider stream: a sum in the wider dtype, as torch's.
        return residual + _MLP.apply(call, None, x, *weights, *biases, out_weight, out_bias)
    if residual is x:  # torch.compile takes no tensor twice
        residual = x.view_as(x)
    return _MLP.apply(call, residual, x, *weights, *biases, out_weight, out_bias)


class _Call(NamedTuple):
    """The options of one call."""

    group: Group
    activation: str
    sequence_parallel: bool
    recompute: int
    fuse_wgrad_accumulation: bool
    impl: str
    overlap: str
    strict: bool
    site: str
    n: int  # weights of the first layer
    grad: bool  # whether autograd is on: inside a function's forward it never is
    partial: bool  # whether the sum over the ranks is left to others

    @property
    def gated(self) -> bool:
        return self.n == 2

    @property
    def bare(self) -> bool:
        """Whether h is z: nothing lies between the layers."""
        return self.activation == "identity" and not self.gated


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, residual: torch.Tensor | None, x: torch.Tensor, *params: Any) -> torch.Tensor:
        n = call.n
        plain = open_params(ctx, x, params, call.fuse_wgrad_accumulation and call.grad)
        op = "gated_linear" if call.gated else "linear_act"
        dtype, first = parts.prepare(x, plain[:n], plain[n : 2 * n], call.activation, call.impl, op=op)
        x, *operands = autocast((x, *plain), dtype)
        weights, biases, (out_weight, out_bias) = operands[:n], operands[n : 2 * n], operands[2 * n :]

        # What backward will read: the first layer's input x, the hidden h, and what leads from dy to dz.
        _, _, need_x, *need = [needed and call.grad for needed in ctx.needs_input_grad]
        need_dz, need_h, need_rows = need_x or any(need[: 2 * n]), need[2 * n], any(need[:n])
        again = call.recompute == 2 and (need_dz or need_h)
        keep_h = need_h and (call.recompute == 0 or call.bare) and not again

        alone = call.group.size == 1
        first_paths = column_paths(call, x, weights, biases, call.activation)
        rows = parts.as_rows(x)
        save = (need_dz or (need_h and not keep_h)) and not again
        h, zs, whole = _hidden(rows, weights, biases, call, first, first_paths, ".in", save=save)
        _, second = parts.prepare(h, [out_weight], [out_bias], "identity", call.impl)
        second_paths = NO_OVERLAP if call.partial else row_paths(call, h, out_weight, out_bias)
        if alone:  # bias and residual ride in the product
            if residual is not None:
                residual = parts.check_residual(residual, x, out_weight, dtype)
            (y,), _ = parts.forward(h, [out_weight], [out_bias], "identity", second, residual=residual)
        elif call.partial:
            y = row_addend(h, out_weight, second)
        else:
            y = sum_output(h, out_weight, out_bias, second, call, second_paths.forward, f"{call.site}.out")

        ctx.call, ctx.choices, ctx.paths, ctx.x_shape = call, (first, second), (first_paths, second_paths), x.shape
        ctx.shard = call.sequence_parallel and not alone and (again or first_paths.gathers_again)
        ctx.save_for_backward(
            None if not (need_rows or again) else rows if ctx.shard else whole,
            h if keep_h else None,
            out_weight if need_dz else None,
            *(weight if need_x or again else None for weight in weights),
            *(bias if again else None for bias in biases),
            *zs,
        )
        return shaped(y, x.shape[:-1])

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        call, n = ctx.call, ctx.call.n
        first, second = ctx.choices
        first_paths, second_paths = ctx.paths
        kept, h, out_weight, *rest = ctx.saved_tensors
        weights, biases, zs = rest[:n], rest[n : 2 * n], rest[2 * n :]
        want = autograd.wanted(ctx)
        _, want_residual, want_x, *want_params = want
        want_dz, want_h = want_x or any(want_params[: 2 * n]), want_params[2 * n]

        x: Any = None if ctx.shard else kept
        dys: Any = None
        dzs: Any = None
        left = autograd.recall(ctx, [dy])
        if left is not None:
            dys, x, h, zs, dzs = left
        if call.recompute == 2 and h is None and (want_dz or want_h):
            h, zs, x = _hidden(kept, weights, biases, call, first, first_paths, ".in.again", save=True, again=True)
        form_dzs = want_dz and dzs is None
        rebuild = form_dzs and h is None and ctx.needs_input_grad[3 + 2 * n]  # for this pass or a later one

        def through_second(dys: torch.Tensor, part: slice, remote: Any) -> Sequence[torch.Tensor]:
            if not form_dzs:
                return ()
            own = [strategies.cut(z, part) for z in zs]
            return _through_second(dys, out_weight, own, call, second, rebuild=rebuild, remote=remote)

        if dys is None:
            rows, path = parts.as_rows(dy), second_paths.backward
            found, dys = gather_output_grad(rows, through_second, call, path, f"{call.site}.out")
        else:
            found = through_second(dys, strategies.ALL, None)
        if form_dzs:
            dzs, h = found[:n], found[n] if rebuild else h
        if want_h and h is None:
            h = _activated(zs, call)

        gather_again = x is None and any(want_params[:n])
        site = f"{call.site}.in"
        with strategies.InFlight() as flights:
            if gather_again:
                finish_gather = flights.add(collectives.start_all_gather(kept, call.group, site=f"{site}.again"))
            if want_x:  # it travels while the weights get their gradients
                finish = flights.add(start_input_grad(dzs, weights, first, call, first_paths.backward, site))
            into = autograd.destinations(ctx, ctx.buffers)
            hides = f"{site}.grad"
            out_grads = strategies.product(hides, _param_grads, [dys], h, want_params[2 * n :], into[2 * n :], second)
            if gather_again:
                x = finish_gather()
            grads: list[Any] = [None] * (2 * n)
            if want_dz:
                grads = strategies.product(hides, _param_grads, dzs, x, want_params[: 2 * n], into[: 2 * n], first)
            dx = finish().view(ctx.x_shape) if want_x else None
        spent = zs if dzs else ()
        autograd.remember(ctx, [dy], (dys, x, h, () if dzs else zs, dzs), want, spent=spent)
        return None, dy if want_residual else None, *close_grads(ctx, dx, [*grads, *out_grads])


def _hidden(
    rows: torch.Tensor,
    weights: Params,
    biases: Params,
    call: _Call,
    choice: Choice,
    paths: Paths,
    suffix: str,
    *,
    save: bool,
    again: bool = False,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor]:
    """The first layer: h; with ``save`` [z] or [g, u], nothing where h is z; every token's x, ``rows`` being ours.

    ``again`` in backward, where x is wanted for the weights' gradients.
    """

    def product(rows: torch.Tensor, part: slice, remote: Any) -> Sequence[torch.Tensor]:
        if not call.gated:
            (h,), zs = parts.forward(rows, weights, biases, call.activation, choice, save=save, remote=remote)
            return h, *zs
        h, g, u = parts.gated_forward(rows, weights, biases, call.activation, choice, save=save, remote=remote)
        return (h,) if g is None or u is None else (h, g, u)

    if call.sequence_parallel:
        keep = again or not paths.gathers_again
        site = call.site + suffix
        (h, *zs), whole = strategies.gather(rows, call.group, product, paths.forward, site=site, keep=keep)
    else:
        (h, *zs), whole = product(rows, strategies.ALL, None), rows
    return h, zs, whole


def _activated(zs: Sequence[torch.Tensor], call: _Call) -> torch.Tensor:
    """h of [z] or [g, u]."""
    h = apply_activation(zs[0], call.activation)
    return h * zs[1] if call.gated else h


def _through_second(
    dys: torch.Tensor,
    out_weight: torch.Tensor,
    zs: Sequence[torch.Tensor],
    call: _Call,
    choice: Choice,
    *,
    rebuild: bool,
    remote: Any,
) -> Sequence[torch.Tensor]:
    """From dy to [dz] or [dg, du], in one product, and with ``rebuild`` h."""
    if call.bare:
        return [parts.input_grad([dys], [out_weight], choice, remote=remote)]
    options: dict[str, Any] = {"rebuild": rebuild, "remote": remote}
    found = (
        parts.input_grad_gated(dys, out_weight, zs[0], zs[1], call.activation, choice, **options)
        if call.gated
        else parts.input_grad_act(dys, out_weight, zs[0], call.activation, choice, **options)
    )
    return [x for x in found if x is not None]


def _param_grads(
    dzs: Sequence[torch.Tensor],
    x: torch.Tensor,
    want: Sequence[bool],
    into: Sequence[torch.Tensor | None],
    choice: Choice,
) -> list[torch.Tensor | None]:
    """The gradients of a layer's weights and then its biases, where wanted and not added to a buffer."""
    n = len(dzs)
    dws, dbs = parts.param_grads(dzs, x, want[:n], want[n:], choice, into=into[:n], bias_into=into[n:])
    return [*dws, *dbs]
