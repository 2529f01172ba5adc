"""Defines a benchmark: a plan of rows, each against one peer, after a correctness check.

A benchmark is one file in ``bench/suites`` with a ``BENCHMARK``. It defines *what* is measured; the runner decides the
order, checks correctness first, prints, records and resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime.cost import pass_bound
from .timing import Ceilings, Timing


@dataclass(frozen=True)
class Settings:
    """The options of a run.

    ``short`` keeps the dozen cases that fit a short run on a GPU. ``dry`` does the same with tiny shapes and single
    calls, interpreted if there is no GPU: it tests the path, and its numbers mean nothing.
    """

    device: torch.device
    short: bool = False
    dry: bool = False
    seconds: float = 2.0  # for one row's timing, both sides together

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def impl(self) -> str:
        """The implementation that users get; a dry run requires the kernels, interpreted."""
        return "triton" if self.dry else "auto"


@dataclass(frozen=True)
class Work:
    """The minimum of work in a call that is timed in microseconds.

    ``flops`` of its matrix products, ``bytes`` to and from memory if everything is touched once, and ``extra``: bytes
    of the peer's own passes over results, which fusion avoids. ``bytes`` may include the same reads and writes: the
    products hide them, or a memory-bound call needs them anyway.
    """

    flops: int
    bytes: int
    extra: int = 0

    def bound(self, ceilings: Ceilings) -> float:
        """The largest possible gain over the peer by avoiding its extra passes, as a share of the products' time.

        0 (unknown) if memory is the limit: there ``extra`` and ``bytes`` overlap.
        """
        products = self.flops / ceilings.flops
        if self.bytes / ceilings.bandwidth > products:
            return 0.0
        return pass_bound(products * 1e6, ceilings.bandwidth, self.extra)


def gates(case: str, metric: str) -> tuple[str, str]:
    """What the checks before a row may be called: its case, or the row's own."""
    return case, f"{case}, {metric}"


@dataclass(frozen=True)
class Measurement:
    """One planned row: ours against one peer on one case.

    ``run`` returns both sides in the unit that ``metric`` names. ``target`` is the least ratio that meets the target
    (ratio > 1: ours is better), or None for a row without one. ``slow``: the peer compiles or searches for long, so a
    run with a deadline measures the row last. ``work`` is given if the metric is microseconds of a known number of
    operations. ``bf16``: its products run in 16 bits, like the product that measures the ceilings; other rows are not
    compared with them. ``skip`` says why the row cannot be measured on this machine; it is then reported, and not run.
    ``own_gate``: before its first timing the benchmark checks what this metric runs, and not what the case's other rows
    do (``gate`` is what ``Benchmark.check`` is asked for).
    """

    case: str
    metric: str
    peer_name: str
    target: float | None
    run: Callable[[], tuple[Timing, Timing]]
    higher_is_better: bool = False
    slow: bool = False
    work: Work | None = None
    bf16: bool = True
    skip: str = ""
    own_gate: bool = False

    @property
    def gate(self) -> str:
        return gates(self.case, self.metric)[self.own_gate]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.metric, self.peer_name


@dataclass(frozen=True)
class Benchmark:
    """A named set of measurements, and the check that must pass before their numbers are shown.

    ``check`` compares the named cases with the fp64 oracle; ``warm`` runs ours once on a case, to compile its kernels
    (it does nothing in a benchmark without any). ``ops`` are the ops that it measures: a change of their sources, or of
    ``sources`` (paths below the package, "layers/mlp.py"), makes its results stale.
    """

    name: str
    summary: str
    targets: Mapping[str, float]
    plan: Callable[[Settings], Sequence[Measurement]]
    check: Callable[[Settings, Sequence[str]], Iterator[tuple[str, Verdict]]]
    warm: Callable[[Settings, str], None] | None = None
    ops: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    devices: tuple[str, ...] = field(default=("cpu", "cuda"))
