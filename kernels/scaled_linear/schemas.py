"""The kernels of ``launch.py`` as torch ops, with their shape functions: what torch.compile and opcheck see.

None of them is differentiable: ``op.py`` puts them together.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import library

LAUNCH = f"{__package__}.launch"


def _matrix(x: Any, rows: Any, cols: Any, dtype: torch.dtype) -> torch.Tensor:
    pitch = (cols + 15) // 16 * 16
    return x.new_empty((rows, pitch), dtype=dtype)[:, :cols]


def _quantize_kernel(x: Any, dtype: Any, transpose: bool, scale: Any) -> Any:
    from . import launch  # Triton, only when a kernel runs

    values, used, *rest = launch.quantize(x, dtype, transpose, scale=scale)
    return [values, used if scale is None else used.clone(), *rest]  # an op's results are its own


def _quantize_fake(x: Any, dtype: Any, transpose: bool, scale: Any) -> Any:
    rows, cols = x.shape
    found = [_matrix(x, rows, cols, dtype), *(x.new_empty((), dtype=torch.float32) for _ in range(2))]
    return [*found, _matrix(x, cols, rows, dtype)] if transpose else found


def _delayed_kernel(x: Any, dtype: Any, transpose: bool, history: Any, margin: int) -> Any:
    from . import launch

    found = launch.quantize(x, dtype, transpose, history=history, margin=margin)
    return tuple(found) if transpose else (*found, _absent(x, dtype))


def _delayed_fake(x: Any, dtype: Any, transpose: bool, history: Any, margin: int) -> Any:
    found = _quantize_fake(x, dtype, transpose, None)
    return tuple(found) if transpose else (*found, _absent(x, dtype))


def _absent(x: Any, dtype: Any) -> torch.Tensor:
    """For the transposed values that nobody wants: an op that changes an argument cannot return a list."""
    return x.new_empty((0, 0), dtype=dtype)


def _rows_kernel(x: Any, dtype: Any, transpose: bool) -> Any:
    from . import launch

    return launch.quantize_rows(x, dtype, transpose)


def _rows_fake(x: Any, dtype: Any, transpose: bool) -> Any:
    rows, cols = x.shape
    found = [_matrix(x, rows, cols, dtype), *(x.new_empty((rows, 1), dtype=torch.float32) for _ in range(2))]
    return [*found, _matrix(x, cols, rows, dtype), x.new_empty((cols, 1), dtype=torch.float32)] if transpose else found


def _fwd_fake(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, activation: str, out_dtype: Any
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _into_fake(x: Any, weight: Any, x_scale: Any, weight_scale: Any, out: Any) -> None:
    pass


quantize = library.register(
    "fp8_quantize(Tensor x, ScalarType dtype, bool transpose, Tensor? scale) -> Tensor[]",
    _quantize_kernel,
    _quantize_fake,
)
quantize_delayed_ = library.register(
    "fp8_quantize_delayed_(Tensor x, ScalarType dtype, bool transpose, Tensor(a!) history, int margin)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _delayed_kernel,
    _delayed_fake,
)
quantize_rows = library.register(
    "fp8_quantize_rows(Tensor x, ScalarType dtype, bool transpose) -> Tensor[]", _rows_kernel, _rows_fake
)
scaled_linear = library.register(
    "scaled_linear(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, str activation, "
    "ScalarType out_dtype) -> Tensor",
    LAUNCH,
    _fwd_fake,
)
scaled_linear_ = library.register(
    "scaled_linear_(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor(a!) out) -> ()",
    LAUNCH,
    _into_fake,
)
