"""``quantize``, ``scaled_linear`` and ``fp8_linear``: the public functions and their autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..linear.reference import ACTIVATIONS
from ..runtime import autograd, dispatch
from ..runtime.dispatch import Choice
from ..runtime.dtypes import E4M3, E5M2, FLOATS, KERNEL_FLOATS
from ..runtime.names import expected
from . import reference, schemas

SCALINGS = ("tensor", "row")
_LARGEST_SIZE = 2**31 - 2**10  # the last tile's end still fits 32 bits
_LONGEST_HISTORY = 4096  # every program of the cast reads it


class Quantized(NamedTuple):
    """x [R, C] in fp8. Scales multiply to dequantise: x is about ``values.float() * scale``."""

    values: torch.Tensor  # [R, C]
    scale: torch.Tensor  # fp32, [] or by row [R, 1]
    amax: torch.Tensor  # fp32, max |x|, shaped like scale; inf where x holds NaN or inf
    values_t: torch.Tensor | None = None  # x^T [C, R]
    scale_t: torch.Tensor | None = None  # its scale: the same [], or by its own rows [C, 1]


def scaled_linear_choice(device: torch.device, impl: str = "auto", *, op: str = "scaled_linear") -> Choice:
    """Which implementation the functions of this file take on ``device``, and why."""
    return dispatch.choose(op, device, impl, unsupported=_why_no_fp8(device))


def _why_no_fp8(device: torch.device) -> str | None:
    """Why Triton has no float8_e4m3fn on this chip, or None."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        chip = str(properties.gcnArchName).partition(":")[0]
        if chip.startswith(("gfx95", "gfx12")):
            return None
        return f"{chip} does not multiply torch.float8_e4m3fn (gfx942 has the fnuz formats; gfx950 and later have it)"
    if (properties.major, properties.minor) >= (8, 9):
        return None
    return f"sm_{properties.major}{properties.minor} does not multiply fp8 (sm_89 and later do)"


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    scaling: str = "tensor",
    *,
    scale: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    margin: int = 0,
    transpose: bool = False,
    impl: str = "auto",
) -> Quantized:
    """x in fp8 and the scale that multiplies to dequantise it; not differentiable.

    Args:
        x: [R, C] in bf16, fp16 or fp32, any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scaling: "tensor", one scale, or "row", one for each row from its own amax.
        scale: the one scale to use, fp32, instead of one from x. Values beyond the format saturate.
        history: [length] fp32, amaxes of earlier calls, newest first, zeros before the first. The scale comes from the
            largest of them (delayed scaling), and this call's amax is pushed in front, in place.
        margin: with ``history``, leave 2^margin of room above it.
        transpose: also x^T, in another pass over x; by row with scales of its own.
        impl: "auto", "triton" or "reference"; see ``kernels/runtime/dispatch.py``.

    An amax that is 0 or not finite gives the scale 1; NaN and infinite elements become NaN, finite ones saturate.
    With one scale for x, current scaling reads x twice and delayed scaling once (and x^T reads it once more); neither
    asks the host. The kernel's
    values lie in rows of a multiple of 16 bytes. Raises ValueError for arguments that do not fit.
    """
    _check_quantize(x, dtype, scaling, scale, history)
    choice = scaled_linear_choice(x.device, impl, op="quantize")
    with torch.no_grad():
        return _quantize(x.detach(), dtype, scaling, transpose, choice, scale=scale, history=history, margin=margin)


