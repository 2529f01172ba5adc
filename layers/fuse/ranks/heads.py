"""Find which features of an attention module's projections belong to which head, by running the module's own forward.

A trial replaces each projection by a stand-in that returns the numbers of its features instead of their values, and
rotary positions by the identity. The numbers are scaled down, so that no clipping changes them, and a second token
holds ones, so that a scale can be divided out. The arguments of transformers' attention functions, or of torch's
scaled_dot_product_attention, then show which features each head reads, and the input of the output layer shows the
order of the heads' results. The method works for every packing of queries, keys and values and every naming of sizes. A
second trial, with one rank's features and sizes, shows whether the forward can run on a part of the heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import products
from ..matchers import rotary
from ..probing import Foreign, foreign
from ..spelled_out.eager_attention import attending
from ..view import Stand, View, with_globals

# The names of the number of heads in modules and configs.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


class Heads(NamedTuple):
    """The features that each query head reads, numbered consecutively over all projections of the module."""

    q: list[list[int]]
    k: list[list[int]]
    v: list[list[int]]
    called: tuple[str, ...]  # the projections, in order
    behind: str  # the layer that reads the heads' results, concatenated
    normed: dict[str, list[int]]  # the features that each norm over all heads reads

    def of_rank(self, rank: int, size: int) -> Heads:
        """The heads of one of ``size`` ranks."""
        each = len(self.q) // size
        mine = slice(rank * each, (rank + 1) * each)
        heads = self._replace(q=self.q[mine], k=self.k[mine], v=self.v[mine])
        normed = {name: [each for each in over if each in heads.features] for name, over in self.normed.items()}
        return heads._replace(normed=normed)

    @property
    def features(self) -> set[int]:
        return {number for part in (self.q, self.k, self.v) for head in part for number in head}


# Arguments of attention modules, beside hidden states, that are the same for all heads.
_FOR_ALL = {"past_key_values", "past_key_value", "layer_past", "position_embeddings", "position_ids", "cache_position"}
_FOR_ALL |= {"output_attentions", "use_cache", "residual", "encoder_hidden_states", "encoder_attention_mask"}
# Arguments that may have a part for each head: [B * N, ...], [N, S, T] or [B, N, S, T].
_FOR_EACH = ("alibi", "position_bias", "attention_mask", "mask")


def given_to_heads(forward: Any) -> dict[str, int] | None:
    """The arguments of ``forward`` that may have a part per head, with their positions; None: some are unknown."""
    takes = [each for each in inspect.signature(forward).parameters.values() if each.name != "self"]
    named = {each.name: place for place, each in enumerate(takes) if each.kind is each.POSITIONAL_OR_KEYWORD}
    if any(place and name not in _FOR_ALL and name not in _FOR_EACH for name, place in named.items()):
        return None
    return {name: place for name, place in named.items() if name in _FOR_EACH}


def part_of_heads(x: torch.Tensor, heads: int, rank: int, size: int) -> torch.Tensor:
    """One rank's part of an argument that covers all heads."""
    each = heads // size
    if x.dim() == 4:
        return x if x.shape[1] == 1 else x.narrow(1, rank * each, each)
    if x.dim() == 3 and x.shape[0] % heads == 0:
        return x.unflatten(0, (-1, heads)).narrow(1, rank * each, each).flatten(0, 1)
    return x


def numbered(module: nn.Module) -> dict[str, range]:
    """The feature numbers of each linear layer of ``module``, consecutive over the layers."""
    found, start = {}, 0
    for name, child in module._modules.items():
        if products.is_linear(child):
            found[name] = range(start, start + products.width_out(child))
            start = found[name].stop
    return found


