"""What the project knows about its ops: every module of ``cases/`` that defines ``SPEC``, or ``SPECS`` for several ops.

Tests, ahead-of-time codegen, ``inspect`` and the benchmarks find an op here. Its cases import without Triton; its
``builds`` function imports the kernels.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..runtime import cache_key
from ..runtime.names import expected
from .accuracy import Verdict, judge

# Ahead-of-time targets: name -> (Triton backend, architecture, warp size).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
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
    """One kernel in one configuration, to be compiled ahead of time for one target.

    ``args`` are the very arguments that the launcher would pass, by name, with tensors on the ``meta`` device:
    the launcher's own argument function makes them, so that what is compiled here is what runs there.
    """

    op: str
    config: str  # readable and unique per target, e.g. "fwd-128x256x64-w8-s3-bf16-bias-gelu_tanh-preact"
    target: str
    fn: Any  # triton.JITFunction
    args: Mapping[str, Any]  # every argument of fn: meta tensors, ints, floats, None, constexpr values, tuples of these
    num_warps: int
    num_stages: int
    wants_wgmma: bool = False  # asserted on sm_90
    wants_tma: bool = False  # asserted on sm_90
    wants_copies: bool = False  # asserted on NVIDIA's chips: copies are under way while a loop computes
    exempt: str | None = None  # why wgmma or TMA is not expected although this is a GEMM on sm_90
    unpipelined: str | None = None  # why each step of a loop waits for all of its matrix products
    runs: Mapping[str, int] = field(default_factory=dict)  # bits of an argument's, where its tensor misleads runs.py
    gemm: Any = None  # what a matrix product was asked to do, linear.gemm.Gemm; what its cost is modelled from
    tile: Any = None  # and in which configuration, linear.gemm.GemmConfig

    def specialise(self) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
        """(signature, constexprs, attrs) as ``triton.compiler.ASTSource`` takes them.

        Triton's own binder and packer make them, as they do at a launch, so both reach the same entry of Triton's
        cache: what its versions put into ``attrs`` beside alignments differs (an entry for each string constexpr in
        3.6, for every constexpr in 3.7), and the key covers all of it. Tensors on ``meta`` count as aligned to 16
        bytes, as torch's allocator makes them.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        if self.fn.hash is None:
            cache_key.settle(self.fn)
        bound, specialisation, _ = _binder(self.fn)(**self.args)
        backend = make_backend(GPUTarget(*TARGETS[self.target]))
        _, signature, constexprs, attrs = self.fn._pack_args(backend, {}, bound, specialisation, {})
        return signature, constexprs, attrs


@functools.cache
def _binder(fn: Any) -> Any:
    """What Triton binds a launch's arguments with. AMD's would also ask which tensors are smaller than 2 GB."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(fn.signature, fn.params, BaseBackend)


def _largest_size(case: Case) -> int:
    return max(case.sizes.values())


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
    # target -> what the cases tagged "codegen" launch there, as builds; the same kernel as often as it is launched.
    launched: Callable[[str], Iterable[Build]] = lambda target: []
    sources: tuple[str, ...] = ()  # files (relative to kernels/) whose change makes a measured result stale
    # case -> the length of the longest sum behind any number of the results, for ``accuracy.judge``.
    terms: Callable[[Case], int] = _largest_size
    # (case, output) -> what else ``accuracy.judge`` has to know of it.
    sums: Callable[[Case, str], Mapping[str, Any]] = lambda case, name: {}
    # (case, device) -> the relative error that the device's own arithmetic may make, where it exceeds that rule's.
    allowed: Callable[[Case, torch.device], float] = lambda case, device: 0.0
    mutates: tuple[str, ...] = ()  # the inputs that ``run`` writes into
    # case -> (operations of the products, bytes to and from memory) that ``run`` needs at least; None: unknown.
    work: Callable[[Case], tuple[int, int]] | None = None

    def judge(
        self, case: Case, name: str, out: torch.Tensor, low: torch.Tensor, oracle: torch.Tensor, **more: Any
    ) -> Verdict:
        """``accuracy.judge`` of the output ``name`` with what the op says of it; ``more`` goes there too."""
        verdict = judge(name, out, low, oracle, **{"terms": self.terms(case), **self.sums(case, name), **more})
        return replace(verdict, budget=max(verdict.budget, self.allowed(case, out.device)))

    def builds(self, target: str) -> list[Build]:
        """What the cases tagged "codegen" launch on ``target``, each kernel once."""
        found: dict[str, Build] = {}
        for build in self.launched(target):
            found.setdefault(build.config, build)
        return list(found.values())

    def tagged(self, tag: str) -> list[Case]:
        return [case for case in self.cases if tag in case.tags]


@functools.cache
def ops() -> dict[str, OpSpec]:
    """Every op's OpSpec by name."""
    from . import cases

    found: dict[str, OpSpec] = {}
    for entry in pkgutil.iter_modules(cases.__path__):
        module = importlib.import_module(f"{cases.__name__}.{entry.name}")
        specs = getattr(module, "SPECS", None) or [spec for spec in [getattr(module, "SPEC", None)] if spec]
        found |= {spec.name: spec for spec in specs}
    return found


def op(name: str) -> OpSpec:
    """The op called ``name``; ValueError listing the known ones otherwise."""
    if name not in ops():
        raise ValueError(f"no op called {name!r}: {expected(name, sorted(ops()), 'known are')}")
    return ops()[name]


def to_double(inputs: dict[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    """The same inputs in fp64 on ``device``, for the oracle; other values pass through. Leaves stay leaves."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                return value.detach().to(device)
            return value.detach().to(device, torch.float64).requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            return type(value)(convert(v) for v in value)
        return value

    return {name: convert(value) for name, value in inputs.items()}
