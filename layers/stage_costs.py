"""What a transformer's parts cost in a pipeline, measured on one block."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..parallel.core import collectives
from ..parallel.core.mesh import MeshLike, whole_group
from ..parallel.pipeline.stage_costs import measured_parts, slowest
from ..parallel.pipeline.timeline import Costs
from .config import TransformerConfig
from .transformer import ParallelTransformer


def measured_costs(
    config: TransformerConfig,
    batch: int,
    length: int,
    *,
    mesh: MeshLike = None,
    device: torch.device | str | None = None,
    split: bool = True,
    rounds: int = 5,
    **options: Any,
) -> list[Costs]:
    """Seconds of the passes of each part of a transformer, for a micro-batch of ``batch`` sequences of ``length``.

    What runs is a model of one block, made with ``options`` (ParallelTransformer's): all blocks are alike, and a model
    that wants a pipeline may not fit one rank. ``split`` says whether the schedule to be splits backward. ``device`` is
    by default the mesh's, without one the CPU. Torch's generators stay as they are. With ``mesh`` a collective of its
    ranks, of which each pass's slowest one counts.
    """
    group = whole_group(mesh)
    if device is None:
        device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = ParallelTransformer(dataclasses.replace(config, num_layers=1), mesh=mesh, device=device, **options)
        tokens, targets = torch.randint(config.vocab_size, (2, batch, length), device=device)
        mine = measured_parts(model, tokens, targets, split=split, rounds=rounds)
    everyones = collectives.gather_objects(mine, group, site="measured_costs")
    first, block, last = map(slowest, zip(*everyones))
    return [first, *[block] * config.num_layers, last]
