"""What a benchmark is: a plan of rows, each against one peer, behind a correctness check.

A benchmark is one file in this folder with a ``BENCHMARK``. It says *what* is measured; the runner decides in which
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
    """How this run measures.

    ``short`` keeps the dozen cases that fit a short run on a GPU. ``dry`` goes the same way with tiny shapes and single
    calls, interpreted where there is no GPU: it proves the path, and its numbers mean nothing.
    """

    device: torch.device
    short: bool = False
    dry: bool = False
    seconds: float = 2.0  # spent on one row's timing, both sides together

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def impl(self) -> str:
        """What users get; a dry run insists on the kernels, interpreted."""
        return "triton" if self.dry else "auto"


@dataclass(frozen=True)
class Work:
    """What a call that is timed in microseconds has to do at the least.

    ``flops`` of its matrix products, ``bytes`` to and from memory if everything is touched once, and ``extra``: bytes
    of the peer's own passes over results, which fusion takes out. ``bytes`` may count the same reads and writes: they
    hide under the products, or are part of what a memory-bound call must do.
    """

    flops: int
    bytes: int
    extra: int = 0

    def bound(self, ceilings: Ceilings) -> float:
        """All that can be gained over the peer by taking its extra passes out, as a share of the products' time.

        0 (unknown) where memory is the limit: there ``extra`` and ``bytes`` overlap.
        """
        products = self.flops / ceilings.flops
        if self.bytes / ceilings.bandwidth > products:
            return 0.0
        return pass_bound(products * 1e6, ceilings.bandwidth, self.extra)


@dataclass(frozen=True)
class Measurement:
    """One row to be: ours against one peer on one case.

    ``run`` returns both sides in the unit that ``metric`` names. ``target`` is the least ratio that counts as met
    (ratio > 1: ours is better), or None where no target is set. ``slow``: the peer compiles or searches for long, so
    a run against the clock leaves the row for last. ``work`` is given where the metric is microseconds of a known
    number of operations. ``bf16``: its products run in 16 bits, as the one does that the ceilings come from; what runs
    in fewer is not held against them.
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

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.metric, self.peer_name


@dataclass(frozen=True)
class Benchmark:
    """A named set of measurements and what must be true before their numbers may be shown.

    ``check`` compares the named cases with the fp64 oracle; ``warm`` runs ours once on a case, so that its kernels
    are compiled (nothing to do where a benchmark has none). ``ops`` are measured by it: their sources, and
    ``sources`` (paths below the package, "layers/mlp.py"), make its results stale when they change.
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
