"""``rms_norm`` and ``layer_norm``: the public functions and their autograd."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple, overload

import torch

from ..dropout import op as dropout
from ..dropout import reference as dropout_reference
from ..dropout import schemas as dropout_schemas
from ..linear.functional import as_rows, shaped
from ..runtime import autograd, dispatch, library, repeated
from ..runtime.dispatch import Choice
from ..runtime.dtypes import no_kernel
from . import cpu, reference, schemas

Optional = torch.Tensor | None
_LARGEST = 2**31 - 2**14  # of a size: the last block's end still fits 32 bits


@overload
def rms_norm(
    x: torch.Tensor,
    weight: Optional = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: Optional = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: None = None,
    carry: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: Optional = None,
    *,
    residual: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    rng_key: Optional = None,
    stream: int = 0,
    row_start: int = 0,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor,
    weight: Optional = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Optional = None,
    dropout_p: float = 0.0,
    rng_key: Optional = None,
    stream: int = 0,
    row_start: int = 0,
    carry: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = s / sqrt(mean(s^2) + eps) * (weight_offset + weight), s = residual + dropout(x), in one pass.

    RMSNorm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension.

    Args:
        x: [..., D] in bf16, fp16 or fp32, any strides. Other dtypes run the reference.
        weight: [D] in any of these dtypes, not necessarily x's, or None for y = s / sqrt(mean(s^2) + eps).
        eps: added to the mean.
        weight_offset: added to the weight in fp32: 1 for Gemma's norms, whose weights are kept around 0.
        residual: [..., D] or None. With it the function returns s as well. Its dtype may be another than x's.
        dropout_p: the share of x that is dropped before the residual is added; needs a residual.
        carry: without a residual, return x as well. What is computed from that x, beside y, has its gradient added up
            with the norm's own in backward's one kernel.
        rng_key, stream, row_start: what the mask is drawn from; see :func:`shardfuse.kernels.dropout.dropout`.
        impl: "auto", "triton" or "reference"; see ``kernels/runtime/dispatch.py``.

    Returns:
        y [..., D], (y, s) with a residual, (y, x) with ``carry``. s has the dtype to which x and residual promote, as
        in x + residual, and is rounded once; y is the norm of the rounded s, in s's dtype. Statistics and products are
        fp32. Under autocast the result is what torch's norm gives there: fp32 on a GPU (s is not cast), but not of
        rms_norm in torch 2.11; s's dtype elsewhere. Parameters are read in the dtype they have; nothing is cast for
        them.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit.
        RuntimeError: impl="triton" where Triton cannot run.

    Backward keeps s, which is a result anyway, and one number per row (layer_norm: two). A row's result does not depend
    on the rows beside it, and all sums are added in a fixed order.
    """
    if not dropout_p and dispatch.uses_reference(impl, x) and _plain(x, weight, None, residual, weight_offset, carry):
        s = x if residual is None else x + residual
        try:
            if cpu.takes(impl, s, weight):
                y = cpu.rms_norm(s, weight, eps)
            else:
                y = torch.rms_norm(s, s.shape[-1:], weight, eps)  # what F.rms_norm calls
        except RuntimeError:
            _check("rms_norm", x, weight, None, residual)
            raise
        dispatch.count("rms_norm", "reference")
        return y if residual is None and not carry else (y, s)
    key = None
    if not dropout_p and dispatch.may_launch(impl, x):
        key = repeated.key_of(impl, (x, residual, weight, None), ("rms_norm", eps, weight_offset, carry))
        launch = None if key is None else _calls.get(key)
        if launch is not None:
            return launch(x, residual, weight, None)
    call = _Call("rms_norm", eps, weight_offset, dropout_p, stream, row_start, carry)
    return _norm(call, x, weight, None, residual, rng_key, impl, key)


