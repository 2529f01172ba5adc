"""The shapes that tests, ahead-of-time builds and benchmarks share for ``rms_norm`` and ``layer_norm``.

A case is T rows of D, and how the call is made: the parameters' dtype ("same" as x's, "fp32", or None for no weight;
``bias`` is ``layer_norm``'s), ``weight_offset``, a residual ("same" dtype as x's, "fp32", or None) and the share ``p``
that is dropped before it, how x lies in memory, and which results have a gradient ("both", "y" or "s").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...norm import op
from ...runtime import device
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from ..registry import Build, Case, OpSpec

_STOCK: dict[str, Any] = {
    "weight": "same",
    "bias": True,
    "weight_offset": 0.0,
    "residual": None,
    "p": 0.0,
    "eps": 1e-5,
    "layout": "rows",
    "upstream": "both",
}


def _case(T: int, D: int, dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    said = {name: value for name, value in options.items() if _STOCK[name] != value}
    extras = [f"{name.replace('_', '')}_{'none' if value is None else value}" for name, value in said.items()]
    name = "-".join([f"t{T}-d{D}-{NAMES[dtype]}", *extras])
    return Case(name, dtype, {"T": T, "D": D}, _STOCK | options, frozenset(tags))


# The interpreter's blocks are 4 rows of at most 512 columns; beyond 1024 the parameters have a pass of their own.
_TEST = (
    _case(9, 80, FP32, "test"),
    _case(6, 1000, BF16, "test", residual="same"),
    _case(2, 4096, FP16, "test", residual="same", p=0.2),
    _case(5, 1600, FP32, "test", weight="fp32"),
    _case(40, 16, FP32, "test", residual="same", p=0.5),  # several blocks of rows for each program
    # One column: what comes back is what is left of a difference, so eps is not to be small beside the mean.
    _case(33, 1, FP32, "test", eps=0.5, residual="same"),
    _case(1, 72, BF16, "test", weight="fp32", residual="fp32", p=0.1),
    _case(7, 96, BF16, "test", weight="fp32", weight_offset=1.0),
    _case(7, 96, FP16, "test", weight_offset=1.0, residual="same", upstream="y"),
    _case(7, 40, FP32, "test", residual="same", p=0.3, upstream="s"),
    _case(5, 33, FP32, "test", weight=None),
    _case(6, 48, BF16, "test", bias=False, residual="fp32"),
    _case(6, 48, FP32, "test", layout="columns"),
    _case(6, 48, FP16, "test", layout="slice"),
    _case(6, 48, FP16, "test", layout="slice", residual="same"),
    _case(0, 24, FP32, "test", residual="same", p=0.1),
)
# The widths of the models in kernels/dev/shapes.py, of their heads, and wider than a program holds.
_BUILDS = (
    _case(8192, 4096, BF16, "codegen"),
    _case(8192, 4096, BF16, "codegen", residual="same"),
    _case(8192, 5120, BF16, "codegen", residual="fp32", p=0.1),
    _case(8192, 12288, BF16, "codegen", residual="same"),
    _case(8192, 16384, BF16, "codegen", residual="same"),
    _case(8192, 8192, FP32, "codegen", residual="same"),
    _case(1024, 32768, BF16, "codegen", residual="same"),
    _case(8192, 128, BF16, "codegen"),
)
# What benchmarks time: with and without a residual; at few tokens the launch is all.
_SHORT = ((8192, 4096, "same"), (8192, 4096, None), (4096, 12288, "same"), (16, 4096, "same"))
_BENCH = (
    *(_case(T, D, BF16, "bench", "short", residual=residual) for T, D, residual in _SHORT),
    *(
        _case(T, D, BF16, "bench", residual=residual)
        for T in (1, 16, 256, 1024, 4096, 8192, 16384)
        for D in (4096, 5120, 8192, 12288, 16384)
        for residual in (None, "same")
    ),
    *(
        _case(T, D, FP32, "bench-cpu", residual=residual)
        for T, D in ((512, 1024), (512, 4096))
        for residual in (None, "same")
    ),
)


def _once(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Each case once, with the tags of all."""
    found: dict[str, Case] = {}
    for case in cases:
        tags = found[case.name].tags if case.name in found else frozenset()
        found[case.name] = replace(case, tags=case.tags | tags)
    return tuple(found.values())


CASES = _once((*_TEST, *_BUILDS, *_BENCH))


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """x, residual, weight and bias as leaves, the gradients of y and s, and an RNG key."""
    T, D = case.sizes["T"], case.sizes["D"]
    options = case.options
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, dtype: str = "same", mean: float = 0.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, device=on) + mean
        return drawn.to(FP32 if dtype == "fp32" else case.dtype)

    if options["layout"] == "columns":
        x = draw(D, T).t()
    elif options["layout"] == "slice":
        x = draw(T, D + 8)[:, 8:]
    else:
        x = draw(T, D, mean=0.5)
    leaves: dict[str, torch.Tensor | None] = {"x": x, "residual": None, "weight": None, "bias": None}
    if options["residual"] is not None:
        leaves["residual"] = draw(T, D, dtype=options["residual"])
    if options["weight"] is not None:
        leaves["weight"] = draw(D, dtype=options["weight"], mean=1.0 - options["weight_offset"])
        leaves["bias"] = draw(D, dtype=options["weight"]) if options["bias"] else None
    dtype = FP32 if options["residual"] == "fp32" else case.dtype
    grads = {name: draw(T, D).to(dtype) for name in ("dy", "ds")}
    rng_key = torch.empty(1, dtype=torch.int64, device=on).random_(generator=generator)
    return {name: t if t is None else t.requires_grad_() for name, t in leaves.items()} | grads | {"rng_key": rng_key}


