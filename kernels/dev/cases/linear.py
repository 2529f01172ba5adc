"""The shapes that tests, ahead-of-time builds and benchmarks share for ``linear_act``.

A case is T tokens, D inputs, F outputs per weight, ``weights`` weights on one x (F // 2^i each, so that they differ),
an activation, a bias or none, how x is laid out, and (ahead-of-time builds only) whether fp32 may round to tf32.
"""

from __future__ import annotations

from typing import Any

import torch

from ...linear import op
from ...linear.reference import ACTIVATIONS
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from .. import shapes
from ..registry import Case, OpSpec
from .linear_builds import collect
from .linear_fused import DGRAD_ACT, DGRAD_GATED, GATED, SOURCES, WGRAD_ACCUMULATE


def _case(T: int, D: int, F: int, dtype: torch.dtype, activation: str, *tags: str, **options: Any) -> Case:
    stock: dict[str, Any] = {
        "activation": activation,
        "bias": True,
        "weights": 1,
        "layout": "rows",
        "residual": False,
        "tf32": False,
    }
    options = stock | options
    extras = [f"x{options['weights']}"] if options["weights"] > 1 else []
    extras += [] if options["bias"] else ["nobias"]
    extras += [] if options["layout"] == "rows" else [options["layout"]]
    extras += ["residual"] if options["residual"] else []
    extras += ["tf32"] if options["tf32"] else []
    name = "-".join([options.pop("model", ""), f"t{T}-d{D}-f{F}", NAMES[dtype], activation, *extras]).lstrip("-")
    return Case(name, dtype, {"T": T, "D": D, "F": F}, options, frozenset(tags))


# Small enough to interpret; blocks are 32 there. Odd sizes, single rows and columns, nothing at all, strided x.
_TEST = (
    *(_case(33, 40, 72, FP32, activation, "test") for activation in ACTIVATIONS),
    *(_case(40, 48, 64, dtype, "gelu_tanh", "test") for dtype in (BF16, FP16)),
    _case(64, 33, 31, FP16, "gelu_erf", "test"),  # TMA impossible: rows of 66 and 62 bytes
    _case(1, 64, 96, BF16, "silu", "test"),
    _case(0, 16, 24, FP32, "relu", "test"),
    _case(5, 1, 1, FP32, "identity", "test"),
    _case(5, 0, 24, FP32, "gelu_tanh", "test"),  # no terms: act(b)
    _case(100, 64, 64, BF16, "identity", "test", bias=False),
    _case(50, 40, 96, FP16, "identity", "test", weights=3),
    _case(37, 64, 64, FP32, "gelu_tanh", "test", weights=2, bias=False),
    _case(34, 48, 40, FP32, "gelu_tanh", "test", layout="columns"),
    _case(34, 48, 40, BF16, "silu", "test", layout="strided"),
    _case(45, 40, 72, FP32, "gelu_tanh", "test", residual=True),
    _case(7, 136, 96, FP16, "gelu_erf", "test", residual=True),  # few tokens: swapped operands, split K
    _case(4, 160, 64, FP32, "identity", "test", weights=3),
    _case(40, 64, 51, FP16, "gelu_tanh", "test"),  # only the result is unaligned
)

