"""``shardfuse schedule``: prints the timeline of a pipeline schedule, its idle shares and its peaks of activations."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..kernels.runtime.printing import Sheet, console, figure, prose, unbroken
from ..parallel.pipeline import timeline
from ..parallel.pipeline.timeline import Costs, Pass, Timeline
from .schedule_costs import Priced

STYLES = {"F": "white on blue", "B": "black on dark_orange", "I": "black on cyan", "W": "white on green4"}
COLOURS = {"F": "#3b6fb6", "B": "#e08a2c", "I": "#4fb3bf", "W": "#5a9e4b"}
MEANS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
LEGEND = {kind: f"{kind} {means}" for kind, means in MEANS.items()}
IDLE = "·"
NARROW = 20  # the fewest columns of a timeline


def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    priced: Priced,
    *,
    draw: Path | None = None,
    json: bool = False,
) -> int:
    """Print the timeline of one step, its idle shares and its peaks; ``draw`` also writes it as a picture.

    Raises ValueError for an unknown schedule or numbers that it does not support, ImportError if a picture is requested
    and matplotlib is missing.
    """
    step = timeline.simulate(name, ranks, microbatches, priced.costs)
    costs = priced.costs
    form = timeline.closed_form(name, ranks, microbatches, costs) if isinstance(costs, Costs) else None
    if draw is not None:
        write_picture(step, draw)
    show(console(stderr=json), step, form, priced)
    if json:
        print(jsonlib.dumps(record(step, form, priced)))
    return 0


def show(people: Console, step: Timeline, form: float | None, priced: Priced) -> None:
    """Print the timeline as text, a line for each rank, and the tables."""
    ranks = len(step.passes)
    people.print(
        f"{step.schedule}: {ranks} pipeline rank{'s' * (ranks > 1)} of {step.stages_per_rank} "
        f"stage{'s' * (step.stages_per_rank > 1)}, {step.microbatches} micro-batch{'es' * (step.microbatches > 1)}; "
        f"a step takes {step.end:g}{priced.unit and ' '}{priced.unit}"
    )
    label = len(f"rank {ranks - 1}") + 2
    width = max(NARROW, people.width - label)
    for rank, passes in enumerate(step.passes):
        people.print(Text(f"rank {rank}".ljust(label)) + line(passes, step.end, width), soft_wrap=True)
    kinds = dict.fromkeys(one.kind for passes in step.passes for one in passes)
    people.print(", ".join([*(LEGEND[kind] for kind in kinds), f"{IDLE} idle"]), style="dim")
    if priced.parts:
        people.print(_parts_table(priced))
    staged = [prose("stages")] if priced.stages else []
    table = Sheet(unbroken("rank"), figure("idle"), figure("peak activations"), *staged)
    for rank, (idle, peak) in enumerate(zip(step.idle, step.peak_activations)):
        mine = sorted({one.stage for one in step.passes[rank]})
        stages = ["; ".join(priced.stages[stage] for stage in mine)] if priced.stages else []
        table.add(str(rank), f"{idle:.1%}", f"{peak:g}", *stages)
    table.add("all", f"{step.idle_share:.1%}", f"{max(step.peak_activations):g}", *("" for _ in staged))
    people.print(table)
    paper = "none for these numbers" if form is None else f"{form:.1%} idle"
    people.print(
        f"closed form: {paper}. Peaks are multiples of what one micro-batch leaves for backward in a rank's stages."
    )


def _parts_table(priced: Priced) -> Sheet:
    """The cost of each part of the model."""
    table = Sheet(unbroken("part"), *(figure(MEANS[kind]) for kind in "FIW"), title=priced.title)
    for part, costs in priced.parts.items():
        table.add(part, *(f"{each:.3g}" for each in (costs.forward, costs.backward, costs.weight)))
    return table


def line(passes: tuple[Pass, ...], end: float, width: int) -> Text:
    """A rank's step in ``width`` columns, with the kind and micro-batch of each pass where they fit."""
    text = Text(IDLE * width)
    for one in passes:
        first, last = round(one.start / end * width), round(one.end / end * width)
        label = f"{one.kind}{one.microbatch}" if last - first > len(str(one.microbatch)) else one.kind
        shown = Text(label[: last - first].ljust(last - first, "-"), STYLES[one.kind])
        text = text[:first] + shown + text[last:]
    return text


def record(step: Timeline, form: float | None, priced: Priced) -> dict[str, Any]:
    """The timeline as values that JSON can hold: times in ``unit``; the closed form is None if there is none."""
    stages = len(step.passes) * step.stages_per_rank
    return {
        "schedule": step.schedule,
        "ranks": len(step.passes),
        "stages_per_rank": step.stages_per_rank,
        "microbatches": step.microbatches,
        "unit": priced.unit or None,
        "costs": [asdict(priced.of(stage)) for stage in range(stages)],
        "stages": list(priced.stages) or None,
        "end": step.end,
        "idle": step.idle,
        "idle_share": step.idle_share,
        "closed_form": form,
        "peak_activations": step.peak_activations,
        "passes": [[one._asdict() for one in passes] for passes in step.passes],
    }


def write_picture(step: Timeline, path: Path) -> None:
    """Write the timeline as a picture, in the format of the path's suffix.

    Raises ImportError without matplotlib, ValueError for an unknown suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError(
            "--draw needs matplotlib, which is not installed: pip install 'shardfuse[bench]', or leave --draw out"
        ) from None
    ranks = len(step.passes)
    longest = max(map(len, step.passes))
    figure = Figure(figsize=(min(40.0, 4 + 0.35 * longest), 1.2 + 0.6 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, passes in enumerate(step.passes):
        colours = [COLOURS[one.kind] for one in passes]
        bars = [(one.start, one.end - one.start) for one in passes]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.5)
        for one in passes:
            if one.end > one.start:
                middle = (one.start + one.end) / 2
                axes.text(middle, rank, str(one.microbatch), ha="center", va="center", fontsize=7, color="white")
    kinds = dict.fromkeys(one.kind for passes in step.passes for one in passes)
    axes.legend(handles=[Patch(color=COLOURS[kind], label=LEGEND[kind]) for kind in kinds], loc="upper right", ncols=4)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.4, -1.2)  # the first rank on top, under the legend
    axes.set_xlim(0, step.end)
    axes.set_title(
        f"{step.schedule}, {step.microbatches} micro-batches: {step.idle_share:.1%} idle, "
        f"at most {max(step.peak_activations):g} micro-batches' activations"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
