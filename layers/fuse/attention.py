"""Attention modules: the projections of one input share a product, and rotary positions take one launch.

The stock forward runs, and the attention function gets what it got before. What changes is what the forward sees: a
view of the module whose projections run together, and in a copy of the function the global name
``apply_rotary_pos_emb``, which is transformers' in every model, bound to ours.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kernels.linear import linear_act
from ...kernels.rope import rope_choice
from ...kernels.runtime.dispatch import Choice
from . import products, rotary
from .swap import Fused, Match
from .view import Shared, Stand, View, names_in

# The projections of queries, keys and values, by their names in transformers' models. Whether they get one input is
# seen in each call.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("wq", "wk", "wv"))


class _Attention(Match):
    def __init__(self, module: nn.Module, group: tuple[str, ...], forward: Any, rotates: bool) -> None:
        ops = [f"linear_act({', '.join(group)})"] if group else []
        super().__init__(
            (*ops, *(["apply_rope"] if rotates else [])), {name: type(module._modules[name]) for name in group}
        )
        self.group, self.forward, self.rotates = group, forward, rotates
        self.apart = False  # the projections turned out to have different inputs


class FusedAttention(Fused):
    """The stock forward with our rotary positions, and with projections that run together."""

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._match.forward(self, *args, **kwargs)  # where the projections are others, positions stay ours

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        match = self._match
        if not match.group or match.apart:
            return self.stock_forward(*args, **kwargs)
        shared = Shared({name: getattr(self, name) for name in match.group}, _project)
        stands = {name: Stand(layer, partial(shared.call, name)) for name, layer in shared.layers.items()}
        result = match.forward(View(self, stands), *args, **kwargs)
        match.apart = shared.apart  # from now on
        return result

    def why_stock(self) -> str | None:
        return "its projections get different inputs" if self._match.apart else super().why_stock()

    def runs(self, device: torch.device) -> list[tuple[str, Choice]]:
        if self._match is None or self.why_stock() is None:
            return super().runs(device)
        return [("apply_rope", rope_choice(device))] if self._match.rotates else []


def _project(x: torch.Tensor, layers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return linear_act(x, *products.operands(layers))


class Attention:
    """Matches a module with projections named as in ``GROUPS``, or whose forward calls ``apply_rotary_pos_emb``."""

    fused = FusedAttention

    def match(self, module: nn.Module) -> Match | None:
        children = module._modules
        forward: Any = type(module).forward
        if not names_in(forward):
            return None
        group = next((names for names in GROUPS if _share(children, names)), ())
        rotate = None
        if rotary.NAME in getattr(getattr(forward, "__code__", None), "co_names", ()):
            rotate = rotary.ours(forward.__globals__.get(rotary.NAME))
        if not group and rotate is None:
            return None
        if rotate is not None:
            forward = _with_global(forward, rotary.NAME, rotate, _globals_of(forward))
        return _Attention(module, group, forward, rotates=rotate is not None)


def _share(children: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether the children of these names are linear layers that may have one input."""
    layers = [children.get(name) for name in names]
    return all(map(products.is_linear, layers)) and len({products.width_in(layer) for layer in layers}) == 1


def _globals_of(function: types.FunctionType) -> frozenset[tuple[str, int]]:
    """The global names that ``function`` reads, with what they are bound to now."""
    scope = function.__globals__
    return frozenset((name, id(scope[name])) for name in function.__code__.co_names if name in scope)


@functools.cache
def _with_global(function: types.FunctionType, name: str, value: Any, _: frozenset[tuple[str, int]]) -> Any:
    """``function`` with one global name bound to ``value``; the same one, while its other names are bound as before."""
    scope = {**function.__globals__, name: value}
    del scope["__name__"]  # torch.compile would take it for the module of that name, and guard what the name is there
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    return copied
