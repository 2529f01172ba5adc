"""Dtypes and the short names that records, cases and options have for them."""

from __future__ import annotations

import torch

from .dtype_names import short_name as short_name

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

NAMES = {dtype: short_name(dtype) for dtype in (BF16, FP16, FP32, FP64, E4M3, E5M2, INT8)}
BY_NAME = {name: dtype for dtype, name in NAMES.items()}
CACHE_NAMES = NAMES | {E4M3: "fp8"}  # the only 8-bit floats that a KV cache holds

QUANTISED = (E4M3, INT8)  # KV caches in these need scales
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}  # the largest finite value that scaling aims at

FLOATS = (BF16, FP16, FP32, FP64)
KERNEL_FLOATS = FLOATS[:3]  # fp64 runs the reference


def no_kernel(*dtypes: torch.dtype) -> str | None:
    """Why a call with operands of ``dtypes`` runs the reference; None where the kernels take them."""
    for dtype in dtypes:
        if dtype not in KERNEL_FLOATS:
            return f"{dtype} has no kernel (bf16, fp16 and fp32 have)"
    return None
