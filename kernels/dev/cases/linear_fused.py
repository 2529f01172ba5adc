"""The shapes of the other ops of this folder: gated layers, and what backward fuses across layers.

    gated_linear       h = act(x @ W_g^T + b_g) * (x @ W_u^T + b_u), and its backward
    dgrad_act          dz = (dy @ W) * act'(z), with h = act(z) where it is rebuilt
    dgrad_gated        dg, du of dh = dy @ W through h = act(g) * u, with h where it is rebuilt
    wgrad_accumulate   dW += dz^T @ x, db += sum_T dz, into fp32 or the operands' dtype

T tokens, D the width of the residual stream, F the feed-forward width. All inputs are of order 1 after the product.
"""

from __future__ import annotations

from typing import Any

import torch

from ...linear import Product, functional, op
from ...runtime.dispatch import Choice
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from .. import shapes
from ..registry import Case, OpSpec
from .linear_builds import collect

SOURCES = (
    *(
        "linear/triton.py",
        "linear/tiles.py",
        "linear/remote.py",
        "linear/activations.py",
        "linear/launch.py",
        "linear/plan.py",
        "linear/gemm.py",
        "linear/config.py",
    ),
    *(
        "linear/schemas.py",
        "linear/functional.py",
        "linear/product.py",
        "linear/op.py",
        "linear/reference.py",
        "runtime/autograd.py",
    ),
    *("runtime/device.py", "runtime/dispatch.py", "runtime/library.py", "runtime/alloc.py", "runtime/tuning.py"),
)


def _case(T: int, D: int, F: int, dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    marks = [str(value) if isinstance(value, str) else name for name, value in options.items() if value]
    return Case(
        "-".join([f"t{T}-d{D}-f{F}", NAMES[dtype], *marks]),
        dtype,
        {"T": T, "D": D, "F": F},
        options,
        frozenset(tags),
    )


def _draw(case: Case, on: torch.device, seed: int) -> Any:
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=on, dtype=torch.float32).mul(scale).to(case.dtype)

    return draw


def _meta(case: Case) -> Any:
    return lambda *shape: torch.empty(shape, dtype=case.dtype, device="meta")


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, device="meta")


def _sizes(case: Case) -> tuple[int, int, int]:
    return case.sizes["T"], case.sizes["D"], case.sizes["F"]


def _choice(impl: str) -> Choice:
    return Choice(impl, "asked for")


# ------------------------------------------------------------------------------------------------ gated_linear

_GATED = (
    _case(33, 40, 72, FP32, "test", activation="silu", bias=True),
    *(_case(36, 48, 40, FP32, "test", activation=a, bias=False) for a in ("gelu_erf", "gelu_tanh", "relu")),
    _case(40, 64, 64, BF16, "test", activation="silu", bias=False),
    _case(35, 33, 31, FP16, "test", activation="silu", bias=True),  # TMA impossible
    _case(5, 136, 96, FP16, "test", activation="silu", bias=True),  # swapped operands, split K
    _case(0, 16, 24, FP32, "test", activation="silu", bias=True),
    _case(8192, 4096, 14336, BF16, "codegen", "short", activation="silu", bias=False),
    _case(4096, 8192, 3584, BF16, "codegen", "short", activation="gelu_tanh", bias=False),
    _case(16, 4096, 14336, BF16, "codegen", activation="silu", bias=False),
    _case(4096, 4096, 4096, BF16, "codegen", activation="gelu_erf", bias=True),
    _case(4096, 4096, 4096, BF16, "codegen", activation="relu", bias=False),
    _case(4096, 4095, 4095, BF16, "codegen", activation="gelu_erf", bias=True),
    _case(4096, 4096, 4096, FP32, "codegen", activation="silu", bias=False, tf32=True),
)


