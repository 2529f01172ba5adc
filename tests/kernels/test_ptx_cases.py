"""The ops' test cases on compiled code: ``kernels/dev/ptx`` runs on this CPU the PTX that Triton makes for a GPU.

In processes of their own, since they replace Triton's driver and this one interprets its kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from shardfuse.kernels.dev import registry
from shardfuse.kernels.runtime.dispatch import triton_version

SIDE = os.environ.get("SHARDFUSE_SIDE_TRITON", "")
# But for casts, which have no loop.
KERNELS = {"_gemm_kernel", "_act_grad_kernel", "_split_sum_kernel", "_norm_fwd_kernel", "_norm_bwd_kernel"}
KERNELS |= {"_norm_bwd_wide_kernel", "_norm_params_kernel", "_norm_sum_kernel", "_reduce_kernel", "_rope_kernel"}
KERNELS |= {"_plan_kernel", "_paged_attention_fwd_kernel", "_merge_kernel", "_write_kv_kernel", "_copy_blocks_kernel"}
KERNELS |= {"_dropout_kernel", "_statistics_kernel", "_gradient_kernel"}

# Of the test cases for Blackwell those that make every form of product, and norms.
BLACKWELL = ["t40-d48-f64-bf16-gelu_tanh", "t64-d33-f31-fp16-gelu_erf", "t40-d64-f64-bf16-silu"]
BLACKWELL += ["t100-d40-f48-bf16-bias-fp32", "t33-d48-f40-bf16-training-row", "t20-d24-v64-fp16-once-bias"]
BLACKWELL += ["prefill-g2-h32-p16-bf16", "mixed-g2-h128-p16-fp16", "t6-d1000-bf16-residual_same"]

# Two tiles of attention, one of them of invariant mode.
FENCED = ("--models", "all", "--op", "paged_attention", "--case", "llama8b-bf16", "--case", "llama8b-invariant-bf16")

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
    ),
]


def _emulated(*options: str, triton: str = "") -> list[dict[str, Any]]:
    """The answers of ``python -m shardfuse.kernels.dev.ptx``, one for each case."""
    unwanted = ("TRITON_INTERPRET", "SHARDFUSE_POISON")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    if triton:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [triton, environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "shardfuse.kernels.dev.ptx", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _ran_and_are_right(answers: list[dict[str, Any]]) -> None:
    wrong = [f"{each['op']} {each['case']}: {each['why']}" for each in answers if not each["ok"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.codegen(seconds=45)
def test_every_case_for_sm_90():
    cases = [(name, case.name) for name, spec in registry.ops().items() for case in spec.tagged("test")]
    answers = _emulated("--arch", "sm_90")
    assert [(each["op"], each["case"]) for each in answers] == cases
    _ran_and_are_right(answers)


@pytest.mark.codegen(seconds=75)
def test_a_case_of_models_for_every_configuration():
    """Loops that refill their pipelines, programs with several tiles; all cases are run nightly."""
    answers = _emulated("--arch", "sm_90", "--models", "some")
    _ran_and_are_right(answers)
    assert {name for each in answers for name in each["launches"]} >= KERNELS


def test_a_sample_for_sm_100():
    """Products with and without TMA, in 16 and 8 bits, of which attention keeps one operand in tensor memory."""
    answers = _emulated("--arch", "sm_100", *(option for name in BLACKWELL for option in ("--case", name)))
    _ran_and_are_right(answers)
    assert len(answers) >= len(BLACKWELL)
    reports = {report for each in answers for report in each["reports"]}
    assert any(report.startswith("note: read of tensor memory") for report in reports)  # it is used


def test_a_sample_for_sm_80():
    answers = _emulated("--arch", "sm_80", "--part", "2/20")
    assert len(answers) >= 8
    _ran_and_are_right(answers)


@pytest.mark.skipif(
    not SIDE, reason="SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)"
)
@pytest.mark.parametrize(
    ("options", "least"),
    [(("--part", "3/24"), 7), (FENCED, 2)],
    ids=["test cases", "tiles whose products need fences"],
)
def test_a_sample_under_another_triton(options: tuple[str, ...], least: int):
    answers = _emulated("--arch", "sm_90", *options, triton=SIDE)
    assert len(answers) >= least
    _ran_and_are_right(answers)
