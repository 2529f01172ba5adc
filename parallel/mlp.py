"""A transformer's feed-forward layer as one autograd function, with its collectives inside.

    y = act(x @ W1^T + b1) @ W2^T + b2          or, gated,  y = (act(g) * u) @ W2^T + b2,
                                                 g = x @ Wg^T + bg,  u = x @ Wu^T + bu

    x, y [..., D] (with sequence parallelism [T/R, D]); W1, Wg, Wu [F/R, D]; W2 [D, F/R]; b1, bg, bu [F/R]; b2 [D]
    z = x @ W1^T + b1, or g and u, and h = act(z), or act(g) * u: [T, F/R]

One function replaces two layers to save memory traffic between them. In backward, the product that would form the
gradient of h applies the activation's gradient in its epilogue and writes the gradient of z, so the gradient of h is
never stored; the same product can recompute h, so forward need not save it. Backward sums dx over the ranks while it
forms the weights' gradients. The collectives and their sites are those of the two layers of :mod:`linear`, at ``site +
".in"`` and ``site + ".out"``. Level 2 gathers x a second time, at ``site + ".in.again"``; with sequence parallelism
every level does if rows travel under the products (``overlap``).

    recompute   kept for backward                     repeated in backward
    0           x (with overlap T/R of it), z, h      with overlap, the all-gather of x
    1           x (with overlap T/R of it), z         the same; h, in the epilogue of a product
    2           x (T/R of it)                         the first product, with sequence parallelism its all-gather

Level 1 is the selective recomputation of Korthikanti et al. (arXiv:2205.05198), section 5, applied to the activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..kernels.linear import Product, apply_activation, feed_forward, functional
from ..kernels.linear.feed_forward import Saved
from ..kernels.runtime import autograd, library, repeated
from ..kernels.runtime.dispatch import Choice
from .core import collectives
from .core.mesh import SINGLE
from .core.operands import Params, close_grads, open_params
from .core.options import TPOptions
from .linear import sum_input_grad
from .overlap.policy import LayerOverlap, column_overlap, row_overlap
from .overlap.strategies import InFlight, Pending, Plain

RECOMPUTE = (0, 1, 2)


def fused_mlp(
    x: torch.Tensor,
    weights: Params,
    biases: Params,
    out_weight: Any,
    out_bias: Any,
    options: TPOptions,
    *,
    activation: str,
    recompute: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The feed-forward layer of this module; two ``weights``, gate and up, make it gated. Parameters are DTensors or
    plain.

    The last product's epilogue adds ``residual``, of the result's shape and dtype; this and torch.compile require a
    group of one rank. Raises ValueError for operands that do not fit, RuntimeError with ``strict`` for an unavailable
    overlap.
    """
    params = (*weights, *biases, out_weight, out_bias)
    alone = options.group.size == 1
    key = None
    if alone and recompute < 2 and not options.fuse_wgrad_accumulation:
        y, key = settled_mlp(x, params, activation, options.impl, recompute=recompute, residual=residual)
        if y is not None:
            return y
    call = _Call(options.now(), activation, recompute, n=len(weights))
    if residual is not None and not alone:
        raise ValueError("residual: a sum over ranks has no epilogue to add it in; add it to the result")
    if residual is not None and residual.dtype != (functional.autocast_dtype(x) or x.dtype):
        # Autocast can make the residual wider: add in the wider dtype, as torch does.
        return residual + ParallelMLPFunction.apply(call, None, x, *params)
    if residual is x:  # torch.compile does not accept a tensor twice
        residual = x.view_as(x)
    return ParallelMLPFunction.apply(call._replace(key=key), residual, x, *params)


