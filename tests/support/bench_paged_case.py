"""Shared by tests of the paged ops' benchmarks: small steps, quantisation modes, problems of writes."""

from __future__ import annotations

from typing import Any

import torch

from shardfuse.bench.suites.cache_write import Problem
from shardfuse.kernels.dev.cases import kv_cache as kv_cases

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TINY: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 16, "page": 4}
FP32: dict[str, Any] = {**TINY, "dtype": torch.float32, "kv_dtype": torch.float32}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8_per_tensor": {"kv_dtype": FP8, "scales": "tensor"},
    "fp8_per_token_head": {"kv_dtype": FP8, "scales": "token_head"},
    "int8_per_token_head": {"kv_dtype": INT8, "scales": "token_head"},
}


def written(op: str, name: str) -> Problem:
    spec = next(spec for spec in kv_cases.SPECS if spec.name == op)
    return Problem(spec, next(case for case in spec.cases if case.name == name))
