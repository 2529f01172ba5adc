"""The least time that an op's call can take on a device: a side that claims less is not computing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels.dev.registry import Case, OpSpec
from .benchmark import Work
from .drawn import tensors
from .report import PEAK_MARGIN
from .timing import Ceilings

# A shared CPU's ceilings may be measured while others work, and a call while they rest.
MARGINS = {"cpu": 2.0, "cuda": PEAK_MARGIN}


def work_of(spec: OpSpec, case: Case, inputs: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> Work:
    """What the op says that a call needs, or where it says nothing, the writing of the outputs.

    Outputs in the memory of the inputs do not count: the op may touch a part of them.
    """
    if spec.work is not None:
        return Work(*spec.work(case))
    own = {x.untyped_storage().data_ptr() for x in tensors(inputs)}
    written = (x for x in outputs.values() if x.untyped_storage().data_ptr() not in own)
    return Work(0, sum(x.numel() * x.element_size() for x in written))


def impossible(name: str, samples: Sequence[float], work: Work, ceilings: Ceilings, device: torch.device) -> str:
    """Why no call can be as fast as the median of ``samples`` (microseconds); an empty string if one can."""
    least = max(work.flops / ceilings.flops, work.bytes / ceilings.bandwidth) * 1e6
    found = sorted(samples)[len(samples) // 2]
    if found * MARGINS[device.type] >= least:
        return ""
    return (
        f"{name} claims {found:.3g} us, and {work.flops:.3g} FLOP and {work.bytes:.3g} bytes take {least:.3g} us at "
        "least at the rates that were measured on this device"
    )
