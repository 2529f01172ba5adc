"""A small model and its batches for tests of data parallelism: over ranks, and whole in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardfuse import GridTransformer, ParallelTransformer, TransformerConfig
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.sharding import gather

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 32,
}
BATCH, LENGTH = 4, 6
TERMS = 512  # the chained sums of two layers, forward and backward


def build(mesh: Any = None, *, style: str = "gelu", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The same weights at every mesh."""
    sizes = SIZES | {name: options.pop(name) for name in (*SIZES, "tie_embeddings") if name in options}
    kind = GridTransformer if mesh is not None and "grid_i" in mesh.mesh_dim_names else ParallelTransformer
    model = kind(TransformerConfig(style=style, **sizes), mesh=mesh, dtype=dtype, **options)
    model.init_weights(5)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [BATCH, LENGTH] of all ranks."""
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.roll(-1, 1)


def share(whole: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's rows of a batch."""
    index, of = data_coordinate(mesh)
    return whole.chunk(of)[index]


def train(model: Any, mesh: DeviceMesh | None, steps: int = 2, micro: int = 1, **hooks: Callable[..., Any]) -> Any:
    """Take ``steps`` steps of AdamW over ``micro`` micro-batches each; returns the optimizer.

    ``hooks``: ``before(index)`` each micro-batch, ``step(number, run)`` in place of a step's forwards and backwards,
    which ``run()`` does.
    """
    before = hooks.get("before", lambda index: None)
    around = hooks.get("step", lambda number, run: run())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # else tiny gradients decide by their sign

    def backward(parts: Any) -> None:
        for index, (x, y) in enumerate(parts):
            before(index)
            (model(x, y) / micro).backward()

    for number in range(steps):
        tokens, targets = (share(whole, mesh).chunk(micro) for whole in batch(number))

        around(number, partial(backward, list(zip(tokens, targets))))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def wrong(model: Any, *, of: str = "weights", **options: Any) -> list[str]:
    """The differences of a model that :func:`train` trained over ranks from one trained in one process."""
    results = []
    for dtype in (torch.float32, torch.float64):
        alone = build(dtype=dtype, **options)
        train(alone, None)
        results.append({name: param.detach() for name, param in alone.named_parameters()})
    low, oracle = results
    found = []
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else gather(param)
        verdict = accuracy.judge(name, whole.detach(), low[name], oracle[name], terms=TERMS)
        found += [] if verdict.ok else [str(verdict)]
    return found


class Traffic(TorchDispatchMode):
    """Counts the bytes of this rank's collectives by name, of whole tensors rather than shards."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            whole = args[1 if name == "_reduce_scatter_base_" else 0]
            self.bytes[name] += sum(tensor.nbytes for tensor in tree_leaves(whole))
        return func(*args, **(kwargs or {}))


def everywhere(value: Any) -> list[Any]:
    """Every rank's ``value``."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