def settled_mlp(
    x: torch.Tensor,
    params: tuple[Any, ...],
    activation: str,
    impl: str = "auto",
    *,
    recompute: int = 0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, Any]:
    """:func:`fused_mlp` in one process, of a kind that was met before, and what it is looked up by; either may be None.

    ``params`` are the weights, the biases, ``out_weight`` and ``out_bias``.
    """
    grad = torch.is_grad_enabled()
    saves = grad and _saves_preact(x, params, recompute)
    key = feed_forward.key_of(impl, x, params, residual, activation, saves)
    settled = feed_forward.find(key)
    if settled is None:
        return None, key
    if grad and _any_requires_grad(x, residual, *params):
        call = _Call(_ALONE, activation, recompute, len(params) // 2 - 1, settled, key)
        y: torch.Tensor = _apply(call, residual, x, *params)
        return y, key
    return settled.forward(x, params, residual)[0], key


def _saves_preact(x: torch.Tensor, params: Params, recompute: int) -> bool:
    """Whether forward keeps what the activation's gradient is formed of."""
    *first, out_weight, _ = params
    return _any_requires_grad(x, *first) or (recompute == 1 and out_weight.requires_grad)


def _any_requires_grad(*tensors: Any) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator takes three times as long
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _Call(NamedTuple):
    """The options of one call."""

    options: TPOptions
    activation: str
    recompute: int
    n: int  # weights of the first layer
    settled: Any = None  # kernels.linear.settled.FeedForward, of a call like one before
    key: Any = None  # that such calls are looked up by

    @property
    def gated(self) -> bool:
        return self.n == 2

    @property
    def bare(self) -> bool:
        """Whether h is z: no activation between the layers."""
        return self.activation == "identity" and not self.gated

    def first_product(
        self, rows: torch.Tensor, weights: Params, biases: Params, choice: Choice, *, save_preact: bool
    ) -> Product:
        """The product that forms h from the rows; with ``save_preact`` also [z] or [g, u], unless h is z."""
        kind = Product.gated_linear if self.gated else Product.linear_act
        return kind(rows, weights, biases, self.activation, choice, save_preact=save_preact)

    def activated(self, zs: Params) -> torch.Tensor:
        """h, from [z] or [g, u]."""
        h = apply_activation(zs[0], self.activation)
        return h * zs[1] if self.gated else h


def _forward_again(
    ctx: Any, call: _Call, residual: torch.Tensor | None, x: torch.Tensor, params: tuple[Any, ...]
) -> torch.Tensor:
    """In one process, of a kind that was met before."""
    n = call.n
    _, _, need_x, *need = ctx.needs_input_grad
    need_dz, need_h = need_x or any(need[: 2 * n]), need[2 * n]
    y, h, zs = call.settled.forward(x, params, residual)
    ctx.call, ctx.x_shape, ctx.keeps_shard = call, x.shape, False
    ctx.save_for_backward(
        x if any(need[:n]) else None,
        h if need_h and call.recompute == 0 else None,
        params[2 * n] if need_dz else None,
        *(params[:n] if need_x else (None,) * n),
        *(None,) * n,
        *zs,
    )
    return y


def _backward_again(ctx: Any, dy: torch.Tensor) -> Any:
    """What backward returns, by launches that are settled.

    None where this pass forms only some gradients, or what it reads lies otherwise than forward left it.
    """
    want = ctx.needs_input_grad
    if library.quiet() and autograd.whole(ctx):
        n = ctx.call.n
        x, h, out_weight, *rest = ctx.saved_tensors
        saved = Saved(x, h, rest[:n], out_weight, rest[2 * n :])
        grads = ctx.call.settled.backward(repeated.dense(dy), want[2:], saved)
        if grads is not None:
            return None, dy if want[1] else None, *grads
    # As forward leaves them that goes step by step.
    n = len(want) - 2
    ctx.choices, ctx.overlap, ctx.specs, ctx.buffers = _TRITON, (_PLAIN, _PLAIN), [None] * (n - 1), [None] * (n - 1)
    ctx.dtypes = [dy.dtype] * n
    return None


_ALONE = TPOptions(SINGLE, site="mlp", grad=True)
_PLAIN = LayerOverlap(Plain(SINGLE), Plain(SINGLE))
_TRITON = (Choice("triton", "as a call like it before"),) * 2


class _Left(NamedTuple):
    """What a backward pass saves for the next one over the same graph."""

    dy: torch.Tensor  # for all tokens
    x: torch.Tensor | None
    h: torch.Tensor | None
    zs: Params
    dzs: Any  # the list, or None if it was not formed


class ParallelMLPFunction(torch.autograd.Function):
    """The feed-forward layer: a column-parallel product, the activation, a row-parallel product.

    x_shard, y_shard, dx_shard, dy_shard  [T/R, D]   this rank's tokens; without sequence parallelism all, [T, D]
    x, dy                                 [T, D]     every rank's, gathered
    w_shard (one, or gate and up)         [F/R, D]
    out_weight                            [D, F/R]
    zs, h, dzs                            [T, F/R]   [z], or [g, u]

    forward    x = all_gather(x_shard);  h, zs = act(x @ w_shard^T + b);
               y_shard = reduce_scatter(h @ out_weight^T) + b2, or all_reduce
    backward   dy = all_gather(dy_shard);  dzs = (dy @ out_weight) * act'(zs), in one product;
               dx_shard = reduce_scatter(sum_i dz_i @ w_i), or all_reduce, under
               dout_weight = dy^T @ h and dw_i = dz_i^T @ x
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, residual: torch.Tensor | None, x_shard: torch.Tensor, *params: Any) -> Any:
        if call.settled is not None:
            return _forward_again(ctx, call, residual, x_shard, params)
        options, n = call.options, call.n
        alone, site = options.group.size == 1, options.site
        plain = open_params(ctx, x_shard, params, options.fuse_wgrad_accumulation and options.grad)
        op = "gated_linear" if call.gated else "linear_act"
        packs = options.packs
        dtype, first_choice = functional.prepare(
            x_shard, plain[:n], plain[n : 2 * n], call.activation, options.impl, op=op, pack_weight=packs
        )
        x_shard, *operands = functional.cast((x_shard, *plain[: 2 * n]), [dtype] * (1 + 2 * n))
        weights, biases, (out_weight, out_bias) = operands[:n], operands[n:], plain[2 * n :]

        # Save the tensors that backward reads: the first layer's input x, the hidden h, and the inputs of the step from
        # dy to dzs.
        _, _, need_x, *need = [needed and options.grad for needed in ctx.needs_input_grad]
        need_dz, need_h, need_rows = need_x or any(need[: 2 * n]), need[2 * n], any(need[:n])
        again = call.recompute == 2 and (need_dz or need_h)
        keep_h = need_h and (call.recompute == 0 or call.bare) and not again
        save_preact = (need_dz or (need_h and not keep_h)) and not again

        in_overlap = column_overlap(options, x_shard, weights)
        rows = functional.as_rows(x_shard)
        product = call.first_product(rows, weights, biases, first_choice, save_preact=save_preact)
        if options.sequence_parallel:
            keep = not in_overlap.gathers_again
            (h, *zs), x = in_overlap.forward.all_gather_linear(product, site=f"{site}.in", keep=keep)
        else:
            (h, *zs), x = product.compute(), rows

        _, second_choice = functional.prepare(h, [out_weight], [out_bias], "identity", options.impl, pack_weight=packs)
        out_weight, out_bias = functional.cast((out_weight, out_bias), [dtype, dtype])
        out_overlap = row_overlap(options, h, out_weight)
        if alone:  # the epilogue adds bias and residual
            given = residual
            if residual is not None:
                functional.check_residual("linear_act", x_shard, [out_weight], residual)
                residual = functional.as_rows(residual)
            (y_shard,) = Product.linear_act(
                h, [out_weight], [out_bias], "identity", second_choice, residual=residual
            ).compute()
            if call.key is not None:  # keep what a call like this one will: a checkpoint compares the two
                feed_forward.keep(call.key, (first_choice, second_choice), x_shard, tuple(plain), given)
                x, h = x_shard, h.view(*x_shard.shape[:-1], h.shape[1])
        else:
            product = Product.linear_act(h, [out_weight], [None], "identity", second_choice)
            if options.sequence_parallel:
                pending = out_overlap.forward.linear_reduce_scatter(product, bias=out_bias, site=f"{site}.out")
            else:
                pending = out_overlap.forward.linear_all_reduce(
                    product, bias=out_bias, site=f"{site}.out", async_op=False
                )
            y_shard = pending.wait()

        ctx.call, ctx.choices, ctx.overlap, ctx.x_shape = (
            call,
            (first_choice, second_choice),
            (in_overlap, out_overlap),
            x_shard.shape,
        )
        ctx.keeps_shard = options.sequence_parallel and not alone and (again or in_overlap.gathers_again)
        ctx.save_for_backward(
            None if not (need_rows or again) else rows if ctx.keeps_shard else x,
            h if keep_h else None,
            out_weight if need_dz else None,
            *(weight if need_x or again else None for weight in weights),
            *(bias if again else None for bias in biases),
            *zs,
        )
        return functional.shaped(y_shard, x_shard.shape[:-1])

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy_shard: torch.Tensor) -> tuple[Any, ...]:
        call, n, options = ctx.call, ctx.call.n, ctx.call.options
        if call.settled is not None:
            grads = _backward_again(ctx, dy_shard)
            if grads is not None:
                return grads
        first_choice, second_choice = ctx.choices
        in_overlap, out_overlap = ctx.overlap
        site = options.site
        kept, h, out_weight, *rest = ctx.saved_tensors
        if call.key is not None:
            kept, h = (t if t is None else functional.as_rows(t) for t in (kept, h))
        weights, biases, zs = rest[:n], rest[n : 2 * n], rest[2 * n :]
        want = autograd.needed_grads(ctx)
        _, want_residual, want_x, *want_params = want
        want_dz, want_h = want_x or any(want_params[: 2 * n]), want_params[2 * n]

        left: _Left | None = autograd.load_saved(ctx, [dy_shard])
        dy, x, h, zs, dzs = left or _Left(None, None if ctx.keeps_shard else kept, h, zs, None)  # type: ignore[arg-type]
        if call.recompute == 2 and h is None and (want_dz or want_h):
            h, zs, x = _first_again(call, kept, weights, biases, first_choice, in_overlap)

        # Backward through the second layer and the activation: dy, dzs, and h if it is needed and was not saved.
        form_dzs = want_dz and dzs is None
        recompute_act = form_dzs and h is None and ctx.needs_input_grad[3 + 2 * n]  # for this pass or a later one
        rows = functional.as_rows(dy_shard) if dy is None else dy
        if call.bare:
            product = Product.input_grad([rows], [out_weight], second_choice)
        else:
            product = Product.input_grad_act(
                rows, out_weight, zs, call.activation, second_choice, recompute_act=recompute_act
            )
        if not form_dzs:
            product = product.without_results()
        if dy is not None or not options.sequence_parallel:
            dy, found = rows, product.compute()
        else:
            keep = autograd.keeps_graph()  # a later pass may need the rows again
            found, dy = out_overlap.backward.all_gather_linear(product, site=f"{site}.out.grad", keep=keep)
        if form_dzs:
            dzs, h = found[:n], found[n] if recompute_act else h
        if want_h and h is None:
            h = call.activated(zs)

        # dx travels while the gradients of the weights are formed.
        gather = x is None and any(want_params[:n])
        buffers = autograd.destinations(ctx, ctx.buffers)
        dws: list[Any] = [None] * n
        dbs: list[Any] = [None] * n
        dx_shard = None
        with InFlight() as flights:
            if gather:
                gathering = flights.add(
                    Pending(collectives.start_all_gather(kept, options.group, site=f"{site}.in.again"))
                )
            if want_x:
                summing = flights.add(
                    sum_input_grad(options, in_overlap.backward, dzs, weights, first_choice, f"{site}.in")
                )
            (dout_weight,), (dout_bias,) = _param_grads([dy], h, want_params[2 * n :], buffers[2 * n :], second_choice)
            if gather:
                x = gathering.wait()
            if want_dz:
                dws, dbs = _param_grads(dzs, x, want_params[: 2 * n], buffers[: 2 * n], first_choice)
            if want_x:
                dx_shard = summing.wait().view(ctx.x_shape)
        released = zs if dzs else ()
        autograd.save_for_next_pass(ctx, [dy_shard], _Left(dy, x, h, () if dzs else zs, dzs), want, released=released)
        grads = close_grads(ctx, dx_shard, [*dws, *dbs, dout_weight, dout_bias])
        return None, dy_shard if want_residual else None, *grads


_apply = autograd.direct(ParallelMLPFunction)


def _first_again(
    call: _Call, kept: torch.Tensor, weights: Params, biases: Params, choice: Choice, overlap: LayerOverlap
) -> tuple[torch.Tensor, Params, torch.Tensor]:
    """Recompute the first layer in backward: h, the zs and all tokens' x, for the weights' gradients."""
    product = call.first_product(kept, weights, biases, choice, save_preact=True)
    if call.options.sequence_parallel:
        (h, *zs), x = overlap.forward.all_gather_linear(product, site=f"{call.options.site}.in.again")
    else:
        (h, *zs), x = product.compute(), kept
    return h, zs, x


def _param_grads(
    dzs: Params, x: torch.Tensor | None, want: Any, into: Any, choice: Choice
) -> tuple[list[Any], list[Any]]:
    """The gradients of a layer's weights and biases that are needed and were not added to a buffer."""
    n = len(dzs)
    return functional.param_grads(
        dzs,
        x,
        want[:n],
        want[n:],
        choice,
        into=into[:n],
        bias_into=into[n:],
    )
