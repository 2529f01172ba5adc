"""What a transformer's parts cost in a pipeline, measured on one block."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..parallel.core import collectives
from ..parallel.core.mesh import MeshLike, whole_group
from ..parallel.pipeline.stage_costs import measured_parts, slowest
from ..parallel.pipeline.timeline import Costs
from .config import TransformerConfig
from .options import ModelKwargs, Unpack
from .transformer import ParallelTransformer


def measured_costs(
    config: TransformerConfig,
    batch: int,
    length: int,
    *,
    split: bool = True,
    rounds: int = 5,
    recompute: bool = False,
    mlp_recompute: int = 0,
    **options: Unpack[ModelKwargs],
) -> list[Costs]:
    """Seconds of the passes of each part of a transformer, for a micro-batch of ``batch`` sequences of ``length``.

    This function measures a model of one block: all blocks are alike, and a model that needs a pipeline may not fit on
    one rank. ``recompute``, ``mlp_recompute`` and ``options`` are ParallelTransformer's; ``device`` is by default the
    mesh's, without one the CPU. ``split`` says whether the schedule splits backward. Torch's generators keep their
    states. With ``mesh`` this is a collective of its ranks, and the slowest rank's time of each pass counts.
    """
    mesh, device = options.get("mesh"), options.get("device")
    group = whole_group(cast(MeshLike, mesh))
    if device is None:
        device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    options["device"] = device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = ParallelTransformer(
            dataclasses.replace(config, num_layers=1), recompute=recompute, mlp_recompute=mlp_recompute, **options
        )
        tokens, targets = torch.randint(config.vocab_size, (2, batch, length), device=device)
        mine = measured_parts(model, tokens, targets, split=split, rounds=rounds)
    everyones = collectives.gather_objects(mine, group, site="measured_costs")
    first, block, last = map(slowest, zip(*everyones))
    return [first, *[block] * config.num_layers, last]
