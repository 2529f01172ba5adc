"""The share of the chip model's speed that products reach in real runs, for each kind of GPU and precision.

One number for each, the only ones that are fitted: with it, half of the published runs take longer than predicted and
half less, each source counting once. The check fits them again for each source that it judges, without that source's
runs. Where a kind has no run of its own, its family's number stands for it; ``efficiency.json`` holds what the planner
uses, fitted to all runs.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from .published import Run
from .step_time import Efficiency, predict

FITTED = Path(__file__).with_name("efficiency.json")
# What stands for a kind that no run was published of. The last resort is an H100.
FAMILY = {
    "a100-40": "a100",
    "a100": "a100-40",
    "h800": "h100",
    "h200": "h100",
    "h100-96": "h100",
    "gb200": "b200",
    "gb300": "b200",
    "b200": "h100",
    "mi300x": "h100",
    "h100": "a100",
}
PAPERS = {"a": "a100"}  # the GPU of the attention kernels' papers, by the first letter of a kind; else an H100
_LOWEST, _HIGHEST = 0.1, 1.2
Table = dict[str, float]  # "h100 bf16" -> share


def fit(runs: Sequence[Run]) -> Table:
    """The shares of all kinds and precisions that ``runs`` cover; runs without a time, or informative, do not count."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.seconds is not None and not run.informative:
            groups[run.cluster.gpu.name, _kind(run.layout.precision)].append(run)
    table: Table = {}
    for (gpu, precision), mine in sorted(groups.items()):  # bf16 comes before fp8, which needs it
        table[f"{gpu} {precision}"] = round(_share(mine, precision, table), 3)
    return table


def _share(runs: Sequence[Run], precision: str, table: Table) -> float:
    """The share at which the median over sources of the median logarithm of predicted over reported time is 0."""

    def middle(share: float) -> float:
        ratios: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            name = run.cluster.gpu.name
            efficiency = of(name, table | {f"{name} {precision}": share})
            found = predict(run.shape, run.layout, run.cluster, run.software, efficiency).total
            ratios[run.source].append(math.log(found / _seconds(run)))
        return median(median(each) for each in ratios.values())

    return _root(middle)


def _root(falling: Callable[[float], float]) -> float:
    low, high = _LOWEST, _HIGHEST
    for _ in range(14):
        share = (low + high) / 2
        low, high = (share, high) if falling(share) > 0 else (low, share)
    return (low + high) / 2


def _seconds(run: Run) -> float:
    assert run.seconds is not None
    return run.seconds


def _kind(precision: str) -> str:
    return "fp8" if precision == "fp8" else "bf16"


def of(gpu: str, table: Table | None = None) -> Efficiency:
    """The shares of a kind of GPU; ``table`` defaults to ``efficiency.json``."""
    table = shipped() if table is None else table
    paper = PAPERS.get(gpu[0], "h100")
    bf16 = _looked_up(gpu, "bf16", table)
    return Efficiency(bf16, _fp8(gpu, bf16, table), _looked_up(paper, "bf16", table))


def _fp8(gpu: str, bf16: float, table: Table) -> float:
    """In fp8; from another kind it comes relative to that kind's bf16."""
    for kind in _kinds(gpu):
        if f"{kind} fp8" in table:
            return table[f"{kind} fp8"] * (bf16 / _looked_up(kind, "bf16", table))
    return bf16


def _looked_up(gpu: str, precision: str, table: Table) -> float:
    return next((table[f"{kind} {precision}"] for kind in _kinds(gpu) if f"{kind} {precision}" in table), 0.75)


def _kinds(gpu: str) -> list[str]:
    kinds = [gpu]
    while kinds[-1] in FAMILY and FAMILY[kinds[-1]] not in kinds:
        kinds.append(FAMILY[kinds[-1]])
    return kinds


@functools.cache
def shipped() -> Table:
    table: Table = json.loads(FITTED.read_text(encoding="utf-8"))["shares"]
    return table
