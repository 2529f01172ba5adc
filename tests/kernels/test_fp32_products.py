"""Every op with a matrix product meets its budget where the products are summed in fp32, as on a GPU.

Elsewhere interpreted products are formed in fp64 and rounded once (tests/support/interpreter.py): closer to the oracle
than any GPU comes, so that alone would say nothing of what a kernel's own sums cost.
"""

from __future__ import annotations

import pytest
import torch

from shardfuse.bench.harness.gate import check_case
from shardfuse.kernels.dev import registry
from shardfuse.kernels.runtime import dispatch

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not dispatch.interpreting(), reason="kernels are not interpreted in this process"),
]

OPS = (
    "linear_act",
    "gated_linear",
    "dgrad_act",
    "dgrad_gated",
    "wgrad_accumulate",
    "scaled_linear",
    "linear_cross_entropy",
    "paged_attention",
    "all_gather_linear",
    "linear_reduce_scatter",
    "linear_all_reduce",
)


@pytest.mark.nightly  # compiled kernels that run in the emulator sum in fp32 always (tests/kernels/test_ptx_cases.py)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("fp32_products")
def test_sums_in_fp32_keep_within_the_budget(op, monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    builder, precisions = interpreter.InterpreterBuilder, set()
    create_dot = builder.create_dot

    def noted(self, a, b, d, *options):
        precisions.add(d.data.dtype.name)
        return create_dot(self, a, b, d, *options)

    monkeypatch.setattr(builder, "create_dot", noted)
    spec = registry.op(op)
    cases = spec.tagged("test")
    for case in {case.dtype: case for case in cases}.values():  # the last of each dtype
        verdicts = check_case(spec, case, torch.device("cpu"), "triton", seed=3)
        assert all(verdict.ok for verdict in verdicts), f"{case.name}: " + "; ".join(map(str, verdicts))
    assert precisions == {"float32"}
