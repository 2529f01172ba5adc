"""A grid of ranks: what each of its axes splits, in one product and from layer to layer.

A product y = x @ W^T of sizes T (tokens), K and N runs on axes that split one size each: ``tokens`` T, ``inner`` K,
``outer`` N. Each matrix has two of the three sizes, so the third axis holds copies of it while the product runs.
Between products that axis splits the matrix as well: x and W are gathered, and y is summed and scattered.

    matrix   in the product         stored                            travels, per rank
    x        [T/i, K/j]             [T/i/k, K/j] or [T/i, K/j/k]      all-gather over outer (k)
    W        [N/k, K/j]             [N/k, K/j/i], turned [N/j/i, K/k] all-gather over tokens (i)
    y        [T/i, N/k], partial    [T/i/j, N/k] or [T/i, N/k/j]      reduce-scatter over inner (j)

This is 3D tensor parallelism (Bian et al., arXiv:2105.14450). The next layer is turned: it swaps the roles of j and k,
so that y is stored as it wants its x. With axes of one rank it becomes

    grid (1, 1, k)    tensor parallelism with sequence parallelism, 1D
    grid (i, 1, 1)    weights sharded over data (ZeRO-3)
    grid (i, 1, k)    ZeRO-3 x tensor parallelism
    grid (i, k)       2D (Optimus, arXiv:2104.05343): every layer has the roles (tokens i, outer k) and no inner axis,
                      and k splits the features of x, not its tokens. The all-gathers are SUMMA's, in one message
                      each; ``overlap="summa"`` sends panel by panel (summa.py)
    the same, depth d 2.5D (Tesseract, arXiv:2105.14500): d splits the tokens once more and holds copies of the weights
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..core import collectives
from ..core.mesh import SINGLE, Group, along, grid_mesh, tp_group, whole_group
from ..core.sharding import GridSpec, ShardSpec, grid_ranks
from ..overlap.policy import check_overlap

ACROSS, WITHIN = "k", "j, i"  # the axes that split stored parameters; over two axes the second one is i

SUMMA = "summa"  # the value of ``overlap`` that sends panels; for two axes alone


class Axes(NamedTuple):
    """The axes of one product."""

    tokens: Group
    inner: Group
    outer: Group
    depth: Group
    spare: int  # the dimension of x that ``outer`` splits, and of y that ``inner`` does: 0 tokens, 1 features
    weight_dim: int  # the dimension of W that ``tokens`` splits; where it is 0 the bias is split as well


class GridOptions(NamedTuple):
    """The options of a layer's call besides its operands, as in ``core/options.py``."""

    axes: Axes
    impl: str = "auto"
    overlap: str = "none"  # or SUMMA
    strict: bool = False
    site: str = "linear"


