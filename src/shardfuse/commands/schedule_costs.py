"""The costs of passes for ``shardfuse schedule``: given, modelled for a chip, or measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..kernels.runtime.printing import console
from ..parallel.pipeline import modelled_costs, timeline
from ..parallel.pipeline.partition import balanced
from ..parallel.pipeline.schedules import find
from ..parallel.pipeline.timeline import Costs

TOKENS = 8192  # the default number per micro-batch and per sequence


@dataclass(frozen=True)
class Priced:
    """The costs of passes: one for all stages, or one for each stage, from its parts."""

    costs: Costs | list[Costs]
    unit: str = ""
    parts: Mapping[str, Costs] = field(default_factory=dict)  # if measured: each kind of part once
    title: str = ""  # of the table of parts
    stages: Sequence[str] = ()  # the parts of each stage

    def of(self, stage: int) -> Costs:
        return self.costs if isinstance(self.costs, Costs) else self.costs[stage]


def price(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    given: Mapping[str, float],
    recompute: bool = False,
    model: str | None = None,
    shape: Mapping[str, Any] | None = None,
    measure: Path | None = None,
    assignments: Sequence[str] = (),
) -> Priced:
    """The costs from one of three sources: the ``given`` fields of Costs, a model of the chip, or a measurement.

    ``model`` and ``shape`` are the arguments of ``modelled_costs.modelled``. ``measure`` is a TOML file of ``shardfuse
    train``, and ``assignments`` override its settings. Raises ValueError if two sources are given, and for invalid
    values of each.
    """
    timeline.order(name, ranks, microbatches)  # raises for invalid numbers
    sources = [option for option, value in (("--model", model), ("--measure", measure)) if value is not None]
    if len(sources) == 2:
        raise ValueError("--model and --measure both give costs: leave one of them out")
    if shape and model is None:
        raise ValueError(f"--{next(iter(shape))} needs a --model, and none is given")
    if assignments and measure is None:
        raise ValueError(f"--set {assignments[0]} needs a file to --measure, and none is given")
    twice = given.keys() - {"held"} if sources else ()
    if twice:
        raise ValueError(f"--{min(twice)}-cost and {sources[0]} both give costs: leave one of them out")
    if measure is not None:
        held = given.get("held", 1.0)
        return _measured(name, ranks, microbatches, measure, assignments, recompute=recompute, held=held)
    if model is not None:
        known = {"tokens": TOKENS, "length": TOKENS, **(shape or {})}
        known["arch"] = known.pop("target", "sm_90")
        costs, unit = replace(modelled_costs.modelled(model, **known), **given), "us"
    else:
        costs, unit = Costs(**given), ""
    return Priced(costs.recomputed() if recompute else costs, unit)


def _measured(
    name: str, ranks: int, microbatches: int, file: Path, assignments: Sequence[str], *, recompute: bool, held: float
) -> Priced:
    """Costs in ms, and stages partitioned by them, as ``parallel.partition = "measured"`` partitions the run."""
    from ..parallel.pipeline.stage_costs import joined
    from ..training.layout import resolve
    from ..training.settings import parse_assignment, read_settings
    from ..training.stages import part_costs

    changes = dict(map(parse_assignment, assignments)) | ({"parallel.recompute": True} if recompute else {})
    settings = read_settings(file, changes)
    parallel = settings.parallel
    if parallel.tp > 1:
        raise ValueError(
            f"{file}: parallel.tp = {parallel.tp}: costs are measured in a single process; pass --set parallel.tp=1, "
            "or use modelled costs of a shard: --model with --tp"
        )
    dp = parallel.dp or 1
    alone = replace(parallel, dp=dp, pp=1, schedule=None, microbatches=microbatches)  # the requested pipeline
    settings = resolve(replace(settings, parallel=alone), parallel.dp_replicate * dp)
    layout, count = find(name).layout, ranks * find(name).stages_per_rank
    balanced([1.0] * (settings.model.num_layers + 2), count, layout=layout, ranks=ranks)  # raises for too few parts
    with console(stderr=True).status("measuring an embedding, a block and a head"):
        costs = [each.scaled(1e3) for each in part_costs(settings, name)]
    ranges = balanced([each.step for each in costs], count, layout=layout, ranks=ranks)
    stages = [joined([costs[part] for part in each], first=each.start == 0) for each in ranges]
    size = -(-settings.share(parallel.dp_replicate * dp) // microbatches)
    return Priced(
        [replace(each, held=held) for each in stages],
        "ms",
        {"embedding": costs[0], "a block": costs[1], "head and loss": costs[-1]},
        f"ms for {size} x {settings.data.seq} tokens, {parallel.precision}, measured on {settings.device}",
        [_words(each, len(costs)) for each in ranges],
    )


def _words(stage: range, count: int) -> str:
    """The parts of a stage of a model of ``count`` parts, in words."""
    blocks = len(range(max(stage.start, 1), min(stage.stop, count - 1)))
    words = ["embedding"] if stage.start == 0 else []
    words += [f"{blocks} block{'s' * (blocks > 1)}"] if blocks else []
    words += ["head"] if stage.stop == count else []
    return " + ".join(words)
