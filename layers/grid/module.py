"""What layers over a grid have in common: how the grid stores their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...parallel.core import mappings
from ...parallel.core.mesh import Group
from ...parallel.core.sharding import ShardSpec
from ...parallel.grid.grid import Grid
from ..module import ShardedModule
from ..options import LayerOptions


class GridModule(ShardedModule):
    """A layer whose parameters a grid splits. A subclass says by :meth:`split` which axes split each of them."""

    takes_grid = True
    grid: Grid

    def __init__(self, shared: LayerOptions, /) -> None:
        super().__init__(shared)
        if shared.group.size > 1 and not isinstance(shared.mesh, Grid):
            raise ValueError(
                f"{type(self).__name__}: mesh: it holds no grid, but {shared.group.size} ranks: make it by "
                "init_mesh(grid=(i, j, k))"
            )
        self.grid = shared.grid

    def split(self, name: str) -> Mapping[str, int]:
        """The dimensions of the parameter ``name`` that ACROSS and WITHIN split, by these names."""
        raise NotImplementedError

    def spec(self, name: str, shape: torch.Size, shard_dim: int | None) -> ShardSpec:
        return self.grid.spec(name, shape, self.split(name))

    def summed_local(self, *names: str, axes: Sequence[Group], site: str) -> tuple[Any, ...]:
        """This rank's plain tensors of small parameters, whose gradients backward sums over ``axes``."""
        tensors = self.local(*names)
        for axis in axes:
            tensors = mappings.copy_all_to(tensors, axis, site=site)
        return tensors

    def sharding_repr(self) -> str:
        return f"grid {self.grid}"
