"""The matchers of feed-forward modules, by the graph of their forward, and of inline feed-forward parts of layers."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ....parallel.core.mappings import RowExchange
from ....parallel.core.mesh import Group
from .. import products
from ..ranks import shard
from ..swap import Fused, Match, again, changed, settings_of, unlike
from ..view import Stand, View, names_in
from .activations import activation_of
from .graph import Part, Rewritten, rewrite


class _Traced(Match):
    """The traced forwards of training and evaluation, and the state that the traces assume; each call compares it."""

    def __init__(self, module: nn.Module, train: Rewritten, evaluation: Rewritten) -> None:
        children = module._modules
        super().__init__(train.ops, {name: type(children[name]) for name in train.read})
        self.takes, self.parts = train.takes, train.parts
        self.forwards = {True: train.forward, False: evaluation.forward}
        self.reads = train.names | evaluation.names
        self.settings = {name: value for name, value in settings_of(module).items() if name in self.reads}
        self.children = tuple(children)
        self.of_children = {
            name: settings
            for name, child in children.items()
            if child is not None and not child._parameters and (settings := settings_of(child))
        }

    def of_copy(self, module: nn.Module, original: nn.Module, memo: dict[int, Any]) -> Match:
        match: Any = super().of_copy(module, original, memo)
        match.settings = again(self.settings, module, original)
        match.of_children = {
            name: again(each, module.get_submodule(name), original.get_submodule(name))
            for name, each in self.of_children.items()
        }
        return match


class FusedFeedForward(Fused):
    """Runs the traced forward with fused products as long as children and settings equal the traced ones."""

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        match = self._match
        given = args if not kwargs else [*args, *map(kwargs.get, match.takes[len(args) :])]
        for each in given:
            if not isinstance(each, torch.Tensor):
                return self.stock_forward(*args, **kwargs)
        if len(given) != len(args) + len(kwargs):
            return self.stock_forward(*args, **kwargs)
        return match.forwards[self.training](self, *given)

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_whole_sequences(super().stock_forward, args, kwargs)

    def why_stock(self) -> str | None:
        match, children = self._match, self._modules
        if tuple(children) != match.children:
            return f"its children were {', '.join(match.children)}, and are {', '.join(children)}"
        if match.of_children:
            for name, settings in match.of_children.items():
                child = children[name]
                if child is not None and (why := changed(child, settings)) is not None:
                    return f"in {name}, {why}"
        if match.settings and (why := changed(self, match.settings)) is not None:
            return why
        return unlike(self, match.kinds)


class FeedForward:
    """Matches a module whose traced forward applies an activation to the result of a linear layer."""

    fused = FusedFeedForward

    def match(self, module: nn.Module) -> Match | None:
        if not any(products.is_linear(child) for child in module.children()):
            return None
        train, evaluation = rewrite(module, True), rewrite(module, False)
        if train is None or evaluation is None or (train.ops, train.read) != (evaluation.ops, evaluation.read):
            return None
        match = _Traced(module, train, evaluation)
        # An object's contents may change while its identity stays, so only plain values can be compared.
        known = (*_SETTLED, type(None))
        return match if all(isinstance(value, known) for value in match.settings.values()) else None

    def split(self, module: nn.Module, match: Any, group: Group) -> str | None:
        """Split ``module`` over ``group``, or return the reason why it stays whole."""
        if (why := _why_whole(module, match.parts, group)) is not None:
            return why
        for part in match.parts:
            first = [getattr(module, name) for name in part.first]
            halves = [_halves(products.width_out(first[0]), group)] if part.packed else ()
            shard.split(first, getattr(module, part.last), group, halves)
        match.kinds = {name: type(module._modules[name]) for name in match.kinds}
        return None


def _why_whole(module: nn.Module, parts: Sequence[Part], group: Group) -> str | None:
    for part in parts:
        if part.last is None:
            return "no linear layer follows the activation at once"
        widths = [products.width_out(getattr(module, name)) // (2 if part.packed else 1) for name in part.first]
        if (why := shard.uneven(widths, group)) is not None:
            return why
    return None


def _halves(rows: int, group: Group) -> RowExchange:
    """The rows of each rank: its part of the first half of ``rows`` and its part of the second half."""
    each = rows // 2 // group.size
    starts = [[half + rank * each for half in (0, rows // 2)] for rank in range(group.size)]
    return RowExchange([[row for start in parts for row in range(start, start + each)] for parts in starts], group)


_SETTLED = (bool, int, float, str, types.FunctionType, types.BuiltinFunctionType, type)


class _SpelledOut(Match):
    def __init__(self, module: nn.Module, linear: str, act: str, activation: str, last: str | None) -> None:
        children = module._modules
        super().__init__((f"linear_act({linear}; {activation})",), {n: type(children[n]) for n in (linear, act)})
        self.linear, self.act, self.activation, self.last = linear, act, activation, last


class FusedSpelledOut(Fused):
    """The stock forward, in which one linear layer applies the activation that follows it."""

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        match, layer, act = self._match, getattr(self, self._match.linear), getattr(self, self._match.act)

        def linear(x: torch.Tensor) -> torch.Tensor:
            return products.hidden(x, (layer,), match.activation, packed=False)

        view = View(self, {match.linear: Stand(layer, linear), match.act: Stand(act, _same)})
        return self._stock.forward(view, *args, **kwargs)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class SpelledOut:
    """Matches a layer whose forward says ``h = self.linear(h)`` and, as its next statement, ``h = self.act(h)``.

    Decoder layers such as OPT's have no separate module for the feed-forward part, and cannot be traced. The forward
    must use each of the two children only there.
    """

    fused = FusedSpelledOut

    def match(self, module: nn.Module) -> Match | None:
        children = module._modules
        linears = {name for name, child in children.items() if products.is_linear(child)}
        if not linears or not names_in(type(module).forward) or (body := _source(type(module))) is None:
            return None
        named = [node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and _is_self(node.value)]
        for statements in _blocks(body):
            for first, second, third in zip(statements, statements[1:], [*statements[2:], None]):
                linear, act, last = _applied(first), _applied(second), third and _applied(third)
                if linear is None or act is None or linear[1] != act[1] or linear[0] not in linears:
                    continue
                if named.count(linear[0]) != 1 or named.count(act[0]) != 1:
                    continue
                child = children.get(act[0])
                activation = None if child is None else activation_of(child.forward)
                if activation is not None:
                    behind = None
                    if last and last[1] == act[1] and last[0] in linears and named.count(last[0]) == 1:
                        behind = last[0]
                    return _SpelledOut(module, linear[0], act[0], activation, behind)
        return None

    def split(self, module: nn.Module, match: Any, group: Group) -> str | None:
        """Split ``module`` over ``group``, or return the reason why it stays whole."""
        if (why := _why_whole(module, [Part((match.linear,), match.last, False)], group)) is not None:
            return why
        shard.split([getattr(module, match.linear)], getattr(module, match.last), group)
        match.kinds = {name: type(module._modules[name]) for name in match.kinds}
        return None


def _source(kind: type[nn.Module]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):  # the source is missing or does not parse alone
        return None


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    return [node.body for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.If, ast.With, ast.For))]


def _applied(statement: ast.stmt) -> tuple[str, str] | None:
    """("child", "h") of ``h = self.child(h)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(func=ast.Attribute(value=owner, attr=child), args=[ast.Name(id=given)], keywords=[]),
        ) if target == given and _is_self(owner):
            return child, target
    return None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
