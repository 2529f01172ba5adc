"""The functions that fused forwards call instead of a module's linear layers, whose parameters they read."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from ...kernels.linear import apply_activation, gated_linear, linear_act, linear_act_choice
from ...kernels.runtime.dispatch import uses_reference
from ...parallel.core import mappings
from ...parallel.core.mesh import SINGLE, Group
from ...parallel.core.options import TPOptions
from ...parallel.core.sharding import local_tensors
from ...parallel.linear import column_linear, row_linear
from ...parallel.mlp import fused_mlp, settled_mlp
from .probing import Foreign, apart, foreign
from .ranks.split_linear import SplitLinear

Layers = tuple[Any, ...]


def is_linear(module: nn.Module | None) -> bool:
    """Whether ``module`` computes x @ W^T + b of its own plain ``weight`` and ``bias``, and nothing more.

    It holds for nn.Linear, for classes that compute the same in other code, and for transformers' Conv1D, which stores
    W^T.
    """
    if module is None or "forward" in module.__dict__ or module._modules or module._buffers:
        return False
    if set(module._parameters) != {"weight", "bias"}:
        return False
    if any(is_lazy(param) for param in module._parameters.values() if param is not None):
        return False
    if not all(p is None or type(p.data) in _PLAIN for p in module._parameters.values()):  # not quantised
        return False
    kind: Any = type(module)
    if kind is nn.Linear or is_conv1d(module):
        return True
    code = getattr(kind.forward, "__code__", None)
    if not issubclass(kind, nn.Linear) or code is None or not set(code.co_names) <= _OF_A_LINEAR:
        return False
    return all(apart(_computes_linear, module, training) for training in (True, False))


_PLAIN = (torch.Tensor, FakeTensor)
_OF_A_LINEAR = {"weight", "bias", "F", "nn", "torch", "functional", "linear", "matmul", "T", "t", "mT"}


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, which needs that package to be imported."""
    kind = type(module)
    return kind is not nn.Linear and kind is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


@torch.no_grad()
def _computes_linear(module: nn.Module, training: bool) -> bool:
    stand_in = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(3, 5), (2, 5)])
    bias = None if module._parameters["bias"] is None else nn.Parameter(weight[:, 0].clone())
    stand_in.__dict__["_parameters"] = {"weight": nn.Parameter(weight), "bias": bias}
    stand_in.__dict__ |= {"in_features": 5, "out_features": 3, "training": training}
    try:
        with foreign("its forward"):
            y = stand_in.forward(x)
    except Foreign:
        return False
    ours = F.linear(x, weight, bias)
    alike = isinstance(y, torch.Tensor) and y.shape == ours.shape and y.dtype == ours.dtype
    return alike and torch.allclose(y, ours, 1e-12, 1e-12)


def width_in(layer: Any) -> int:
    """D, the input width of a layer that :func:`is_linear` accepts."""
    return int(layer.weight.shape[0 if is_conv1d(layer) else 1])


def width_out(layer: Any) -> int:
    """F, the output width of a layer that :func:`is_linear` accepts."""
    return int(layer.weight.shape[1 if is_conv1d(layer) else 0])


def operands(layers: Layers, packed: bool = False) -> tuple[list[Any], list[Any]]:
    """The weights [F, D] and biases [F] of ``layers``, or of the two halves of one ``packed`` layer [2 F, D]."""
    weights, biases = [], []
    for layer in layers:
        params = layer.__dict__["_parameters"]  # nn.Module's own search takes three times as long
        if type(layer) is nn.Linear and "weight" in params and "bias" in params:
            weights.append(params["weight"])
            biases.append(params["bias"])
            continue
        split = isinstance(layer, SplitLinear)
        weight, bias = layer.operand() if split else (_held(layer, "weight"), _held(layer, "bias"))
        weights.append(weight.t() if not split and is_conv1d(layer) else weight)
        biases.append(bias)
    if not packed:
        return weights, biases
    (weight,), (bias,) = weights, biases
    return list(weight.chunk(2)), [None, None] if bias is None else list(bias.chunk(2))


def _held(layer: Any, name: str) -> Any:
    """``getattr(layer, name)`` without nn.Module's slow attribute lookup where ``name`` is a parameter."""
    params = layer._parameters
    return params[name] if name in params else getattr(layer, name)