@dataclass(frozen=True)
class Grid:
    """The axes of a grid, and all its ranks. ``flat`` has two axes, i and k, whose layers all have the same roles."""

    i: Group = SINGLE
    j: Group = SINGLE
    k: Group = SINGLE
    depth: Group = SINGLE
    whole: Group = SINGLE
    flat: bool = False

    @classmethod
    def of(cls, mesh: Any) -> Grid:
        """The grid of a mesh of ``init_mesh(grid=...)``; a Grid itself; None: one process.

        The first call for a mesh with other dimensions beside those of the grid creates a process group: every rank
        calls it. Raises ValueError for a mesh without a grid, TypeError for anything else.
        """
        if isinstance(mesh, Grid):
            return mesh
        if mesh is None or mesh is SINGLE:
            return cls()
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: expected a mesh with a grid, a Grid or None, not {type(mesh).__name__}")
        names = mesh.mesh_dim_names or ()
        if not {"grid_i", "grid_k"} <= set(names):
            raise ValueError(f"mesh: its dimensions {names} hold no grid: make it by init_mesh(grid=(i, j, k))")
        axes = {axis: tp_group(mesh[f"grid_{axis}"]) for axis in ("i", "j", "k", "depth") if f"grid_{axis}" in names}
        ranks = grid_mesh(mesh)
        whole = grid_ranks(ranks, whole_group(ranks).pg if ranks.size() > 1 else None)
        return cls(**axes, whole=whole, flat="j" not in axes)

    def __str__(self) -> str:
        if self.flat:
            return f"(i={self.i.size}, k={self.k.size}, depth {self.depth.size})"
        return f"(i={self.i.size}, j={self.j.size}, k={self.k.size})"

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions that ``init_mesh`` gives a mesh with this grid, and their sizes."""
        sizes = {"grid_depth": self.depth.size, "grid_k": self.k.size, "grid_j": self.j.size, "grid_i": self.i.size}
        absent = {"grid_depth"} if self.depth.size == 1 else set()
        return {name: size for name, size in sizes.items() if name not in absent | ({"grid_j"} if self.flat else set())}

    # --- roles --------------------------------------------------------------------------------------------------------

    @property
    def hidden(self) -> Group:
        """The axis that splits the model width D between layers."""
        return self.k if self.flat else self.j

    def axes(self, turned: bool = False) -> Axes:
        """The axes of a layer from the model width; ``turned``: back to it."""
        if self.flat:
            return Axes(self.i, SINGLE, self.k, self.depth, 1, 1)
        inner, outer = (self.k, self.j) if turned else (self.j, self.k)
        return Axes(self.i, inner, outer, self.depth, 0, 0 if turned else 1)

    @property
    def rows(self) -> tuple[Group, ...]:
        """The axes that split the tokens between layers, the first one first."""
        return (self.depth, self.i) if self.flat else (self.depth, self.i, self.k)

    @property
    def sequences(self) -> tuple[Group, ...]:
        """The axes that split whole sequences, in attention and in the loss."""
        return self.depth, self.i, self.j

    def spec(self, name: str, shape: torch.Size, split: Mapping[str, int]) -> ShardSpec:
        """How the grid stores a parameter: ``split`` names the dimensions that :data:`ACROSS` and :data:`WITHIN` do."""
        mesh = self.whole.mesh
        if mesh is None:
            return ShardSpec(name, shape)
        names = {"grid_k": ACROSS, "grid_i": WITHIN, "grid_ji": WITHIN}
        dims = [split.get(names.get(each, "")) for each in mesh.mesh_dim_names or ()]
        return GridSpec(name, shape, group=self.whole, grid_shard_dims=tuple(dims))

    # --- sizes --------------------------------------------------------------------------------------------------------

    def check_width(self, name: str, value: int, *, turned: bool = False) -> None:
        """ValueError unless a number of features can be split: of the model width, or with ``turned`` of what lies
        between the two layers of an MLP or of attention."""
        parts = self.k.size if turned else self.i.size * self.j.size
        if self.flat:
            parts = math.lcm(self.i.size, self.k.size)
        if value % parts:
            raise ValueError(
                f"{name}={value} does not divide by the {parts} parts that a grid of {self} stores weights in: make it "
                f"a multiple, such as {_near(value, parts)}, or use fewer ranks along its axes"
            )

    def check_count(self, name: str, value: int) -> None:
        """ValueError unless k can split ``value`` heads, words of a vocabulary or features."""
        parts = self.k.size
        if value % parts:
            raise ValueError(
                f"{name}={value} does not divide by the {parts} ranks along k of a grid of {self}: make it a multiple, "
                f"such as {_near(value, parts)}, or use fewer of them"
            )

    def check_batch(self, batch: int, length: int, what: str = "batch") -> None:
        """ValueError unless a batch of sequences, or ``what`` it is, can be split."""
        wanted = size_of(self.sequences)
        if batch < 1 or batch % wanted:
            raise ValueError(
                f"a {what} of {batch} sequences does not divide by {wanted}: a grid of {self} attends over whole "
                f"sequences, each on the ranks of one k; pass a multiple, such as {_near(batch, wanted)}"
            )
        rows = size_of(self.rows)
        if batch * length % rows:
            raise ValueError(
                f"{batch} sequences of {length} tokens do not divide by the {rows} ranks over which a grid of {self} "
                f"splits tokens: pass sequences of a multiple of {rows // math.gcd(batch, rows)} tokens, or a multiple "
                f"of {math.lcm(wanted, rows // math.gcd(length, rows))} sequences"
            )


def sharing_group(mesh: DeviceMesh | None) -> Group:
    """The ranks of ``mesh`` that share a model's tensors: those along tp, or all of a grid, as in :meth:`Grid.of`."""
    if mesh is not None and "grid_i" in (mesh.mesh_dim_names or ()):
        return Grid.of(mesh).whole
    return along(mesh, "tp")


def size_of(axes: Sequence[Group]) -> int:
    """The number of parts into which ``axes`` split a dimension together."""
    return math.prod(axis.size for axis in axes)


def local_rows(x: torch.Tensor, axes: Sequence[Group]) -> torch.Tensor:
    """This rank's rows of ``x``, which ``axes`` split, the first one first."""
    for axis in axes:
        x = collectives.local_slice(x, axis, 0)
    return x


def check_grid_overlap(overlap: str, grid: Grid, strict: bool = False) -> None:
    """ValueError unless a layer over ``grid`` knows ``overlap``; RuntimeError where ``strict`` wants it in vain."""
    if overlap != SUMMA:
        check_overlap(overlap)
        if strict and grid.flat and grid.whole.size > 1 and overlap not in ("auto", "none"):
            raise RuntimeError(
                f"overlap={overlap!r} was asked for with strict=True, but over a grid of {grid} no axis splits the "
                f"rows that a product could wait for piece by piece: pass overlap={SUMMA!r}, or strict=False"
            )
    elif not grid.flat and grid.whole.size > 1:
        raise ValueError(
            f"overlap={SUMMA!r} over a grid of {grid}: panels want features that both axes split, so make the mesh by "
            "init_mesh(grid=(rows, columns))"
        )


def _near(value: int, parts: int) -> str:
    lower = value - value % parts
    return f"{lower} or {lower + parts}" if lower else str(parts)
