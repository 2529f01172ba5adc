"""tests/support/interpreter.py computes like a GPU: it rounds to bf16, and rows are independent of each other."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from portable import lacking

from shardfuse.kernels.runtime import dispatch

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not dispatch.interpreting(), reason="kernels are not interpreted in this process"),
]


@triton.jit
def _through_bf16_kernel(x_ptr, y_ptr, wide_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    y = tl.load(x_ptr + offs).to(tl.bfloat16)
    tl.store(y_ptr + offs, y)
    tl.store(wide_ptr + offs, y.to(tl.float32))


def test_fp32_becomes_the_nearest_bf16():
    """Including ties, numbers that round up to infinity, subnormal numbers and NaN."""
    odd = [math.inf, -math.inf, math.nan, 3.4e38, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40]
    x = torch.cat((torch.tensor(odd), torch.randn(512), torch.randn(503) * 1e-39))
    y, wide = torch.empty(1024, dtype=torch.bfloat16), torch.empty(1024)
    _through_bf16_kernel[(1,)](x, y, wide, 1024)
    for found, expected in ((y, x.bfloat16()), (wide, x.bfloat16().float())):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# --- products ---------------------------------------------------------------------------------------------------------

PRODUCTS = """
import sys

import numpy as np

sys.path.insert(0, sys.argv[1])
import interpreter

interpreter.install()
from triton.runtime.interpreter import TensorHandle, interpreter_builder, tl

generator = np.random.default_rng(0)


def dot(a, b):
    zeros = TensorHandle(np.zeros((len(a), b.shape[1]), np.float32), tl.float32)
    kind = tl.float32 if a.dtype == np.float32 else tl.float16
    return interpreter_builder.create_dot(TensorHandle(a, kind), TensorHandle(b, kind), zeros, None, 0).data


def laid_out(x):
    wide = np.zeros((len(x), 2 * x.shape[1]), x.dtype)
    wide[:, ::2] = x
    return [np.ascontiguousarray(x), np.asfortranarray(x), wide[:, ::2]]


for dtype in (np.float32, np.float16):
    for K in (16, 33, 128):
        a, b = (generator.standard_normal(shape).astype(dtype) for shape in ((64, K), (K, 48)))
        whole = dot(a, b)
        for M in (1, 2, 3, 7, 16, 33):
            assert np.array_equal(dot(a[:M], b), whole[:M]), (dtype, K, M)
            assert np.array_equal(dot(a[M : M + 1], b), whole[M : M + 1]), (dtype, K, M)
        order = generator.permutation(64)
        assert np.array_equal(dot(a[order], b), whole[order]), (dtype, K)
        for x in laid_out(a):
            for y in laid_out(b):
                assert np.array_equal(dot(x, y), whole), (dtype, K, x.strides, y.strides)
        error = np.abs(whole - a.astype(np.float64) @ b.astype(np.float64))
        assert np.all(error <= np.spacing(np.abs(whole)) / 2), "rounded more than once"
"""


@pytest.mark.parametrize("coretype", ["Haswell", "SkylakeX", "Sandybridge", "Nehalem", "Prescott"])
def test_a_row_of_a_product_depends_on_no_other_row_and_on_no_layout(coretype):
    """Under OpenBLAS kernels whose order of summation depends on the number of rows, or on the strides."""
    if lacking(coretype):
        pytest.skip(f"OPENBLAS_CORETYPE={coretype} needs {', '.join(lacking(coretype))}: not on this processor")
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS, str(Path(__file__).parent)],
        env={**os.environ, "OPENBLAS_CORETYPE": coretype},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
