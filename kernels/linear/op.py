"""``linear_act`` and ``gated_linear``: the public functions and their autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch

from ..runtime import autograd, dispatch, library, repeated
from ..runtime import onednn as packing
from ..runtime.dispatch import Choice
from . import functional, onednn_autograd, reference
from .config import forced

Optional = tuple["torch.Tensor | None", ...]


@overload
def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "identity",
    residual: torch.Tensor | None = None,
    fuse_wgrad_accumulation: bool = False,
    pack_weight: bool = False,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def linear_act(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor | None] | None = None,
    *,
    activation: str = "identity",
    fuse_wgrad_accumulation: bool = False,
    pack_weight: bool = False,
    impl: str = "auto",
) -> tuple[torch.Tensor, ...]: ...
def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    activation: str = "identity",
    residual: torch.Tensor | None = None,
    fuse_wgrad_accumulation: bool = False,
    pack_weight: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """act(x @ W^T + b) + residual, for one weight or for up to three weights on the same x in one launch.

    Args:
        x: [..., D] in bf16, fp16 or fp32, any strides. Other dtypes run the reference.
        weight: [F, D], or a sequence of [F_i, D] (q, k, v; gate, up). Same dtype as x, except under autocast.
        bias: [F] or None; with several weights a sequence of these, or None.
        activation: "identity", "relu", "squared_relu", "gelu_erf", "gelu_tanh", "quick_gelu" or "silu".
        residual: [..., F] in x's dtype or None, with one weight only. Under autocast a wider one stays as it is, and
            so does the result.
        fuse_wgrad_accumulation: backward adds dW and db to the buffers ``weight.main_grad`` and ``bias.main_grad``
            (fp32, or the parameter's dtype), as they are when forward runs, instead of returning them.
        pack_weight: for inference on a CPU: where oneDNN runs, keep a copy of the weight in its own layout until the
            weight changes. A call that wants gradients keeps none.
        impl: "auto", "triton", "onednn" or "reference"; see ``kernels/runtime/dispatch.py``.

    Returns:
        [..., F] in x's dtype, or a tuple of [..., F_i]. Products accumulate in fp32.

    Raises:
        ValueError: shapes, dtypes, devices or names that do not fit.
        RuntimeError: impl="triton" or "onednn" where it cannot run; fuse_wgrad_accumulation under torch.compile.

    The backward saves x and, unless the activation is the identity, the pre-activation z; it forms dz = dy * act'(z)
    once, then dx = dz @ W and dW = dz^T @ x with db = sum_T dz in the same pass. It forms what is asked of it and no
    more, and each product once where a split backward asks in two passes.
    """
    many = not isinstance(weight, torch.Tensor)
    weights: tuple[torch.Tensor, ...] = tuple(weight) if many else (weight,)  # type: ignore[assignment]
    key = None
    one = many and isinstance(bias, torch.Tensor)  # refused below
    if not (fuse_wgrad_accumulation or one) and forced.config is None and dispatch.may_launch(impl, x):
        listed = _listed(bias, len(weights))
        grad = torch.is_grad_enabled()
        wants = grad and _want_grad(x, *weights, *listed)
        saves = wants and activation != "identity"
        key = repeated.key_of(impl, (x, residual, *weights, *listed), ("linear_act", activation, saves))
        launch = None if key is None else _calls.get(key)
        if launch is not None:
            if wants or (grad and _want_grad(residual)):
                ys = launch.differentiable(x, weights, listed, residual)
            else:
                ys, _ = launch(x, weights, listed, residual)
            return tuple(ys) if many else ys[0]
    if bias is None or isinstance(bias, torch.Tensor):
        if many and bias is not None:
            raise ValueError("linear_act: bias is one tensor but weight is a sequence; pass a bias or None for each")
        if not many and not fuse_wgrad_accumulation:
            settled = functional.settled(impl, x, weight, activation, pack_weight)
            if settled == "reference":
                return functional.plain_forward(x, weights, (bias,), activation, residual)
            if settled == "onednn" and residual is None and torch.is_grad_enabled() and _want_grad(x, *weights, bias):
                functional.check(x, weights, (bias,), activation)
                if onednn_autograd.takes(x.dtype, x, weights[0]):
                    dispatch.count("linear_act", "onednn")
                    packing.drop(weights[0])
                    return onednn_autograd.linear_act(x, weights[0], bias, activation)
        biases: Optional = (bias,) * len(weights)
    else:
        biases = tuple(bias)
    if pack_weight or packing.here.serving:
        pack_weight = functional.packs(pack_weight)
    dtype, choice = functional.prepare(x, weights, biases, activation, impl, residual, pack_weight=pack_weight)
    if choice.impl == "reference" and not fuse_wgrad_accumulation:
        outputs = reference.linear_act(x, weights, biases, activation, residual)
        return outputs if many else outputs[0]
    n, params = len(weights), (*weights, *biases)
    late = None
    if residual is not None and residual.dtype != dtype:  # under autocast: a sum in the wider dtype, as torch's
        late, residual = residual, None
    elif residual is x:  # torch.compile takes no tensor twice
        residual = x.view_as(x)
    if torch.is_grad_enabled() and _want_grad(x, residual, *params):
        plain = choice.impl == "onednn" and residual is None and not (many or fuse_wgrad_accumulation)
        if plain and onednn_autograd.takes(dtype, x, weights[0]):
            y: torch.Tensor = onednn_autograd.linear_act(x, *params, activation)
            return y if late is None else y + late
        buffers = autograd.main_grads(params) if fuse_wgrad_accumulation else (None,) * len(params)
        compiling = torch.compiler.is_compiling()
        apply = _LinearAct.apply if compiling or choice.impl == "reference" else _apply_linear_act
        ys = apply(_Call("linear_act", activation, choice, dtype, n, buffers), x, residual, *params)
    else:
        rows, residual, operands = _operands(dtype, x, residual, params)
        if choice.impl == "onednn":  # which may multiply by several weights at once
            ys = functional.linear_act_fwd(choice, rows, operands[:n], operands[n:], residual, activation)
        else:
            where = functional.implementation(choice, rows, *operands, residual)
            ys = where.linear_act_fwd(rows, operands[:n], operands[n:], residual, activation, False)
        ys = _shaped(ys, x)
    if late is not None:
        return ys[0] + late
    if key is not None and choice.triton:
        _keep(key, (x, residual, *params))
    return tuple(ys) if many else ys[0]


def gated_linear(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    fuse_wgrad_accumulation: bool = False,
    pack_weight: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """act(x @ W_g^T + b_g) * (x @ W_u^T + b_u), both products and theirs in one launch.

    SwiGLU with "silu", GeGLU with "gelu_erf" or "gelu_tanh", ReGLU with "relu" (Shazeer, arXiv:2002.05202). x
    [..., D]; the weights [F, D], separate parameters; the biases [F] or None. Returns [..., F] in x's dtype.

    Dtypes, ``fuse_wgrad_accumulation``, ``pack_weight``, ``impl`` and what is raised are as in :func:`linear_act`. The
    backward saves x and the two factors before the activation.
    """
    weights, biases = (gate_weight, up_weight), (gate_bias, up_bias)
    key = None
    if not fuse_wgrad_accumulation and forced.config is None and dispatch.may_launch(impl, x):
        saves = torch.is_grad_enabled() and _want_grad(x, *weights, *biases)
        key = repeated.key_of(impl, (x, None, *weights, *biases), ("gated_linear", activation, saves))
        launch = None if key is None else _calls.get(key)
        if launch is not None:
            return launch.differentiable(x, weights, biases) if saves else launch(x, weights, biases, None)[0][0]
    if not fuse_wgrad_accumulation and functional.settled(impl, x, gate_weight, activation, pack_weight) == "reference":
        return functional.plain_forward(x, weights, biases, activation, op="gated_linear")
    if pack_weight or packing.here.serving:
        pack_weight = functional.packs(pack_weight)
    dtype, choice = functional.prepare(x, weights, biases, activation, impl, op="gated_linear", pack_weight=pack_weight)
    if choice.impl == "reference" and not fuse_wgrad_accumulation:
        return reference.gated_linear(x, weights, biases, activation)
    params = (*weights, *biases)
    if torch.is_grad_enabled() and _want_grad(x, *params):
        buffers = autograd.main_grads(params) if fuse_wgrad_accumulation else (None,) * len(params)
        compiling = torch.compiler.is_compiling()
        apply = _GatedLinear.apply if compiling or choice.impl == "reference" else _apply_gated_linear
        h = apply(_Call("gated_linear", activation, choice, dtype, 2, buffers), x, *params)
        if key is not None and choice.triton:
            _keep(key, (x, None, *params))
        return h
    rows, _, operands = _operands(dtype, x, None, params)
    where = functional.implementation(choice, rows, *operands)
    (h,) = _shaped(where.gated_linear_fwd(rows, operands[:2], operands[2:], activation, False), x)
    if key is not None and choice.triton:
        _keep(key, (x, None, *params))
    return h


class _Call(NamedTuple):
    """The options of one call."""

    op: str
    activation: str
    choice: Choice
    dtype: torch.dtype  # to compute in
    n: int  # weights
    buffers: Sequence[torch.Tensor | None]  # where the gradients of weights and biases are added, None: returned
    forward: Any = None  # of a call like one before: settled.Forward
    backward: Any = None  # settled.LinearBackward


def _operands(
    dtype: torch.dtype, x: torch.Tensor, residual: torch.Tensor | None, params: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor | None, list[Any]]:
    """x and the residual in rows [T, D] and [T, F], and the parameters, in the dtype to compute in.

    Under autocast that casts them. It happens within the autograd functions: these then stand next to the parameters
    in the graph, and can tell whether a parameter's gradient is to be returned or may go to its ``main_grad``.
    """
    x, residual, *operands = [t if t is None or t.dtype is dtype else t.to(dtype) for t in (x, residual, *params)]
    return functional.as_rows(x), None if residual is None else functional.as_rows(residual), operands


def _shaped(results: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The results, [T, F_i] each, with the leading dimensions of x."""
    return results if x.dim() == 2 else [functional.shaped(each, x.shape[:-1]) for each in results]


def _kept(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What backward keeps of x: x itself where its rows are a view, as a call like one before does.

    A checkpoint compares what a first call and its repetition keep.
    """
    if torch.compiler.is_compiling() or rows.dtype is not x.dtype or not repeated.rows_lie(x):
        return rows
    return x


def _want_grad(*tensors: torch.Tensor | None) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator takes three times as long
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _LinearAct(torch.autograd.Function):
    """y_i = act(x @ W_i^T + b_i) + residual: x [..., D], W_i [F_i, D], b_i [F_i], residual and y_i [..., F_i]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, residual: torch.Tensor | None, *params: Any) -> Any:
        n = call.n
        _, need_x, need_residual, *need = ctx.needs_input_grad
        weights: Any
        zs: Any
        if call.forward is not None:
            rows, weights = x, params[:n]
            ys, zs = call.forward(x, weights, params[n:], residual)
        else:
            rows, residual, operands = _operands(call.dtype, x, residual, params)
            weights, biases = operands[:n], operands[n:]
            save_preact = call.activation != "identity" and (need_x or any(need))  # the identity's backward needs none
            where = functional.implementation(call.choice, rows, *operands, residual)
            found = where.linear_act_fwd(rows, weights, biases, residual, call.activation, save_preact)
            ys, zs = _shaped(found[:n], x), found[n:]
            rows = _kept(x, rows)
        if n > 1 and not (need_x or need_residual):  # outputs whose own operands want no gradient have none
            wants = [need_w or need_b for need_w, need_b in zip(need[:n], need[n:])]
            ctx.mark_non_differentiable(*[y for y, want in zip(ys, wants) if not want])
            zs = [z if want else None for z, want in zip(zs, wants)]
        ctx.set_materialize_grads(False)
        weights = weights if need_x else [None] * n
        ctx.save_for_backward(rows if any(need[:n]) else None, *weights, *zs)
        ctx.call = call
        return tuple(ys)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        call, n = ctx.call, ctx.call.n
        if call.forward is not None:
            formed = _backward_again(ctx, dys)
            if formed is not None:
                return formed
        x, *rest = ctx.saved_tensors
        weights, zs = rest[:n], rest[n:]
        want = autograd.needed_grads(ctx)
        _, want_x, want_residual, *want_params = want
        given = [i for i, dy in enumerate(dys) if dy is not None]
        dzs = autograd.load_saved(ctx, dys)
        if dzs is None and (want_x or any(want_params) or autograd.keeps_graph()):  # the next pass recalls them
            dzs = [None if dy is None else functional.as_rows(dy) for dy in dys]
            if zs:
                dzs = [dz if dz is None else functional.act_grad(dz, z, call.activation, call.choice)
                       for dz, z in zip(dzs, zs)]  # fmt: skip
        dx: torch.Tensor | None = None
        grads: list[torch.Tensor | None] = [None] * (2 * n)
        if want_x and given:
            reached, weights = [dzs[i] for i in given], [weights[i] for i in given]
            dx = functional.implementation(call.choice, *reached, *weights).linear_dgrad(reached, weights)
            (dx,) = _shaped([dx], next(dy for dy in dys if dy is not None))
        if any(want_params):
            grads = _param_grads(ctx, dzs, x, want_params)
        autograd.save_for_next_pass(ctx, dys, dzs, want, released=zs)
        return None, dx, dys[0] if want_residual else None, *grads


class _GatedLinear(torch.autograd.Function):
    """h = act(x @ W_g^T + b_g) * (x @ W_u^T + b_u): x [..., D], weights [F, D], biases [F] or None, h [..., F]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> torch.Tensor:
        _, need_x, *need = ctx.needs_input_grad
        operands: Any
        if call.forward is not None:
            rows, operands = x, params
            (h,), (g, u) = call.forward(x, params[:2], params[2:], None)
        else:
            rows, _, operands = _operands(call.dtype, x, None, params)
            where = functional.implementation(call.choice, rows, *operands)
            h, g, u = where.gated_linear_fwd(rows, operands[:2], operands[2:], call.activation, True)
            (h,) = _shaped([h], x)
            rows = _kept(x, rows)
        weights = operands[:2] if need_x else [None, None]
        ctx.save_for_backward(rows if any(need[:2]) else None, *weights, g, u)
        ctx.call = call
        return h

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dh: torch.Tensor) -> Any:
        x, *weights, g, u = ctx.saved_tensors
        want = autograd.needed_grads(ctx)
        _, want_x, *want_params = want
        dzs = autograd.load_saved(ctx, [dh])
        if dzs is None:
            dzs = functional.gated_act_grad(functional.as_rows(dh), g, u, ctx.call.activation, ctx.call.choice)
        dx: torch.Tensor | None = None
        if want_x:
            dx = functional.implementation(ctx.call.choice, *dzs, *weights).linear_dgrad(dzs, weights)
            (dx,) = _shaped([dx], dh)
        grads = _param_grads(ctx, dzs, x, want_params)
        autograd.save_for_next_pass(ctx, [dh], dzs, want, released=(g, u))
        return None, dx, *grads


def _backward_again(ctx: Any, dys: Sequence[torch.Tensor | None]) -> Any:
    """What :class:`_LinearAct`'s backward returns, by launches that are settled; None where this pass forms only some
    gradients, or what it reads lies otherwise than forward left it.
    """
    if not all(isinstance(dy, torch.Tensor) for dy in dys) or not library.quiet() or not autograd.whole(ctx):
        return None
    call, n = ctx.call, ctx.call.n
    x, *rest = ctx.saved_tensors
    weights, zs = rest[:n], rest[n:]
    dzs: Any = [repeated.dense(dy) for dy in dys]  # type: ignore[arg-type]  # none is None
    if zs:
        dzs = [functional.act_grad(functional.as_rows(dy), z, call.activation, call.choice) for dy, z in zip(dzs, zs)]
    _, want_x, want_residual, *want = ctx.needs_input_grad
    grads = call.backward(tuple(dzs), x, weights, (want_x, *want))
    if grads is None:
        return None
    dx, dws, dbs = grads
    if dx is not None and zs:
        (dx,) = _shaped([dx], dys[0])  # type: ignore[arg-type]  # none is None
    return None, dx, dys[0] if want_residual else None, *dws, *dbs


_apply_linear_act, _apply_gated_linear = autograd.direct(_LinearAct), autograd.direct(_GatedLinear)


class _Launch:
    """Calls of one kind, counted."""

    def __init__(self, op: str, activation: str, forward: Any, backward: Any, dtype: torch.dtype, n: int) -> None:
        self._call = _Call(op, activation, _TRITON, dtype, n, (None,) * 2 * n, forward, backward)
        self._forward, self._counted = forward, (op, "triton")

    def __call__(self, x: torch.Tensor, weights: Any, biases: Any, residual: torch.Tensor | None) -> Any:
        """The results, and what backward reads: as ``settled.Forward``."""
        dispatch.counts[self._counted] += 1
        return self._forward(x, weights, biases, residual)

    def differentiable(self, x: torch.Tensor, weights: Any, biases: Any, residual: torch.Tensor | None = None) -> Any:
        """The results, as part of autograd's graph."""
        dispatch.counts[self._counted] += 1
        if self._call.op == "gated_linear":
            return _apply_gated_linear(self._call, x, *weights, *biases)
        return _apply_linear_act(self._call, x, residual, *weights, *biases)


_TRITON = Choice("triton", "as a call like it before")
_calls: repeated.Calls[_Launch] = repeated.Calls()


def _keep(key: Any, operands: Any) -> None:
    """After a call that ran the kernel: have those of its kind launch it, if that is all that they need."""
    op, activation, saves = key[1]
    x, residual, *params = operands
    weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
    added = all(t is None or (t.is_contiguous() and t.dtype is x.dtype) for t in (residual, *biases))
    plain = added and residual is not x and all(w.numel() for w in weights) and not dispatch.row_invariant()
    if plain and repeated.rows_lie(x):
        settled = library.imported(f"{__package__}.settled")
        gated = op == "gated_linear"
        forward = settled.Forward(x, weights, biases, residual, activation, saves, gated, x.device)
        _calls[key] = _Launch(op, activation, forward, settled.LinearBackward(), x.dtype, len(weights))


def _listed(bias: Any, n: int) -> tuple[torch.Tensor | None, ...]:
    return (bias,) * n if bias is None or isinstance(bias, torch.Tensor) else tuple(bias)


def _param_grads(
    ctx: Any, dzs: Sequence[torch.Tensor | None], x: torch.Tensor | None, want: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of weights and biases that ``want`` names and a dz reaches; None for the rest, and for those that
    went into a buffer.
    """
    call, n = ctx.call, ctx.call.n
    into = autograd.destinations(ctx, call.buffers)
    grads: list[torch.Tensor | None] = [None] * (2 * n)
    given = [i for i, dz in enumerate(dzs) if dz is not None]
    if given:
        of_weights, of_biases = given, [n + i for i in given]
        dws, dbs = functional.param_grads(
            [dzs[i] for i in given],  # type: ignore[misc]
            None if x is None else functional.as_rows(x),
            [want[i] for i in of_weights],
            [want[i] for i in of_biases],
            call.choice,
            into=[into[i] for i in of_weights],
            bias_into=[into[i] for i in of_biases],
        )
        for i, grad in zip((*of_weights, *of_biases), (*dws, *dbs)):
            grads[i] = grad
    return grads
