"""The shapes that tests, ahead-of-time builds and benchmarks share for ``all_reduce_rmsnorm``.

A case is T rows of D on R ranks, in ``shots`` rounds, with a residual ("same" dtype as x's, "fp32", or None) and a bias
or none. The ranks are parts of one process and take turns: all have sent, and all flags are up, before the first one
runs. ``tests/kernels/test_all_reduce_norm.py`` runs ranks that are processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...comm import reduce_op as op
from ...comm import reduce_reference as reference
from ...comm.reduce_config import Norm, flagged_programs, slot_shape
from ...runtime import device
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from ...runtime.signals import CHUNKS, PHASES, STATE, Signals, in_one_process
from ..registry import Build, Case, OpSpec

_STOCK: dict[str, Any] = {"shots": 1, "residual": "same", "bias": False, "weight_offset": 0.0, "gather": None}
_EPOCH = 5


def _case(T: int, D: int, R: int, dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    said = {name: value for name, value in options.items() if _STOCK[name] != value}
    extras = [f"{name.replace('_', '')}_{'none' if value is None else value}" for name, value in said.items()]
    name = "-".join([f"t{T}-d{D}-r{R}-{NAMES[dtype]}", *extras])
    return Case(name, dtype, {"T": T, "D": D, "R": R}, _STOCK | options, frozenset(tags))


# The interpreter's programs are 3.
_TEST = (
    _case(5, 80, 2, FP32, "test"),
    _case(4, 96, 4, BF16, "test", bias=True),
    _case(2, 33, 3, FP16, "test", residual=None, weight_offset=1.0),
    _case(11, 64, 2, BF16, "test", shots=2, residual="fp32"),
    _case(8, 48, 4, FP32, "test", shots=2, bias=True),
    _case(2, 17, 3, FP16, "test", shots=2, residual=None),
    _case(1, 1000, 1, FP32, "test"),
)
# The widths of the models in kernels/dev/shapes.py. ``gather``: after a GEMM has sent, T/R rows or all. Between two
# ranks a second round saves nothing.
_BUILDS = (
    *(_case(16, D, R, BF16, "codegen") for D in (4096, 8192) for R in (2, 8)),
    *(_case(64, D, R, BF16, "codegen", shots=2) for D, R in ((4096, 8), (8192, 4), (8192, 8))),
    _case(16, 5120, 4, BF16, "codegen", bias=True),
    _case(16, 12288, 8, BF16, "codegen", bias=True),
    _case(16, 16384, 8, BF16, "codegen", shots=2),
    _case(16, 4096, 8, FP16, "codegen", residual="fp32"),
    _case(16, 8192, 3, FP32, "codegen"),
    _case(4096, 4096, 4, BF16, "codegen", gather=False, bias=True),
    _case(4096, 8192, 8, BF16, "codegen", gather=True),
    _case(4096, 16384, 8, FP32, "codegen", gather=True),
)
_BENCH = tuple(
    _case(T, D, R, BF16, "bench", *(["short"] if (T, D) == (16, 8192) else []))
    for D in (4096, 8192)
    for R in (2, 4, 8)
    for T in (1, 16, 64)
)
CASES = (*_TEST, *_BUILDS, *_BENCH)


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """x of all ranks [R, T, D], and what every rank adds to the sum."""
    T, D, R = (case.sizes[letter] for letter in "TDR")
    options = case.options
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = case.dtype, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=on) + mean).to(dtype)

    residual = None
    if options["residual"] is not None:
        residual = draw(T, D, dtype=FP32 if options["residual"] == "fp32" else case.dtype)
    weight = draw(D, mean=1.0 - options["weight_offset"])
    return {"x": draw(R, T, D), "residual": residual, "weight": weight, "bias": draw(D) if options["bias"] else None}


def _run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """y and s of all ranks, [R, T, D]."""
    x, shots = inputs["x"], case.options["shots"]
    R, T, D = x.shape
    programs = flagged_programs(device.architecture(x.device))
    peers = [x.new_empty(slot_shape(T, D, R, shots, programs)) for _ in range(R)]
    ranks = in_one_process(peers, timeout_s=10.0, epoch=_EPOCH)
    turns = programs if shots == 2 else None
    for signals in ranks:
        signals.pads[signals.rank].fill_(_EPOCH)
        reference.send_addend(x[signals.rank], peers, signals.rank, shots=shots, turns=turns)
    if shots == 2:
        for rank in range(R):
            reference.send_sums(peers, rank, T, turns=turns)
    more = {name: inputs[name] for name in ("weight", "residual", "bias")}
    more |= {"weight_offset": case.options["weight_offset"], "shots": shots, "impl": impl}
    found = [op.all_reduce_rmsnorm(x[signals.rank], peers=peers, signals=signals, **more) for signals in ranks]
    ys, ss = zip(*found)
    return {"y": torch.stack(ys), "s": torch.stack(ss)}


def _launch(case: Case, arch: str, device_counted: bool) -> None:
    """What one rank launches."""
    from ...comm import reduce

    T, D, R = (case.sizes[letter] for letter in "TDR")
    options, gather = case.options, case.options["gather"]

    def make(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = T if gather is not False else T // R
    residual = None
    if options["residual"] is not None:
        residual = make(rows, D, dtype=FP32 if options["residual"] == "fp32" else case.dtype)
    bias = make(D) if options["bias"] else None
    norm = Norm(make(D), make(D) if gather is not None and bias is not None else None, centred=bias is not None)
    int32 = {"dtype": torch.int32}
    pads = [make(PHASES, R, CHUNKS, **int32)] * R
    state, report = make(STATE, **int32), make(8, **int32)
    signals = Signals(0, None if device_counted else 1, pads, make(2, R, dtype=torch.int64), state, report, 1.0)
    more: dict[str, Any] = {"bias": bias, "residual": residual}
    if gather is not None:
        slot = make(T + R * (T // R), D) if gather else make(R, T // R, D)
        reduce.reduce_scattered([slot] * R, signals, T, D, case.dtype, norm=norm, gather=gather, **more)
        return
    shape = slot_shape(T, D, R, options["shots"], flagged_programs(arch))
    slot = make(*((2, *shape) if device_counted else shape))
    norm = norm._replace(centred=False)
    reduce.all_reduce_rmsnorm(make(T, D), [slot] * R, signals, norm=norm, shots=options["shots"], **more)


def _launched(target: str) -> Iterator[Build]:
    """The exchanges of decoding as graphs capture them, the others as the host counts them."""
    for case in SPEC.tagged("codegen"):
        options, gather = case.options, case.options["gather"]
        device_counted = gather is None and case.dtype is BF16
        with device.capture(target) as launches:
            _launch(case, target, device_counted)
        kind = f"{options['shots']}-shot" if gather is None else "gathered" if gather else "scattered"
        steps = [kind, f"d{case.sizes['D']}", str(launches[0].config), f"ranks{case.sizes['R']}", NAMES[case.dtype]]
        steps += ["bias"] if options["bias"] else []
        steps += ["counted"] if device_counted else []
        for item in launches:
            yield Build(SPEC.name, "-".join(steps), target, item.fn, item.args, item.num_warps, item.num_stages)


SPEC = OpSpec(
    name="all_reduce_rmsnorm",
    summary="the sum over ranks with bias, residual and RMSNorm, in one launch",
    cases=CASES,
    make_inputs=make_inputs,
    run=_run,
    launched=_launched,
    sources=(
        *(f"comm/reduce{part}.py" for part in ("", "_triton", "_config", "_op", "_reference")),
        *("norm/triton.py", "norm/reference.py", "runtime/signals.py", "runtime/signals_triton.py"),
    ),
)
REDUCE_SPECS = (SPEC,)
