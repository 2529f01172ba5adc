"""The measured costs of the parts of a run's model, on the run's own machine."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.dtypes import BY_NAME
from ..layers.stage_costs import measured_costs
from ..parallel.pipeline.schedules import find
from ..parallel.pipeline.timeline import Costs
from .settings import RunSettings


def part_costs(settings: RunSettings, schedule: str, *, mesh: DeviceMesh | None = None) -> list[Costs]:
    """The seconds of each part's passes for one micro-batch of the run of resolved ``settings``.

    Backward is split if ``schedule`` splits it. A collective: all of ``mesh``'s ranks call it.
    """
    parallel = settings.parallel
    microbatches = parallel.microbatches or 1
    assert parallel.dp is not None, "not resolved"
    return measured_costs(
        settings.model,
        -(-settings.share(parallel.dp_replicate * parallel.dp) // microbatches),
        settings.data.seq,
        mesh=mesh,
        device=settings.device,
        dtype=BY_NAME[parallel.precision],
        sequence_parallel=parallel.sequence_parallel,
        recompute=bool(parallel.recompute),
        mlp_recompute=parallel.mlp_recompute,
        overlap=parallel.overlap or "auto",
        split=find(schedule).splits_backward,
    )