def hidden(x: torch.Tensor, layers: Layers, activation: str, packed: bool) -> torch.Tensor:
    """``activation(first(x))``, or gated ``activation(gate(x)) * up(x)``."""
    weights, biases = operands(layers, packed)
    group = group_of(layers[0])
    pack = not layers[0].training
    if group.size > 1:
        options = TPOptions(group, site="mlp.in", pack_weight=pack)
        return column_linear(x, weights, biases, options, activation=activation)[0]
    if len(weights) == 2:
        return gated_linear(x, *weights, *biases, activation=activation, pack_weight=pack)
    return linear_act(x, weights[0], biases[0], activation=activation, pack_weight=pack)


def feed_forward(x: torch.Tensor, layers: Layers, last: Any, activation: str, packed: bool) -> torch.Tensor:
    """``last(hidden(x))``; with gradients and kernels as one autograd function, which keeps less for backward."""
    (weight,), (bias,) = operands((last,))
    if group_of(last).size > 1:
        return _over_ranks(x, layers, weight, bias, activation, packed)
    plain = uses_reference("auto", x) or (torch.compiler.is_compiling() and not torch.is_grad_enabled())
    if not plain:
        weights, biases = operands(layers, packed)
        y, _ = settled_mlp(x, (*weights, *biases, weight, bias), activation)
        if y is not None:
            return y
    if plain or not linear_act_choice(x.dtype, x.device).triton:
        return linear_act(hidden(x, layers, activation, packed), weight, bias, pack_weight=not last.training)
    return fused_mlp(x, weights, biases, weight, bias, _ALONE, activation=activation)


_ALONE = TPOptions(SINGLE, site="mlp")


def group_of(layer: Any) -> Group:
    """The ranks over which ``layer`` is split."""
    group: Group = vars(layer).get("group", SINGLE)
    return group


def _over_ranks(x: torch.Tensor, layers: Layers, weight: Any, bias: Any, activation: str, packed: bool) -> torch.Tensor:
    group, sequence = group_of(layers[0]), getattr(layers[0], "sequence", None)
    divided = sequence is not None and sequence.active
    if packed and not divided and layers[0].exchanges_results(x):
        gate, up = layers[0](x).chunk(2, -1)
        options = TPOptions(group, site="mlp.out", pack_weight=not layers[0].training)
        return row_linear(apply_activation(gate, activation) * up, weight, bias, options)
    weights, biases = operands(layers, packed)
    rows = x.flatten(0, -2) if divided else x  # the order does not matter here
    options = TPOptions(group, sequence_parallel=divided, site="mlp", pack_weight=not layers[0].training)
    if not torch.compiler.is_compiling():
        y = fused_mlp(rows, weights, biases, weight, bias, options, activation=activation)
        return y.view(x.shape) if divided else y
    enter = mappings.all_gather_from if divided else mappings.copy_to
    own = *local_tensors(*weights), *local_tensors(*biases)
    h = (gated_linear if len(weights) == 2 else linear_act)(
        enter(rows, group, site="mlp.in"), *own, activation=activation
    )
    y = row_linear(h, weight, bias, TPOptions(group, sequence_parallel=divided, site="mlp.out"))
    return y.view(x.shape) if divided else y


def columns(x: torch.Tensor, layers: Layers) -> tuple[torch.Tensor, ...]:
    """This rank's output features of ``layers`` on x; the caller sums the gradient of x over the ranks."""
    weights, biases = operands(layers)
    return linear_act(x, local_tensors(*weights), local_tensors(*biases), pack_weight=not layers[0].training)


def rows_scattered(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Run ``layer``, split by rows, on x [B, S, D/R]; return this rank's part of the sequences [B, S/R, F]."""
    (weight,), (bias,) = operands((layer,))
    y = linear_act(x, *local_tensors(weight), pack_weight=not layer.training)
    y = mappings.reduce_scatter_to(y, layer.group, dim=1, site="attention.out")
    (bias,) = mappings.copy_all_to(local_tensors(bias), layer.group, site="attention.out.bias")
    return y if bias is None else y + bias.to(y.dtype)
