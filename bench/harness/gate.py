"""The gate before every timing: ours against the fp64 oracle, by the same rule as the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict, judge
from ...kernels.dev.registry import Case, OpSpec, to_double

Outputs = Mapping[str, torch.Tensor]


def check_case(spec: OpSpec, case: Case, device: torch.device, impl: str, *, seed: int = 0) -> list[Verdict]:
    """Check one op on one case, outputs and gradients, with fresh random inputs.

    All three sides get their copies before any of them runs: an op may write into its inputs.
    """
    inputs = spec.make_inputs(case, device, seed)
    plain, exact = copy_inputs(inputs), to_double(copy_inputs(inputs), device)
    return check_outputs(
        spec.run(inputs, case, impl),
        low=lambda: spec.run(plain, case, "reference"),
        oracle=lambda: spec.run(exact, case, "reference"),
        rule=partial(spec.judge, case),
    )


def check_outputs(
    ours: Outputs,
    *,
    low: Callable[[], Outputs],
    oracle: Callable[[], Outputs],
    terms: int = 1,
    rule: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], Verdict] | None = None,
) -> list[Verdict]:
    """Compare by name. ``low`` does the same maths in ours' precision, ``oracle`` in fp64.

    ``rule`` judges an output; without one ``accuracy.judge`` does, to which ``terms`` goes.

    Raises RuntimeError if the sides don't return the same names: a missing gradient must not pass as a right one.
    """
    want, have = oracle(), low()
    if not (ours.keys() == want.keys() == have.keys()):
        raise RuntimeError(
            f"the sides to compare return different names: {sorted(ours)}, {sorted(have)}, {sorted(want)}; "
            "every output and gradient must be in all three"
        )
    rule = rule or partial(judge, terms=terms)
    return [rule(name, ours[name], have[name], want[name]) for name in ours]


def module_outputs(
    module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor, **options: Any
) -> dict[str, torch.Tensor]:
    """y, dx and every parameter's gradient of ``module(x, **options)`` under the cotangent ``grad``."""
    x = x.detach().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x, **options)
    y.backward(grad)
    grads = {f"d_{name}": _grad(name, parameter) for name, parameter in module.named_parameters()}
    return {"y": y.detach(), "d_x": _grad("x", x), **grads}


def join_layers(outputs: Outputs) -> dict[str, torch.Tensor]:
    """The same outputs with each layer's weight and bias gradients as one vector, named after the layer.

    For attention: almost everything cancels in the gradient of the key bias, so its own relative error does not
    describe the layer's accuracy.
    """
    joined: dict[str, list[torch.Tensor]] = {}
    for name, value in outputs.items():
        joined.setdefault(name.removesuffix(".weight").removesuffix(".bias"), []).append(value)
    return {
        name: parts[0] if len(parts) == 1 else torch.cat([p.flatten() for p in parts]) for name, parts in joined.items()
    }


def _grad(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        raise RuntimeError(f"the backward pass left no gradient for {name}")
    return tensor.grad


def copy_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same values as new leaves, so that gradients of two runs do not add up."""

    def renew(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            return type(value)(renew(v) for v in value)
        return value

    return {name: renew(value) for name, value in inputs.items()}