def _gated_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    T, D, F = _sizes(case)
    draw = _draw(case, on, seed)
    return {
        "x": draw(T, D).requires_grad_(),
        "weights": [draw(F, D, scale=D**-0.5).requires_grad_() for _ in range(2)],
        "biases": [draw(F).requires_grad_() if case.options["bias"] else None for _ in range(2)],
        "grad": draw(T, F),
    }


def _gated_run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Forward and backward: h, dx, dw0 (gate), dw1 (up), db0, db1."""
    x, weights, biases = inputs["x"], inputs["weights"], inputs["biases"]
    h = op.gated_linear(x, *weights, *biases, activation=case.options["activation"], impl=impl)
    leaves = {"dx": x} | {f"dw{i}": w for i, w in enumerate(weights)}
    leaves |= {f"db{i}": b for i, b in enumerate(biases) if b is not None}
    return {"h": h.detach()} | dict(zip(leaves, torch.autograd.grad(h, list(leaves.values()), inputs["grad"])))


def _gated_launch(case: Case) -> None:
    from ...linear import launch

    T, D, F = _sizes(case)
    new = _meta(case)
    x, weights = new(T, D), (new(F, D), new(F, D))
    biases = tuple(new(F) if case.options["bias"] else None for _ in range(2))
    activation = case.options["activation"]
    launch.gated_linear_fwd(x, weights, biases, activation, False)
    launch.gated_linear_fwd(x, weights, biases, activation, True)
    launch.gated_act_grad(new(T, F), new(T, F), new(T, F), activation)


def _gated_launch_projection(size: shapes.Projection) -> None:
    from ...linear import launch

    x = _bf16(size.T, size.D)
    weights = (_bf16(size.widths[0], size.D), _bf16(size.widths[1], size.D))
    for save in (False, True):
        launch.gated_linear_fwd(x, weights, (None, None), size.activation, save)


def _gated_work(case: Case) -> tuple[int, int]:
    """Six products, three for each weight; each operand is read once and each result written once."""
    T, D, F = _sizes(case)
    return 12 * T * D * F, 2 * (T * D + 2 * D * F + T * F) * case.dtype.itemsize


GATED: OpSpec = OpSpec(
    name="gated_linear",
    summary="act(x @ Wg^T) * (x @ Wu^T), both products in one launch, forward and backward",
    cases=_GATED,
    make_inputs=_gated_inputs,
    run=_gated_run,
    launched=lambda target: collect(
        "gated_linear",
        target,
        GATED.tagged("codegen"),
        _gated_launch,
        shapes.grid((shapes.GATE_UP,), models=shapes.GATED_MODELS),
        _gated_launch_projection,
    ),
    sources=SOURCES,
    work=_gated_work,
)

# ------------------------------------------------------------------------------------------------ dgrad_act

_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "silu", "relu", "squared_relu", "quick_gelu")
_DGRAD_ACT = (
    *(_case(33, 40, 72, FP32, "test", activation=a, recompute_act=True) for a in _ACTIVATIONS),
    _case(40, 64, 48, BF16, "test", activation="gelu_tanh", recompute_act=False),
    _case(35, 33, 31, FP16, "test", activation="gelu_erf", recompute_act=True),
    _case(3, 136, 64, FP16, "test", activation="silu", recompute_act=True),
    _case(0, 16, 24, FP32, "test", activation="silu", recompute_act=True),
    *(
        _case(8192, 4096, 16384, BF16, "codegen", activation=a, recompute_act=recompute_act)
        for a in ("gelu_tanh", "gelu_erf", "silu", "relu")
        for recompute_act in (False, True)
    ),
    _case(16, 4096, 14336, BF16, "codegen", activation="gelu_tanh", recompute_act=True),
    _case(4096, 4095, 4095, BF16, "codegen", activation="gelu_erf", recompute_act=True),
    _case(4096, 4096, 4096, FP32, "codegen", activation="gelu_erf", recompute_act=True),
    _case(4096, 4096, 4096, FP32, "codegen", activation="gelu_erf", recompute_act=True, tf32=True),
)


def _dgrad_act_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    T, D, F = _sizes(case)
    draw = _draw(case, on, seed)
    return {"dy": draw(T, D), "weight": draw(D, F, scale=D**-0.5), "z": draw(T, F)}


def _through(inputs: dict[str, Any], preacts: tuple[str, ...], case: Case, impl: str) -> list[torch.Tensor]:
    """The results of a backward through a layer and the activation before it."""
    operands = inputs["dy"], inputs["weight"], [inputs[name] for name in preacts]
    recompute_act = case.options["recompute_act"]
    product = Product.input_grad_act(*operands, case.options["activation"], _choice(impl), recompute_act=recompute_act)
    return product.compute()


def _dgrad_act_run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    return dict(zip(("dz", "h"), _through(inputs, ("z",), case, impl)))


def _dgrad_act_launch(case: Case) -> None:
    from ...linear import launch

    T, D, F = _sizes(case)
    new = _meta(case)
    launch.linear_dgrad_act(new(T, D), new(D, F), new(T, F), case.options["activation"], case.options["recompute_act"])


def _dgrad_act_launch_projection(size: shapes.Projection) -> None:
    from ...linear import launch

    dy, weight, z = _bf16(size.T, size.F), _bf16(size.F, size.D), _bf16(size.T, size.D)
    launch.linear_dgrad_act(dy, weight, z, "gelu_tanh", False)


DGRAD_ACT: OpSpec = OpSpec(
    name="dgrad_act",
    summary="the activation's gradient in the epilogue of the dgrad before it",
    cases=_DGRAD_ACT,
    make_inputs=_dgrad_act_inputs,
    run=_dgrad_act_run,
    launched=lambda target: collect(
        "dgrad_act",
        target,
        DGRAD_ACT.tagged("codegen"),
        _dgrad_act_launch,
        shapes.grid(("down",)),
        _dgrad_act_launch_projection,
    ),
    sources=SOURCES,
)

# ---------------------------------------------------------------------------------------------- dgrad_gated

_DGRAD_GATED = (
    *(
        _case(33, 40, 72, FP32, "test", activation=a, recompute_act=True)
        for a in ("silu", "gelu_tanh", "gelu_erf", "relu")
    ),
    _case(40, 64, 48, BF16, "test", activation="silu", recompute_act=False),
    _case(3, 136, 64, FP16, "test", activation="silu", recompute_act=True),
    _case(0, 16, 24, FP32, "test", activation="silu", recompute_act=True),
    *(_case(8192, 4096, 14336, BF16, "codegen", activation="silu", recompute_act=r) for r in (False, True)),
    _case(8192, 4096, 14336, BF16, "codegen", activation="gelu_tanh", recompute_act=True),
    _case(8192, 4096, 14336, BF16, "codegen", activation="gelu_erf", recompute_act=True),
    _case(4096, 4095, 4095, BF16, "codegen", activation="gelu_erf", recompute_act=True),
    _case(4096, 4096, 4096, FP32, "codegen", activation="gelu_erf", recompute_act=True, tf32=True),
)


def _dgrad_gated_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    T, D, F = _sizes(case)
    draw = _draw(case, on, seed)
    return {"dy": draw(T, D), "weight": draw(D, F, scale=D**-0.5), "g": draw(T, F), "u": draw(T, F)}


def _dgrad_gated_run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    return dict(zip(("dg", "du", "h"), _through(inputs, ("g", "u"), case, impl)))


def _dgrad_gated_launch(case: Case) -> None:
    from ...linear import launch

    T, D, F = _sizes(case)
    new = _meta(case)
    options = case.options
    launch.linear_dgrad_gated(
        new(T, D), new(D, F), new(T, F), new(T, F), options["activation"], options["recompute_act"]
    )


def _dgrad_gated_launch_projection(size: shapes.Projection) -> None:
    from ...linear import launch

    dy, weight, g, u = _bf16(size.T, size.F), _bf16(size.F, size.D), _bf16(size.T, size.D), _bf16(size.T, size.D)
    launch.linear_dgrad_gated(dy, weight, g, u, "silu", False)


DGRAD_GATED: OpSpec = OpSpec(
    name="dgrad_gated",
    summary="both gradients of a gated product in the epilogue of the dgrad before it",
    cases=_DGRAD_GATED,
    make_inputs=_dgrad_gated_inputs,
    run=_dgrad_gated_run,
    launched=lambda target: collect(
        "dgrad_gated",
        target,
        DGRAD_GATED.tagged("codegen"),
        _dgrad_gated_launch,
        shapes.grid(("down",), models=shapes.GATED_MODELS),
        _dgrad_gated_launch_projection,
    ),
    sources=SOURCES,
)

# ------------------------------------------------------------------------------------------ wgrad_accumulate

_WGRAD = (
    _case(40, 48, 72, FP32, "test", bias=True),
    _case(100, 40, 48, BF16, "test", bias=True, fp32=True),
    _case(70, 33, 31, FP16, "test", bias=False, fp32=True),  # TMA impossible
    _case(90, 64, 40, FP16, "test", bias=True),
    _case(0, 16, 24, FP32, "test", bias=True),
    _case(8192, 4096, 16384, BF16, "codegen", bias=True, fp32=True),
    _case(8192, 4096, 16384, BF16, "codegen", bias=False, fp32=True),
    _case(8192, 4096, 16384, BF16, "codegen", bias=True),
    _case(8192, 4096, 16384, FP32, "codegen", bias=True, tf32=True),
    _case(16384, 1024, 1024, BF16, "codegen", bias=True, fp32=True),  # few tiles and many tokens: split K
)


def _wgrad_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    T, D, F = _sizes(case)
    draw = _draw(case, on, seed)
    into = FP32 if case.options.get("fp32") else case.dtype
    return {
        "dz": draw(T, F),
        "x": draw(T, D, scale=max(T, 1) ** -0.5),
        "dw": draw(F, D).to(into),
        "db": draw(F).to(into) if case.options["bias"] else None,
    }


def _wgrad_run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    dw, db = inputs["dw"].clone(), None if inputs["db"] is None else inputs["db"].clone()
    functional.param_grads(
        [inputs["dz"]], inputs["x"], [True], [db is not None], _choice(impl), into=[dw], bias_into=[db]
    )
    return {"dw": dw} if db is None else {"dw": dw, "db": db}


def _wgrad_launch(case: Case) -> None:
    from ...linear import launch

    T, D, F = _sizes(case)
    new = _meta(case)
    into = FP32 if case.options.get("fp32") else case.dtype
    db = new(F).to(into) if case.options["bias"] else None
    launch.linear_wgrad_((new(T, F),), new(T, D), (new(F, D).to(into),), (db,))


def _wgrad_launch_projection(size: shapes.Projection) -> None:
    from ...linear import launch

    dz, x, dw = _bf16(size.T, size.F), _bf16(size.T, size.D), _bf16(size.F, size.D).float()
    launch.linear_wgrad_((dz,), x, (dw,), (_bf16(size.F).float() if size.bias else None,))


WGRAD_ACCUMULATE: OpSpec = OpSpec(
    name="wgrad_accumulate",
    summary="weight and bias gradients added in place to what their buffers hold",
    cases=_WGRAD,
    make_inputs=_wgrad_inputs,
    run=_wgrad_run,
    launched=lambda target: collect(
        "wgrad_accumulate",
        target,
        WGRAD_ACCUMULATE.tagged("codegen"),
        _wgrad_launch,
        shapes.grid(("o", "up", "down")),
        _wgrad_launch_projection,
    ),
    sources=SOURCES,
)
