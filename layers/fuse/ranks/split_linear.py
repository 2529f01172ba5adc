"""A linear layer of a foreign model, split over ranks in place, for cases that our own layers do not cover.

There are two such cases. transformers' Conv1D stores W^T. A packed layer (gate and up, or queries, keys and values)
holds parts of which each rank needs a share, but torch's engines and checkpoints split its parameters evenly into
consecutive rows: each rank therefore exchanges rows with the others before the product, and gradients after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....kernels.linear import linear_act_choice
from ....parallel.core import mappings
from ....parallel.core.sharding import local_tensors
from ....parallel.linear import column_linear, row_linear
from ...linear import linear_init
from ...module import Runs, ShardedModule, TensorParallel
from ...options import LayerKwargs, LayerOptions, Unpack


class SplitLinear(TensorParallel, ShardedModule):
    """``nn.Linear`` or Conv1D with its output features (``rows=False``) or its input features split over the ranks.

    ``transposed``: the weight is stored as [D, F]. ``exchange``: the output features of each rank, if they differ from
    the consecutive ones that its parameters hold. By columns x is whole and y holds this rank's features; with ``rows``
    x holds this rank's features and y is whole.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        rows: bool = False,
        transposed: bool = False,
        exchange: mappings.RowExchange | None = None,
        **options: Unpack[LayerKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, LayerKwargs)
        super().__init__(shared)
        self.keep(shared)
        self.in_features, self.out_features = in_features, out_features
        self.rows, self.transposed, self.exchange = rows, transposed, exchange
        shape = (in_features, out_features) if transposed else (out_features, in_features)
        weight_init, bias_init = linear_init(in_features, shared.init_std)
        self.add_parameter("weight", shape, int(rows is not transposed), weight_init)
        self.add_parameter("bias", (out_features,) if bias else None, None if rows else 0, bias_init)

    def operand(self) -> tuple[Any, Any]:
        """This rank's weight [F/R, D] (with ``rows`` [F, D/R]) and bias, plain; a collective with an ``exchange``."""
        weight, bias = self._own()
        if self.exchange is None:
            return weight, bias
        weight = mappings.exchange_rows(weight, self.exchange, site="packed.weight")
        return weight, None if bias is None else mappings.exchange_rows(bias, self.exchange, site="packed.bias")

    def _own(self) -> tuple[Any, Any]:
        weight, bias = local_tensors(self.weight, self.bias)
        return weight.t() if self.transposed else weight, bias

    def exchanges_results(self, x: torch.Tensor) -> bool:
        """Whether to exchange rows of y^T [F/R, T] instead of the weight's [F/R, D], because there are fewer tokens."""
        return self.exchange is not None and x.numel() < x.shape[-1] * x.shape[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        swap = self.exchanges_results(x)
        weight, bias = self._own() if swap else self.operand()
        if self.rows:
            return row_linear(x, weight, bias, self.tp_options("linear.out"))
        y = column_linear(x, [weight], [bias], self.tp_options("linear.in"))[0]
        if not swap:
            return y
        assert self.exchange is not None
        features = mappings.exchange_rows(y.flatten(0, -2).t(), self.exchange, site="packed.result")
        return features.t().reshape(*y.shape[:-1], -1)

    def runs(self, device: torch.device) -> Runs:
        return [("linear_act", linear_act_choice(self.weight.dtype, device, self.impl))]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {'rows' if self.rows else 'columns'}, {self.sharding_repr()}"