# The sizes that a short GPU call times.
_SHORT = tuple(
    _case(size.T, size.D, size.F, BF16, size.activation, "codegen", "short", model=f"{size.model}-tp{size.tp}")
    for size in (*shapes.SHORT["linear_act"], *shapes.SHORT["small_m"])
    if len(size.widths) == 1
)
# What else ships: other epilogues and dtypes, several weights, operands that TMA cannot take. fp16 compiles to what
# bf16 does, and relu's epilogue is the plain one with a maximum: neither gets builds of its own.
_BUILDS = (
    *(_case(4096, 4096, 4096, BF16, activation, "codegen") for activation in ("identity", "gelu_erf", "silu")),
    _case(4096, 4096, 4096, FP32, "gelu_tanh", "codegen"),
    _case(4096, 4096, 4096, FP32, "gelu_tanh", "codegen", tf32=True),
    _case(4096, 4096, 4096, BF16, "identity", "codegen", weights=3),
    _case(4096, 4096, 14336, BF16, "identity", "codegen", weights=2, bias=False),
    _case(4096, 4095, 4095, BF16, "gelu_tanh", "codegen"),
    _case(4096, 4095, 4096, FP32, "identity", "codegen", tf32=True),  # copied ahead without TMA
    _case(4096, 4096, 4095, BF16, "identity", "codegen"),  # a vocabulary of odd size: only the result is unaligned
    _case(4096, 4096, 4096, BF16, "gelu_erf", "codegen", residual=True),
    _case(4096, 4095, 4095, BF16, "gelu_erf", "codegen", residual=True),
    _case(4096, 4096, 4096, FP32, "gelu_erf", "codegen", residual=True, tf32=True),
)
CASES = tuple({case.name: case for case in (*_TEST, *_SHORT, *_BUILDS)}.values())


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """x, weights, biases and the outputs' gradients; random, of order 1 after the product."""
    T, D, F = (case.sizes[letter] for letter in "TDF")
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=on, dtype=torch.float32).mul(scale).to(case.dtype)

    if case.options["layout"] == "columns":
        x = draw(D, T).t()
    elif case.options["layout"] == "strided":
        x = draw(T, 2 * D)[:, ::2]
    else:
        x = draw(T, D)
    widths = [max(F // 2**i, 1) for i in range(case.options["weights"])]
    weights = [draw(width, D, scale=max(D, 1) ** -0.5).requires_grad_() for width in widths]
    biases = [draw(width).requires_grad_() if case.options["bias"] else None for width in widths]
    grads = [draw(T, width) for width in widths]
    residual = draw(T, F).requires_grad_() if case.options["residual"] else None
    inputs = {"x": x.requires_grad_(), "weights": weights, "biases": biases, "residual": residual, "grads": grads}
    return inputs


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Forward and backward; outputs y0.., gradients dx, dw0.., db0.."""
    x, weights, biases, residual = (inputs[name] for name in ("x", "weights", "biases", "residual"))
    activation = case.options["activation"]
    if residual is None:
        ys = op.linear_act(x, weights, biases, activation=activation, impl=impl)
    else:
        ys = (op.linear_act(x, weights[0], biases[0], activation=activation, residual=residual, impl=impl),)
    leaves = {"dx": x} if residual is None else {"dx": x, "dresidual": residual}
    leaves |= {f"dw{i}": w for i, w in enumerate(inputs["weights"])}
    leaves |= {f"db{i}": b for i, b in enumerate(inputs["biases"]) if b is not None}
    grads = torch.autograd.grad(ys, list(leaves.values()), inputs["grads"])
    return {f"y{i}": y.detach() for i, y in enumerate(ys)} | dict(zip(leaves, grads))


def _launch(case: Case) -> None:
    """Everything that a call and its backward launch, with and without what only training needs."""
    from ...linear import launch

    T, D, F = (case.sizes[letter] for letter in "TDF")
    activation = case.options["activation"]
    widths = [F // 2**i for i in range(case.options["weights"])]
    x = torch.empty(T, D, dtype=case.dtype, device="meta")
    weights = tuple(x.new_empty(width, D) for width in widths)
    biases = tuple(x.new_empty(width) if case.options["bias"] else None for width in widths)
    residual = x.new_empty(T, F) if case.options["residual"] else None
    save = activation != "identity"
    launch.linear_act_fwd(x, weights, biases, residual, activation, False)
    found = launch.linear_act_fwd(x, weights, biases, residual, activation, save)
    ys, zs = found[: len(weights)], found[len(weights) :]
    dzs = tuple(launch.act_grad(y, z, activation) for y, z in zip(ys, zs)) if save else tuple(ys)
    launch.linear_dgrad(dzs, weights)
    launch.linear_wgrad(dzs, x, [case.options["bias"]] * len(widths))


def _launch_projection(size: shapes.Projection) -> None:
    from ...linear import launch

    x = torch.empty(size.T, size.D, dtype=BF16, device="meta")
    weights = tuple(x.new_empty(width, size.D) for width in size.widths)
    biases = tuple(x.new_empty(width) if size.bias else None for width in size.widths)
    ys = launch.linear_act_fwd(x, weights, biases, None, size.activation, False)
    if size.activation != "identity":
        launch.linear_act_fwd(x, weights, biases, None, size.activation, True)
    launch.linear_dgrad(tuple(ys), weights)
    launch.linear_wgrad(tuple(ys), x, [size.bias] * len(weights))


def _work(case: Case) -> tuple[int, int]:
    """Three products, with y = x @ W^T, dx and dW; each operand is read once and each result written once."""
    T, D, F = (case.sizes[letter] for letter in "TDF")
    width = sum(max(F // 2**i, 1) for i in range(case.options["weights"]))
    return 6 * T * D * width, 2 * (T * D + D * width + T * width) * case.dtype.itemsize


SPEC: OpSpec = OpSpec(
    name="linear_act",
    summary="act(x @ W^T + b) for up to three weights, forward and backward",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    launched=lambda target: collect(
        "linear_act",
        target,
        SPEC.tagged("codegen"),
        _launch,
        (*shapes.grid(shapes.KINDS), *shapes.grid(("up",), shapes.FEW_TOKENS)),
        _launch_projection,
    ),
    sources=SOURCES,
    work=_work,
)
SPECS = (SPEC, GATED, DGRAD_ACT, DGRAD_GATED, WGRAD_ACCUMULATE)
