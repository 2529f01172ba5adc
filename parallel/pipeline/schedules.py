"""The pipeline schedules by name: torch's own (torch.distributed.pipelining), and the naive one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...kernels.runtime.names import expected
from .partition import owners

# The two waits exist from torch 2.15 on.
_BACKWARD = {"FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "SEND_B", "RECV_B", "REDUCE_GRAD"}
_BACKWARD |= {"WAIT_SEND_B", "WAIT_REDUCE_GRAD"}


@contextlib.contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Within the block one of torch's schedules has no backward in its list of actions, if it uses a list.

    In an evaluation torch (2.13) keeps the backward actions, which do nothing, except that those that pass a gradient
    to another stage of the same rank raise; torch 2.15 also waits for gradients that no rank sends.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if orders is None:
        yield
        return
    flat = {
        rank: [leaf for action in order for leaf in action.sub_actions or [action]] for rank, order in orders.items()
    }
    schedule.pipeline_order_with_comms = {
        rank: [action for action in order if action.computation_type.name not in _BACKWARD]
        for rank, order in flat.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = orders


class Schedule(NamedTuple):
    """A pipeline schedule."""

    torch_name: str  # of torch's class
    stages_per_rank: int
    splits_backward: bool  # into a pass for the inputs' gradients and one for the weights'
    layout: str  # which rank has which stages: see partition.owners

    @property
    def kind(self) -> type[Any]:
        """torch's class, or ours. It is imported here because that takes as long as torch itself."""
        if self.torch_name == "ScheduleNaive":
            from .naive import ScheduleNaive

            return ScheduleNaive
        from torch.distributed import pipelining

        kind: type[Any] = getattr(pipelining, self.torch_name)
        return kind


# Huang et al., "GPipe" (arXiv:1811.06965); Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
# (arXiv:2006.09503) and "Efficient Large-Scale Language Model Training" (arXiv:2104.04473); Qi et al., "Zero Bubble
# Pipeline Parallelism" (arXiv:2401.10241); DeepSeek-AI, "DeepSeek-V3" (arXiv:2412.19437). GPipe with re-materialisation
# is "gpipe" with a model that recomputes.
SCHEDULES = {
    "naive": Schedule("ScheduleNaive", 1, False, "loop"),
    "gpipe": Schedule("ScheduleGPipe", 1, False, "loop"),
    "1f1b": Schedule("Schedule1F1B", 1, False, "loop"),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, False, "loop"),
    "interleaved_zb": Schedule("ScheduleInterleavedZeroBubble", 2, True, "loop"),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, True, "v"),
    "dualpipev": Schedule("ScheduleDualPipeV", 2, True, "v"),
}


def find(name: str) -> Schedule:
    """The schedule ``name``; ValueError for an unknown one."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: {expected(name, SCHEDULES)}")
    return SCHEDULES[name]


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """The stages of a pipeline rank under a schedule."""
    schedule = find(name)
    owner = owners(ranks * schedule.stages_per_rank, ranks, schedule.layout)
    return [stage for stage, at in enumerate(owner) if at == rank]


def default_microbatches(name: str, ranks: int) -> int:
    """Two for each stage, which every schedule supports."""
    return 2 * ranks * find(name).stages_per_rank


def check_microbatches(name: str, microbatches: int, ranks: int) -> None:
    """ValueError if the schedule cannot run with that many micro-batches."""
    schedule = find(name)
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: expected at least 1")
    least = {"1f1b": ranks, "dualpipev": ranks * schedule.stages_per_rank}.get(name, 1)
    if microbatches < least:
        raise ValueError(
            f"schedule={name!r} over {ranks} pipeline ranks needs at least {least} micro-batches, not {microbatches}: "
            "raise microbatches, or use schedule='gpipe', which runs with any number"
        )
    rounds = max(1, microbatches // ranks)
    if name.startswith("interleaved") and microbatches % rounds:
        raise ValueError(
            f"schedule={name!r} over {ranks} pipeline ranks runs in {rounds} rounds, and {microbatches} micro-batches "
            f"do not divide by that: use {microbatches - microbatches % ranks} or "
            f"{microbatches - microbatches % ranks + ranks}"
        )
