"""Compare an op's kernels with the same maths in fp64, and models with each other: kernels/dev/accuracy.py."""

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
    verdicts = [spec.judge(case, name, ours[name], low[name], oracle[name]) for name in oracle]
    assert all(verdict.ok for verdict in verdicts), "; ".join(map(str, verdicts))
    return ours


@torch.no_grad()
def assert_same_model(expected: torch.nn.Module, found: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Assert that weights are equal bit for bit, and results but for a BLAS's order; returns the expected ones.

    Weights that a file was mapped for may lie at other addresses, where a BLAS may sum in another order.
    """
    state, read = expected.state_dict(), found.state_dict()
    assert state.keys() == read.keys()
    assert [name for name in state if not torch.equal(state[name], read[name])] == []
    want, got = (getattr(out, "logits", out) for out in (expected(*inputs), found(*inputs)))
    terms = sum(size for value in state.values() for size in value.shape)
    assert accuracy.within("logits", got, want, accuracy.FACTOR * accuracy.rounding(want.dtype, terms)).ok
    return want
