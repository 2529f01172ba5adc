"""``shardfuse schedule``: what a pipeline schedule does when, what it leaves idle, and what it keeps in memory."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .bench.report import console
from .parallel import stage_costs, timeline
from .parallel.timeline import Costs, Pass, Timeline

STYLES = {"F": "white on blue", "B": "black on dark_orange", "I": "black on cyan", "W": "white on green4"}
COLOURS = {"F": "#3b6fb6", "B": "#e08a2c", "I": "#4fb3bf", "W": "#5a9e4b"}
MEANS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
LEGEND = {kind: f"{kind} {means}" for kind, means in MEANS.items()}
IDLE = "·"
NARROW = 60  # columns that a timeline has at least


def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    *,
    draw: Path | None = None,
    json: bool = False,
) -> int:
    """Print the timeline of one step, its idle shares and its peaks; ``draw`` writes it as a picture too.

    Raises ValueError for a schedule that there is not or that cannot work with these numbers, ImportError where a
    picture is wanted and matplotlib is missing.
    """
    step = timeline.simulate(name, ranks, microbatches, costs)
    form = timeline.closed_form(name, ranks, microbatches, costs)
    if draw is not None:
        write_picture(step, draw)
    show(console(stderr=json), step, form)
    if json:
        print(jsonlib.dumps(record(step, form)))
    return 0


def costs_of(given: Mapping[str, float], model: str | None, shape: Mapping[str, Any], recompute: bool) -> Costs:
    """The ``given`` fields of Costs, or those modelled for a block of ``model`` (see ``stage_costs.modelled``).

    Raises ValueError where both are given, and what either says of its values.
    """
    if model is None:
        costs = Costs(**given)
    else:
        twice = given.keys() - {"held"}
        if twice:
            raise ValueError(f"--model has costs of its own: leave out --{min(twice)}-cost, or --model")
        costs = replace(stage_costs.modelled(model, **shape), **given)
    return costs.recomputed() if recompute else costs


def show(people: Console, step: Timeline, form: float | None) -> None:
    """The timeline as text, a line for each rank, and the table."""
    ranks = len(step.passes)
    people.print(
        f"{step.schedule}: {ranks} pipeline rank{'s' * (ranks > 1)} of {step.stages_per_rank} "
        f"stage{'s' * (step.stages_per_rank > 1)}, {step.microbatches} micro-batch{'es' * (step.microbatches > 1)}; "
        f"a step takes {step.end:g}"
    )
    label = len(f"rank {ranks - 1}") + 2
    width = max(NARROW, people.width - label)
    for rank, passes in enumerate(step.passes):
        people.print(Text(f"rank {rank}".ljust(label)) + line(passes, step.end, width), soft_wrap=True)
    kinds = dict.fromkeys(one.kind for passes in step.passes for one in passes)
    people.print(", ".join([*(LEGEND[kind] for kind in kinds), f"{IDLE} idle"]), style="dim", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank")
    for heading in ("idle", "peak activations"):
        table.add_column(heading, justify="right")
    for rank, (idle, peak) in enumerate(zip(step.idle, step.peak_activations)):
        table.add_row(str(rank), f"{idle:.1%}", f"{peak:g}")
    table.add_row("all", f"{step.idle_share:.1%}", f"{max(step.peak_activations):g}")
    people.print(table)
    paper = "none for these numbers" if form is None else f"{form:.1%} idle"
    people.print(
        f"closed form: {paper}. Peaks are in what one micro-batch leaves for backward in all of a rank's stages.",
        soft_wrap=True,
    )


def line(passes: tuple[Pass, ...], end: float, width: int) -> Text:
    """A rank's step in ``width`` columns: each pass its kind and micro-batch, as far as they fit."""
    text = Text(IDLE * width)
    for one in passes:
        first, last = round(one.start / end * width), round(one.end / end * width)
        label = f"{one.kind}{one.microbatch}" if last - first > len(str(one.microbatch)) else one.kind
        shown = Text(label[: last - first].ljust(last - first, "-"), STYLES[one.kind])
        text = text[:first] + shown + text[last:]
    return text


def record(step: Timeline, form: float | None) -> dict[str, Any]:
    """The same as JSON; times in the costs' unit, the closed form null where there is none."""
    return {
        "schedule": step.schedule,
        "ranks": len(step.passes),
        "stages_per_rank": step.stages_per_rank,
        "microbatches": step.microbatches,
        "end": step.end,
        "idle": step.idle,
        "idle_share": step.idle_share,
        "closed_form": form,
        "peak_activations": step.peak_activations,
        "passes": [[one._asdict() for one in passes] for passes in step.passes],
    }


def write_picture(step: Timeline, path: Path) -> None:
    """The timeline as a picture, in the format that the path's ending names.

    Raises ImportError without matplotlib, ValueError for an ending that it does not know.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError(
            "--draw wants matplotlib, which is not installed: pip install 'shardfuse[bench]', or leave --draw out"
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
