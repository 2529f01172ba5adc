"""The feed-forward layer of a transformer, split over a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.linear import ACTIVATIONS, apply_activation
from ..parallel.mesh import MeshLike, tp_group
from .linear import ColumnParallelLinear, RowParallelLinear, project
from .module import check_divides


class ParallelMLP(nn.Module):
    """``c_proj(activation(c_fc(x)))``, or gated: ``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    x and the result are [..., D], replicated; with sequence parallelism [T/R, D]. The first layer splits columns, the
    second rows, so the activation between them stays where it is: one all-reduce forward and one backward (with
    sequence parallelism an all-gather and a reduce-scatter each way). Parameters are called as in Starcoder2
    (``c_fc``, ``c_proj``) or, gated, as in Llama (``gate_proj``, ``up_proj``, ``down_proj``).

    ``activation=None`` means tanh-GeLU, or SiLU where gated; ``bias=None`` means biases unless gated.
    Raises ValueError where ``ffn_size`` does not divide by the group's size.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str | None = None,
        gated: bool = False,
        bias: bool | None = None,
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        params: str = "dtensor",
        impl: str = "auto",
        init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = tp_group(mesh)
        self.gated = gated
        self.activation = activation or ("silu" if gated else "gelu_tanh")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        check_divides("ffn_size", ffn_size, self.group)
        common: dict[str, Any] = {
            "bias": not gated if bias is None else bias,
            "mesh": self.group,
            "sequence_parallel": sequence_parallel,
            "params": params,
            "impl": impl,
            "site": "mlp",
            "init_std": init_std,
            "dtype": dtype,
            "device": device,
        }
        if gated:
            self.gate_proj = ColumnParallelLinear(hidden_size, ffn_size, **common)
            self.up_proj = ColumnParallelLinear(hidden_size, ffn_size, **common)
            self.down_proj = RowParallelLinear(ffn_size, hidden_size, **common)
        else:
            self.c_fc = ColumnParallelLinear(hidden_size, ffn_size, activation=self.activation, **common)
            self.c_proj = RowParallelLinear(ffn_size, hidden_size, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            gate, up = project(x, self.gate_proj, self.up_proj)
            return self.down_proj(apply_activation(gate, self.activation) * up)
        return self.c_proj(self.c_fc(x))
