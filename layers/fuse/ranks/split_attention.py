"""Split attention modules over ranks by heads, with queries, keys and values from one layer or from three."""

from __future__ import annotations

from itertools import chain
from typing import Any

from ....parallel.core.mappings import RowExchange
from ....parallel.core.mesh import SINGLE, Group
from ..matchers.norms import FusedNorm
from ..probing import apart, listening
from ..view import View, names_in
from . import shard
from .heads import HEADS, Heads, given_to_heads, heads_of, numbered

# The names under which a forward may read a size from its module or config instead of its tensors: the number of heads
# (HEADS), of KV heads, and of all heads' features.
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("hidden_size", "embed_dim", "all_head_size", "inner_dim", "attention_size", "split_size")


def split(module: Any, match: Any, group: Group) -> str | None:
    """Split ``module`` over ``group`` by heads, or return the reason why it stays whole."""
    features = numbered(module)
    heads, told = apart(_whole_heads, module, features)
    if heads is None:
        return ": ".join(["a trial could not find the features that its heads read", *told[:1]])
    given = given_to_heads(module._stock.forward)
    if given is None:
        return "it takes arguments that may have a part for each head"
    norms = [child for child in module._modules.values() if isinstance(child, FusedNorm)]
    why = _other_layers(match, heads, features) or _uneven(heads, group) or _own_parameters(module, heads, norms)
    if why is not None:
        return why
    wanted = {name: _wanted(heads, features[name], group.size) for name in heads.called}
    if any(not _is_division(parts, features[name]) for name, parts in wanted.items()):
        return "some of its features belong to heads of several ranks, or to no head"
    sizes = _sizes(module, heads, group.size)
    for rank in (0, group.size - 1):
        of_rank = {**features, **{name: parts[rank] for name, parts in wanted.items()}}
        seen = apart(heads_of, module, module._stock.forward, of_rank, sizes)
        if seen != heads.of_rank(rank, group.size):
            return "its forward cannot run on a part of its heads"

    first, last = [module._modules[name] for name in heads.called], module._modules[heads.behind]
    shard.split(first, last, group, [_exchange(wanted[name], features[name], group) for name in heads.called])
    match.sizes, match.heads, match.given_to_heads = sizes, len(heads.q), given
    match.split = tuple(name for name, param in module._parameters.items() if param is not None)
    for name in match.split:
        shard.split_parameter(module, name, group)
    match.kinds = {name: type(module._modules[name]) for name in match.kinds}
    match.around = {name: type(module._modules[name]) for name in (*heads.called, heads.behind)}
    for name in heads.normed:
        norm = module._modules[name]
        norm._match.across = group
        shard.split_parameter(norm, "weight", group)
    for norm in norms:
        norm._match.group = group if norm._match.across.size == 1 else SINGLE
    return None


def _whole_heads(module: Any, features: dict[str, range]) -> tuple[Heads | None, list[str]]:
    """The heads that the module's forward forms, and the errors of that forward."""
    with listening() as told:
        return heads_of(module, module._stock.forward, features), told


def _other_layers(match: Any, heads: Heads, features: dict[str, range]) -> str | None:
    if {*heads.called, heads.behind} != set(features) or len(heads.called) > 3:
        return "it has other layers than those around its attention function"
    return None if set(match.names) <= set(heads.called) else "a projection follows its attention function"


def _uneven(heads: Heads, group: Group) -> str | None:
    return shard.uneven([len(heads.q), len({tuple(head) for head in heads.k})], group)


def _own_parameters(module: Any, heads: Heads, norms: list[FusedNorm]) -> str | None:
    if any(param is not None and param.shape[:1] != (len(heads.q),) for param in module._parameters.values()):
        return "it has parameters of its own, which are not one for each head"
    others = [child for name, child in module._modules.items() if name not in (*heads.called, heads.behind)]
    if any(any(True for _ in child.parameters()) for child in others if child is not None and child not in norms):
        return "it has other children with parameters"
    for norm in norms:
        weight, name = norm._parameters.get("weight"), next(n for n, each in module._modules.items() if each is norm)
        if name not in heads.normed and weight is not None and len(weight) not in {len(heads.q[0]), len(heads.k[0])}:
            return f"{name} runs neither over each head nor over all of them"  # its gradient may be whole already
    for name in heads.normed:
        if module._modules[name]._match.op != "rms_norm":
            return f"{name} runs over all of its heads, and is no RMSNorm"
        if [*range(heads.normed[name][0], heads.normed[name][0] + len(heads.normed[name]))] != heads.normed[name]:
            return f"{name} runs over features in another order than the layer's"
    return None


def _wanted(heads: Heads, features: range, size: int) -> list[list[int]]:
    """The features of one layer that each rank's heads read."""
    return [sorted(heads.of_rank(rank, size).features & set(features)) for rank in range(size)]


def _is_division(parts: list[list[int]], features: range) -> bool:
    return len({len(part) for part in parts}) == 1 and sorted(chain(*parts)) == list(features)


def _exchange(parts: list[list[int]], features: range, group: Group) -> RowExchange | None:
    if [*chain(*parts)] == list(features):
        return None
    return RowExchange([[number - features.start for number in part] for part in parts], group)


def _sizes(module: Any, heads: Heads, size: int) -> dict[str, Any]:
    """The attributes of ``module`` and its config that take other values on one of ``size`` ranks."""
    count, keys, width = len(heads.q), len({tuple(head) for head in heads.k}), len(heads.q) * len(heads.q[0])
    whole = {**dict.fromkeys(HEADS, count), **dict.fromkeys(_KEYS, keys), **dict.fromkeys(_WIDTHS, width)}
    own: dict[str, Any] = {name: value // size for name, value in whole.items() if vars(module).get(name) == value}
    read, config = names_in(module._stock.forward), vars(module).get("config")
    theirs = {
        name: value // size
        for name, value in whole.items()
        if name in read and name not in own and getattr(config, name, None) == value
    }
    return {**own, "config": View(config, theirs)} if theirs else own
