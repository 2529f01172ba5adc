"""Candidate configurations against today's, and kernels that ``auto`` takes without a measurement on Hopper.

A row of a candidate times the op twice: within ``forced`` and as users call it. Both sides run the same kernel with
different tiles, warps and stages, so a ratio above 1 says that the rule in ``kernels/*/config.py``, or an entry in
``kernels/tuned``, should change. The candidates compile for sm_90 without spills in their loops; ``bench tune``
searches wider and takes longer.

Two rows compare a kernel with stock torch: the fp32 product with cuBLAS's, and the cast to fp8 with a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import Projection, projection
from ...kernels.linear import config as gemms
from ...kernels.linear import linear_act
from ...kernels.linear.gemm import GemmConfig
from ...kernels.paged_attention import config as tiles
from ...kernels.paged_attention.config import AttentionConfig
from ...kernels.runtime import device, fences
from ...kernels.scaled_linear import Quantized, quantize
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs, check_outputs
from ..harness.problem import Operands, Problem, eager
from ..harness.timing import Call, Timing, compare, input_sets
from . import paged, paged_decode, paged_prefill
from .paged import Step

UP, QKV = projection("llama3-8b", "up", 1, 8192), projection("llama3-8b", "qkv", 1, 4096)
PREFILL, DECODE = paged_prefill.prompts(1, 8192), paged.decodes(64, 8192)

# block_m, block_n, block_k, num_warps, num_stages
GEMMS: tuple[tuple[Projection, GemmConfig], ...] = tuple(
    (each, config)
    for each in (UP, QKV)
    for config in (
        GemmConfig(128, 256, 64, 8, 3, use_tma=True),
        GemmConfig(128, 256, 64, 8, 3, use_tma=True, epilogue_subtile=True),
        GemmConfig(256, 128, 64, 8, 3, use_tma=True),
        GemmConfig(256, 128, 64, 8, 4, use_tma=True, epilogue_subtile=True),
        GemmConfig(128, 128, 64, 8, 4, use_tma=True),
        GemmConfig(128, 128, 64, 4, 4, use_tma=True),
    )
)
# block_m, block_n, num_warps, num_stages
ATTENTION: tuple[tuple[Step, AttentionConfig], ...] = (
    (PREFILL, AttentionConfig(128, 128, 8, 3, per_sm=1)),  # spills five values per thread, outside the loops over keys
    (PREFILL, AttentionConfig(128, 64, 8, 3, per_sm=1)),
    (PREFILL, AttentionConfig(64, 64, 4, 3, per_sm=2)),
    (PREFILL, AttentionConfig(64, 128, 8, 3, per_sm=1)),
    (PREFILL, AttentionConfig(32, 32, 2, 5, per_sm=4)),  # where a Triton without fences leaves no more than 32 rows
    (DECODE, AttentionConfig(16, 128, 4, 4, per_sm=2)),
    (DECODE, AttentionConfig(16, 64, 4, 4, per_sm=4)),
    (DECODE, AttentionConfig(16, 32, 4, 5, per_sm=4)),
)
CAST = (8192, 4096)  # of x [R, C]

METRIC = "forward, us"
TODAY = "today's configuration"
EAGER = "eager, cuBLAS in IEEE fp32"
COPY = "copy of the bytes"


class Case(Protocol):
    """What one row measures."""

    @property
    def name(self) -> str: ...

    def row(self, settings: Settings) -> Measurement: ...

    def check(self, settings: Settings) -> Iterator[Verdict]: ...

    def warm(self, settings: Settings) -> None: ...


@dataclass(frozen=True)
class Product:
    """``linear_act`` as in training, forced to ``config``; without one the kernel that ``impl="triton"`` takes."""

    problem: Problem
    config: GemmConfig | None = None

    @property
    def name(self) -> str:
        return self.problem.name if self.config is None else f"{self.problem.name} {self.config}"

    def row(self, settings: Settings) -> Measurement:
        found, activation = self.problem, self.problem.projection.activation
        if self.config is None:
            peer_name, peer = EAGER, partial(eager, activation=activation)
        else:
            peer_name, peer = TODAY, partial(_linear_act, activation=activation, impl=settings.impl)
        writes = found.output_bytes * (1 if activation == "identity" else 2)
        work = Work(found.flops, found.input_bytes + found.weight_bytes + writes)
        row = problem.row(settings, found, METRIC, self._forward, peer_name, peer, None, work=work)
        return replace(row, case=self.name, bf16=found.dtype == torch.bfloat16)

    def check(self, settings: Settings) -> Iterator[Verdict]:
        name = self.problem.name
        return (verdict for _, verdict in problem.verdicts(settings, [self.problem], [name], self._outputs))

    def warm(self, settings: Settings) -> None:
        operands = self.problem.operands(settings.device)
        for each in (self, replace(self, config=None)):  # the peer's kernel too
            each._forward(operands)

    def _forward(self, operands: Operands, impl: str = "triton") -> tuple[torch.Tensor, ...]:
        with contextlib.nullcontext() if self.config is None else gemms.forced(self.config):
            return _linear_act(operands, self.problem.projection.activation, impl)

    def _outputs(self, problem: Problem, operands: Operands, impl: str) -> Outputs:
        """The outputs, and the gradients that today's backward computes from what the forward pass saved."""
        ys = self._forward(operands, "reference" if impl == "reference" else "triton")
        grads = torch.autograd.grad(ys, list(operands.leaves.values()), operands.dys)
        return {f"y{i}": y.detach() for i, y in enumerate(ys)} | dict(zip(operands.leaves, grads))