@torch.no_grad()
def heads_of(
    module: nn.Module, forward: Any, features: Mapping[str, Any], replaced: Mapping[str, Any] | None = None
) -> Heads | None:
    """The heads that ``module``'s ``forward`` forms if its layers return ``features``; None if the trial finds none.

    ``replaced`` gives other values to attributes, such as the number of heads.
    """
    if not features:
        return None
    run = _Run(features)
    stands: dict[str, Any] = {}
    for name, child in module._modules.items():
        if name in features:
            stands[name] = Stand(child, partial(run.project, name))
        elif child is not None and next(child.parameters(), None) is not None:
            stands[name] = Stand(child, partial(run.norm, name))
    stands |= replaced or {}
    if hasattr(module, "config"):
        stands["config"] = View(stands.get("config", module.config), {"_attn_implementation": "sdpa"})
    spelled_out = attending(getattr(module, "_stock", type(module)), {rotary.NAME: rotary.none})
    forward = spelled_out or with_globals(forward, {"ALL_ATTENTION_FUNCTIONS": run, rotary.NAME: rotary.none})
    stands.setdefault("_match", SimpleNamespace())
    width = next(products.width_in(module._modules[name]) for name in features)
    view = View(module, {**stands, "training": False})
    given = _arguments(module, width, next((getattr(view, n) for n in HEADS if hasattr(view, n)), 1))
    try:
        with run, foreign("on stand-ins for its projections its forward", _Done):
            forward(view, *given)
    except _Done:
        pass
    except Foreign:
        return None
    return run.found()


class _Done(Exception):
    pass


class _Run(TorchFunctionMode):
    """One trial run of the forward, and its observations."""

    def __init__(self, features: Mapping[str, Any]) -> None:
        super().__init__()
        self.features = features
        self.called: list[str] = []
        self.qkv: tuple[torch.Tensor, ...] | None = None
        self.behind: tuple[str, torch.Tensor] | None = None
        self.normed: dict[str, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args[:3], *list((kwargs or {}).values())[: 3 - len(args)]).transpose(1, 2)
        return func(*args, **(kwargs or {}))

    def get_interface(self, *_: Any) -> Any:
        """Stands in for the method of transformers' ``ALL_ATTENTION_FUNCTIONS``."""
        return lambda module, q, k, v, *args, **kwargs: (self._attend(q, k, v), None)

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.qkv is not None:
            self.behind = name, x
            raise _Done
        self.called.append(name)
        return _numbers(torch.tensor(list(self.features[name])))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Stand in for a norm of queries or keys: per head [1, 2, N, H] (or transposed), or over all [1, 2, N * H]."""
        if x.dim() == 3:
            self.normed[name] = x
        return x

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if any(not isinstance(x, torch.Tensor) or x.dim() != 4 for x in (q, k, v)):
            raise _Done
        self.qkv = q, k, v
        heads, width = q.shape[1], v.shape[-1]
        return _numbers(torch.arange(heads * width)).unflatten(-1, (heads, width))

    def found(self) -> Heads | None:
        if self.qkv is None or self.behind is None:
            return None
        name, result = self.behind
        heads = self.qkv[0].shape[1]
        if any(x.shape[0] != 1 or x.shape[2] != 2 or not x.shape[1] or heads % x.shape[1] for x in self.qkv):
            return None
        if any(x.dim() != 3 or x.shape[:2] != (1, 2) for x in (result, *self.normed.values())):
            return None
        if not all(x.is_floating_point() for x in (*self.qkv, result, *self.normed.values())):  # not feature numbers
            return None
        q, k, v = (_read(x.repeat_interleave(heads // x.shape[1], 1)[0].transpose(0, 1)) for x in self.qkv)
        normed = {name: _read(x[0]) for name, x in self.normed.items()}
        order = _read(result[0])
        return Heads(q, k, v, tuple(self.called), name, normed) if order == [*range(result.shape[-1])] else None


def _numbers(features: torch.Tensor) -> torch.Tensor:
    """Encode feature numbers as [1, 2, F]: the numbers, then ones, both scaled down."""
    return torch.stack([features, torch.ones_like(features)])[None].double() * 2.0**-30


def _read(x: torch.Tensor) -> Any:
    """Decode the feature numbers in x [2, ...]."""
    return (x[0] / x[1]).round().long().tolist()


def _arguments(module: nn.Module, width: int, heads: int) -> list[Any]:
    x = torch.zeros(1, 2, width, dtype=torch.float64)
    bias = torch.zeros(heads, 1, 2, dtype=torch.float64)
    known = {
        **{"position_embeddings": (x[..., :2], x[..., :2]), "position_ids": torch.arange(2)[None]},
        **{"residual": x, "alibi": bias, "position_bias": bias},
    }
    given: list[Any] = []
    for each in inspect.signature(type(module).forward).parameters.values():
        if each.kind is not each.POSITIONAL_OR_KEYWORD or each.name == "self":
            continue
        default = None if each.default is each.empty else each.default
        given.append(x if not given else known.get(each.name, default))
    return given
