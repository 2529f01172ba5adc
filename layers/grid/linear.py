"""The linear layer over a grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...kernels.linear import ACTIVATIONS, apply_activation, functional
from ...kernels.runtime.checks import whole_number
from ...kernels.runtime.names import expected
from ...parallel.core.first_calls import compare_call
from ...parallel.grid.grid import ACROSS, WITHIN, GridOptions
from ...parallel.grid.linear import grid_linear
from ..linear import linear_init
from ..module import Runs
from ..options import LayerKwargs, LayerOptions, Unpack
from .module import GridModule


class GridLinear(GridModule):
    """``activation(nn.Linear(in_features, out_features)(x))``, split over a grid (``parallel/grid/grid.py``).

    x [T/i/k, D/j] -> [T/i/j, F/k]; ``turned``, for the layer after it, [T/i/j, F/k] -> [T/i/k, D/j]. Over a grid of two
    axes both are [T/i, D/k] -> [T/i, F/k], and a depth splits the tokens once more. Weights [F, D] are stored as
    [F/k, D/j/i], turned as [F/j/i, D/k], and biases as the rows of weights. ``site`` names the layer's collectives. The
    other keyword arguments are documented in :class:`~shardfuse.layers.options.LayerOptions`.

    Raises ValueError for sizes that the grid cannot divide, with those next to them that it can.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        turned: bool = False,
        activation: str = "identity",
        site: str = "linear",
        **options: Unpack[LayerKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, LayerKwargs)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: {expected(activation, ACTIVATIONS)}")
        super().__init__(shared)
        self.axes = self.grid.axes(turned)
        self.grid.check_width("in_features", whole_number("in_features", in_features), turned=turned)
        if self.grid.flat:
            self.grid.check_count("out_features", whole_number("out_features", out_features))
        else:
            self.grid.check_width("out_features", whole_number("out_features", out_features), turned=not turned)
        self.in_features, self.out_features = in_features, out_features
        self.turned, self.activation, self.site = turned, activation, site
        self.impl, self.overlap, self.strict = shared.impl, shared.overlap, shared.strict
        weight_init, bias_init = linear_init(in_features, shared.init_std)
        self.add_parameter("weight", (out_features, in_features), None, weight_init)
        self.add_parameter("bias", (out_features,) if bias else None, None, bias_init)
        self.reset_parameters()

    def split(self, name: str) -> Mapping[str, int]:
        rows, columns = (ACROSS, WITHIN) if self.axes.weight_dim else (WITHIN, ACROSS)
        return {rows: 0} if name == "bias" else {rows: 0, columns: 1}

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``residual``, of the result's layout, is added to it."""
        (y,) = grid_project(x, self)
        y = apply_activation(y, self.activation)
        return y if residual is None else y + residual

    def runs(self, device: torch.device) -> Runs:
        (weight,) = self.local("weight")
        return [("linear_act", functional.layer_choice(weight, device, self.impl, "identity", self.training))]

    def extra_repr(self) -> str:
        turned = ", turned" if self.turned else ""
        return f"{self.in_features}, {self.out_features}, activation={self.activation}{turned}, {self.sharding_repr()}"


def grid_project(x: torch.Tensor, *layers: Any) -> tuple[torch.Tensor, ...]:
    """Several layers of equal options on one ``x``, without their activations: one gather of x and one product."""
    if torch.compiler.is_compiling():
        raise RuntimeError("a layer over a grid runs eagerly: leave it out of torch.compile, or out of fullgraph=True")
    first = layers[0]
    compare_call(first, first.group, x=x)
    options = GridOptions(first.axes, first.impl, first.overlap, first.strict, first.site)
    return grid_linear(x, [layer.weight for layer in layers], [layer.bias for layer in layers], options)
