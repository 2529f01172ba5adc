"""What the project knows about its ops: found by walking the folders beside this file for ``cases.py``.

A new op is one new folder whose ``cases.py`` defines ``SPEC``; tests, ahead-of-time codegen, ``inspect`` and the
benchmarks find it here. ``cases.py`` must import without Triton (``builds`` imports the kernels when called).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Ahead-of-time targets: name -> (Triton backend, architecture, warp size).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Case:
    """One shape of one op, shared by tests, codegen and benchmarks.

    ``sizes`` are the op's own (M, N, K, ...), ``options`` its keyword arguments (activation, ...). ``tags`` say who
    uses it: ``test`` (small enough to interpret), ``codegen`` (its configuration is built ahead of time),
    ``bench`` (timed; on a GPU), ``bench-cpu`` (timed on a CPU), ``short`` (one of the dozen that ``make gpu`` runs).
    """

    name: str
    dtype: torch.dtype
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Build:
    """One kernel in one configuration, to be compiled ahead of time for one target."""

    op: str
    config: str  # readable and unique per target, e.g. "fwd-128x256x64-w8-s3-bf16-bias-gelu_tanh-preact"
    target: str
    fn: Any  # triton.JITFunction
    signature: Mapping[str, str]  # argument name -> "*bf16", "i32", ...; constexpr arguments left out
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...]  # names of pointers and integers known to be multiples of 16
    num_warps: int
    num_stages: int
    wants_wgmma: bool = False  # asserted on sm_90
    wants_tma: bool = False  # asserted on sm_90
    exempt: str | None = None  # why wgmma or TMA is not expected although this is a GEMM on sm_90


@dataclass(frozen=True)
class OpSpec:
    """An op as tests, codegen and benchmarks see it."""

    name: str
    summary: str
    cases: tuple[Case, ...]
    # (case, device, seed) -> the op's inputs by name; floating-point leaves require grad where a gradient exists.
    make_inputs: Callable[[Case, torch.device, int], dict[str, Any]]
    # (inputs, case, impl) -> outputs and gradients by name. The reference in fp64 is run(double inputs, "reference").
    run: Callable[[dict[str, Any], Case, str], dict[str, torch.Tensor]]
    # target -> the builds that its configuration function returns over the cases tagged "codegen".
    builds: Callable[[str], list[Build]]
    sources: tuple[str, ...] = ()  # files (relative to kernels/) whose change makes a measured result stale

    def tagged(self, tag: str) -> list[Case]:
        return [case for case in self.cases if tag in case.tags]


@functools.cache
def ops() -> dict[str, OpSpec]:
    """Every op's SPEC by name."""
    from .. import kernels

    found: dict[str, OpSpec] = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        name = f"{kernels.__name__}.{module.name}.cases"
        if module.ispkg and importlib.util.find_spec(name) is not None:
            spec: OpSpec = importlib.import_module(name).SPEC
            found[spec.name] = spec
    return found


def op(name: str) -> OpSpec:
    """The op called ``name``; ValueError listing the known ones otherwise."""
    if name not in ops():
        raise ValueError(f"no op called {name!r}: known are {', '.join(sorted(ops()))}")
    return ops()[name]


def to_double(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in fp64 on the CPU, for the oracle; other values pass through. Leaves stay leaves."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                return value.detach().cpu()
            return value.detach().to("cpu", torch.float64).requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            return type(value)(convert(v) for v in value)
        return value

    return {name: convert(value) for name, value in inputs.items()}
