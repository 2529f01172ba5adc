"""Norms over the model width, by torch's own functions, whose parameters know the group that shares them.

Tensor parallelism without sequence parallelism normalises every token on every rank: the weights are replicated and
so are their gradients. With sequence parallelism a rank normalises its own tokens [T/R, D] only, so the gradients are
summed over the group in backward (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels.dispatch import Choice
from ..parallel.mesh import MeshLike
from .module import Init, Runs, ShardedModule


class LayerNorm(ShardedModule):
    """``nn.LayerNorm(hidden_size)``; x [..., D] (with sequence parallelism [T/R, D])."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        params: str = "dtensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel=sequence_parallel, params=params, dtype=dtype, device=device)
        self.hidden_size = hidden_size
        self.eps = eps
        self.add_parameter("weight", (hidden_size,), None, Init(constant=1.0))
        self.add_parameter("bias", (hidden_size,) if bias else None, None, Init(constant=0.0))
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.local_repeated("weight", "bias", site="norm")
        return F.layer_norm(x, (self.hidden_size,), weight, bias, self.eps)

    def runs(self, device: torch.device) -> Runs:
        return [("layer_norm", Choice("reference", "torch's own layer_norm"))]

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, {self.sharding_repr()}"


class RMSNorm(ShardedModule):
    """``nn.RMSNorm(hidden_size)`` (Zhang and Sennrich, arXiv:1910.07467); x [..., D] as in :class:`LayerNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        params: str = "dtensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel=sequence_parallel, params=params, dtype=dtype, device=device)
        self.hidden_size = hidden_size
        self.eps = eps
        self.add_parameter("weight", (hidden_size,), None, Init(constant=1.0))
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,) = self.local_repeated("weight", site="norm")
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)

    def runs(self, device: torch.device) -> Runs:
        return [("rms_norm", Choice("reference", "torch's own rms_norm"))]

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, {self.sharding_repr()}"
