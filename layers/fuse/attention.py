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

from ...kernels.rope import rope_choice
from ...kernels.runtime.dispatch import Choice
from ...parallel.core.mesh import Group
from ...parallel.core.options import TPOptions
from ...parallel.linear import column_linear
from . import products, rotary, shard
from .norms import FusedNorm
from .swap import Fused, Match
from .view import Shared, Stand, View, names_in

# The projections of queries, keys and values, by their names in transformers' models. Whether they get one input is
# seen in each call.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("wq", "wk", "wv"))


_OUTPUTS = ("o_proj", "out_proj", "dense", "out_lin", "wo")  # what may follow the attention
# Sizes that a forward may have from its module rather than from its tensors: of all heads, of all keys' heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("hidden_size", "embed_dim", "all_head_size", "inner_dim", "attention_size")


class _Attention(Match):
    def __init__(self, module: nn.Module, names: tuple[str, ...], forward: Any, rotates: bool) -> None:
        ops = [f"linear_act({', '.join(names)})"] if names else []
        super().__init__(
            (*ops, *(["apply_rope"] if rotates else [])), {name: type(module._modules[name]) for name in names}
        )
        self.names, self.forward, self.rotates = names, forward, rotates
        self.sizes: dict[str, int] = {}  # of this rank's heads
        self.apart = False  # the projections turned out to have different inputs


class FusedAttention(Fused):
    """The stock forward with our rotary positions, and with projections that run together."""

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        match = self._match  # where the projections are others, positions stay ours
        return match.forward(View(self, match.sizes) if match.sizes else self, *args, **kwargs)

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        match = self._match
        if not match.names or match.apart:
            return self.stock_forward(*args, **kwargs)
        shared = Shared({name: getattr(self, name) for name in match.names}, _project)
        stands = {name: Stand(layer, partial(shared.call, name)) for name, layer in shared.layers.items()}
        result = match.forward(View(self, {**stands, **match.sizes}), *args, **kwargs)
        match.apart = shared.apart  # from now on
        return result

    def why_stock(self) -> str | None:
        return "its projections get different inputs" if self._match.apart else super().why_stock()

    def runs(self, device: torch.device) -> list[tuple[str, Choice]]:
        if self._match is None or self.why_stock() is None:
            return super().runs(device)
        return [("apply_rope", rope_choice(device))] if self._match.rotates else []


def _project(x: torch.Tensor, layers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    options = TPOptions(products.group_of(layers[0]), site="attention.in")
    return column_linear(x, *products.operands(layers), options)


class Attention:
    """Matches a module with projections named as in ``GROUPS``, or whose forward calls ``apply_rotary_pos_emb``."""

    fused = FusedAttention

    def match(self, module: nn.Module) -> Match | None:
        children = module._modules
        forward: Any = type(module).forward
        if not names_in(forward):
            return None
        names = next((names for names in GROUPS if _share(children, names)), ())
        rotate = None
        if rotary.NAME in getattr(getattr(forward, "__code__", None), "co_names", ()):
            rotate = rotary.ours(forward.__globals__.get(rotary.NAME))
        if not names and rotate is None:
            return None
        if rotate is not None:
            forward = _with_global(forward, rotary.NAME, rotate, _globals_of(forward))
        return _Attention(module, names, forward, rotates=rotate is not None)

    def split(self, module: nn.Module, match: Any, group: Group) -> str | None:
        """Split ``module`` over ``group`` by heads, or say why it stays whole."""
        children = module._modules
        out = next((name for name in _OUTPUTS if name in children), None)
        width = getattr(module, "head_dim", None)
        if not match.names or out is None or not isinstance(width, int):
            return "its projections, its output layer or its head_dim are not known by their names"
        if any(param is not None for param in module._parameters.values()):
            return "it has parameters of its own"
        others = [child for name, child in children.items() if name not in (*match.names, out) and child is not None]
        norms = [child for child in others if isinstance(child, FusedNorm)]
        if any(each for child in others if child not in norms for each in child.parameters()):
            return "it has other children with parameters"
        if any(param.numel() != width for norm in norms for param in norm.parameters()):
            return "a norm runs over all of its heads"
        first = [children[name] for name in match.names]
        heads, keys = (products.width_out(layer) // width for layer in first[:2])
        if (why := shard.why_whole(first, children[out], group, [heads, keys])) is not None:
            return why
        whole = {**dict.fromkeys(_HEADS, heads), **dict.fromkeys(_KEYS, keys), **dict.fromkeys(_WIDTHS, heads * width)}
        match.sizes = {name: size // group.size for name, size in whole.items() if getattr(module, name, None) == size}
        shard.split(first, children[out], group)
        match.kinds = {name: type(children[name]) for name in match.names}
        for norm in norms:
            norm._match.group = group
        return None


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
