"""What a layer over a grid sends and receives, in closed form, and which grid of a number of ranks moves least.

All numbers are elements that each rank sends (and receives) in rings, where a gather or a scatter of n elements over R
ranks moves (R - 1) / R * n and an all-reduce twice that. Of a product of T tokens, K and N features, with the axes
``inner`` and ``outer`` of :mod:`grid` (j and k, or turned k and j; over two axes 1 and k):

    in       x         (outer - 1) / outer * T K / (i d inner)
    weight   W         (i - 1) / i * K N / (inner outer)
    out      y         (inner - 1) / inner * T N / (i d outer)

Forward moves each once. Backward moves dx, dW and dy likewise and gathers x and W again, so a step moves ``in`` and
``weight`` three times and ``out`` twice, and a depth d all-reduces dW/i. With all axes of q ranks this is

    2D       3 (q - 1) / q^2 (TK + KN)
    3D       2 (q - 1) / q^3 (TK + KN + TN), and (q - 1) / q^3 (TK + KN) that is gathered again
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Split(NamedTuple):
    """The sizes of a grid's axes; ``flat`` has two, i and k."""

    i: int = 1
    j: int = 1
    k: int = 1
    depth: int = 1
    flat: bool = False

    @property
    def ranks(self) -> int:
        return self.i * self.j * self.k * self.depth


class Moved(NamedTuple):
    """Elements by what travels."""

    inputs: float
    weights: float
    outputs: float
    copies: float = 0.0  # dW, between the copies of a depth


def forward(tokens: int, features_in: int, features_out: int, split: Split, *, turned: bool = False) -> Moved:
    """What the forward of one layer moves."""
    i, j, k, depth, flat = split
    inner, outer = (1, k) if flat else (k, j) if turned else (j, k)
    rows = tokens / (i * depth)
    return Moved(
        _ring(outer) * rows * features_in / inner,
        _ring(i) * features_in * features_out / (inner * outer),
        _ring(inner) * rows * features_out / outer,
    )


def step(tokens: int, features_in: int, features_out: int, split: Split, *, turned: bool = False) -> Moved:
    """What forward and backward of one layer move."""
    once = forward(tokens, features_in, features_out, split, turned=turned)
    inner, outer = (1, split.k) if split.flat else (split.j, split.k)
    stored = features_in * features_out / (inner * outer * split.i)
    return Moved(3 * once.inputs, 3 * once.weights, 2 * once.outputs, 2 * _ring(split.depth) * stored)


def block(tokens: int, width: int, split: Split) -> float:
    """What the four products of a decoder's block move in a step: q, k and v as one of N = 3 D, o, up to 4 D, down."""
    pairs = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return sum(sum(step(tokens, *sizes, split, turned=bool(n % 2))) for n, sizes in enumerate(pairs))


def splits(ranks: int) -> Iterator[Split]:
    """Every grid (i, j, k) of ``ranks``."""
    for i in range(1, ranks + 1):
        for j in range(1, ranks // i + 1):
            if ranks % (i * j) == 0:
                yield Split(i, j, ranks // (i * j))


def fits(split: Split, sequences: int, heads: int) -> bool:
    """Whether the grid divides whole ``sequences`` (over i, j and depth) and ``heads`` (over k)."""
    return not (sequences % (split.i * split.j * split.depth) or heads % split.k)


class Layouts(NamedTuple):
    """The grids of a number of ranks to compare; None where the ranks form none that fits."""

    tp: Split | None  # 1D, with sequence parallelism
    flat: Split | None  # 2D, as many rows as columns
    cube: Split | None  # 3D, three axes of one size
    zero_tp: Split | None  # the ZeRO-3 x tensor parallelism that moves least
    best: Split | None  # the grid of three axes that moves least


def layouts(tokens: int, width: int, ranks: int, *, sequences: int, heads: int) -> Layouts:
    """The grids that are worth comparing for a block of ``width`` and ``tokens`` in ``sequences``."""

    def least(found: Iterable[Split]) -> Split | None:
        able = (split for split in found if split.ranks == ranks and fits(split, sequences, heads))
        return min(able, key=lambda split: block(tokens, width, split), default=None)

    square, third = math.isqrt(ranks), round(ranks ** (1 / 3))
    every = list(splits(ranks))
    return Layouts(
        least([Split(k=ranks)]),
        least([Split(square, 1, square, flat=True)]),
        least([Split(third, third, third)]),
        least(split for split in every if split.j == 1),
        least(every),
    )


WIDTH, HEADS, LENGTH = 16384, 128, 2048  # of the table below
RANKS, SEQUENCES = (8, 64, 512), (2, 8, 32, 128, 512)


def table() -> str:
    """The Markdown table of ``docs/grid.md``: millions of elements that a rank sends for a block in a step."""
    lines = [
        "| ranks | sequences | 1D | 2D | 3D | ZeRO-3 x TP | best grid | moves less by | FLOP per element |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        for sequences in SEQUENCES:
            tokens = sequences * LENGTH
            found = layouts(tokens, WIDTH, ranks, sequences=sequences, heads=HEADS)
            if found.best is None:
                continue
            moved = [None if split is None else block(tokens, WIDTH, split) for split in found]
            *cells, least = [_cell(amount, split) for amount, split in zip(moved, found)]
            rival, ours = moved[-2:]
            assert ours is not None
            gain = "-" if rival is None else "nothing" if found.best.j == 1 else f"{1 - ours / rival:.0%}"
            flop = 3 * 2 * 12 * tokens * WIDTH**2 / ranks / ours
            lines.append(f"| {ranks} | {sequences} | {' | '.join(cells)} | {least} | {gain} | {flop:,.0f} |")
    return "\n".join(lines)


def _cell(amount: float | None, split: Split | None) -> str:
    if amount is None or split is None:
        return "-"
    axes = (split.i, split.k) if split.flat else (split.i, split.j, split.k)
    return f"{amount / 1e6:,.0f} ({', '.join(map(str, axes))})"


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks
