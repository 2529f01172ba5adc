"""The model, optimizer and training that tests of checkpoints save and load."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardfuse.parallel.core import mappings
from shardfuse.parallel.core.mesh import SINGLE, Group
from shardfuse.parallel.core.sharding import ShardSpec, draw_shard, local_tensor, make_parameter, named_seed

WIDTH, FFN = 6, 24
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {  # logical shape and sharded dimension
    "up": ((FFN, WIDTH), 0),
    "down": ((WIDTH, FFN), 1),
    "bias": ((FFN,), 0),
    "norm": ((WIDTH,), None),
    "temperature": ((), None),
}


class Net(nn.Module):
    """x [T, D] -> [T, D], column- then row-parallel; ``twin`` is ``up`` under a second name."""

    def __init__(self, group: Group = SINGLE, params: str = "dtensor", seed: int = 0, dtype: Any = None) -> None:
        super().__init__()
        for name, (shape, dim) in SHAPES.items():
            spec = ShardSpec(name, torch.Size(shape), dim, group)
            drawn = draw_shard(shape or (1,), dim, group.rank, group.size, seed=named_seed(seed, name), std=1.0)
            self.register_parameter(name, make_parameter(drawn.view(spec.local_shape).to(dtype), spec, params))
        self.twin = self.up
        self.register_buffer("steps", torch.tensor([seed, seed + 1]))

    def loss(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        up, down, bias, norm, temperature = (local_tensor(getattr(self, name)) for name in SHAPES)
        hidden = (mappings.copy_to(x * norm, group, site="in") @ up.t() + bias).tanh()
        y = mappings.reduce_from(hidden @ down.t(), group, site="out")
        return (y * temperature).square().mean()


def train(model: Net, optimizer: torch.optim.Optimizer, group: Group, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model.loss(x, group)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    groups = [{"params": [model.up, model.down]}, {"params": [model.bias, model.norm, model.temperature], "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9), foreach=False)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "checkpoint.json") -> None:
    """Change one of the checkpoint's JSON files, with checksums that are right for the result."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    sign(folder, measure=name != "checkpoint.json")


def sign(folder: Path, *, measure: bool = True) -> None:
    """Give ``checkpoint.json`` a right checksum and, with ``measure``, those of the files as they are."""
    content = json.loads((folder / "checkpoint.json").read_text())
    if measure:
        data = {name: (folder / name).read_bytes() for name in content["files"] if (folder / name).is_file()}
        content["files"] = {name: [len(each), zlib.crc32(each)] for name, each in data.items()}
    content.pop("sha256", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(content))


class Exploit:
    """Unpickling it would touch a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)