def _run(name: str, inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """y and s, and the gradients of whatever is there."""
    options = case.options
    leaves = {key: inputs[key] for key in ("x", "residual", "weight", "bias") if inputs[key] is not None}
    call = {"eps": options["eps"], "weight_offset": options["weight_offset"], "impl": impl}
    if "residual" in leaves:
        call |= {"residual": leaves["residual"], "dropout_p": options["p"], "rng_key": inputs["rng_key"]}
        call |= {"stream": 3, "row_start": 5}
    if name == "layer_norm":
        found: Any = op.layer_norm(inputs["x"], inputs["weight"], inputs["bias"], **call)
    else:
        leaves.pop("bias", None)
        found = op.rms_norm(inputs["x"], inputs["weight"], **call)
    results = dict(zip(("y", "s"), found if isinstance(found, tuple) else (found,)))
    ends = {key: out for key, out in results.items() if options["upstream"] in ("both", key)}
    if ends.keys() == {"s"}:  # which neither weight nor bias has a part in
        leaves = {key: leaf for key, leaf in leaves.items() if key in ("x", "residual")}
    grads = torch.autograd.grad(list(ends.values()), list(leaves.values()), [inputs[f"d{key}"] for key in ends])
    return {key: out.detach() for key, out in results.items()} | dict(zip([f"d{key}" for key in leaves], grads))


def _launch(name: str, case: Case) -> None:
    """What a call and its backward launch."""
    from ...norm import launch

    T, D = case.sizes["T"], case.sizes["D"]
    options, centred = case.options, name == "layer_norm"
    x = torch.empty(T, D, dtype=case.dtype, device="meta")
    residual = None
    if options["residual"] is not None:
        residual = torch.empty_like(x, dtype=FP32 if options["residual"] == "fp32" else None)
    weight = x.new_empty(D)
    bias = x.new_empty(D) if centred else None
    rng_key = torch.empty(1, dtype=torch.int64, device="meta") if options["p"] else None
    drawn = (options["weight_offset"], options["p"], 0, 0)
    s = x if residual is None else residual
    y, rstd, *rest = launch.norm_fwd(x, residual, weight, bias, rng_key, centred, options["eps"], *drawn, s.dtype)
    mean = rest[0] if centred else None
    apart = s.dtype if rng_key is not None or s.dtype != x.dtype else None  # from dx
    params = case.dtype, case.dtype if centred else None
    launch.norm_bwd(y, residual, s, weight, rstd, mean, rng_key, *drawn, case.dtype, apart, *params)


def _launched(name: str, target: str) -> Iterator[Build]:
    for case in SPECS[name == "layer_norm"].tagged("codegen"):
        with device.capture(target) as launches:
            _launch(name, case)
        for item in launches:
            steps = [
                item.fn.__name__.removeprefix("_norm_").removesuffix("_kernel"),
                *([f"d{item.args['D']}"] if "ALIGN" in item.args else []),
            ]
            steps += [str(item.config), NAMES[case.dtype]]
            steps += ["residual"] if any(item.args.get(key) is not None for key in ("residual_ptr", "ds_ptr")) else []
            steps += ["dropout"] if item.args.get("rng_key_ptr") is not None else []
            yield Build(name, "-".join(steps), target, item.fn, item.args, item.num_warps, item.num_stages)


def _work(case: Case) -> tuple[int, int]:
    """Forward reads x (and the residual), writes y (and the sum). Backward, counted where both results have gradients,
    reads these and the normalised tensor, and writes one gradient.
    """
    forward, backward = (4, 4) if case.options["residual"] is not None else (2, 3)
    passes = forward + (backward if case.options["upstream"] == "both" else 0)
    return 0, passes * case.sizes["T"] * case.sizes["D"] * case.dtype.itemsize


def _spec(name: str, summary: str) -> OpSpec:
    return OpSpec(
        name=name,
        summary=summary,
        cases=CASES,
        make_inputs=make_inputs,
        run=lambda inputs, case, impl: _run(name, inputs, case, impl),
        launched=lambda target: _launched(name, target),
        sources=(
            *(f"norm/{part}.py" for part in ("triton", "launch", "config", "schemas", "op", "reference")),
            *(f"dropout/{part}.py" for part in ("triton", "reference")),
            "runtime/autograd.py",
        ),
        work=_work,
    )


SPECS = (
    _spec("rms_norm", "RMSNorm, with residual sum and dropout before it, forward and backward"),
    _spec("layer_norm", "LayerNorm, with residual sum and dropout before it, forward and backward"),
)
