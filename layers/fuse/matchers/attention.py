"""The matcher of attention modules: projections of one input share a product, and rotary positions take one launch.

The stock forward still runs, and the attention function gets the same arguments. Two things change for the forward:
``self`` is a view of the module whose projections run together, and in a copy of the function the global name
``apply_rotary_pos_emb``, the same in all models of transformers, is bound to ours. If the forward writes its attention
out in products and a softmax, ``eager_attention.py`` turns that into torch's SDPA.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ....kernels.linear import linear_act
from ....kernels.rope import rope_choice
from ....kernels.runtime.dispatch import Choice
from ....parallel.core import mappings
from ....parallel.core.mesh import Group
from ....parallel.core.options import TPOptions
from ....parallel.core.sharding import local_tensor
from ....parallel.linear import column_linear
from ...attention.sdpa import choose_path
from .. import products
from ..ranks import split_attention
from ..ranks.heads import heads_of, numbered, part_of_heads
from ..spelled_out.eager_attention import attending
from ..swap import Fused, Match, on_first, unlike
from ..view import LiveView, Shared, Stand, View, names_in, with_global
from . import rotary

# The projections of queries, keys and values, by their names in transformers' models. Each call checks whether they get
# the same input.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("wq", "wk", "wv"))


class _Attention(Match):
    def __init__(self, module: nn.Module, names: tuple[str, ...], forward: Any, rotates: bool) -> None:
        ops = [f"linear_act({', '.join(names)})"] if names else []
        super().__init__(
            (*ops, *(["apply_rope"] if rotates else [])), {name: type(module._modules[name]) for name in names}
        )
        self.names, self.forward, self.rotates = names, forward, rotates
        self.sizes: dict[str, Any] = {}  # the sizes that the forward sees for this rank's heads
        self.split: tuple[str, ...] = ()  # the module's own parameters that are split by heads
        self.heads, self.given_to_heads = 0, dict[str, int]()  # of all ranks; the arguments with a part per head
        self.around: dict[str, type] = {}  # the split layers: projections and output layer
        self.apart = False  # the projections turned out to have different inputs
        # None: the forward does not write its attention out; "": torch's SDPA runs it; otherwise the reason why SDPA
        # did not.
        self.spelled_out: str | None = None


class FusedAttention(Fused):
    """The stock forward with our rotary positions and with projections that run together."""

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        # Rotary positions stay ours even if the projections were replaced.
        return self.on_whole_sequences(partial(self._run, {}), args, kwargs)

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        match = self._match
        if match.sequence is not None and match.sequence.active and not unlike(self, match.around):
            return self._run_divided(*args, **kwargs)
        if not match.names or match.apart:
            return self.stock_forward(*args, **kwargs)
        if match.sequence is None and not (match.sizes or match.split or match.given_to_heads):  # whole, in one process
            shared = self._shared(match.names, _project)
            result = match.forward(LiveView.of(self, shared.stands()), *args, **kwargs)
            match.apart = shared.apart  # holds for all later calls
            return result
        return self.on_whole_sequences(partial(self._run_shared, match.names, _project), args, kwargs)

    def _run(self, stands: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        match = self._match
        own = {name: local_tensor(getattr(self, name)) for name in match.split}
        seen = {**stands, **match.sizes, **own}
        if match.given_to_heads:
            args, kwargs = self._of_this_rank(args, kwargs)
        return match.forward(View(self, seen) if seen else self, *args, **kwargs)

    def _of_this_rank(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        match, given, named = self._match, list(args), dict(kwargs)
        for name, place in match.given_to_heads.items():
            where: Any = given if place < len(given) else named
            key = place if place < len(given) else name
            value = where[key] if place < len(given) else where.get(key)
            if isinstance(value, torch.Tensor):
                where[key] = part_of_heads(value, match.heads, match.group.rank, match.group.size)
        return tuple(given), named

    def _run_shared(self, names: tuple[str, ...], project: Any, *args: Any, **kwargs: Any) -> Any:
        shared = self._shared(names, project)
        result = self._run(shared.stands(), *args, **kwargs)
        self._match.apart = shared.apart  # holds for all later calls
        return result

    def _shared(self, names: tuple[str, ...], project: Any) -> Shared:
        children = self._modules
        return Shared({name: children[name] for name in names}, project)

    def _run_divided(self, *args: Any, **kwargs: Any) -> Any:
        """Run on this rank's part of the sequences: gather before the projections, scatter after the last layer."""
        match = self._match
        gather = partial(mappings.all_gather_from, group=match.sequence.group, dim=1, site="attention.in")
        args, kwargs = on_first(args, kwargs, gather)
        *first, last = match.around
        stands = {name: Stand(layer, partial(_column, layer)) for name in first if (layer := getattr(self, name))}
        if match.names and not match.apart:
            stands |= Shared({name: getattr(self, name) for name in match.names}, products.columns).stands()
        stands[last] = Stand(getattr(self, last), partial(products.rows_scattered, getattr(self, last)))
        return self._run(stands, *args, **kwargs)

    def why_stock(self) -> str | None:
        return "its projections get different inputs" if self._match.apart else super().why_stock()

    def runs(self, device: torch.device) -> list[tuple[str, Choice]]:
        match = self._match
        if match is None:
            return []
        choices = dict(super().runs(device))
        if match.rotates:
            choices.setdefault("apply_rope", rope_choice(device))
        if match.spelled_out is not None:
            sdpa = choose_path(device, torch.float32, head_dim=64)
            choices["attention"] = Choice("stock", match.spelled_out) if match.spelled_out else sdpa
        return list(choices.items())


def _column(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return products.columns(x, (layer,))[0]


def _project(x: torch.Tensor, layers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    pack = not layers[0].training
    if products.group_of(layers[0]).size == 1:
        return linear_act(x, *products.operands(layers), pack_weight=pack)
    options = TPOptions(products.group_of(layers[0]), site="attention.in", pack_weight=pack)
    return column_linear(x, *products.operands(layers), options)


class Attention:
    """Matches modules with projections as in ``GROUPS``, ``apply_rotary_pos_emb``, or written-out attention."""

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
        spelled_out = attending(type(module), {} if rotate is None else {rotary.NAME: rotate})
        if not names and rotate is None and spelled_out is None:
            return None
        if rotate is not None and spelled_out is None:
            forward = with_global(forward, rotary.NAME, rotate)
        match = _Attention(module, names, spelled_out or forward, rotates=rotate is not None)
        if spelled_out is not None:
            match.ops, match.spelled_out = (*match.ops, "attention"), ""
        return match

    def split(self, module: Any, match: Any, group: Group) -> str | None:
        """Split ``module`` over ``group`` by heads, or return the reason why it stays whole."""
        return split_attention.split(module, match, group)


class PackedAttention(Attention):
    """Matches attention with nothing to fuse in one process, so that ``split`` can divide it over ranks."""

    def match(self, module: nn.Module) -> Match | None:
        forward: Any = type(module).forward
        if not names_in(forward) or heads_of(module, forward, numbered(module)) is None:
            return None
        return _Attention(module, (), forward, rotates=False)


def _share(children: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether the children of these names are linear layers of one input width, which may therefore share an input."""
    layers = [children.get(name) for name in names]
    return all(map(products.is_linear, layers)) and len({products.width_in(layer) for layer in layers}) == 1
