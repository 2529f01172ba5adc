"""Offsets past 2^31 elements in compiled kernels, on the emulator of PTX."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardfuse.kernels.runtime.dispatch import triton_version

PROGRAM = Path(__file__).parents[1] / "support" / "ptx_offsets.py"
BF16_EPS = 2.0**-8  # relative, of a rounding

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
    ),
]

KERNELS = {
    "a GEMM's A": ["_gemm_kernel"],
    "a GEMM's B": ["_gemm_kernel"],
    "paged attention's cache": ["_paged_attention_fwd_kernel"],
    "rms_norm's rows": ["_norm_fwd_kernel"],
    "cross-entropy's logits": ["_statistics_kernel", "_gradient_kernel"],
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SHARDFUSE_POISON")}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("operand", KERNELS)
def test_rows_far_apart(answers: dict[str, Any], operand: str):
    """Rounding the operands and the result of such a short sum to bf16 costs at most a few roundings of the largest."""
    answer = answers[operand]
    assert [name for name in answer["ran"] if name in KERNELS[operand]] == KERNELS[operand], answer["ran"]
    assert answer["reports"] == []
    assert answer["error"] < 4 * BF16_EPS
