"""Turns a library's forward function into an implementation of one of our ops: its inputs, gradients and names.

Each function here takes ``forward`` and returns ``run(inputs, case)``, as ``Rival`` wants it. Gradients come from
autograd through whatever ``forward`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...kernels.dev.registry import Case
from .rivals import Outputs, Run

Tensor = torch.Tensor
# (x, residual, weight, bias, eps) -> y, or (y, s) with a residual
Norm = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, float], Any]
# (q, k or None, cos, sin, interleaved) -> (q, k or None); cos and sin [S, P/2] fp32
Rope = Callable[[Tensor, Tensor | None, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
# (x, weights, biases, activation, residual) -> an output for each weight
Linear = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None], str, Tensor | None], Sequence[Tensor]]
# (x, (gate, up) weights, biases, activation) -> h
Gated = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None], str], Tensor]


def norm(forward: Norm, *, bias: bool) -> Run:
    """``rms_norm``, or with ``bias`` ``layer_norm``."""

    def run(inputs: dict[str, Any], case: Case) -> Outputs:
        names = ("x", "residual", "weight", *(("bias",) if bias else ()))
        leaves = {name: inputs[name] for name in names if inputs[name] is not None}
        residual, scale = inputs["residual"], inputs["weight"]
        found = forward(inputs["x"], residual, scale, inputs["bias"] if bias else None, case.options["eps"])
        outputs = dict(zip(("y", "s"), found if isinstance(found, tuple) else (found,)))
        ends = {name: out for name, out in outputs.items() if case.options["upstream"] in ("both", name)}
        if ends.keys() == {"s"}:  # the parameters have no part in the sum
            leaves = {name: leaf for name, leaf in leaves.items() if name in ("x", "residual")}
        return _with_grads(outputs, ends, [inputs[f"d{name}"] for name in ends], leaves)

    return run


def rope(forward: Rope) -> Run:
    """``rope``; an op in place rotates copies of the leaves, as ours does."""

    def run(inputs: dict[str, Any], case: Case) -> Outputs:
        leaves = {name: inputs[name] for name in "qk" if inputs[name] is not None}
        given = {name: leaf.clone() if case.options["inplace"] else leaf for name, leaf in leaves.items()}
        tables = inputs["cos"], inputs["sin"]
        rotated = forward(given["q"], given.get("k"), *tables, case.options["interleaved"])
        outputs = {f"{name}_out": out for name, out in zip("qk", rotated) if out is not None}
        return _with_grads(outputs, outputs, [inputs[f"d{name}"] for name in outputs], leaves)

    return run


def linear(forward: Linear) -> Run:
    """``linear_act``."""

    def run(inputs: dict[str, Any], case: Case) -> Outputs:
        x, weights, biases, residual = (inputs[name] for name in ("x", "weights", "biases", "residual"))
        ys = forward(x, weights, biases, case.options["activation"], residual)
        outputs = {f"y{i}": y for i, y in enumerate(ys)}
        leaves = {"x": x} if residual is None else {"x": x, "residual": residual}
        return _with_grads(outputs, outputs, inputs["grads"], leaves | _parameters(weights, biases))

    return run


def gated(forward: Gated) -> Run:
    """``gated_linear``."""

    def run(inputs: dict[str, Any], case: Case) -> Outputs:
        x, weights, biases = inputs["x"], inputs["weights"], inputs["biases"]
        outputs = {"h": forward(x, weights, biases, case.options["activation"])}
        return _with_grads(outputs, outputs, [inputs["grad"]], {"x": x} | _parameters(weights, biases))

    return run


def _parameters(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> dict[str, Tensor]:
    found = {f"w{i}": weight for i, weight in enumerate(weights)}
    return found | {f"b{i}": bias for i, bias in enumerate(biases) if bias is not None}


def _with_grads(
    outputs: Mapping[str, Tensor], ends: Mapping[str, Tensor], grads: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs, and the gradient of each leaf under the cotangents ``grads`` of ``ends``."""
    found = torch.autograd.grad(list(ends.values()), list(leaves.values()), list(grads))
    return {name: out.detach() for name, out in outputs.items()} | {f"d{n}": g for n, g in zip(leaves, found)}