def _quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool,
    choice: Choice,
    *,
    scale: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    margin: int = 0,
) -> Quantized:
    """:func:`quantize` of what was checked."""
    if scaling == "row":
        found = (schemas if choice.triton else reference).quantize_rows(x, dtype, transpose)
        return Quantized(*found)
    if not choice.triton:
        found = reference.quantize(x, dtype, transpose, scale=scale, history=history, margin=margin)
    elif history is not None:
        found = schemas.quantize_delayed_(x, dtype, transpose, history, margin)[: 4 if transpose else 3]
    else:
        found = schemas.quantize(x, dtype, transpose, scale)
    values, used, amax, *rest = found
    return Quantized(values, used, amax, rest[0], used) if transpose else Quantized(values, used, amax)


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "identity",
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> torch.Tensor:
    """act((x * x_scale) @ (W * weight_scale)^T + b): fp8 operands, both scales in the epilogue. Not differentiable.

    Args:
        x: [..., D], float8_e4m3fn or float8_e5m2.
        weight: [F, D], either format; not necessarily that of x.
        x_scale: fp32 with one element, or one for each row of x ([T, 1], say). It multiplies, as in torch._scaled_mm.
        weight_scale: fp32 with one element, or one for each row of the weight: [F, 1], or [1, F] as torch has it.
        bias: [F] in bf16, fp16 or fp32, or None.
        activation: as in ``linear_act``.
        out_dtype: bf16, fp16 or fp32.
        impl: "auto", "triton" or "reference"; the reference multiplies in fp32.

    Returns [..., F]. Any sizes and strides are computed; the tensor memory accelerator needs rows of a multiple of 16
    bytes (D a multiple of 16, or what :func:`quantize` returns). Hopper's tensor cores add fp8 products up with about
    14 bits until the sum leaves them: here once per tile for activations and weights (torch._scaled_mm's
    use_fast_accum=True), and every block of K where an operand is a gradient in e5m2.

    Raises ValueError for arguments that do not fit, RuntimeError for impl="triton" on a chip without these formats.
    """
    _check_product(x, weight, x_scale, weight_scale, bias, activation, out_dtype)
    choice = scaled_linear_choice(x.device, impl)
    dispatch.count("scaled_linear", choice.impl)
    rows = x.reshape(_tokens(x), x.shape[-1])
    y = _product(rows, weight, x_scale, weight_scale, choice, out_dtype, bias=bias, activation=activation)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    choice: Choice,
    out_dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "identity",
) -> torch.Tensor:
    if not choice.triton:
        return reference.scaled_linear(x, weight, x_scale, weight_scale, bias, activation, out_dtype)
    return schemas.scaled_linear(x, weight, x_scale.float(), weight_scale.float(), bias, activation, out_dtype)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scaling: str = "tensor",
    histories: torch.Tensor | None = None,
    margin: int = 0,
    fuse_wgrad_accumulation: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """x @ W^T + b with all three products of training in fp8: e4m3 x e4m3 forward, e5m2 gradients x e4m3 backward.

    Args:
        x: [..., D] in bf16, fp16 or fp32, any strides.
        weight: [F, D], bias: [F] or None; in these dtypes too, not necessarily that of x.
        scaling: "tensor" or "row". By row each operand is quantised again for the gradients, along what those contract.
        histories: [3, length] fp32, for delayed scaling: amaxes of x, weight and the output's gradient, newest first,
            zeros at the start. Updated in place; with scaling="tensor" only. None: current scaling.
        margin: with ``histories``, leave 2^margin of room above them.
        fuse_wgrad_accumulation: as in ``linear_act``.
        impl: "auto", "triton" or "reference", which quantises alike and multiplies in fp32.

    Returns [..., F] in x's dtype, or autocast's. Gradients have their tensor's dtype. Backward keeps one byte an
    element of x and of the weight, and forms what is asked of it. The bias gradient sums the unquantised dy.

    Raises ValueError for arguments that do not fit, RuntimeError for impl="triton" on a chip without these formats, and
    under torch.func's transforms.
    """
    _check_linear(x, weight, bias, scaling, histories)
    choice = scaled_linear_choice(x.device, impl, op="fp8_linear")
    dispatch.count("fp8_linear", choice.impl)
    autocast = torch.is_autocast_enabled(x.device.type)
    call = _Call(
        choice,
        scaling,
        margin,
        torch.get_autocast_dtype(x.device.type) if autocast else x.dtype,
        autograd.main_grads((weight, bias)) if fuse_wgrad_accumulation else [None, None],
    )
    if why := autograd.transformed():
        raise RuntimeError(f"fp8_linear: {why}, and gradients in fp8 no other form: use linear_act or nn.Linear there")
    rows = x.reshape(_tokens(x), x.shape[-1])
    y = _Fp8Linear.apply(call, rows, weight, bias, histories)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _tokens(x: torch.Tensor) -> int:
    """The rows of x [..., D], of which there may be some where D is 0."""
    return math.prod(x.shape[:-1])


