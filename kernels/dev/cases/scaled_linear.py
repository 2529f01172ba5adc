"""The shapes that tests, ahead-of-time builds and benchmarks share for ``scaled_linear``.

A case is T tokens, D inputs, F outputs and a ``kind``: "product", ``scaled_linear`` on quantised operands, or
"training", ``fp8_linear`` and its backward on bf16, fp16 or fp32 ones. ``scaling`` is "tensor", "row" or, for training,
"delayed"; ``formats`` those of a product's two operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ...runtime import device
from ...runtime.chips import converts_e4m3
from ...runtime.dtypes import BF16, E4M3, E5M2, FP16, FP32, NAMES
from ...scaled_linear import op, reference
from ..registry import Build, Case, OpSpec
from . import linear_builds as builds
from .linear_fused import SOURCES


def _case(T: int, D: int, F: int, dtype: torch.dtype, kind: str, scaling: str, *tags: str, **options: Any) -> Case:
    stock: dict[str, Any] = {"activation": "identity", "bias": True, "formats": (E4M3, E4M3)}
    options = stock | options | {"kind": kind, "scaling": scaling}
    name = f"t{T}-d{D}-f{F}-{NAMES[dtype]}-{kind}-{scaling}"
    name += "" if options["activation"] == "identity" else f"-{options['activation']}"
    name += "" if options["bias"] else "-nobias"
    name += "" if options["formats"] == stock["formats"] else "-" + "x".join(NAMES[t] for t in options["formats"])
    return Case(name, dtype, {"T": T, "D": D, "F": F}, options, frozenset(tags))


# ``dtype`` is the product's output, or what is trained in.
_TEST = (
    _case(40, 48, 72, BF16, "product", "tensor", "test"),
    _case(33, 80, 64, FP32, "product", "row", "test", activation="gelu_tanh"),
    _case(64, 64, 40, FP16, "product", "tensor", "test", bias=False, formats=(E5M2, E4M3)),
    _case(35, 33, 31, BF16, "product", "row", "test", activation="silu"),  # rows that TMA cannot take
    _case(1, 160, 64, FP32, "product", "row", "test"),  # one row, several columns: swapped operands, split K
    _case(5, 160, 1, FP32, "product", "row", "test"),
    _case(0, 16, 24, BF16, "product", "tensor", "test"),
    _case(5, 0, 24, FP32, "product", "tensor", "test"),
    _case(33, 40, 24, FP32, "training", "tensor", "test"),
    _case(33, 48, 40, BF16, "training", "row", "test"),
    _case(70, 40, 33, FP16, "training", "delayed", "test", bias=False),
    _case(0, 16, 24, FP32, "training", "row", "test"),
)
_BUILDS = (
    _case(8192, 4096, 14336, BF16, "training", "tensor", "codegen", bias=False),
    _case(8192, 4096, 14336, BF16, "product", "row", "codegen", activation="gelu_tanh"),
    _case(16, 4096, 4096, BF16, "product", "row", "codegen", bias=False),
)
CASES = (*_TEST, *_BUILDS)


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """Random operands, of order 1 after the product: quantised ones and their scales, or leaves and a gradient."""
    T, D, F = (case.sizes[letter] for letter in "TDF")
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=on).mul(scale).to(dtype)

    bias = draw(F) if case.options["bias"] else None
    x, weight = draw(T, D, dtype=FP32), draw(F, D, scale=max(D, 1) ** -0.5, dtype=FP32)
    if case.options["kind"] == "training":
        leaves = {"x": x.to(case.dtype), "weight": weight.to(case.dtype), "bias": bias}
        return {name: t if t is None else t.requires_grad_() for name, t in leaves.items()} | {"dy": draw(T, F)}
    quantize = reference.quantize_rows if case.options["scaling"] == "row" else reference.quantize
    (xq, x_scale, _), (wq, weight_scale, _) = (
        quantize(t, dtype, False) for t, dtype in zip((x, weight), case.options["formats"])
    )
    return {"x": xq, "weight": wq, "x_scale": x_scale, "weight_scale": weight_scale, "bias": bias}


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Output y; for training also dx, dw and db. Inputs in fp64 are the oracle's: multiplied as they are."""
    if case.options["kind"] == "training":
        return _train(inputs, case, impl)
    x, weight, scales, bias = inputs["x"], inputs["weight"], (inputs["x_scale"], inputs["weight_scale"]), inputs["bias"]
    activation = case.options["activation"]
    if x.dtype == torch.float64:
        return {"y": reference.scaled_linear(x, weight, *scales, bias, activation, torch.float64)}
    return {"y": op.scaled_linear(x, weight, *scales, bias, activation=activation, out_dtype=case.dtype, impl=impl)}


