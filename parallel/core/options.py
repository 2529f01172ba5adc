"""The options of a tensor-parallel layer's call besides its operands, as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.runtime import onednn
from .mesh import Group


class TPOptions(NamedTuple):
    """The options of one call of a column- or row-parallel layer, or of an MLP made of both."""

    group: Group
    sequence_parallel: bool = False
    fuse_wgrad_accumulation: bool = False  # add the parameters' gradients to their ``main_grad``
    impl: str = "auto"
    overlap: str = "none"  # "auto", "kernel", "chunked" or "none": see overlap/policy.py
    strict: bool = False  # RuntimeError where ``overlap`` is unavailable, instead of a fall-back to "none"
    site: str = "linear"  # the name of its collectives
    pack_weight: bool = False  # for inference on a CPU: see ``linear_act``
    grad: bool = False  # whether autograd is on: inside an autograd function's forward it always reads off

    @property
    def packs(self) -> bool:
        """Whether this call may keep packed weights."""
        return (self.pack_weight or onednn.here.serving) and onednn.PACKS and not self.grad

    def now(self) -> TPOptions:
        """A copy with the current value of ``grad``."""
        return self._replace(grad=torch.is_grad_enabled())
