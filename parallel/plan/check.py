"""The planner against published runs, run by run: errors of an average cancel, those of a run do not.

Each source is judged with shares (``efficiency.py``) that were fitted without it, beside a baseline that knows no more
than a constant model FLOPs utilization (MFU) for each GPU and precision, fitted likewise. A source with at least five
runs passes if 80 % of its steps are predicted within 15 %, and more than the baseline predicts so. Memory is judged
where it was reported: within 1 % where states and activations were given apart, 10 % of peaks. A published layout was
chosen by people who measured: its predicted step may take at most 10 % longer than that of the best layout that the
search finds for the same software, recomputation, sequence parallelism and precision, or ``FAR`` says why it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from . import efficiency
from .known_misses import FAR, MISSED
from .layout import Layout
from .memory import Memory, of_rank
from .memory import predict as predict_memory
from .published import Run, runs
from .search import SCHEDULES, Search, Space
from .software import OURS
from .step_time import predict

WITHIN = 0.15
SHARE = 0.8
JUDGED = 5  # runs of a source, at least
SPLIT_WITHIN, PEAK_WITHIN = 0.01, 0.10
LAYOUT_WITHIN = 0.10
GIB = 1 << 30


@dataclass(frozen=True)
class Step:
    """A run's step: predicted and reported seconds, and what a constant MFU predicts."""

    run: Run
    predicted: float
    baseline: float

    @property
    def reported(self) -> float:
        assert self.run.seconds is not None
        return self.run.seconds

    @property
    def error(self) -> float:
        return self.predicted / self.reported - 1

    @property
    def near(self) -> bool:
        return abs(self.error) <= WITHIN

    @property
    def reason(self) -> str:
        """Why the step may be further off than that; empty for one that is not, or that nothing explains."""
        return "" if self.near else MISSED.get((self.run.source, self.run.shape.name, self.run.cluster.gpu.name), "")

    @property
    def baseline_error(self) -> float:
        return self.baseline / self.reported - 1


@dataclass(frozen=True)
class Source:
    """A source's steps, and the verdict on them; None where it is not judged."""

    name: str
    steps: tuple[Step, ...]

    @property
    def hits(self) -> int:
        return sum(step.near for step in self.steps)

    @property
    def baseline_hits(self) -> int:
        return sum(abs(step.baseline_error) <= WITHIN for step in self.steps)

    @property
    def passed(self) -> bool | None:
        if len(self.steps) < JUDGED or any(step.run.informative for step in self.steps):
            return None
        misses, others = len(self.steps) - self.hits, len(self.steps) - self.baseline_hits
        return self.hits >= SHARE * len(self.steps) and (misses < others or misses == 0)


@dataclass(frozen=True)
class Held:
    """A run's memory, in GiB, of one kind."""

    run: Run
    what: str
    predicted: float
    reported: float
    within: float

    @property
    def error(self) -> float:
        return self.predicted / self.reported - 1

    @property
    def passed(self) -> bool:
        return abs(self.error) <= self.within


def steps(found: Sequence[Run] | None = None) -> list[Source]:
    """Every source's steps, each predicted without that source."""
    found = [run for run in (runs() if found is None else found) if run.seconds is not None]
    judged = [run for run in found if not run.informative]
    sources: dict[str, list[Run]] = defaultdict(list)
    for run in found:
        sources[run.source].append(run)
    results = []
    for name, mine in sources.items():
        others = [run for run in judged if run.source != name]
        shares, constant = efficiency.fit(others), _utilizations(others)
        results.append(Source(name, tuple(_step(run, shares, constant) for run in mine)))
    return results


def unexplained(sources: Iterable[Source]) -> list[Step]:
    """The steps of published runs, informative ones apart, that are off without a known reason."""
    steps = (step for source in sources for step in source.steps)
    return [step for step in steps if not (step.near or step.reason or step.run.informative)]


def _step(run: Run, shares: efficiency.Table, constant: dict[str, float]) -> Step:
    rates = efficiency.of(run.cluster.gpu.name, shares)
    predicted = predict(run.shape, run.layout, run.cluster, run.software, rates).total
    gpu, precision = run.cluster.gpu.name, "fp8" if run.layout.precision == "fp8" else "bf16"
    share = next((constant[key] for key in _keys(gpu, precision) if key in constant), 0.4)
    return Step(run, predicted, _model_flops(run) / (share * _peak(run)))


