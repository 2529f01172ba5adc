#!/usr/bin/env python3
"""Draw ``overview.svg`` for the README: the time of one MLP over two GPUs, in stock torch and in shardfuse.

Every length comes from the project's cost model, with the figures that ship for the H100; none is measured. The stock
MLP runs an all-gather, a GEMM, a GeLU pass, a GEMM and a reduce-scatter, one after the other. In shardfuse, with
``overlap="kernel"``, the transfers run under the GEMMs, and GeLU in the first one's epilogue, which nothing hides. Both
sides form their products in the same time. ``make front`` runs this file, and a test compares its output with the
committed picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch

from shardfuse.kernels.runtime import cost
from shardfuse.kernels.runtime.chips import CHIPS
from shardfuse.parallel.overlap import link_model, link_profile
from shardfuse.parallel.overlap.link_model import COLLECTIVES, GATHER, SCATTER, Call

OUT = Path(__file__).with_name("overview.svg")
ARCH, LINK, RANKS = "sm_90", "node", 2
PROFILE = link_profile.read(link_profile.SHIPPED / f"{ARCH}.json")
TOKENS, WIDTH, HIDDEN = 8192, 4096, 16384
UP = Call(GATHER, TOKENS, WIDTH, HIDDEN // RANKS, torch.bfloat16, RANKS)
DOWN = Call(SCATTER, TOKENS, HIDDEN // RANKS, WIDTH, torch.bfloat16, RANKS)

# Clocks of a multiprocessor of Hopper's for one element: GeLU takes two approximate instructions (exp2, reciprocal) at
# 16 per clock (CUDA C++ Programming Guide, arithmetic instructions), the product 2 K operations at 4,096 per clock.
GELU_SHARE = (2 / 16) / (2 * WIDTH / 4096)

PAGE = 800, 360  # the units of the picture
LEFT, PER_US = 78, 0.362  # where time 0 is, and the length of a microsecond
LANES = {"NVLink": (0, 28), "SMs": (32, 50)}  # below the top of a way: each lane's top and height
TICK_US = 500
# Light, then dark: the picture follows the reader's setting.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#57606a", "#b1bac4"),
    "line": ("#afb8c1", "#4b535d"),
    "idle": ("#f0f2f5", "#1c222b"),
    "transfer": ("#ffb77c", "#bd561d"),
    "gemm": ("#b6e3ff", "#0550ae"),
    "gelu": ("#e2c5ff", "#8250df"),
    "saved": ("#dafbe1", "#12381f"),
    "gain": ("#1a7f37", "#56d364"),
}


class Block(NamedTuple):
    """What one lane does from one time to another, in microseconds."""

    lane: str
    kind: str
    begin: float
    end: float
    name: str = ""  # written into the block

    @property
    def us(self) -> str:
        return us(self.end - self.begin)


def us(length: float) -> str:
    return f"{length:,.0f} µs"


def stock() -> list[Block]:
    """The blocks of stock torch: each begins where the one before it ends."""
    links = PROFILE.links[LINK]
    gather, scatter = (link_model.collective_seconds(links[COLLECTIVES[call.op]], call) for call in (UP, DOWN))
    passes = cost.pass_bytes(cost.PASSES["forward"], TOKENS, HIDDEN // RANKS)
    steps = [
        ("NVLink", "transfer", gather, ""),
        ("SMs", "gemm", link_model.gemm_seconds(PROFILE, TOKENS, UP), "GEMM 1 + bias"),
        ("SMs", "gelu", passes / CHIPS[ARCH].bandwidth, ""),
        ("SMs", "gemm", link_model.gemm_seconds(PROFILE, TOKENS, DOWN), "GEMM 2"),
        ("NVLink", "transfer", scatter, ""),
    ]
    blocks, now = [], 0.0
    for lane, kind, seconds, name in steps:
        assert seconds is not None
        blocks.append(Block(lane, kind, now, now + seconds * 1e6, name))
        now = blocks[-1].end
    return blocks


class Fused(NamedTuple):
    """One call in shardfuse: a GEMM with the transfers under it, and what follows: GeLU, or the sum of what arrived."""

    transfers: list[Block]
    gemm: Block
    rest: Block


def fused(call: Call, name: str, start: float) -> Fused:
    """``call`` from the microsecond ``start``."""
    timeline = link_model.kernel_timeline(PROFILE, call)
    estimate = link_model.predict(PROFILE, LINK, call, "kernel")
    assert timeline is not None
    assert estimate is not None
    spans = [(start + begin * 1e6, start + end * 1e6) for begin, end in timeline.transfers]
    begin, end = (start + seconds * 1e6 for seconds in (timeline.products[0][0], timeline.products[-1][1]))
    last = start + estimate.total_s * 1e6
    gelu = GELU_SHARE * link_model.gemm_seconds(PROFILE, TOKENS, call) * 1e6
    rest = Block("SMs", "gelu", end, end + gelu) if call is UP else Block("SMs", "transfer", end, last)
    return Fused([Block("NVLink", "transfer", *span) for span in spans], Block("SMs", "gemm", begin, end, name), rest)


def across(time: float) -> float:
    return LEFT + time * PER_US


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(begin: float, end: float, y: float, height: float, kind: str) -> str:
    """A rectangle from one time to another."""
    x, width = across(begin), (end - begin) * PER_US
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


def way(blocks: list[Block], y: float, heading: str, until: float) -> list[str]:
    """The two lanes of one way, from ``y`` down; idle lanes are drawn to ``until``."""
    parts = [text(12, y - 10, heading, "heading")]
    for lane, (top, height) in LANES.items():
        parts.append(text(12, y + top + height / 2 + 6, lane, "faint"))
        parts.append(rect(0, until, y + top, height, "idle"))
    for block in blocks:
        top, height = LANES[block.lane]
        parts.append(rect(block.begin, block.end, y + top, height, block.kind))
        if block.name:
            middle = across((block.begin + block.end) / 2)
            parts.append(text(middle, y + top + 19, block.name, "name", "middle"))
            parts.append(text(middle, y + top + 38, block.us, "", "middle"))
    return parts


def stock_labels(blocks: list[Block], y: float) -> list[str]:
    """The names of the blocks that are too short to hold theirs; the lane of the links is idle there."""
    gather, _, gelu, _, scatter = blocks
    return [
        text(across(gather.end) + 6, y, f"all-gather {gather.us}"),
        text(across((gelu.begin + gelu.end) / 2), y, f"GeLU {gelu.us} ↓", "", "middle"),
        text(across(scatter.begin) - 6, y, f"reduce-scatter {scatter.us}", "", "end"),
    ]


def fused_labels(up: Fused, down: Fused, y: float) -> list[str]:
    """The names of the transfers, and below the lanes those of the launches' starts and of the sum."""
    under = y + sum(LANES["SMs"]) + 16
    gather, scatter = (us(sum(piece.end - piece.begin for piece in each.transfers)) for each in (up, down))
    return [
        text(across(up.transfers[-1].end) + 6, y + 20, f"all-gather {gather}"),
        text(across(down.transfers[-1].end) + 6, y + 20, f"reduce-scatter {scatter}"),
        text(across(0), under, f"start {us(up.gemm.begin)}", "faint"),
        text(
            across(up.rest.end),
            under,
            f"GeLU {up.rest.us}, start {us(down.gemm.begin - up.rest.end)}",
            "faint",
            "middle",
        ),
        text(across(down.rest.end), under, f"sum of parts {down.rest.us}", "faint", "end"),
    ]


