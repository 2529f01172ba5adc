"""The shapes that tests, ahead-of-time builds and benchmarks share for ``dropout``: R rows of C, a part of more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...dropout.op import dropout
from ...runtime import device
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from ..registry import Build, Case, OpSpec


def _case(R: int, C: int, dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    options = {"p": 0.1, "residual": True, "stream": 0, "row_start": 0, "col_start": 0} | options
    name = f"r{R}-c{C}-{NAMES[dtype]}-p{options['p']:g}" + ("-residual" if options["residual"] else "")
    name += f"-stream{options['stream']}" if options["stream"] else ""
    name += f"-at{options['row_start']},{options['col_start']}" if options["row_start"] or options["col_start"] else ""
    return Case(name, dtype, {"R": R, "C": C}, options, frozenset(tags))


CASES = (
    _case(9, 40, FP32, "test"),
    _case(5, 33, BF16, "test", p=0.5, residual=False),
    _case(3, 1, FP16, "test", p=0.25, stream=2**31 + 1),
    _case(6, 70, FP16, "test", row_start=2**33 - 2, col_start=64),  # rows past 32 bits
    _case(4, 80, FP32, "test", p=0.0, residual=False),
    _case(0, 8, FP32, "test"),
    _case(8192, 4096, BF16, "codegen", "bench", "short"),
    _case(8192, 4096, BF16, "codegen", "bench", residual=False),
    _case(8192, 5120, FP32, "codegen"),
    _case(512, 1024, FP32, "bench-cpu"),
)


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """x, the residual or None, the gradient to come, and an RNG key."""
    generator = torch.Generator(on).manual_seed(seed)
    shape = case.sizes["R"], case.sizes["C"]

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=on).to(case.dtype)

    return {
        "x": draw().requires_grad_(),
        "residual": draw().requires_grad_() if case.options["residual"] else None,
        "dy": draw(),
        "rng_key": torch.empty(1, dtype=torch.int64, device=on).random_(generator=generator),
    }


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """y and the gradients of x and the residual."""
    options = dict(case.options)
    del options["residual"]
    x, residual = inputs["x"], inputs["residual"]
    y = dropout(x, rng_key=inputs["rng_key"], residual=residual, impl=impl, **options)
    leaves = {"dx": x} | ({} if residual is None else {"dresidual": residual})
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), inputs["dy"])))


def _launched(target: str) -> Iterator[Build]:
    from ...dropout import launch

    for case in SPEC.tagged("codegen"):
        x = torch.empty(case.sizes["R"], case.sizes["C"], dtype=case.dtype, device="meta")
        residual = torch.empty_like(x) if case.options["residual"] else None
        rng_key = torch.empty(1, dtype=torch.int64, device="meta")
        with device.capture(target) as launches:
            launch.dropout(x, residual, rng_key, case.options["p"], 0, 0, 0)
        for item in launches:
            config = f"{item.config}-{NAMES[case.dtype]}" + ("-residual" if case.options["residual"] else "")
            yield Build("dropout", config, target, item.fn, item.args, item.num_warps, item.num_stages)


SPEC = OpSpec(
    name="dropout",
    summary="dropout by position, plus a residual; backward draws the mask again",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    launched=_launched,
    sources=(
        *(f"dropout/{name}.py" for name in ("triton", "launch", "schemas", "op", "reference")),
        "runtime/autograd.py",
    ),
    terms=lambda case: 1,
)
