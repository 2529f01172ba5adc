"""A transformer's feed-forward layer as one autograd function, with its collectives inside.

    y = act(x @ W1^T + b1) @ W2^T + b2          or, gated,  y = (act(g) * u) @ W2^T + b2,
                                                 g = x @ Wg^T + bg,  u = x @ Wu^T + bu

    x, y [..., D] (with sequence parallelism [T/R, D]); W1, Wg, Wu [F/R, D]; W2 [D, F/R]; b1, bg, bu [F/R]; b2 [D]
    z = x @ W1^T + b1, or g and u, and h = act(z), or act(g) * u: [T, F/R]

One function where two would do, because of what lies between the layers: the gradient of z leaves the product that
would have formed that of h, which is never written, and h need not be kept, since the same product can rebuild it.
Backward sums dx over the ranks while it forms the weights' gradients. What crosses the ranks, and where it is counted,
is what the two layers of :mod:`linear` would send, at ``site + ".in"`` and ``site + ".out"``; level 2 gathers x once
more, at ``site + ".in.again"``.

    recompute   kept for backward      done again in backward
    0           x, z, h                nothing
    1           x, z                   h, in the epilogue of a product
    2           x (T/R of it)          the first product, with sequence parallelism its all-gather

Level 1 is the selective recomputation of Korthikanti et al. (arXiv:2205.05198), section 5, applied to the activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels import autograd
from ..kernels.dispatch import Choice
from ..kernels.linear import apply_activation, parts
from . import collectives
from .linear import gather_output_grad, reduce_input_grad, reduce_output
from .mesh import Group
from .operands import Params, autocast, close_grads, open_params

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
    site: str,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer above; with two ``weights``, gate and up, it is gated. Parameters are DTensors or plain.

    ``residual``, of the result's shape and dtype, is added in the last product's epilogue: for a group of one only.
    ``fuse_wgrad_accumulation`` adds the parameters' gradients to their ``main_grad`` instead of returning them.
    Under torch.compile for a group of one only. Raises ValueError for operands that do not fit.
    """
    options = (activation, sequence_parallel, recompute, fuse_wgrad_accumulation, impl, site)
    call = _Call(group, *options, n=len(weights), grad=torch.is_grad_enabled())
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
    site: str
    n: int  # weights of the first layer
    grad: bool  # whether autograd is on: inside a function's forward it never is

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

        whole = _gather(x, call, ".in")
        rows = parts.as_rows(whole)
        h, zs = _hidden(rows, weights, biases, call, first, save=(need_dz or (need_h and not keep_h)) and not again)
        _, second = parts.prepare(h, [out_weight], [out_bias], "identity", call.impl)
        alone = call.group.size == 1  # the bias then rides in the product
        if residual is not None:
            residual = parts.check_residual(residual, whole, out_weight, dtype)
        (y,), _ = parts.forward(h, [out_weight], [out_bias if alone else None], "identity", second, residual=residual)
        y = parts.shaped(y, whole)
        if not alone:
            y = reduce_output(y, out_bias, call.group, call.sequence_parallel, f"{call.site}.out")

        ctx.call, ctx.choices, ctx.x_shape = call, (first, second), whole.shape
        ctx.save_for_backward(
            x if again else rows if need_rows else None,
            h if keep_h else None,
            out_weight if need_dz else None,
            *(weight if need_x or again else None for weight in weights),
            *(bias if again else None for bias in biases),
            *zs,
        )
        return y

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        call, n = ctx.call, ctx.call.n
        first, second = ctx.choices
        x, h, out_weight, *rest = ctx.saved_tensors
        weights, biases, zs = rest[:n], rest[n : 2 * n], rest[2 * n :]
        want = autograd.wanted(ctx)
        _, want_residual, want_x, *want_params = want
        want_dz, want_h = want_x or any(want_params[: 2 * n]), want_params[2 * n]

        dzs: Any = None
        left = autograd.recall(ctx, [dy])
        if left is not None:
            dys, x, h, zs, dzs = left
        else:
            dys = parts.as_rows(gather_output_grad(dy, call.group, call.sequence_parallel, f"{call.site}.out"))
        if call.recompute == 2 and h is None and (want_dz or want_h):
            x = parts.as_rows(_gather(x, call, ".in.again"))
            h, zs = _hidden(x, weights, biases, call, first, save=True)
        if want_dz and dzs is None:
            rebuild = h is None and ctx.needs_input_grad[3 + 2 * n]  # for this pass or a later one
            dzs, rebuilt = _through_second(dys, out_weight, zs, call, second, rebuild=rebuild)
            h = rebuilt if rebuild else h
        elif want_h and h is None:
            h = _activated(zs, call)

        if want_x:  # it travels while the weights get their gradients
            dx = parts.input_grad(dzs, weights, first).view(ctx.x_shape)
            finish = reduce_input_grad(dx, call.group, call.sequence_parallel, f"{call.site}.in")
        into = autograd.destinations(ctx, ctx.buffers)
        out_grads = _param_grads([dys], h, want_params[2 * n :], into[2 * n :], second)
        grads = _param_grads(dzs, x, want_params[: 2 * n], into[: 2 * n], first) if want_dz else [None] * (2 * n)
        autograd.remember(ctx, [dy], (dys, x, h, None if dzs else zs, dzs), want)
        closed = close_grads(ctx, finish() if want_x else None, [*grads, *out_grads])
        return None, dy if want_residual else None, *closed


def _gather(x: torch.Tensor, call: _Call, suffix: str) -> torch.Tensor:
    """Every token of x."""
    return collectives.all_gather(x, call.group, site=call.site + suffix) if call.sequence_parallel else x


def _hidden(
    rows: torch.Tensor, weights: Params, biases: Params, call: _Call, choice: Choice, *, save: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first layer: h and, with ``save``, [z] or [g, u]; nothing for the latter where h is z."""
    if not call.gated:
        (h,), zs = parts.forward(rows, weights, biases, call.activation, choice, save=save)
        return h, zs
    h, g, u = parts.gated_forward(rows, weights, biases, call.activation, choice, save=save)
    return h, [] if g is None or u is None else [g, u]


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
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """From dy to [dz] or [dg, du], in one product, and with ``rebuild`` h."""
    if call.bare:
        return [parts.input_grad([dys], [out_weight], choice)], None
    if not call.gated:
        dz, h = parts.input_grad_act(dys, out_weight, zs[0], call.activation, choice, rebuild=rebuild)
        return [dz], h
    dg, du, h = parts.input_grad_gated(dys, out_weight, zs[0], zs[1], call.activation, choice, rebuild=rebuild)
    return [dg, du], h


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