def fused_way(up: Fused, down: Fused, y: float, until: float) -> list[str]:
    """The lanes of shardfuse, with what they save of the time of stock torch."""
    blocks = [*up.transfers, up.gemm, up.rest, *down.transfers, down.gemm, down.rest]
    end, (top, height) = down.rest.end, LANES["SMs"]
    middle = across((end + until) / 2)
    return [
        *way(blocks, y, "shardfuse: transfers under the GEMMs, GeLU in the first one's kernel", until),
        *fused_labels(up, down, y),
        rect(end, until, y + top, height, "saved"),
        text(middle, y + top + 22, us(until - end), "small gain", "middle"),
        text(middle, y + top + 41, "saved", "small gain", "middle"),
        text(across(until) + 8, y + 30, us(end), "total"),
        text(across(until) + 8, y + 56, f"{until / end:.2f}\N{MULTIPLICATION SIGN}", "total gain"),
        text(across(until) + 8, y + 76, "as fast", "name gain"),
    ]


def axis(y: float, until: float) -> list[str]:
    """The axis of both ways, in microseconds."""
    parts = [f'<path d="M{LEFT} {y:.1f} H{across(until):.1f}" class="axis"/>']
    for time in range(0, int(until) + 1, TICK_US):
        parts.append(f'<path d="M{across(time):.1f} {y:.1f} v5" class="axis"/>')
        parts.append(text(across(time), y + 21, f"{time:,}", "faint", "middle"))
    parts.append(text(across(until), y + 21, "µs", "faint", "end"))
    return parts


def style(dark: bool) -> str:
    colour = {name: pair[dark] for name, pair in COLOURS.items()}
    fills = "".join(f".{name}{{fill:{colour[name]}}}" for name in COLOURS if name not in ("ink", "line"))
    return f"text{{fill:{colour['ink']}}}{fills}.axis{{stroke:{colour['line']}}}"


def picture() -> str:
    """The whole file."""
    before = stock()
    until = before[-1].end
    up = fused(UP, "GEMM 1 + bias", 0.0)
    down = fused(DOWN, "GEMM 2", up.rest.end)
    fonts = (
        "text{font:17px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".heading,.name{font-weight:600}.total{font-size:22px;font-weight:700}.faint{font-size:16px}"
        ".small{font-size:14px;font-weight:600}"
    )
    what = f"One MLP over two GPUs, predicted: {us(until)} in stock torch, {us(down.rest.end)} in shardfuse"
    shape = f'{TOKENS:,} tokens, width {WIDTH} → {HIDDEN} → {WIDTH}, bf16, two H100; overlap="kernel"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE[0]} {PAGE[1]}" role="img" aria-labelledby="what">',
        f'<title id="what">{what}</title>',
        f"<style>{fonts}{style(False)}@media(prefers-color-scheme:dark){{{style(True)}}}</style>",
        text(12, 26, "One MLP's forward over two GPUs, the same on both ranks", "total"),
        text(12, 49, shape, "faint"),
        *way(before, 89, "stock torch: one after the other", until),
        *stock_labels(before, 89 + 20),
        text(across(until) + 8, 89 + 48, us(until), "total"),
        *fused_way(up, down, 206, until),
        *axis(206 + 104, until),
        text(
            12,
            PAGE[1] - 8,
            "Predicted by the project's cost model, not measured; equal GEMMs assumed",
            "name",
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
    print(f"wrote {OUT.name}")
