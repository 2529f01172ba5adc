"""What the parts of a run's model cost, measured where the run is."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..layers.stage_costs import measured_costs
from ..parallel.timeline import Costs
from .precision import PRECISIONS
from .settings import RunSettings


def part_costs(
    settings: RunSettings, microbatches: int | None = None, *, mesh: DeviceMesh | None = None
) -> list[Costs]:
    """Seconds of each part's passes for one micro-batch of the run that ``settings`` (resolved) describe.

    ``microbatches`` defaults to the run's. A collective of ``mesh``'s ranks.
    """
    parallel = settings.parallel
    microbatches = microbatches or parallel.microbatches or 1
    assert parallel.dp is not None, "not resolved"
    assert settings.device is not None, "not resolved"
    device = torch.device(settings.device)
    return measured_costs(
        settings.model,
        -(-settings.share(parallel.rep * parallel.dp) // microbatches),
        settings.data.seq,
        mesh=mesh,
        device=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device,
        dtype=PRECISIONS[parallel.precision] or torch.float32,
        sequence_parallel=parallel.sequence_parallel,
        recompute=bool(parallel.recompute),
        overlap=parallel.overlap or "auto",
    )
