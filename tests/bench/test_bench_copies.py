"""Targets of the rows beside a copy of their bytes and beside a loss's products, and the gate of the casts to fp8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardfuse.bench.harness import runner
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.suites import quantise
from shardfuse.kernels.scaled_linear import quantize

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
COPY, PRODUCTS = "copy of the bytes", "the three products alone"


def _targets(bench: str, peer: str, device: torch.device = CUDA) -> dict[str, float | None]:
    """By case; a case's metrics have one target."""
    rows = [row for row in runner.find(bench).plan(Settings(device)) if row.peer_name == peer]
    found = {row.case: row.target for row in rows}
    assert all(found[row.case] == row.target for row in rows)
    return found


@pytest.mark.parametrize(
    ("bench", "peer", "expected"),
    [
        ("norm", COPY, {"rms_norm-t4096-d4096-bf16": 0.95, "layer_norm-t16384-d16384-bf16-residual_same": 0.95}),
        ("norm", COPY, {"rms_norm-t1024-d16384-bf16": 0.90, "rms_norm-t256-d4096-bf16": None}),
        ("rope", COPY, {"llama8b-b1-s8192-n32-k8-h128-bf16": 0.95, "starcoder2-b4-s4096-n36-k4-h128-bf16": 0.95}),
        ("rope", COPY, {"llama70b-tp8-b4-s4096-n8-k1-h128-bf16": 0.90}),  # 1,152 elements for each token
        ("rope", COPY, {"llama8b-decode-t64-n32-k8-h128-bf16-inplace": None}),
        ("quantise", COPY, {"r8192-c4096-bf16-e4m3_per_row": 0.90, "r128-c4096-bf16-e4m3_per_row": None}),
        ("quantise", COPY, {"r8192-c14336-bf16-e4m3_per_tensor": 0.54}),
        ("cross_entropy", PRODUCTS, {f"t8192-d4096-v{V}-bfloat16": 1 / 1.08 for V in (128256, 152064)}),
        ("cross_entropy", PRODUCTS, {"t8192-d4096-v32000-bfloat16": 1 / 1.1, "t4096-d4096-v128256-bfloat16": None}),
    ],
)
def test_targets_on_a_gpu(bench: str, peer: str, expected: dict[str, float | None]):
    found = _targets(bench, peer)
    assert {case: found[case] for case in expected} == {
        case: target if target is None else pytest.approx(target) for case, target in expected.items()
    }


def test_a_cpu_casts_by_row_without_a_target():
    found = _targets("quantise", COPY, CPU)
    assert {case.rpartition("_")[2] for case in found} == {"tensor", "row"}
    assert set(found.values()) == {None}


@pytest.mark.parametrize("fault", ["", "one scale", "scale", "values"])
def test_the_gate_of_a_cast_by_row(monkeypatch: pytest.MonkeyPatch, fault: str):
    """Red for the scale of the tensor in place of the rows', for a scale that is too large, for values out of place."""

    def faulty(x: torch.Tensor, *, scaling: str, impl: str) -> object:
        found = quantize(x, scaling="tensor" if fault == "one scale" else scaling, impl=impl)
        if impl == "reference":
            return quantize(x, scaling=scaling, impl=impl)
        if fault == "one scale":
            return found._replace(scale=found.scale.expand(len(x), 1))
        if fault == "scale":
            return quantize(x * 1.01, scaling=scaling, impl=impl)._replace(values=found.values)
        return found._replace(values=found.values.roll(1, 0)) if fault == "values" else found

    settings = replace(Settings(CPU), dry=True)
    monkeypatch.setattr(quantise, "quantize", faulty)
    (_, cast) = quantise.DRY
    verdicts = list(quantise.check(settings, [cast.name]))
    assert len(verdicts) == 2
    assert all(verdict.ok for _, verdict in verdicts) == (not fault)
