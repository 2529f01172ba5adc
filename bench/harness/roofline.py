"""A roofline plot (Williams et al., doi:10.1145/1498765.1498785) of measured rows, under ceilings of the same runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "shardfuse"
MARGIN = 1.3  # around the points, as a factor
# The sides, by the beginning of a peer's name: label, colour (Okabe and Ito's, safe for colour-blind readers), marker.
_SIDES = {
    OURS: (OURS, "#0072B2", "o"),
    "cuBLAS": ("cuBLAS, plain GEMM", "#000000", "_"),
    "eager": ("eager", "#D55E00", "v"),
    "torch.compile": ("torch.compile", "#009E73", "s"),
    "torch._addmm": ("torch._addmm_activation", "#CC79A7", "D"),
    "Liger": ("Liger", "#E69F00", "^"),
}
_OTHER = ("other", "#999999", "x")


def draw(title: str, benchmarks: Mapping[str, Sequence[Row]]) -> Figure | None:
    """Both sides of every row that has work and ceilings, a panel for each benchmark; None without such rows.

    A side's height is the useful work over its time, so both sides of a row have the same abscissa: the intensity of
    ours. Raises RuntimeError if Matplotlib is not installed.
    """
    found = {name: [row for row in rows if row.work and row.ceilings] for name, rows in benchmarks.items()}
    found = {name: rows for name, rows in found.items() if rows}
    if not found:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError(
            "the roofline plot needs Matplotlib, which is not installed: pip install 'shardfuse[bench]'"
        ) from None
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(2.0 + 4.6 * columns, 1.2 + 4.0 * lines), dpi=150, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (name, rows) in zip(panels, found.items()):
        axes.set(xscale="log", yscale="log", title=f"{name}, {len(rows)} rows")
        axes.set(xlabel="FLOP per byte that must be moved", ylabel="TFLOP/s")
        _points(axes, rows)
        _ceilings(axes, rows)
        _ticks(axes)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _points(axes: Axes, rows: Iterable[Row]) -> None:
    """Draw peers hollow, ours full and on top, and a thin line between the two sides of a row."""
    sides: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        found = {
            OURS: (intensity(row), tflops(row, row.ours)),
            row.peer_name: (intensity(row), tflops(row, row.peer)),
        }
        axes.plot(*zip(*found.values()), color="#bbbbbb", linewidth=0.7, zorder=2)
        for name, point in found.items():
            sides.setdefault(_side(name), []).append(point)
    for (label, colour, marker), points in sides.items():
        ours = label == OURS
        style: dict[str, Any] = {"s": 22 if ours else 70 if marker == "_" else 38, "zorder": 4 if ours else 3}
        style |= {"color": colour} if ours or marker in "_x" else {"facecolors": "none", "edgecolors": colour}
        x, heights = zip(*points)
        axes.scatter(x, heights, marker=marker, label=label, linewidths=1.2, **style)


def _ceilings(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the median ceilings of the rows' runs, and set limits that show every point and the ceiling above it."""
    peak, copy = ceilings(rows)
    intensities = [intensity(row) for row in rows]
    left, right = min(intensities) / MARGIN, max(intensities) * MARGIN
    top = min(peak, max(intensities) * MARGIN * copy)
    edges = [left, peak / copy, right] if left < peak / copy < right else [left, right]
    axes.plot(edges, [min(peak, x * copy) for x in edges], color="black", linewidth=1.3, zorder=1)
    axes.set_xlim(left, right)
    lowest = min(tflops(row, time) for row in rows for time in (row.ours, row.peer))
    axes.set_ylim(min(lowest, top) / MARGIN, top * MARGIN)
    said = f"cuBLAS 8192³ bf16: {peak:,.0f} TFLOP/s\ncopy: {copy:,.2f} TB/s"
    axes.text(0.03, 0.97, said, transform=axes.transAxes, va="top", fontsize="small", color="#444444")


def ceilings(rows: Iterable[Row]) -> tuple[float, float]:
    """The median ceilings of the rows' runs: TFLOP/s of the GEMM, TB/s of the copy."""
    found = [row.ceilings for row in rows if row.ceilings]
    peak = statistics.median(each.flops for each in found) / 1e12
    return peak, statistics.median(each.bandwidth for each in found) / 1e12


def _ticks(axes: Axes) -> None:
    """Plain numbers, closer together the smaller the part of a power of ten that a panel spans."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=range(1, 10) if high / low < 8 else (1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def intensity(row: Row) -> float:
    """FLOP for each byte that must be moved."""
    assert row.work is not None
    return row.work.flops / row.work.bytes


def tflops(row: Row, microseconds: float) -> float:
    """TFLOP/s of the row's work in ``microseconds``."""
    assert row.work is not None
    return row.work.flops / microseconds / 1e6


def _side(name: str) -> tuple[str, str, str]:
    return next((side for start, side in _SIDES.items() if name.startswith(start)), _OTHER)
