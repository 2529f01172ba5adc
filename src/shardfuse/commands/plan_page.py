"""The best layout as a picture of its pipeline's timeline and its memory, or as a page of picture and tables.

The page is one file without scripts, which opens from disk without a network.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.page.markup import Element, add, new
from ..parallel.pipeline.timeline import Costs, Timeline, simulate
from ..parallel.plan.search import Found
from ..parallel.plan.shapes import described
from ..planning import PARTS, Plan
from . import pages
from .plan import gib, memory_unit
from .schedule import COLOURS, LEGEND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 1 << 30
_ROUNDS = 3  # the most micro-batches per rank in a timeline: the middle of a long step repeats itself
_RANKS = 16  # the most bars of memory
_KINDS = ("#3b6fb6", "#6f9bd8", "#a9c4ec", "#e08a2c", "#f2bd83", "#b8860b", "#8a6fb0", "#9a9a9a", "#dcdcdc")


def write(made: Plan, path: Path) -> None:
    """Write the picture (.png, .svg, .pdf) or the page (.html). Raises ImportError without matplotlib, ValueError for
    another suffix.
    """
    suffix = check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if suffix == ".html":
        path.write_text(page(made), encoding="utf-8")
    else:
        picture(made).savefig(path, dpi=120)


def check_suffix(path: Path) -> str:
    """The suffix of a name that :func:`write` takes, in lower case; ValueError for another one."""
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg", ".pdf", ".html"):
        raise ValueError(f"--draw {path}: expected a name that ends in .png, .svg, .pdf or .html")
    return suffix


def picture(made: Plan) -> Figure:
    """The timeline of the best layout's pipeline, if it has one, above the memory of each of its ranks."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "--draw needs matplotlib, which is not installed: pip install 'shardfuse[bench]', or leave --draw out"
        ) from None
    step = _timeline(made.best)
    drawn = Figure(figsize=(12, 4.2 if step is None else 6 + 0.28 * len(step.passes)), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(1 if step is None else 2, squeeze=False)[:, 0]
    if step is not None:
        _draw_timeline(panels[0], step, made.best)
    _draw_memory(panels[-1], made)
    return drawn


def _timeline(found: Found) -> Timeline | None:
    layout, time = found.layout, found.time
    if layout.pp == 1:
        return None
    # Forward, input gradients and weight gradients each take a third of the products. Forward takes a third of the
    # rest, and the input gradients take the other two.
    rest = time.total - time.bubble - time.gradients - time.optimizer - time.products
    parts = (time.products / 3 + rest / 3, time.products / 3 + rest * 2 / 3, time.products / 3)
    scale = layout.microbatches * layout.interleave
    fewer = min(layout.microbatches, _ROUNDS * layout.pp)
    return simulate(layout.schedule, layout.pp, fewer, Costs(*(part / scale for part in parts)))


def _draw_timeline(axes: Axes, step: Timeline, found: Found) -> None:
    from matplotlib.patches import Patch

    ranks = len(step.passes)
    for rank, passes in enumerate(step.passes):
        bars = [(one.start, one.end - one.start) for one in passes]
        colours = [COLOURS[one.kind] for one in passes]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.3)
    kinds = dict.fromkeys(one.kind for passes in step.passes for one in passes)
    axes.legend(handles=[Patch(color=COLOURS[kind], label=LEGEND[kind]) for kind in kinds], loc="upper right", ncols=4)
    every = max(1, ranks // 16)
    axes.set_yticks(range(0, ranks, every), [f"rank {rank}" for rank in range(0, ranks, every)])
    axes.set_ylim(ranks - 0.4, -0.5 - max(1.0, 0.1 * ranks))  # the first rank on top, under the legend
    axes.set_xlim(0, step.end)
    axes.set_xlabel("seconds")
    whole = found.layout.microbatches
    shown = f"{whole}" if step.microbatches == whole else f"the first {step.microbatches} of {whole}"
    axes.set_title(f"{step.schedule}: {shown} micro-batches; idle in the whole step {_idle(found):.1%}")


def _idle(found: Found) -> float:
    return found.time.bubble / found.time.total


def _draw_memory(axes: Axes, made: Plan) -> None:
    held = made.memory_of(made.best)
    every = -(-len(held) // _RANKS)
    ranks = sorted({*range(0, len(held), every), len(held) - 1})
    left = [0.0] * len(ranks)
    for kind, colour in zip((each.name for each in fields(held[0])), _KINDS):
        values = [getattr(held[rank], kind) / GIB for rank in ranks]
        if any(values):
            axes.barh(range(len(ranks)), values, left=left, label=kind, color=colour)
            left = [so_far + value for so_far, value in zip(left, values)]
    axes.axvline(made.cluster.gpu.memory / GIB, color="#ad1f2b", label=f"{made.cluster.gpu.name}, whole")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" if len(held) > 1 else "each GPU" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_title("Memory of a GPU of each pipeline rank" if len(held) > 1 else "Memory of a GPU")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def page(made: Plan) -> str:
    """The picture and the tables in one file."""
    stream = io.BytesIO()
    picture(made).savefig(stream, format="svg")
    image = "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()
    head = new("header")
    add(head, "h1", f"{made.shape.name} on {made.cluster.gpus} {made.cluster.gpu.name}")
    best = made.best
    add(
        head,
        "p",
        f"{described(made.shape)}; batches of {best.layout.batch} sequences of "
        f"{best.layout.length} tokens in {best.layout.precision}; {made.cluster.network.name}. All figures are "
        "predictions.",
    )
    drawing = _section(f"The best layout: {best.layout.described()}")
    add(drawing, "img", src=image, alt="Timeline of the pipeline and memory of its ranks")
    sections = (head, drawing, _layouts(made), _parts(made), _memory(made), _traffic(made))
    return pages.page("shardfuse plan", sections)


def _section(title: str) -> Element:
    found = new("section")
    add(found, "h2", title)
    return found


def _table(section: Element, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
    """A table whose first ``words`` columns are text and whose others are numbers."""
    table = add(add(section, "div", class_="scroll"), "table")
    line = add(table, "tr")
    for index, heading in enumerate(headings):
        add(line, "th", heading, class_="number" if index >= words else "")
    for row in rows:
        line = add(table, "tr")
        for index, cell in enumerate(row):
            add(line, "td", cell, class_="number" if index >= words else "")


def _layouts(made: Plan) -> Element:
    found = _section("The quickest layouts")
    rows = [
        (
            f"{number}. {each.layout.described()}", f"{each.time.total:.3g} s",
            f"{made.tokens_per_second(each):,.0f}", f"{made.utilization(each):.1%}",
            f"{each.memory.total / GIB:.1f}", f"{each.time.exposed / each.time.total:.1%}", f"{_idle(each):.1%}",
        )
        for number, each in enumerate(made.found, 1)
    ]  # fmt: skip
    _table(found, ("layout", "step", "tokens/s", "MFU", "GiB", "exposed", "idle"), rows)
    reasons = add(found, "ul")
    for number, reason in enumerate(made.reasons(), 1):
        add(reasons, "li", f"{number} beats {number + 1}: {reason}")
    return found


def _parts(made: Plan) -> Element:
    found, time = _section("Its step"), made.best.time
    rows = [
        (words, f"{getattr(time, name):.3g} s", f"{getattr(time, name) / time.total:.1%}")
        for name, words in PARTS.items()
        if getattr(time, name) > 0
    ]
    _table(found, ("part", "time", "share"), rows)
    return found


def _memory(made: Plan) -> Element:
    found, held = _section("Its fullest GPU"), made.best.memory
    values: list[tuple[str, Any]] = [(each.name, getattr(held, each.name)) for each in fields(held)]
    unit, size = memory_unit(made.best)
    rows = [(name, f"{value / size:.2f}") for name, value in (*values, ("total", held.total)) if value]
    _table(found, ("kind", unit), rows)
    return found


def _traffic(made: Plan) -> Element:
    found = _section("What its first rank sends in a step")
    rows = [(flow.what, flow.kind, flow.group, flow.link, gib(flow.bytes)) for flow in made.traffic(made.best)]
    _table(found, ("what", "collective", "over", "link", "GiB"), rows, words=4)
    return found
