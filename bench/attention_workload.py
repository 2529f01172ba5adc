"""Calls of ``paged_attention`` whose sequences all run in one tile, for the tuner to compile, check and time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..kernels.dev import registry
from ..kernels.dev.cases import paged_builds
from ..kernels.dev.registry import Case
from ..kernels.paged_attention import config as tiles
from ..kernels.paged_attention.config import AttentionConfig, Problem
from ..kernels.paged_attention.options import Bounds
from ..kernels.paged_attention.tuned import OP, bucket, fits
from ..kernels.runtime import device, dispatch
from . import workload

NAME = "paged_attention"  # in the registry
_STAGES, _STAGES_AMD = (3, 4, 5, 6), (1, 2)
_PER_SM = (1, 2, 3, 4)


@dataclass(frozen=True)
class Call:
    """A case, called as an engine does, which knows bounds of its lengths; ``rows`` is what its tile is asked for."""

    case: Case
    problem: Problem
    rows: int
    bucket: str

    table_op, stock = OP, False  # plain torch gathers pages: "auto" takes it on no GPU

    @property
    def terms(self) -> int:
        return registry.op(NAME).terms(self.case)

    def __call__(self, args: Any) -> dict[str, torch.Tensor]:
        return registry.op(NAME).run(args, self.case, "triton")

    def reference(self, args: Any) -> dict[str, torch.Tensor]:
        return registry.op(NAME).run(args, self.case, "reference")

    def draw(self, on: torch.device, seed: int) -> dict[str, Any]:
        return registry.op(NAME).make_inputs(self.case, on, seed)

    def now(self, arch: str) -> AttentionConfig:
        return tiles.pick_tile(self.problem, self.rows)

    def candidates(self, arch: str) -> list[AttentionConfig]:
        """What fits, the nearest to what runs now first: one step is half or twice a size, or two of the others.

        Nothing models what a tile costs.
        """
        now = self.now(arch)
        names = ("block_m", "block_n", "num_warps", "num_stages", "per_sm")
        every = [dataclasses.replace(now, **dict(zip(names, sizes))) for sizes in product(*_grid(arch, self.rows))]

        def distance(config: AttentionConfig) -> tuple[float, int, str]:
            pairs = [(getattr(config, name), getattr(now, name)) for name in names]
            steps = [abs(math.log2(new / old)) for new, old in pairs[:3]] + [abs(a - b) / 2 for a, b in pairs[3:]]
            return sum(steps), sum(map(bool, steps)), str(dataclasses.astuple(config))

        return sorted({now, *(config for config in every if fits(self.problem, config))}, key=distance)

    def forced(self, config: AttentionConfig) -> AbstractContextManager[None]:
        return tiles.forced(config)

    def predicted_us(self, arch: str, config: AttentionConfig) -> float | None:
        return None

    def request(self, config: AttentionConfig, arch: str) -> dict[str, Any]:
        return {"case": self.case.name, "config": dataclasses.asdict(config), "arch": arch}


def calls(case: Case, arch: str) -> Iterator[Call]:
    """The call of a case, unless no table decides its tile, or its sequences run in tiles of two kinds."""
    from ..kernels.paged_attention import launch

    case = _bounded(case)
    queries = [n for n in case.options["queries"] if n]
    invariant = dispatch.row_invariant() if case.options.get("invariant") is None else case.options["invariant"]
    with device.capture(arch):
        problem = launch.problem_of(*paged_builds.call(case), invariant, Bounds(min(queries), max(queries)))
    needed = {n * problem.group for n in queries}
    found = [
        rows
        for rows, above, upto in tiles.row_classes(problem)
        if any(above < n and (upto is None or n <= upto) for n in needed)
    ]
    key = bucket(problem, found[0])
    if len(found) == 1 and key is not None:
        yield Call(case, problem, found[0], key)


def faults_of(request: Mapping[str, Any]) -> list[str]:
    """Compile what :meth:`Call.request` asks for, in this process; returns what keeps it from being used."""
    case = next(case for case in registry.op(NAME).cases if case.name == request["case"])
    with tiles.forced(AttentionConfig(**request["config"])):
        builds = {each.config: each for each in paged_builds.collect(request["arch"], [_bounded(case)])}
    # One that does without some unit of the chip may still be the fastest.
    kept = (dataclasses.replace(each, wants_wgmma=False, wants_copies=False) for each in builds.values())
    return workload.problems_of(kept)


def _bounded(case: Case) -> Case:
    return dataclasses.replace(case, options={**case.options, "host": "bounds"})


def _grid(arch: str, rows: int) -> list[tuple[int, ...]]:
    """Rows, keys, warps, stages, programs on a multiprocessor."""
    if arch == device.INTERPRETER:  # a few, to go the whole way with
        return [(rows,), (16, 32), (4,), (1,), (1, 2)]
    # A warp group multiplies 64 rows.
    stages = _STAGES_AMD if arch.startswith("gfx") else _STAGES
    return [(rows, 64), (16, 32, 64, 128), (4, 8), stages, _PER_SM]
