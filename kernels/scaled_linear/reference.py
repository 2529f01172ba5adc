"""The specification in plain torch: quantisation to fp8, and the product of what it stands for.

    scale = max|x| * 2^margin / L       L: the format's largest number; one scale, or one for each row
    values = round(x / scale)           saturating; NaN for what is not finite
    y = act((x_values * x_scale) @ (W_values * weight_scale)^T + b)

``scale`` multiplies to dequantise, as in torch._scaled_mm. The formats and the scaling are Micikevicius et al., "FP8
Formats for Deep Learning" (arXiv:2209.05433), sections 3 and 4; delayed scaling is TransformerEngine's recipe
(``nvte_delayed_scaling_recipe_amax_and_scale_update``, and "FP8 Delayed Scaling" in its user guide): the largest amax
of a window of earlier calls takes the place of this call's.
"""

from __future__ import annotations

import torch

from ..linear.reference import ACTIVATIONS
from ..runtime.dtypes import E4M3, E5M2

DTYPES = (E4M3, E5M2)
_TINY = 2.0**-126  # the smallest normal number: its inverse is finite


def magnitude(x: torch.Tensor, by_row: bool = False) -> torch.Tensor:
    """max |x| in fp32, [] or by row [R, 1]; inf where x holds NaN or inf, 0 where x is empty."""
    size = x.float().abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    if by_row:
        return size.amax(1, keepdim=True) if x.shape[1] else size.new_zeros(x.shape[0], 1)
    return size.amax() if x.numel() else size.new_zeros(())


def scale_of(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """The scale for a largest magnitude; 1 where that is 0 or infinite."""
    amax = amax * 2.0**margin
    # Over a tensor: torch's GPU kernels multiply by the inverse of a number, which rounds twice.
    scale = (amax / torch.full_like(amax, torch.finfo(dtype).max)).clamp_min(_TINY)
    return torch.where((amax > 0) & (amax < float("inf")), scale, 1.0)


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [R, C] over ``scale`` in fp8."""
    largest = torch.finfo(dtype).max
    x = x.float()
    finite = x.isfinite()
    values = (torch.where(finite, x, 0.0) * (1.0 / scale)).clamp(-largest, largest)
    return torch.where(finite, values, float("nan")).to(dtype)


def push_(history: torch.Tensor, amax: torch.Tensor) -> None:
    """Put ``amax`` in front of ``history`` [length], whose oldest entry leaves."""
    history.copy_(torch.cat([amax.reshape(1), history[:-1]]))


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    transpose: bool,
    *,
    scale: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    margin: int = 0,
) -> list[torch.Tensor]:
    """One scale for x [R, C]: given, of the history [length], or of x -> values, scale, amax [, values^T]."""
    amax = magnitude(x)
    if history is not None:
        scale = scale_of(history.amax(), dtype, margin)
        push_(history, amax)
    elif scale is None:
        scale = scale_of(amax, dtype, margin)
    values = cast(x, scale, dtype)
    found = [values, scale.reshape(()), amax]
    return [*found, values.t().contiguous()] if transpose else found


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> list[torch.Tensor]:
    """A scale for each row of x [R, C] -> values, scale [R, 1], amax [R, 1] [, values^T and its scale [C, 1]]."""
    amax = magnitude(x, by_row=True)
    scale = scale_of(amax, dtype)
    found = [cast(x, scale, dtype), scale, amax]
    if transpose:
        scale_t = scale_of(magnitude(x.t(), by_row=True), dtype)
        found += [cast(x.t(), scale_t, dtype).contiguous(), scale_t]
    return found


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x [T, D], W [F, D]; scales of one element, or T and F. In fp32, or in fp64 where ``out_dtype`` is that."""
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    y = (x.to(wide) @ weight.to(wide).t()) * (x_scale.to(wide).reshape(-1, 1) * weight_scale.to(wide).reshape(1, -1))
    if bias is not None:
        y = y + bias.to(wide)
    return ACTIVATIONS[activation](y).to(out_dtype)
