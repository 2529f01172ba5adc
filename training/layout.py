"""Layout validation from a run's settings alone, before any process starts.

The rules belong to the layers and the schedules; this module calls them. torch's pipelining takes seconds to import, so
only a run with a schedule imports it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from ..layers.hf.reading import read_hf_config
from ..layers.transformer import ParallelTransformer
from ..parallel import compatibility
from ..parallel.core.mesh import Group
from ..parallel.pipeline.partition import balanced
from .data.loading import with_ends
from .settings import LR, START_LR, ParallelSettings, RunSettings


def resolve(settings: RunSettings, processes: int) -> RunSettings:
    """Fill in the settings that follow from the machine, ``processes`` and the folder ``start``.

    Raises ValueError if they do not fit or the model cannot be divided in this way, and the errors of
    ``read_hf_config``.
    """
    if settings.start is not None:
        settings = dataclasses.replace(settings, model=read_hf_config(settings.start))
        settings.check_length()
    if settings.start is None and settings.data.tokenizer is not None:
        settings = dataclasses.replace(settings, model=with_ends(settings.model, Path(settings.data.tokenizer)))
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise ValueError("device = 'cuda': this machine has no GPU that torch can use; choose --device cpu")
    device = settings.device or ("cuda" if available else "cpu")
    parallel = settings.parallel.over(processes)
    assert parallel.dp is not None
    share = settings.share(parallel.dp_replicate * parallel.dp)
    if parallel.microbatches is None:
        parallel = dataclasses.replace(parallel, microbatches=default_count(parallel, share))
    optimizer = settings.optimizer
    if optimizer.lr is None:
        optimizer = dataclasses.replace(optimizer, lr=LR if settings.start is None else START_LR)
    resolved = dataclasses.replace(settings, device=device, parallel=parallel, optimizer=optimizer)
    check_layout(resolved)
    return resolved


def check_gpus(settings: RunSettings, processes: int) -> None:
    """ValueError where ``processes`` on this machine, those of resolved ``settings``, are more than its GPUs."""
    if settings.device == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(
            f"{processes} processes: this machine has {torch.cuda.device_count()} GPUs, and every process needs one; "
            "start fewer, choose --device cpu, or let torchrun start them on several machines"
        )


def check_layout(settings: RunSettings) -> None:
    """Raise ValueError where the model of resolved ``settings`` cannot be divided over its ranks."""
    parallel = settings.parallel
    model = ParallelTransformer(
        dataclasses.replace(settings.model, num_layers=1),  # all blocks are alike
        mesh=Group(None, 0, parallel.tp, None),
        sequence_parallel=parallel.sequence_parallel,
        overlap=parallel.overlap or "auto",
        params="local",
        device="meta",
    )
    if parallel.schedule is None:
        return
    from ..parallel.pipeline.schedules import check_microbatches, find

    schedule = find(parallel.schedule)
    if parallel.pp > 1:
        assert parallel.dp is not None  # resolve() filled it in
        compatibility.check(
            nn.Identity(),  # checks engines and schedule only; parallelize checks the model as well
            zero=parallel.zero,
            schedule=parallel.schedule,
            splits_backward=schedule.splits_backward,
            offload=parallel.offload,
            precision=None if parallel.precision == "fp32" else parallel.precision,
            shares=parallel.dp_replicate * parallel.dp,
        )
        assert parallel.microbatches is not None  # resolve() filled it in
        check_microbatches(parallel.schedule, parallel.microbatches, parallel.pp)
        parts = len(model.pipeline_parts()) - 1 + settings.model.num_layers
        balanced([1.0] * parts, parallel.pp * schedule.stages_per_rank, layout=schedule.layout, ranks=parallel.pp)


def default_count(parallel: ParallelSettings, sequences: int) -> int | None:
    """The default number of micro-batches for a rank's ``sequences``; None without a pipeline.

    ``parallelize`` takes two for each stage; this takes at most one for each sequence. Where the schedule cannot run
    with so few, it takes the fewest possible. Raises ValueError for an unknown schedule.
    """
    if parallel.pp == 1 or parallel.schedule is None:
        return None
    from ..parallel.pipeline.schedules import default_microbatches

    most = default_microbatches(parallel.schedule, parallel.pp)
    fewer = [count for count in range(min(sequences, most), 0, -1) if _runs(parallel, count)]
    more = [count for count in range(sequences, most) if _runs(parallel, count)]
    return [*fewer, *more, most][0]


def padding(parallel: ParallelSettings, sequences: int) -> int:
    """The number of padding sequences added to a rank's ``sequences`` (``ParallelModel.step``)."""
    count = parallel.microbatches or 1
    uneven = -sequences % count if parallel.pp > 1 else 0  # a pipeline's micro-batches have one size
    return max(count - sequences, uneven)


def remarks(settings: RunSettings) -> list[str]:
    """Warnings about resolved ``settings`` that are valid but probably unintended."""
    parallel = settings.parallel
    assert parallel.dp is not None  # resolve() filled it in
    found = []
    if parallel.zero and parallel.dp == 1 and parallel.dp_replicate > 1:
        found.append(
            f"zero = {parallel.zero} shards nothing: shards are counted by dp, which is 1, and dp_replicate = "
            f"{parallel.dp_replicate} are whole replicas; leave dp_replicate out to shard over all "
            f"{parallel.dp_replicate}, or lower tp or pp and raise dp for replicas of shards"
        )
    data_parallel_size = parallel.dp_replicate * parallel.dp
    sequences = settings.share(data_parallel_size)
    empty = padding(parallel, sequences)
    if empty:
        fewer = [n for n in range(parallel.microbatches or 1, 0, -1) if _fills(parallel, n, sequences)]
        instead = f", or microbatches = {fewer[0]}" if fewer else ""
        found.append(
            f"{parallel.microbatches} micro-batches of a rank's {sequences} sequences per step: {empty} empty "
            "sequences are added, which costs time; use data.batch = "
            f"{data_parallel_size * (sequences + empty)}{instead}"
        )
    return found


def _fills(parallel: ParallelSettings, count: int, sequences: int) -> bool:
    """Whether ``count`` micro-batches of ``sequences`` are possible without padding."""
    if padding(dataclasses.replace(parallel, microbatches=count), sequences):
        return False
    return parallel.pp == 1 or _runs(parallel, count)


def _runs(parallel: ParallelSettings, count: int) -> bool:
    """Whether the schedule can run with ``count`` micro-batches."""
    from ..parallel.pipeline.schedules import check_microbatches

    assert parallel.schedule is not None
    try:
        check_microbatches(parallel.schedule, count, parallel.pp)
    except ValueError:
        return False
    return True