def _train(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
    scaling, histories = case.options["scaling"], None
    if scaling == "delayed":
        # The scales of calls before this one: x and the gradient have outgrown theirs.
        scaling, histories = "tensor", torch.tensor([[2.0, 0.5], [0.1, 1.0], [1.0, 0.0]], device=x.device)
    y = op.fp8_linear(x, weight, bias, scaling=scaling, histories=histories, impl=impl)
    leaves = {"dx": x, "dw": weight} | ({} if bias is None else {"db": bias})
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), inputs["dy"])))


def _launch(case: Case) -> None:
    """What a call launches; for training with its backward, under current and delayed scaling and by row."""
    from ...scaled_linear import launch

    T, D, F = (case.sizes[letter] for letter in "TDF")

    def fp8(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=dtype, device="meta")

    def scale(rows: int) -> torch.Tensor:
        return torch.empty(rows if case.options["scaling"] == "row" else 1, device="meta")

    x_format, weight_format = case.options["formats"]
    bias = torch.empty(F, dtype=case.dtype, device="meta") if case.options["bias"] else None
    operands = fp8(T, D, x_format), fp8(F, D, weight_format), scale(T), scale(F), bias
    launch.scaled_linear(*operands, case.options["activation"], case.dtype)
    if case.options["kind"] == "training":
        dy = torch.empty(T, F, dtype=case.dtype, device="meta")
        launch.quantize(dy, E5M2, True)
        launch.quantize(dy, E5M2, True, history=torch.empty(16, device="meta"))
        launch.quantize_rows(dy, E5M2, True)
        launch.scaled_linear(fp8(T, F, E5M2), fp8(D, F, E4M3), scale(T), scale(D), None, "identity", case.dtype)
        launch.scaled_linear(fp8(F, T, E5M2), fp8(D, T, E4M3), scale(F), scale(D), None, "identity", case.dtype)


def _launched(target: str) -> Iterator[Build]:
    """Every launch of the cases tagged "codegen"; none on chips without these formats."""
    if not converts_e4m3(target):
        return
    for case in SPEC.tagged("codegen"):
        with device.capture(target) as launches:
            _launch(case)
        yield from (_build(item, target) for item in launches)


def _build(item: device.Launch, target: str) -> Build:
    if item.gemm is not None or "EPILOGUE" in item.args:  # the product's
        build = builds.build_of("scaled_linear", item, target)
        if item.gemm is None:
            return build
        return dataclasses.replace(build, config=f"{build.config}-by_{NAMES[item.args['b_ptrs'][0].dtype]}")
    args = item.args
    steps = [item.fn.__name__.removeprefix("_").removesuffix("_kernel"), str(item.config)]
    steps += [NAMES[args["values_ptr"].dtype]] if "values_ptr" in args else []
    if "amaxes_ptr" in args:  # the cast with one scale
        steps += ["transposed"] if args["amaxes_ptr"] is None else []
        steps += ["delayed"] if args["parts_ptr"] is not None else []
    return Build(
        op="scaled_linear",
        config="-".join(["quantize", *steps]),
        target=target,
        fn=item.fn,
        args=args,
        num_warps=item.num_warps,
        num_stages=item.num_stages,
    )


def tensor_core_error(terms: int, device: torch.device) -> float:
    """The relative error of Hopper's fp8 sums of ``terms`` products.

    They keep 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.5.2), cut off and not rounded, so that up to K errors of
    a 2^-13th add up against sums that grow with K's root. The interpreter adds in fp32.
    """
    return terms**0.5 * 2.0**-13 if device.type == "cuda" else 0.0


SPEC = OpSpec(
    name="scaled_linear",
    summary="fp8 operands with scales in the epilogue, their quantisation, and training through both",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    launched=_launched,
    allowed=lambda case, device: tensor_core_error(max(case.sizes.values()), device),
    sources=(
        *(f"scaled_linear/{name}.py" for name in ("triton", "launch", "schemas", "op", "reference")),
        *SOURCES,  # of the product that it runs
    ),
)
