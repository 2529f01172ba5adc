"""Sequence parallelism in a foreign model: in training, its list of layers works on this rank's part of each sequence.

    x [B, S, D] -> first layer: this rank's x [B, S/R, D] -> ... -> last layer -> x [B, S, D]

Norms and residuals see [B, S/R, D], so they save R times less for backward. Attention and feed-forward parts gather the
sequences before their first product and scatter the sums after their last one (Korthikanti et al., arXiv:2205.05198).
Before the first layer and after the last one every rank has whole sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....parallel.core import mappings
from ....parallel.core.mesh import Group
from ..matchers.attention import FusedAttention
from ..matchers.feed_forward import FusedFeedForward
from ..matchers.norms import FusedNorm
from ..swap import Fused, Match, become, on_first, on_result
from ..view import names_in


class Sequence:
    """The division of sequences among the ranks of ``group``; it is active in training only."""

    def __init__(self, group: Group, layers: list[nn.Module]) -> None:
        self.group, self.first, self.last = group, layers[0], layers[-1]

    @property
    def active(self) -> bool:
        return self.first.training  # one flag, so that no two modules differ


class FusedLayer(Fused):
    """The first layer takes this rank's part of each sequence; the last layer gathers the parts."""

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        sequence = self._match.sequence
        if not sequence.active:
            return self.stock_forward(*args, **kwargs)
        if self is sequence.first:
            args, kwargs = on_first(args, kwargs, self._split)
        out = self.stock_forward(*args, **kwargs)
        return on_result(out, self._gather) if self is sequence.last else out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        group = self._match.sequence.group
        if x.shape[1] % group.size:
            raise ValueError(
                f"sequence_parallel: sequences of {x.shape[1]} tokens do not divide by the {group.size} ranks: pad the "
                "batch, or fuse without sequence_parallel"
            )
        return mappings.split_to(x, group, dim=1, site="layers.in")

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        return mappings.gather_from(x, self._match.sequence.group, dim=1, site="layers.out")


class Layer:
    """The fused form of the first and last layer, which :func:`divide` applies; it matches nothing by itself."""

    fused = FusedLayer

    def match(self, module: nn.Module) -> Match | None:
        return None


def divide(model: nn.Module, group: Group) -> None:
    """Let the layers of ``model``, which is split over ``group``, divide sequences in training.

    Raises ValueError for a model whose layers do more than attention, feed-forward parts, norms and sums.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]
    layers = max(lists, key=lambda each: sum(param.numel() for param in each.parameters()), default=None)
    if layers is None:
        raise ValueError(f"sequence_parallel: {type(model).__name__} has no list of layers")
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        if (why := _why_not(layer)) is not None:
            raise ValueError(
                f"sequence_parallel: {paths[layer]} ({type(layer).__name__}): {why}; fuse without sequence_parallel"
            )
    sequence = Sequence(group, list(layers))
    for layer in layers:
        for child in layer.modules():
            if isinstance(child, Fused) and child in layer.children():
                child._match.sequence = sequence
                for part in getattr(child._match, "parts", ()):
                    for name in (*part.first, part.last):
                        child.get_submodule(name).sequence = sequence  # type: ignore[assignment]
    for layer in {sequence.first, sequence.last}:
        match = Match(())
        match.sequence = sequence
        become(layer, Layer(), match)


def _why_not(layer: nn.Module) -> str | None:
    if next(layer.parameters(recurse=False), None) is not None:
        return "it has parameters of its own"
    for name, child in layer.named_children():
        split = isinstance(child, (FusedAttention, FusedFeedForward)) and child._match.group.size > 1
        if not split and not isinstance(child, FusedNorm) and next(child.parameters(), None) is not None:
            return f"{name} is a {type(child).__name__} that is not split"
        if isinstance(child, FusedFeedForward) and (other := child._match.reads & _SHAPES):
            return f"{name} uses {', '.join(sorted(other))}"
    read = names_in(type(layer).forward)
    numbers = {name for name, value in vars(layer).items() if isinstance(value, (int, float))}
    absent = {name for name in read if not hasattr(layer, name) and name not in type(layer).forward.__globals__}
    other = read - {*layer._modules, *numbers} - _HARMLESS - (absent - _SHAPES)
    return f"it uses {', '.join(sorted(other))}" if not read or other else None


_HARMLESS = {"nn", "F", "functional", "dropout", "training", "hasattr", "ValueError"}
_SHAPES = {"shape", "size", "view", "reshape", "flatten", "transpose", "permute", "mean", "sum", "softmax", "cumsum"}
