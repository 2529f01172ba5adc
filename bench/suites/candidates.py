"""Candidate configurations against today's.

A row of a candidate times the op twice: within ``forced`` and as users call it. Both sides run the same kernel with
different tiles, warps and stages, so a ratio above 1 says that the rule in ``kernels/*/config.py``, or an entry in
``kernels/tuned``, should change. The candidates compile for sm_90 without spills in their loops; ``bench tune``
searches wider and takes longer. One entry compares pages of 128 tokens with those of 16.

``SHARDFUSE_CANDIDATES=FILE`` adds entries: a JSON list of ["up" or "qkv", GemmConfig's fields] and ["prefill" or
"decode", AttentionConfig's fields], such as ["up", {"block_m": 64, "block_n": 256, "block_k": 64, "num_warps": 4,
"num_stages": 4, "use_tma": true}].
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import Projection, projection
from ...kernels.linear import config as gemms
from ...kernels.linear import linear_act
from ...kernels.linear.gemm import GemmConfig
from ...kernels.paged_attention import config as tiles
from ...kernels.paged_attention.config import AttentionConfig
from ...kernels.runtime import device, fences
from ..harness import problem
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs
from ..harness.problem import Operands, Problem
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
# block_m, block_n, num_warps, num_stages; without any, today's with pages of 128 tokens
ATTENTION: tuple[tuple[Step, AttentionConfig | None], ...] = (
    (PREFILL, None),
    (PREFILL, AttentionConfig(128, 128, 8, 3, per_sm=1)),  # spills five values per thread, outside the loops over keys
    (PREFILL, AttentionConfig(128, 64, 8, 3, per_sm=1)),
    (PREFILL, AttentionConfig(64, 64, 4, 3, per_sm=2)),
    (PREFILL, AttentionConfig(64, 128, 8, 3, per_sm=1)),
    (PREFILL, AttentionConfig(32, 32, 2, 5, per_sm=4)),  # where a Triton without fences leaves no more than 32 rows
    (DECODE, AttentionConfig(16, 128, 4, 4, per_sm=2)),
    (DECODE, AttentionConfig(16, 64, 4, 4, per_sm=4)),
    (DECODE, AttentionConfig(16, 32, 4, 5, per_sm=4)),
)

PAGE = 128
NAMED = {"up": UP, "qkv": QKV, "prefill": PREFILL, "decode": DECODE}
METRIC = "forward, us"
TODAY = "today's configuration"
ADDED = "SHARDFUSE_CANDIDATES"
UNFENCED = "this Triton puts no proxy fence between a copy and the products that read it; `auto` never takes such tiles"


class Case(Protocol):
    """What one row measures."""

    @property
    def name(self) -> str: ...

    def row(self, settings: Settings) -> Measurement: ...

    def check(self, settings: Settings) -> Iterator[Verdict]: ...

    def warm(self, settings: Settings) -> None: ...


@dataclass(frozen=True)
class Product:
    """``linear_act`` as in training, forced to ``config``."""

    problem: Problem
    config: GemmConfig

    @property
    def name(self) -> str:
        return f"{self.problem.name} {self.config}"

    def row(self, settings: Settings) -> Measurement:
        found, activation = self.problem, self.problem.projection.activation
        peer = partial(_linear_act, activation=activation, impl=settings.impl)
        writes = found.output_bytes * (1 if activation == "identity" else 2)
        work = Work(found.flops, found.input_bytes + found.weight_bytes + writes)
        return replace(
            problem.row(settings, found, METRIC, self._forward, TODAY, peer, None, work=work), case=self.name
        )

    def check(self, settings: Settings) -> Iterator[Verdict]:
        name = self.problem.name
        return (verdict for _, verdict in problem.verdicts(settings, [self.problem], [name], self._outputs))

    def warm(self, settings: Settings) -> None:
        operands = self.problem.operands(settings.device)
        self._forward(operands)
        _linear_act(operands, self.problem.projection.activation, settings.impl)  # the peer's kernel

    def _forward(self, operands: Operands, impl: str = "triton") -> tuple[torch.Tensor, ...]:
        with gemms.forced(self.config):
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
    """``paged_attention`` with the plan that a step's layers share, both forced to ``config``; without one with pages
    of PAGE tokens.
    """

    step: Step
    config: AttentionConfig | None
    skip: str = ""

    @property
    def name(self) -> str:
        how = f"pages-of-{PAGE}" if self.config is None else f"{self.config}-per_sm{self.config.per_sm}"
        return f"{self.step.name} {how}"

    @property
    def own(self) -> Step:
        return self.step if self.config is not None else replace(self.step, page=PAGE)

    def row(self, settings: Settings) -> Measurement:
        def run() -> tuple[Timing, Timing]:
            sets = range(input_sets(self.step.bytes, settings.device))
            draw = partial(paged.Operands.of, device=settings.device)
            with torch.no_grad():
                return compare(
                    [self._forced(draw(self.own, seed=seed)) for seed in sets],
                    [paged.ours(draw(self.step, seed=seed), settings.impl) for seed in sets],
                    settings.device,
                    seconds=settings.seconds,
                    dry=settings.dry,
                )

        return Measurement(self.name, METRIC, TODAY, None, run, work=self.step.work, skip=self.skip)

    def check(self, settings: Settings) -> Iterator[Verdict]:
        with self._configured():
            found = list(paged.check([self.own], settings, [self.own.name]))
        return (verdict for _, verdict in found)

    def warm(self, settings: Settings) -> None:
        today = paged.Operands.of(self.step, settings.device, 0)
        for call in (self._forced(paged.Operands.of(self.own, settings.device, 0)), paged.ours(today, settings.impl)):
            call()

    def _forced(self, operands: paged.Operands) -> Call:
        with self._configured():
            call = paged.ours(operands, "triton")

        def run() -> object:
            with self._configured():
                return call()

        return run

    def _configured(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.config is None else tiles.forced(self.config)


# --- the benchmark ----------------------------------------------------------------------------------------------------


def cases(settings: Settings) -> list[Case]:
    """Everything above; a dry run takes tiny shapes, with the same configurations."""
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    products, attention = _added(os.environ.get(ADDED))
    found: list[Case] = [Product(Problem(_size(each, settings), dtype), config) for each, config in GEMMS + products]
    arch = device.architecture(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for each, config in ATTENTION + attention:
        safe = config is None or fences.fenced(arch) or not fences.asynchronous(arch, config.block_m, config.num_warps)
        found.append(Attention(_step(each, settings), config, "" if safe else UNFENCED))
    return found


def _added(file: str | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Products and attention that a user's file adds; ValueError where it is not what the module says."""
    if not file:
        return (), ()
    found: tuple[list[Any], list[Any]] = ([], [])
    try:
        for name, fields in json.loads(Path(file).read_text()):
            of = NAMED[name]
            attends = isinstance(of, Step)
            found[attends].append((of, (AttentionConfig if attends else GemmConfig)(**fields)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{ADDED}={file}: {type(error).__name__}: {error}; expected a JSON list of [name, fields], where name is "
            f"one of {', '.join(NAMED)} and fields are those of GemmConfig or AttentionConfig"
        ) from None
    return tuple(found[False]), tuple(found[True])


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
    summary="other tiles, warps and stages of linear_act and paged_attention against today's",
    targets={},
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act", "paged_attention"),
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
