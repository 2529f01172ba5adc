"""What ``shardfuse schedule`` takes the passes to cost: as given, modelled for a chip, or measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .bench.report import console
from .parallel import stage_costs
from .parallel.partition import balanced
from .parallel.schedules import check_microbatches, find
from .parallel.timeline import Costs


@dataclass(frozen=True)
class Priced:
    """What passes cost: those of every stage alike, or of each by the parts that it has."""

    costs: Costs | list[Costs]
    unit: str = ""
    parts: Mapping[str, Costs] = field(default_factory=dict)  # where they were measured: each kind of part once
    title: str = ""  # of what
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
    modelled: tuple[str, Mapping[str, Any]] | None = None,
    measured: tuple[Path, Sequence[str]] | None = None,
) -> Priced:
    """The ``given`` fields of Costs; or those of ``modelled``, a model and what else ``stage_costs.modelled`` takes; or
    those ``measured`` of a TOML file of ``shardfuse train`` with some settings over the file's.

    Raises ValueError where two of them are given, and for what each says of its values.
    """
    sources = [option for option, value in (("--model", modelled), ("--measure", measured)) if value is not None]
    if len(sources) == 2:
        raise ValueError("--model and --measure both give costs: leave one of them out")
    twice = given.keys() - {"held"} if sources else ()
    if twice:
        raise ValueError(f"{sources[0]} has costs of its own: leave out --{min(twice)}-cost, or {sources[0]}")
    if measured is not None:
        return _measured(name, ranks, microbatches, *measured, recompute=recompute, held=given.get("held", 1.0))
    if modelled is not None:
        model, shape = modelled
        costs, unit = replace(stage_costs.modelled(model, **shape), **given), "us"
    else:
        costs, unit = Costs(**given), ""
    return Priced(costs.recomputed() if recompute else costs, unit)


def _measured(
    name: str, ranks: int, microbatches: int, file: Path, assignments: Sequence[str], *, recompute: bool, held: float
) -> Priced:
    """In ms, and cut in stages as is best by them: with ``parallel.partition = "measured"`` the run is cut so too."""
    from .training.settings import parse_assignment, read_settings, resolve
    from .training.stages import part_costs

    changes = dict(map(parse_assignment, assignments)) | ({"parallel.recompute": True} if recompute else {})
    settings = read_settings(file, changes)
    parallel = settings.parallel
    if parallel.tp > 1:
        raise ValueError(
            f"{file}: parallel.tp = {parallel.tp}: costs are measured in this process alone; pass --set parallel.tp=1, "
            "or have those of a shard modelled: --model with --tp"
        )
    dp = parallel.dp or 1
    settings = resolve(replace(settings, parallel=replace(parallel, dp=dp)), parallel.rep * dp * parallel.pp)
    check_microbatches(name, microbatches, ranks)
    with console(stderr=True).status("measuring an embedding, a block and a head"):
        costs = [each.scaled(1e3) for each in part_costs(settings, microbatches)]
    layout, count = find(name).layout, ranks * find(name).stages_per_rank
    ranges = balanced([each.step for each in costs], count, layout=layout, ranks=ranks)
    stages = [stage_costs.joined([costs[part] for part in each], first=each.start == 0) for each in ranges]
    size = -(-settings.share(parallel.rep * dp) // microbatches)
    return Priced(
        [replace(each, held=held) for each in stages],
        "ms",
        {"embedding": costs[0], "a block": costs[1], "head and loss": costs[-1]},
        f"ms for {size} x {settings.data.seq} tokens, {parallel.precision}, measured on {settings.device}",
        [_words(each, len(costs)) for each in ranges],
    )


def _words(stage: range, count: int) -> str:
    """What a stage of a model of ``count`` parts consists of."""
    blocks = len(range(max(stage.start, 1), min(stage.stop, count - 1)))
    words = ["embedding"] if stage.start == 0 else []
    words += [f"{blocks} block{'s' * (blocks > 1)}"] if blocks else []
    words += ["head"] if stage.stop == count else []
    return " + ".join(words)
