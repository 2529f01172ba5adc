"""Compare an op's kernels with the same maths in fp64, by the rule of kernels/dev/accuracy.py."""

from __future__ import annotations

from typing import Any

import torch

from shardfuse.kernels.dev import registry


def assert_matches(
    spec: registry.OpSpec, case: registry.Case, inputs: dict[str, Any], *, impl: str = "triton"
) -> dict[str, torch.Tensor]:
    """Assert that outputs and gradients of ``impl`` are within the budget; returns them.

    The op must not write into its inputs: all sides get the same tensors.
    """
    ours, low = (spec.run(inputs, case, each) for each in (impl, "reference"))
    oracle = spec.run(registry.to_double(inputs), case, "reference")
    assert ours.keys() == low.keys() == oracle.keys()
    assert all(ours[name].dtype == low[name].dtype for name in ours)
    verdicts = [spec.judge(case, name, ours[name], low[name], oracle[name]) for name in oracle]
    assert all(verdict.ok for verdict in verdicts), "; ".join(map(str, verdicts))
    return ours
