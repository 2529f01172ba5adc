"""The kernels of ``launch.py`` as torch ops, with their shape functions: what torch.compile and opcheck see.

Neither is differentiable: ``op.py`` puts them together in an autograd function. Lists of results hold those that were
asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import library

LAUNCH = f"{__package__}.launch"


def _fwd_fake(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    rng_key: Any,
    centred: bool,
    eps: float,
    weight_offset: float,
    p: float,
    stream: int,
    row_start: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    outputs = [x.new_empty(x.shape, dtype=dtype)]
    outputs += [x.new_empty((x.shape[0],), dtype=torch.float32) for _ in range(2 if centred else 1)]
    if residual is not None:
        outputs.append(x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype)))
    return outputs


def _bwd_fake(
    dy: Any,
    ds: Any,
    s: Any,
    weight: Any,
    rstd: Any,
    mean: Any,
    rng_key: Any,
    weight_offset: float,
    p: float,
    stream: int,
    row_start: int,
    dx_dtype: torch.dtype | None,
    dresidual_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    inputs = [s.new_empty(s.shape, dtype=t) for t in (dx_dtype, dresidual_dtype) if t is not None]
    return inputs + [s.new_empty(s.shape[1:], dtype=t) for t in (dweight_dtype, dbias_dtype) if t is not None]


norm_fwd = library.register(
    "norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? rng_key, bool centred, float eps, "
    "float weight_offset, float p, SymInt stream, SymInt row_start, ScalarType dtype) -> Tensor[]",
    LAUNCH,
    _fwd_fake,
)
norm_bwd = library.register(
    "norm_bwd(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, Tensor? mean, Tensor? rng_key, "
    "float weight_offset, float p, SymInt stream, SymInt row_start, ScalarType? dx_dtype, "
    "ScalarType? dresidual_dtype, ScalarType? dweight_dtype, ScalarType? dbias_dtype) -> Tensor[]",
    LAUNCH,
    _bwd_fake,
)