class _Call(NamedTuple):
    """The options of one call."""

    choice: Choice
    scaling: str
    margin: int
    out_dtype: torch.dtype
    buffers: Sequence[torch.Tensor | None]  # where the gradients of weight and bias are added, None: returned

    def quantize(
        self, x: torch.Tensor, dtype: torch.dtype, transpose: bool, histories: torch.Tensor | None, which: int
    ) -> Quantized:
        history = None if histories is None else histories[which]
        return _quantize(x, dtype, self.scaling, transpose, self.choice, history=history, margin=self.margin)


class _Fp8Linear(torch.autograd.Function):
    """y = x @ W^T + b on rows: x [T, D], W [F, D], b [F] or None, y [T, F]."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        histories: torch.Tensor | None,
    ) -> torch.Tensor:
        _, need_x, need_weight, _, _ = ctx.needs_input_grad
        xq = call.quantize(x, E4M3, need_weight, histories, 0)
        wq = call.quantize(weight, E4M3, need_x, histories, 1)
        ctx.save_for_backward(xq.values_t, xq.scale_t, wq.values_t, wq.scale_t)
        ctx.call, ctx.histories = call, histories
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return _product(xq.values, wq.values, xq.scale, wq.scale, call.choice, call.out_dtype, bias=bias)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        call = ctx.call
        x_t, x_scale, weight_t, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        want = autograd.needed_grads(ctx)
        _, want_x, want_weight, want_bias, _ = want
        buffer_w, buffer_b = _buffers(ctx)
        dx = dw = db = None
        dyq = autograd.load_saved(ctx, [dy])
        if dyq is None and (want_x or want_weight):
            dyq = call.quantize(dy, E5M2, ctx.needs_input_grad[2], ctx.histories, 2)
        if want_x:
            dx = _product(dyq.values, weight_t, dyq.scale, weight_scale, call.choice, x_dtype)
        if want_weight and buffer_w is not None:
            _add_product_(buffer_w, dyq.values_t, x_t, dyq.scale_t, x_scale, call.choice)
        elif want_weight:
            dw = _product(dyq.values_t, x_t, dyq.scale_t, x_scale, call.choice, weight_dtype)
        if want_bias and buffer_b is not None:
            buffer_b.add_(dy.sum(0, dtype=buffer_b.dtype))
        elif want_bias:
            db = dy.sum(0, dtype=bias_dtype)
        autograd.save_for_next_pass(ctx, [dy], dyq, want)
        return None, dx, dw, db, None


def _buffers(ctx: Any) -> Sequence[torch.Tensor | None]:
    """Where this pass adds the gradients of weight and bias; None for those that it returns."""
    buffers = ctx.call.buffers
    if all(buffer is None for buffer in buffers):
        return buffers
    returned = autograd.captured(ctx)[2:4]
    return [None if given else buffer for buffer, given in zip(buffers, returned)]


def _add_product_(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    choice: Choice,
) -> None:
    if choice.triton:
        schemas.scaled_linear_(x, weight, x_scale, weight_scale, out)
    else:
        out.add_(reference.scaled_linear(x, weight, x_scale, weight_scale, None, "identity", torch.float32))


# ---------------------------------------------------------------------------------------------------- checks


def _check_quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    scale: torch.Tensor | None,
    history: torch.Tensor | None,
) -> None:
    op = "quantize"
    if x.dim() != 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}: expected [R, C]; flatten the leading dimensions")
    _check_input(op, "x", x)
    if dtype not in reference.DTYPES:
        raise ValueError(f"{op}: dtype={dtype}: expected one of {', '.join(map(str, reference.DTYPES))}")
    _check_scaling(op, scaling)
    if scaling == "row" and (scale is not None or history is not None):
        raise ValueError(f"{op}: scale and history go with scaling='tensor'; by row the scales come from x itself")
    if scale is not None and history is not None:
        raise ValueError(f"{op}: pass scale or history, not both")
    if scale is not None:
        _check_scale(op, "scale", scale, x, 1)
    if history is not None:
        _check_histories(op, "history", history, x, 1)


def _check_scaling(op: str, scaling: str) -> None:
    if scaling not in SCALINGS:
        raise ValueError(f"{op}: scaling={scaling!r}: {expected(scaling, SCALINGS)}")


def _check_input(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:  # fp64 is the oracle's
        raise ValueError(f"{op}: {name} is {tensor.dtype}: expected bf16, fp16 or fp32")
    _check_sizes(op, name, tensor)


def _check_sizes(op: str, name: str, tensor: torch.Tensor) -> None:
    if max(_tokens(tensor), tensor.shape[-1]) > _LARGEST_SIZE:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}: no size may exceed {_LARGEST_SIZE}")


def _check_scale(op: str, name: str, scale: torch.Tensor, on: torch.Tensor, rows: int) -> None:
    if scale.dtype not in (torch.float32, torch.float64) or scale.numel() not in (1, rows):
        expected = "one element" if rows == 1 else f"1 or {rows} elements"
        raise ValueError(f"{op}: {name} is {scale.dtype} {list(scale.shape)}: expected fp32 with {expected}")
    if scale.device != on.device:
        raise ValueError(f"{op}: {name} is on {scale.device} but its tensor on {on.device}; move them together")


def _check_histories(op: str, name: str, history: torch.Tensor, on: torch.Tensor, dims: int) -> None:
    fits = history.dim() == dims and 1 <= history.shape[-1] <= _LONGEST_HISTORY and (dims == 1 or len(history) == 3)
    if not fits or history.dtype != torch.float32 or not history.is_contiguous() or history.device != on.device:
        expected = "[length]" if dims == 1 else "[3, length]"
        raise ValueError(
            f"{op}: {name} is {history.dtype} {list(history.shape)} on {history.device}: expected contiguous fp32 "
            f"{expected}, of length 1 to {_LONGEST_HISTORY}, on {on.device}"
        )


def _check_weight(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x is a scalar: expected [..., D]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)} but x has {tuple(x.shape)}: expected [F, {x.shape[-1]}] "
            "(as nn.Linear stores it)"
        )
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}: expected [{weight.shape[0]}]")
        _check_input(op, "bias", bias)
    if weight.device != x.device or (bias is not None and bias.device != x.device):
        raise ValueError(f"{op}: x is on {x.device} but weight or bias is elsewhere; move them together")


def _check_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> None:
    op = "scaled_linear"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r}: {expected(activation, ACTIVATIONS)}")
    _check_weight(op, x, weight, bias)
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in reference.DTYPES:
            formats = " or ".join(map(str, reference.DTYPES))
            raise ValueError(f"{op}: {name} is {tensor.dtype}: expected {formats}; quantize() makes one")
        _check_sizes(op, name, tensor)
    _check_scale(op, "x_scale", x_scale, x, _tokens(x))
    _check_scale(op, "weight_scale", weight_scale, weight, weight.shape[0])
    if out_dtype not in KERNEL_FLOATS:
        raise ValueError(f"{op}: out_dtype={out_dtype}: expected bf16, fp16 or fp32")


def _check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: str,
    histories: torch.Tensor | None,
) -> None:
    op = "fp8_linear"
    _check_weight(op, x, weight, bias)
    _check_input(op, "x", x)
    _check_input(op, "weight", weight)
    _check_scaling(op, scaling)
    if histories is not None:
        if scaling == "row":
            raise ValueError(f"{op}: histories go with scaling='tensor'; by row the scales come from the tensors")
        _check_histories(op, "histories", histories, x, 2)
