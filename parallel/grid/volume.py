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

from collections.abc import Iterator
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


def block(tokens: int, width: int, split: Split, *, ffn: int | None = None) -> float:
    """What the four products of a decoder's block move in a step: q, k and v as one of N = 3 D, o, up to ``ffn`` (4 D),
    down."""
    ffn = 4 * width if ffn is None else ffn
    pairs = ((width, 3 * width), (width, width), (width, ffn), (ffn, width))
    return sum(sum(step(tokens, *sizes, split, turned=bool(n % 2))) for n, sizes in enumerate(pairs))


def splits(ranks: int) -> Iterator[Split]:
    """Every grid (i, j, k) of ``ranks``."""
    for i in range(1, ranks + 1):
        for j in range(1, ranks // i + 1):
            if ranks % (i * j) == 0:
                yield Split(i, j, ranks // (i * j))


def best(tokens: int, width: int, ranks: int, *, sequences: int, heads: int, inner: int | None = None) -> Split | None:
    """The grid that moves least among those that can hold ``sequences`` (whole on i and j) and ``heads`` (on k).

    With ``inner=1`` of ZeRO-3 x tensor parallelism alone. None where no grid can.
    """
    able = (split for split in splits(ranks) if not (sequences % (split.i * split.j) or heads % split.k))
    chosen = [split for split in able if inner is None or split.j == inner]
    return min(chosen, key=lambda split: block(tokens, width, split), default=None)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks
