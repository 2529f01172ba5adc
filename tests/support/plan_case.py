"""What a rank holds while it trains a small model, to hold against the planner's prediction: bytes by kind."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from shardfuse.layers import ParallelTransformer, TransformerConfig
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize


class Saved:
    """Counts the bytes that autograd keeps for backward, each storage once, without the parameters'."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._kept: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, x: torch.Tensor) -> _Held:
        return _Held(self, x)

    def take(self, storage: torch.UntypedStorage) -> bool:
        key = storage.data_ptr()
        if key in self._parameters or not key:
            return False
        if not self._kept.get(key):
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._kept[key] = self._kept.get(key, 0) + 1
        return True

    def give(self, key: int, size: int) -> None:
        self._kept[key] -= 1
        if not self._kept[key]:
            self.now -= size


class _Held:
    def __init__(self, counter: Saved, x: torch.Tensor) -> None:
        self.x = x
        storage = x.untyped_storage()
        self._counter, self._key, self._size = counter, storage.data_ptr(), storage.nbytes()
        self._counted = counter.take(storage)

    def __del__(self) -> None:
        if self._counted:
            self._counter.give(self._key, self._size)


def held(
    rank: int,
    world: int,
    config: dict[str, Any],
    degrees: dict[str, int],
    options: dict[str, Any],
    layers: dict[str, Any],
    shape: tuple[int, int],
) -> dict[str, int]:
    """Bytes of parameters, gradients, the optimizer's state, and the most that was saved for backward, on this rank."""
    mesh = init_mesh(**degrees)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = ParallelTransformer(TransformerConfig(**config), mesh=mesh, **layers)
    spread = parallelize(model, mesh, seed=0, **options)
    optimizer = torch.optim.AdamW(spread.parameters())
    share, readers = data_coordinate(mesh)
    tokens = torch.randint(config["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    mine = tokens.tensor_split(readers)[share]
    found: dict[str, int] = {}
    for step in range(2):  # the second one finds the state that the first one made
        counter = Saved({_local(p).untyped_storage().data_ptr() for p in spread.parameters()})
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda kept: kept.x):
            spread.step(mine[:, :-1], mine[:, 1:])
        state = itertools.chain.from_iterable(each.values() for each in optimizer.state.values())
        found = {
            "weights": sum(_bytes(p) for p in spread.parameters()),
            "gradients": sum(_bytes(p.grad) for p in spread.parameters() if p.grad is not None),
            "optimizer": sum(_bytes(x) for x in state if isinstance(x, torch.Tensor) and x.dim()),
            "activations": counter.peak,
        }
        optimizer.step()
        optimizer.zero_grad()
    return found


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _bytes(x: torch.Tensor) -> int:
    local = _local(x)
    return local.numel() * local.element_size()