def _linear_act(operands: Operands, activation: str, impl: str) -> tuple[torch.Tensor, ...]:
    return linear_act(operands.x, operands.weights, operands.biases, activation=activation, impl=impl)


@dataclass(frozen=True)
class Attention:
    """``paged_attention`` with the plan that a step's layers share, both forced to ``config``."""

    step: Step
    config: AttentionConfig

    @property
    def name(self) -> str:
        return f"{self.step.name} {self.config}-per_sm{self.config.per_sm}"

    def row(self, settings: Settings) -> Measurement:
        def run() -> tuple[Timing, Timing]:
            sets = range(input_sets(self.step.bytes, settings.device))
            operands = [paged.Operands.of(self.step, settings.device, seed) for seed in sets]
            with torch.no_grad():
                return compare(
                    [self._forced(each) for each in operands],
                    [paged.ours(each, settings.impl) for each in operands],
                    settings.device,
                    seconds=settings.seconds,
                    dry=settings.dry,
                )

        return Measurement(self.name, METRIC, TODAY, None, run, work=self.step.work)

    def check(self, settings: Settings) -> Iterator[Verdict]:
        with tiles.forced(self.config):
            found = list(paged.check([self.step], settings, [self.step.name]))
        return (verdict for _, verdict in found)

    def warm(self, settings: Settings) -> None:
        operands = paged.Operands.of(self.step, settings.device, 0)
        for call in (self._forced(operands), paged.ours(operands, settings.impl)):
            call()

    def _forced(self, operands: paged.Operands) -> Call:
        with tiles.forced(self.config):
            call = paged.ours(operands, "triton")

        def run() -> object:
            with tiles.forced(self.config):
                return call()

        return run


@dataclass(frozen=True)
class Cast:
    """``quantize`` of x [R, C] to e4m3 with one scale, which reads x twice."""

    R: int
    C: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"quantize-r{self.R}-c{self.C}-{str(self.dtype).removeprefix('torch.')}-e4m3_per_tensor"

    @property
    def bytes(self) -> int:
        return self.R * self.C * (self.dtype.itemsize + 1)

    def row(self, settings: Settings) -> Measurement:
        def run() -> tuple[Timing, Timing]:
            sets = [self._draw(settings, seed) for seed in range(input_sets(self.bytes, settings.device))]
            return compare(
                [partial(quantize, x, impl=settings.impl) for x in sets],
                [_copied(x, self.bytes // 2) for x in sets],
                settings.device,
                seconds=settings.seconds,
                dry=settings.dry,
            )

        return Measurement(self.name, METRIC, COPY, None, run, work=Work(0, self.bytes), bf16=False)

    def check(self, settings: Settings) -> Iterator[Verdict]:
        x = self._draw(settings, 0)
        yield from check_outputs(
            {"values": _widened(quantize(x, impl=settings.impl))},
            low=lambda: {"values": _widened(quantize(x, impl="reference"))},
            oracle=lambda: {"values": x.double()},
        )

    def warm(self, settings: Settings) -> None:
        quantize(self._draw(settings, 0), impl=settings.impl)

    def _draw(self, settings: Settings, seed: int) -> torch.Tensor:
        generator = torch.Generator(settings.device).manual_seed(seed)
        return torch.randn(self.R, self.C, generator=generator, device=settings.device).to(self.dtype)


def _widened(found: Quantized) -> torch.Tensor:
    return found.values.double() * found.scale


def _copied(x: torch.Tensor, half: int) -> Call:
    """A copy that reads and writes ``half`` bytes each, what a cast with a given scale touches together."""
    source = torch.empty(half, dtype=torch.uint8, device=x.device).random_()
    return partial(torch.empty_like(source).copy_, source)


# --- the benchmark ----------------------------------------------------------------------------------------------------


def cases(settings: Settings) -> list[Case]:
    """Everything above; a dry run takes tiny shapes, with the same configurations."""
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    found: list[Case] = [Product(Problem(_size(each, settings), dtype), config) for each, config in GEMMS]
    found.append(Product(Problem(_size(UP, settings), torch.float32)))
    arch = device.architecture(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found += [
        Attention(_step(each, settings), config)
        for each, config in ATTENTION
        if fences.fenced(arch) or not fences.asynchronous(arch, config.block_m, config.num_warps)
    ]
    found.append(Cast(*((40, 72) if settings.dry else CAST), dtype))
    return found


def _size(chosen: Projection, settings: Settings) -> Projection:
    return problem.DRY.get(chosen.kind, problem.DRY["qkv"]) if settings.dry else chosen


def _step(chosen: Step, settings: Settings) -> Step:
    if not settings.dry:
        return chosen
    return (paged_decode if max(chosen.queries) == 1 else paged_prefill).steps(settings)[0]


def plan(settings: Settings) -> list[Measurement]:
    return [case.row(settings) for case in cases(settings)]


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for case in cases(settings):
        if case.name in names:
            for verdict in case.check(settings):
                yield case.name, verdict


def warm(settings: Settings, name: str) -> None:
    for case in cases(settings):
        if case.name == name:
            case.warm(settings)


BENCHMARK = Benchmark(
    name="candidates",
    summary="other tiles, warps and stages of linear_act and paged_attention against today's; fp32 products, fp8 casts",
    targets={},
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act", "paged_attention", "scaled_linear"),
    sources=(
        "bench/harness/problem.py",
        "bench/harness/stock.py",
        "bench/suites/paged.py",
        "bench/suites/paged_decode.py",
        "bench/suites/paged_prefill.py",
        "kernels/dev/shapes.py",
    ),
    devices=("cuda",),
)
