#!/usr/bin/env python3
"""Draw ``overview.svg`` for the README: the floors of the project, and one product that overlaps its all-gather.

The picture is a scheme: the lengths in it are no measurements. ``make front`` runs this file, and a test compares its
output with the committed picture.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).with_name("overview.svg")
WIDTH, HEIGHT = 1000, 384
# Light, then dark: the picture follows the reader's setting.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#57606a", "#b1bac4"),
    "line": ("#afb8c1", "#4b535d"),
    "face": ("#f6f8fa", "#161b22"),
    "floor": ("#ddf4ff", "#0c2d6b"),
    "rank0": ("#b6e3ff", "#0550ae"),
    "rank1": ("#aceebb", "#116329"),
    "rank2": ("#fae17d", "#7d4e00"),
    "rank3": ("#ffd8b5", "#953800"),
}
RANKS = 4


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "", under: str = "") -> str:
    """A rectangle with its name in the middle and, in smaller letters, a second line."""
    parts = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>']
    middle = y + height / 2 + 4
    if words:
        parts.append(text(x + width / 2, middle - 8 if under else middle, words, "name", "middle"))
    if under:
        parts.append(text(x + width / 2, middle + 9, under, "small", "middle"))
    return "".join(parts)


def floors(x: float, y: float, width: float) -> list[str]:
    """The floors, from the face down to what they stand on."""
    height, gap = 46, 6
    parts = [text(x, y - 14, "The floors: imports only go down", "title")]
    rows: list[list[tuple[str, str, str]]] = [
        [("floor", "shardfuse", "fuse · parallelize · Engine · explain · command line")],
        [
            ("floor", name, under)
            for name, under in (("training", ""), ("serving", ""), ("integrations", ""), ("bench", ""))
        ],
        [("floor", "layers", "nn.Modules with the stock parameters and state_dict")],
        [("floor", "parallel", "tensor, sequence and pipeline parallelism, ZeRO, overlap")],
        [("floor", "kernels", "each op: plain torch = the specification, Triton, oneDNN")],
        [("outside", "torch · torch.distributed · Triton", "as released: no fork, no C++ build")],
    ]
    for i, row in enumerate(rows):
        each = (width - gap * (len(row) - 1)) / len(row)
        for j, (kind, name, under) in enumerate(row):
            parts.append(box(x + j * (each + gap), y + i * (height + gap), each, height, kind, name, under))
    return parts


def lanes(
    x: float, y: float, width: float, title: str, links: list[float], tiles: list[float], each: float
) -> list[str]:
    """What the links and the SMs of rank 0 do: the times at which rows of each rank travel, and are multiplied.

    ``links`` and ``tiles`` are where each rank's piece begins, in units of ``each`` pixels; a piece is one unit long.
    """
    left, lane = x + 46, 30
    parts = [text(x, y, title, "name")]
    for name, top in (("links", y + 12), ("SMs", y + 12 + lane + 6)):
        parts.append(text(x, top + lane / 2 + 4, name, "small"))
        parts.append(f'<line x1="{left:g}" y1="{top + lane:g}" x2="{x + width:g}" y2="{top + lane:g}" class="axis"/>')
    for rank, begin in enumerate(links, start=1):
        parts.append(box(left + begin * each, y + 12, each - 3, lane, f"rank{rank}", f"x{rank}"))
    for rank, begin in enumerate(tiles):
        parts.append(box(left + begin * each, y + 18 + lane, each - 3, lane, f"rank{rank}", f"x{rank} · W"))
    return parts


def flag(x: float, y: float) -> str:
    """An arrow from rows that have come to the tiles that waited for them."""
    return f'<path d="M{x:g} {y:g} v10" class="arrow" marker-end="url(#tip)"/>'


def overlap(x: float, y: float, width: float) -> list[str]:
    """An all-gather and its product on rank 0 of four, one after the other and overlapped."""
    each = (width - 46) / 7
    left = x + 46
    parts = [text(x, y - 14, "One product of a layer, on rank 0 of 4, which holds rows x0", "title")]
    parts += lanes(x, y + 14, width, "one after the other", [0, 1, 2], [3, 4, 5, 6], each)
    top = y + 128
    parts += lanes(
        x,
        top,
        width,
        "overlapped: tiles wait for the rows that they need, not for ranks",
        [0, 1, 2],
        [0, 1, 2, 3],
        each,
    )
    parts += [flag(left + rank * each - 2, top + 37) for rank in range(1, RANKS)]
    saved = left + 4 * each
    parts.append(
        f'<path d="M{saved:g} {top + 63:g} h{3 * each - 6:g}" class="arrow" '
        'marker-start="url(#back)" marker-end="url(#tip)"/>'
    )
    parts.append(text(saved + 1.5 * each, top + 56, "saved", "small", "middle"))
    notes = (
        "An arrow is a flag in shared memory: the sender raises it, and the tiles' first load waits for it.",
        "Bias, activation, residual and the product of a gated layer run in the same tiles: one store.",
        "Row-parallel layers do the reverse: each tile goes to the rank that adds it up.",
        "This is a scheme, not a measurement. explain(model, x) says what a layer does, and why.",
    )
    parts += [text(x, top + 112 + 19 * i, note, "small") for i, note in enumerate(notes)]
    return parts


def style(dark: bool) -> str:
    colour = {name: pair[dark] for name, pair in COLOURS.items()}
    fills = "".join(
        f".{name}{{fill:{colour[name]};stroke:{colour['line']}}}" for name in COLOURS if name[:4] in ("floo", "rank")
    )
    return (
        f"text{{fill:{colour['ink']}}}.small{{fill:{colour['faint']}}}{fills}"
        f".outside{{fill:{colour['face']};stroke:{colour['line']};stroke-dasharray:4 3}}"
        f".axis{{stroke:{colour['line']}}}"
        f".arrow{{stroke:{colour['ink']};fill:none}}.tip{{fill:{colour['ink']}}}"
    )


def picture() -> str:
    """The whole file."""
    fonts = (
        "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".title{font-size:14px;font-weight:600}.name{font-weight:600}.small{font-size:11px}"
    )
    shape = 'viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" markerHeight="7"'
    tip = '<path d="M0 0 L6 3 L0 6 z" class="tip"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="what">',
        '<title id="what">The floors of shardfuse, and a product that overlaps its all-gather</title>',
        f"<style>{fonts}{style(False)}@media(prefers-color-scheme:dark){{{style(True)}}}</style>",
        f'<defs><marker id="tip" {shape} orient="auto">{tip}</marker>',
        f'<marker id="back" {shape} orient="auto-start-reverse">{tip}</marker></defs>',
        *floors(16, 46, 400),
        *overlap(456, 46, 528),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
    print(f"wrote {OUT.name}")
