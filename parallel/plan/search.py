"""The quickest layouts that fit: enumerate, drop what is too slow, and ask of the rest what they hold.

The search is exhaustive over its :class:`Space`, but for three rules, which cannot lose the best layout:

    less recomputation      it only costs time: where a layout fits without, or is too slow without, it is not tried
                            with it; the same holds for no sequence parallelism, where sequence parallelism divides
    a bound                 a micro-batch takes a block at least the same time whatever the layout's ZeRO stage,
                            schedule, recomputation and offloading: the degrees with the lowest bound are searched
                            first, and where a bound is slower than what was found, all of those are skipped
    one of each mesh        of the layouts with the same degrees only the quickest is kept, so that the few that are
                            shown differ
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ..pipeline.schedules import check_microbatches, find
from . import memory, step_time
from .hardware import Cluster
from .layout import RECOMPUTE, Layout
from .memory import Memory
from .shapes import ModelShape
from .software import Software
from .step_time import Efficiency, StepTime

SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zb", "zbv")
_LARGEST_TP = 64
Mesh = tuple[int, int, int, int]
Recompute = tuple[str, int]  # a layout's recompute and mlp_recompute


@dataclass(frozen=True)
class Space:
    """What a search chooses from: the values of each field of a ``Layout``; an empty tuple leaves a field free.

    ``interleave`` None gives each schedule the stages that this library runs it with. ZeRO 2 is no choice of its own:
    from stage 1 on FSDP2 shards gradients too. Raises ValueError for degrees below 1, and for unknown choices.
    """

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = (1,)
    dp: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 3)
    micro: tuple[int, ...] = ()
    schedule: tuple[str, ...] = SCHEDULES
    interleave: tuple[int, ...] | None = None
    recompute: tuple[str, ...] = ("none", "full")
    mlp_recompute: tuple[int, ...] = (0, 1, 2)  # 1 and 2 only beside recompute "none"
    sequence_parallel: tuple[bool, ...] = (True, False)
    offload: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dp", "replicas", "micro", "interleave"):
            wrong = [each for each in getattr(self, name) or () if type(each) is not int or each < 1]
            if wrong:
                raise ValueError(f"{name}={wrong[0]!r}: expected whole numbers of at least 1")
        for name, known in (
            ("schedule", SCHEDULES), ("recompute", RECOMPUTE), ("mlp_recompute", (0, 1, 2)), ("zero", (0, 1, 2, 3)),
            ("sequence_parallel", (True, False)), ("offload", (True, False)),
        ):  # fmt: skip
            unknown = [each for each in getattr(self, name) if each not in known or type(each) is not type(known[0])]
            if unknown:
                raise ValueError(f"{name}={unknown[0]!r}: expected some of {', '.join(map(str, known))}")
        if not self.recomputations:
            raise ValueError(
                f"mlp_recompute={self.mlp_recompute} with recompute={self.recompute}: a block that is recomputed keeps "
                "nothing of its MLP; allow mlp_recompute=0, or recompute='none'"
            )

    @property
    def recomputations(self) -> list[Recompute]:
        """Each keeps less than the one before it and takes as long or longer."""
        pairs = itertools.product(RECOMPUTE, (0, 1, 2))
        return [
            (blocks, mlp)
            for blocks, mlp in pairs
            if blocks in self.recompute and mlp in self.mlp_recompute and (blocks == "none" or not mlp)
        ]


@dataclass(frozen=True)
class Found:
    """A layout that fits, what its fullest rank holds, and the time of its step."""

    layout: Layout
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class Result:
    """The quickest layouts, best first; how many layouts were considered."""

    found: tuple[Found, ...]
    considered: int
    seconds: float


class _Least(NamedTuple):
    """The seconds that every layout of some degrees and micro-batches takes, by its time in one block."""

    seconds: float
    mesh: Mesh
    micro: int
    sequence_parallel: bool  # where tensor parallelism leaves the choice
    block: step_time.Block


@dataclass(frozen=True)
class Search:
    """The question: ``batch`` sequences of ``length`` tokens a step, for ``shape`` on ``cluster``."""

    shape: ModelShape
    cluster: Cluster
    software: Software
    efficiency: Efficiency
    batch: int
    length: int
    precision: str = "bf16"
    space: Space = Space()

    def best(self, count: int = 5) -> Result:
        """The ``count`` quickest layouts that fit, of different degrees; none where nothing fits."""
        begun = time.perf_counter()
        best: dict[Mesh, Found] = {}
        considered = 0
        for least in sorted(itertools.starmap(self._least, self._meshes()), key=lambda each: each.seconds):
            if least.seconds < self._worst(best, least.mesh, count):
                judge = partial(self._judge, best, count, least)
                considered += sum(1 for _ in self._tried(least.mesh, least.micro, judge))
        found = sorted(best.values(), key=lambda each: each.time.total)[:count]
        return Result(tuple(found), considered, time.perf_counter() - begun)

    def _judge(self, best: dict[Mesh, Found], count: int, least: _Least, layout: Layout) -> bool | None:
        """Whether ``layout`` fits; None if it is too slow to be shown, as it is with more recomputation. Keeps it."""
        worst = self._worst(best, least.mesh, count)
        if not self._may_fit(layout):
            return False
        held = self._held(layout) if worst == math.inf else None  # asked first where no time is too slow
        if held is None and worst == math.inf:
            return False
        block = least.block if layout.sequence_parallel == least.sequence_parallel else None
        took = step_time.predict(
            self.shape, layout, self.cluster, self.software, self.efficiency, block=block, below=worst
        )
        if took.total >= worst:
            return None
        held = held or self._held(layout)
        if held is None:
            return False
        best[least.mesh] = Found(layout, held, took)
        return True

    def fits(self) -> bool:
        """Whether any layout fits."""
        return any(fit for at in self._meshes() for fit in self._tried(*at, lambda each: self._held(each) is not None))

    def divides(self) -> bool:
        """Whether any layout divides model, batch and GPUs, be there memory for it or not."""
        return any(True for at in self._meshes() for _ in self._tried(*at, lambda layout: True))

    @staticmethod
    def _worst(best: dict[Mesh, Found], mesh: Mesh, count: int) -> float:
        """What a layout of ``mesh`` has to beat to be shown."""
        times = sorted(each.time.total for each in best.values())
        last = times[count - 1] if len(times) >= count else float("inf")
        return min(last, best[mesh].time.total) if mesh in best else last

    def _meshes(self) -> Iterator[tuple[Mesh, int]]:
        """Degrees (tp, pp, cp, data-parallel ranks) and micro-batches that divide, large micro-batches first."""
        gpus, space = self.cluster.gpus, self.space
        largest = min(_LARGEST_TP, self.shape.heads)
        for tp in _allowed(space.tp, [n for n in _divisors(gpus) if n <= largest], gpus):
            for pp in _allowed(space.pp, [n for n in _divisors(gpus // tp) if n <= self.shape.layers], gpus // tp):
                for cp in _allowed(space.cp, [1], gpus // tp // pp):
                    shares = gpus // tp // pp // cp
                    if self.batch % shares:
                        continue
                    mine = self.batch // shares
                    for micro in space.micro or [n for n in reversed(_divisors(mine)) if n <= 8 or n & (n - 1) == 0]:
                        if mine % micro == 0:
                            yield (tp, pp, cp, shares), micro

    def _least(self, mesh: Mesh, micro: int) -> _Least:
        """What no layout of these degrees and micro-batches can do without."""
        tp, pp, cp, shares = mesh
        layout = Layout(
            tp, pp, cp, shares, micro=micro, batch=self.batch, length=self.length, precision=self.precision,
            sequence_parallel=tp > 1 and True in self.space.sequence_parallel,
        )  # fmt: skip
        block = step_time.of_block(self.shape, layout, self.cluster, self.software, self.efficiency)
        seconds = layout.microbatches * -(-self.shape.layers // pp) * block.total
        return _Least(seconds, mesh, micro, layout.sequence_parallel, block)

    def _tried(self, mesh: Mesh, micro: int, judge: Callable[[Layout], bool | None]) -> Iterator[bool | None]:
        """What ``judge`` says of each layout worth trying: whether it fits; None where it is too slow."""
        shares = mesh[3]
        for schedule in self._schedules(mesh[1], self.batch // shares // micro):
            for offload in sorted(self.space.offload):
                for zero, dp in itertools.product(self.space.zero, self._shards(shares)):
                    if (zero == 0 and dp != shares) or (zero == 3 and splits(schedule[0])):
                        continue
                    # ZeRO over one rank shards nothing: it serves to bring offloaded weights block by block.
                    if (zero and dp * mesh[2] == 1 and not (offload and zero == 3)) or (offload and not zero):
                        continue
                    for layout in self._cheapest(mesh, micro, schedule, zero, dp, offload):
                        fit = judge(layout)
                        yield fit
                        if fit is not False:
                            break

    def _cheapest(
        self,
        mesh: Mesh,
        micro: int,
        schedule: tuple[str, int],
        zero: int,
        dp: int,
        offload: bool,
    ) -> Iterator[Layout]:
        """Layouts that keep less and less and take longer and longer."""
        tp, pp, cp, shares = mesh
        for recompute, mlp_recompute in self.space.recomputations:
            for parallel in (True, False) if tp > 1 else (False,):
                layout = Layout(
                    tp, pp, cp, dp, shares // dp, schedule[1], zero, micro, self.batch, self.length, parallel,
                    recompute, self.precision, offload, schedule[0], mlp_recompute,
                )  # fmt: skip
                if (tp == 1 or parallel in self.space.sequence_parallel) and not layout.why_not(self.shape):
                    yield layout
                    break

    def _may_fit(self, layout: Layout) -> bool:
        """Whether the memory of a GPU and its host hold what any layout of the kind needs: quickly said."""
        gpu, host = memory.least(self.shape, layout, self.software)
        return gpu <= self.cluster.gpu.memory and host <= self.cluster.gpu.host_memory

    def _held(self, layout: Layout) -> Memory | None:
        """What the fullest rank holds; None if that is more than there is, on the GPU or its host."""
        if not self._may_fit(layout):
            return None
        held = memory.predict(self.shape, layout, self.software, limit=self.cluster.gpu.memory)
        if held.total > self.cluster.gpu.memory:
            return None
        if layout.offload and memory.on_host(self.shape, layout, self.software) > self.cluster.gpu.host_memory:
            return None
        return held

    def _schedules(self, pp: int, microbatches: int) -> list[tuple[str, int]]:
        """The schedules that run with so many micro-batches, and their stages on a rank."""
        if pp == 1:
            return [("", 1)]
        found = []
        for name in self.space.schedule:
            try:
                check_microbatches(name, microbatches, pp)
            except ValueError:
                continue
            several = self.space.interleave if name == "interleaved_1f1b" and self.space.interleave else None
            found += [(name, each) for each in several or (find(name).stages_per_rank,)]
        return found

    def _shards(self, shares: int) -> list[int]:
        """Over how many ranks ZeRO may shard: all, or whole nodes of them, the others being replicas."""
        dps, replicas = self.space.dp, self.space.replicas
        if dps or replicas:
            allowed = [dp for dp in _divisors(shares) if not replicas or shares // dp in replicas]
            return [dp for dp in allowed if not dps or dp in dps]
        return [
            dp for dp in _divisors(shares) if dp == shares or (dp >= self.cluster.network.node and dp & (dp - 1) == 0)
        ]


def splits(schedule: str) -> bool:
    """Whether a schedule splits backward, which ZeRO 3 cannot do (``compatibility.py``)."""
    return bool(schedule) and find(schedule).splits_backward


def smallest(search: Search, *, most: int = 1 << 17) -> Found | None:
    """The quickest layout on the fewest GPUs that hold the model; None if ``most`` do not.

    Processes of one machine share its memory: no more of them are tried than there are.

    Counts are 1, 2, 4, ... within a node, whole nodes up to 64 of them, and doubled nodes from there.
    """
    most = search.cluster.gpus if search.cluster.one_machine else most
    for gpus in _counts(search.cluster.network.node, most):
        smaller = replace(search, cluster=search.cluster.of(gpus))
        if smaller.fits():
            return smaller.best(1).found[0]
    return None


def _counts(node: int, most: int) -> Iterator[int]:
    within = [1 << power for power in range(node.bit_length()) if 1 << power < node]
    beyond = (64 * node << power for power in itertools.count(1))
    counts = itertools.chain(within, range(node, 64 * node + 1, node), beyond)
    yield from itertools.takewhile(lambda gpus: gpus <= most, counts)


def _divisors(n: int) -> list[int]:
    """In order; none of 0."""
    small = [each for each in range(1, math.isqrt(n) + 1) if n % each == 0]
    return small + [n // each for each in reversed(small) if each * each != n]


def _allowed(wanted: tuple[int, ...], free: list[int], whole: int) -> list[int]:
    return [each for each in wanted if whole % each == 0] if wanted else free