def _keys(gpu: str, precision: str) -> list[str]:
    kinds = [gpu, efficiency.FAMILY.get(gpu, gpu), "h100", "a100"]
    return [f"{kind} {which}" for which in dict.fromkeys((precision, "bf16")) for kind in kinds]


def _utilizations(found: Sequence[Run]) -> dict[str, float]:
    """The constant MFU of each GPU and precision: the median over sources of each one's median."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in found:
        assert run.seconds is not None
        precision = "fp8" if run.layout.precision == "fp8" else "bf16"
        share = _model_flops(run) / (run.seconds * _peak(run))
        groups[f"{run.cluster.gpu.name} {precision}"][run.source].append(share)
    return {key: median(median(each) for each in mine.values()) for key, mine in groups.items()}


def _model_flops(run: Run) -> float:
    return run.shape.flops(run.layout.batch * run.layout.length, run.layout.length)


def _peak(run: Run) -> float:
    return run.cluster.gpu.flops[run.layout.precision] * run.cluster.gpus


def memory(found: Sequence[Run] | None = None) -> list[Held]:
    """Every reported memory of runs that are judged, beside the prediction."""
    results = []
    for run in runs() if found is None else found:
        if not run.gib or run.informative:
            continue
        if len(run.gib) == 2:  # of blocks alone: the papers' formula leaves embeddings and head out
            states, kept = _blocks(run)
            results.append(Held(run, "states of the blocks", states / GIB, run.gib[0], SPLIT_WITHIN))
            results.append(Held(run, "activations", kept / GIB, run.gib[1], SPLIT_WITHIN))
        else:
            peak = predict_memory(run.shape, run.layout, run.software).total
            results.append(Held(run, "peak", peak / GIB, run.gib[0], PEAK_WITHIN))
    return results


def _blocks(run: Run) -> tuple[float, float]:
    """Bytes of the first rank's states and activations, without embedding and head."""
    held: Memory = of_rank(run.shape, run.layout, run.software, 0)
    blocks = run.shape.layers * run.shape.layer_parameters / run.layout.pp
    last = run.shape.head_parameters if run.layout.pp == 1 else 0
    return held.states * blocks / (blocks + run.shape.embedding_parameters + last), held.activations


@dataclass(frozen=True)
class Chosen:
    """A published layout beside the best that the search finds: with the same choices, and with none made.

    ``over`` is the share by which the published one is predicted to take longer than ``best``. ``free`` is None where
    no layout of this library fits.
    """

    run: Run
    over: float
    best: Layout
    free: Layout | None

    @property
    def near(self) -> bool:
        return self.over <= LAYOUT_WITHIN

    @property
    def reason(self) -> str:
        """Why a layout may be further from the best than that; empty for one that is not, or that nothing explains."""
        return "" if self.near else FAR.get((self.run.source, self.run.shape.name), "")

    @property
    def passed(self) -> bool:
        return self.near or bool(self.reason)


def layouts(found: Iterable[Run] | None = None, *, free: bool = True) -> list[Chosen]:
    """Every judged run with a time, beside the best layouts; with ``free`` False without those of a free search."""
    results = []
    for run in runs() if found is None else found:
        if run.informative or run.seconds is None:
            continue
        rates = efficiency.of(run.cluster.gpu.name)
        layout = run.layout
        mine = predict(run.shape, layout, run.cluster, run.software, rates).total
        search = Search(
            run.shape, run.cluster, run.software, rates, layout.batch, layout.length, layout.precision, _space(run)
        )
        best = search.best(1).found
        if not best:
            continue
        ours = replace(search, software=OURS, space=Space()).best(1).found if free else ()
        results.append(Chosen(run, mine / best[0].time.total - 1, best[0].layout, ours[0].layout if ours else None))
    return results


def _space(run: Run) -> Space:
    """What the run's software offers, with the run's recomputation and sequence parallelism."""
    layout, offers = run.layout, run.software.offers
    parallel = (layout.sequence_parallel,) if layout.tp > 1 else (True, False)
    return Space(
        tp=() if "tp" in offers else (1,),
        pp=() if "pp" in offers else (1,),
        cp=(1, 2, 4, 8, 16) if "cp" in offers else (1,),
        replicas=(1,),
        zero=tuple(stage for stage in range(4) if f"zero{stage}" in offers),
        schedule=tuple(name for name in SCHEDULES if name in offers),
        interleave=(2, 3, 4, 6, 8, 12),
        recompute=(layout.recompute,),
        mlp_recompute=(0,),
        sequence_parallel=parallel,
        offload=(False,),
    )