@overload
def layer_norm(
    x: torch.Tensor,
    weight: Optional = None,
    bias: Optional = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: Optional = None,
    bias: Optional = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: None = None,
    carry: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: Optional = None,
    bias: Optional = None,
    *,
    residual: torch.Tensor,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    rng_key: Optional = None,
    stream: int = 0,
    row_start: int = 0,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
def layer_norm(
    x: torch.Tensor,
    weight: Optional = None,
    bias: Optional = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Optional = None,
    dropout_p: float = 0.0,
    rng_key: Optional = None,
    stream: int = 0,
    row_start: int = 0,
    carry: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = (s - mean(s)) / sqrt(var(s) + eps) * (weight_offset + weight) + bias, s = residual + dropout(x), in one pass.

    LayerNorm (Ba et al., arXiv:1607.06450) over the last dimension; the variance is over D, not D - 1. bias [D] or
    None. Everything else is as in :func:`rms_norm`.
    """
    if not dropout_p and dispatch.uses_reference(impl, x) and _plain(x, weight, bias, residual, weight_offset, carry):
        s = x if residual is None else x + residual
        try:
            y = torch.layer_norm(s, s.shape[-1:], weight, bias, eps)  # what F.layer_norm calls
        except RuntimeError:
            _check("layer_norm", x, weight, bias, residual)
            raise
        dispatch.count("layer_norm", "reference")
        return y if residual is None and not carry else (y, s)
    key = None
    if not dropout_p and dispatch.may_launch(impl, x):
        key = repeated.key_of(impl, (x, residual, weight, bias), ("layer_norm", eps, weight_offset, carry))
        launch = None if key is None else _calls.get(key)
        if launch is not None:
            return launch(x, residual, weight, bias)
    call = _Call("layer_norm", eps, weight_offset, dropout_p, stream, row_start, carry)
    return _norm(call, x, weight, bias, residual, rng_key, impl, key)


def norm_choice(op: str, device: torch.device, impl: str = "auto", *dtypes: torch.dtype) -> Choice:
    """Which implementation ``op`` ("rms_norm", "layer_norm") takes for ``dtypes`` on ``device``, and why."""
    return dispatch.choose(op, device, impl, unsupported=autograd.transformed() or no_kernel(*dtypes))


class _Call(NamedTuple):
    """The options of one call."""

    op: str
    eps: float
    weight_offset: float
    p: float  # of dropout
    stream: int
    row_start: int
    carry: bool
    forward: Any = None  # launch.Forward, of a call like one before

    @property
    def centred(self) -> bool:
        return self.op == "layer_norm"


def _plain(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, weight_offset: float, carry: bool
) -> bool:
    """Whether torch's own functions take these as they are, and would notice what is wrong with them."""
    dtype, on_cpu = x.dtype, x.is_cpu  # beside a GPU's tensors torch looks at devices itself
    if weight is not None and (weight_offset or weight.dtype is not dtype or weight.is_cpu is not on_cpu):
        return False
    if residual is not None and (
        carry or residual.dtype is not dtype or residual.is_cpu is not on_cpu or residual.shape != x.shape
    ):
        return False
    return bias is None or (bias.dtype is dtype and bias.is_cpu is on_cpu)


class _Launch:
    """Calls of one kind."""

    def __init__(self, call: _Call) -> None:
        self._call, self._counted = call, (call.op, "triton")

    def __call__(self, x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional) -> Any:
        call = self._call
        dispatch.counts[self._counted] += 1
        if torch.is_grad_enabled() and _want_grad(x, residual, weight, bias):
            if not call.carry or x.requires_grad:
                return _apply_norm(call, None, x, residual, weight, bias)
            return _apply_norm(call._replace(carry=False), None, x, residual, weight, bias), x
        y, s, _, _ = call.forward(x, residual, weight, bias)
        return (y, x) if call.carry else y if s is None else (y, s)


def _want_grad(*tensors: Optional) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator takes three times as long
        if tensor is not None and tensor.requires_grad:
            return True
    return False


_calls: repeated.Calls[_Launch] = repeated.Calls()


def _keep(key: Any, call: _Call, x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional) -> None:
    """After a call that ran the kernel: have those of its kind launch it, if that is all that they need."""
    dense = all(t is None or t.is_contiguous() for t in (weight, bias))
    if dense and residual is not x and all(t is None or repeated.rows_lie(t) for t in (x, residual)):
        launch = library.imported(f"{__package__}.launch")
        forward = launch.Forward(x, residual, weight, bias, call.centred, call.eps, call.weight_offset)
        _calls[key] = _Launch(call._replace(forward=forward))


def _norm(
    call: _Call,
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    residual: Optional,
    rng_key: Optional,
    impl: str,
    key: Any = None,
) -> Any:
    _check(call.op, x, weight, bias, residual)
    # torch.compile has to have looked at each number before the autograd function does (2.13 loses it otherwise).
    if not (call.eps >= 0 and abs(call.weight_offset) < math.inf):
        raise ValueError(
            f"{call.op}: eps={call.eps}, weight_offset={call.weight_offset}: expected at least 0 and a finite offset"
        )
    if call.p:
        if residual is None:
            raise ValueError(
                f"{call.op}: dropout_p={call.p} without a residual: expected the residual that the dropped x is added "
                "to; call dropout() before the norm where there is none"
            )
        dropout.check(call.p, rng_key, x.device, stream=call.stream, row_start=call.row_start)
    else:
        rng_key, call = None, call._replace(stream=0, row_start=0)
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    choice = norm_choice(call.op, x.device, impl, *[t.dtype for t in tensors])
    dispatch.count(call.op, choice.impl)
    if call.carry and residual is not None:
        raise ValueError(f"{call.op}: carry=True beside a residual: the sum is what carries on, and is returned anyway")
    if not choice.triton:
        found = _reference(call, x, residual, weight, bias, rng_key)
        return (found, x) if call.carry else found
    if x.shape[-1] > _LARGEST or x.shape[:-1].numel() > _LARGEST:
        raise ValueError(
            f"{call.op}: x has shape {tuple(x.shape)}: the kernel takes rows and columns up to {_LARGEST}; split the "
            "call, or pass impl='reference'"
        )
    if key is not None:
        _keep(key, call, x, residual, weight, bias)
    if residual is x:  # a compiled autograd function takes no tensor twice
        residual = x.view_as(x)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        compiling = torch.compiler.is_compiling()
        apply = _Norm.apply if compiling else _apply_norm
        if not call.carry or (x.requires_grad and not compiling):
            return apply(call, rng_key, x, residual, weight, bias)
        # A compiler adds gradients up where it likes, and returns no input.
        return apply(call._replace(carry=False), rng_key, x, residual, weight, bias), x
    y, s, _, _ = _forward(call, rng_key, x, residual, weight, bias)
    if call.carry:
        return y, x
    return y if s is None else (y, s)


def _check(op: str, x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x is a scalar: expected [..., D]")
    if not x.is_floating_point():
        raise ValueError(f"{op}: x is {x.dtype}: expected bf16, fp16, fp32 or fp64; convert it first")
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is None:
            continue
        shape = x.shape if name == "residual" else x.shape[-1:]
        if tensor.shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)} but x has {tuple(x.shape)}: expected {tuple(shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} is {tensor.dtype}: expected a floating-point dtype; convert it first")
        if tensor.device != x.device:
            raise ValueError(f"{op}: x is on {x.device} but {name} on {tensor.device}; move them together")


def _result_dtype(call: _Call, s: torch.dtype, device: torch.device) -> torch.dtype:
    """What torch's norms return for s: fp32 under a GPU's autocast, if that knows the norm, but for fp64."""
    autocast = device.type == "cuda" and torch.is_autocast_enabled("cuda") and s != torch.float64
    return torch.float32 if autocast and _autocasts(call.op) else s


@functools.cache
def _autocasts(norm: str) -> bool:
    """Whether autocast runs torch's function of this name in fp32 on a GPU: rms_norm in torch 2.11 it does not."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{norm}", "AutocastCUDA"))


def _reference(
    call: _Call, x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional, rng_key: Optional
) -> Any:
    s = x
    if residual is not None:
        keep = None
        if rng_key is not None:
            rows, cols = x.shape[:-1].numel(), x.shape[-1]
            keep = dropout_reference.keep_mask(
                rng_key, call.p, rows, cols, stream=call.stream, row_start=call.row_start
            )
        s = reference.residual_sum(x, residual, keep, call.p)
    dtype = _result_dtype(call, s.dtype, s.device)
    if call.centred:
        y = reference.layer_norm(s, weight, bias, call.eps, call.weight_offset, dtype)
    else:
        y = reference.rms_norm(s, weight, call.eps, call.weight_offset, dtype)
    return y if residual is None else (y, s)


def _forward(
    call: _Call, rng_key: Optional, x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional
) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
    """y, s (None without a residual), rstd, mean (None for RMSNorm), by the kernel."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    found = library.launches(schemas, x, residual, weight, bias, rng_key).norm_fwd(
        as_rows(x),
        None if residual is None else as_rows(residual),
        weight,
        bias,
        rng_key,
        call.centred,
        call.eps,
        call.weight_offset,
        call.p,
        call.stream,
        call.row_start,
        _result_dtype(call, dtype, x.device),
    )
    y, rstd = shaped(found[0], x.shape[:-1]), found[1]
    s = None if residual is None else shaped(found[-1], x.shape[:-1])
    return y, s, rstd, found[2] if call.centred else None


class _Norm(torch.autograd.Function):
    """y, or y and s, of x, residual [..., D], weight, bias [D]: see :func:`rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        rng_key: Optional,
        x: torch.Tensor,
        residual: Optional,
        weight: Optional,
        bias: Optional,
    ) -> Any:
        if call.forward is not None:
            y, s, rstd, mean = call.forward(x, residual, weight, bias)
        else:
            y, s, rstd, mean = _forward(call, rng_key, x, residual, weight, bias)
        # The tensors that the caller holds, not views of their memory: torch notices if they are written to.
        ctx.save_for_backward(rng_key, x if s is None else s, weight, rstd, mean)
        ctx.call = call
        ctx.dtypes = tuple([None if t is None else t.dtype for t in (x, residual, weight, bias)])
        ctx.set_materialize_grads(False)  # often only one of the results has a gradient
        if s is None:
            return (y, x) if call.carry else y
        if not any(ctx.needs_input_grad[2:4]):
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: Any) -> Any:
        if ctx.call.forward is not None:
            grads = _backward_again(ctx, *dys)
            if grads is not None:
                return grads
        want = autograd.needed_grads(ctx)
        dy, ds = dys if len(dys) == 2 else (*dys, None)
        if dy is None:
            return None, None, *_from_sum(ctx, ds, *want[2:4]), None, None
        rng_key, s, weight, rstd, mean = ctx.saved_tensors
        call = ctx.call
        inputs = want[2] or want[3]
        params = autograd.load_saved(ctx, dys)
        # Beside the inputs' gradients those of the parameters cost no pass of their own: a later one finds them formed.
        form = params is None and (inputs or any(want[4:]))
        dtypes = [dtype if yes else None for dtype, yes in zip(ctx.dtypes, want[2:4])]
        shared = dtypes[0] == dtypes[1] and rng_key is None
        if shared:
            dtypes[1] = None
        dtypes += [dtype if form and need else None for dtype, need in zip(ctx.dtypes[2:], ctx.needs_input_grad[4:])]
        formed = iter(())
        if any(dtype is not None for dtype in dtypes):
            formed = iter(
                library.launches(schemas, dy, ds, s, weight, rng_key).norm_bwd(
                    as_rows(dy),
                    None if ds is None else as_rows(ds),
                    as_rows(s),
                    weight,
                    rstd,
                    mean,
                    rng_key,
                    call.weight_offset,
                    call.p,
                    call.stream,
                    call.row_start,
                    *dtypes,
                )
            )
        dx, dresidual, *fresh = [None if dtype is None else next(formed) for dtype in dtypes]
        dx, dresidual = (None if t is None else shaped(t, s.shape[:-1]) for t in (dx, dresidual))
        if shared:
            dresidual = dx
        params = fresh if form else params
        autograd.save_for_next_pass(ctx, dys, params, want)
        return None, None, dx, dresidual, *[t if yes else None for t, yes in zip(params or (None, None), want[4:])]


_apply_norm = autograd.direct(_Norm)


def _backward_again(ctx: Any, dy: Optional, ds: Optional = None) -> Any:
    """What backward returns, by launches that are settled; None where this pass forms only some gradients, or what it
    reads lies otherwise than forward left it.
    """
    if dy is None or not library.quiet() or not autograd.whole(ctx):
        return None
    dy = repeated.dense(dy)
    _, s, weight, rstd, mean = ctx.saved_tensors
    dtypes = [dtype if yes else None for dtype, yes in zip(ctx.dtypes, ctx.needs_input_grad[2:])]
    shared = dtypes[0] is dtypes[1]
    if shared:
        dtypes[1] = None
    found = ctx.call.forward.backward((dy, ds, s, weight, rstd, mean), tuple(dtypes))
    if found is None:
        return None
    dx, dresidual, *params = found
    return None, None, dx, dx if shared else dresidual, *params


def _from_sum(ctx: Any, ds: Optional, want_x: bool, want_residual: bool) -> tuple[Optional, Optional]:
    """The gradients of x and residual where only s has one."""
    if ds is None:
        return None, None
    call, (x_dtype, residual_dtype) = ctx.call, ctx.dtypes[:2]
    dx = None
    if want_x:
        rng_key = ctx.saved_tensors[0]
        dx = ds
        if rng_key is not None:
            dx = dropout_schemas.dropout(
                as_rows(ds).contiguous(), None, rng_key, call.p, call.stream, call.row_start, 0
            )
            dx = shaped(dx, ds.shape[:-1])
        dx = dx.to(x_dtype)
    return dx, ds.to(residual_dtype) if want_residual else None
