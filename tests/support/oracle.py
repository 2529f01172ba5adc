"""Compare an op's kernels with the same maths in fp64, by the rule of kernels/dev/accuracy.py."""

from __future__ import annotations

from typing import Any

import torch

from shardfuse.kernels.dev import accuracy, registry


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
    device = next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
    allowed = spec.allowed(case, device)
    verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name], terms=spec.terms(case)) for name in oracle]
    assert all(verdict.ok or verdict.error < allowed for verdict in verdicts), "; ".join(map(str, verdicts))
    return ours
