"""Attention that a module spells out, softmax(q k^T) v in products and a softmax: its own code, with scores that wait.

The module's forward, or the method that it calls for this, runs as it was written, but for its matrix products and
``torch.tensor(number)``, which become calls of ours: they return :class:`~.scores.Scores`, and see numbers.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import operator
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..view import View, with_global
from . import score_steps as score_steps  # fills the table of what waits
from . import scores
from .scores import Scores, Seen, Weights

_OURS = "_shardfuse_call"  # the name of ours in the code
_PRODUCTS = ("matmul", "bmm", "baddbmm")
_CHOOSES = {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"}  # the model runs what its user asked for
# Scores are no tensors to these; an autograd function would not see their graph, and takes gradients' mode with it.
_ASKS = {"is_tensor", "type", "Tensor", "apply", "no_grad", "set_grad_enabled", "inference_mode"}
_Function = Callable[..., Any]
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def attending(kind: Any, bound: dict[str, Any]) -> _Function | None:
    """The forward of the class ``kind`` with scores that wait and ``bound`` for global names; None if it has none.

    To be called with the module, or a view of it. After each call ``module._match.spelled_out`` says why scores were
    computed, if they were.
    """
    forward: Any = kind.forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if not _CHOOSES.isdisjoint(names):
        return None
    methods = {}
    for name in names:
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, types.FunctionType) and (waiting := _waiting(method)) is not None:
            methods[name] = waiting
    own: Any = _waiting(forward)
    if own is None and not methods:
        return None
    own = own or forward
    for name, value in bound.items():
        own = with_global(own, name, value)
        forward = with_global(forward, name, value)
    return _running(own, tuple(methods.items()), forward)


@functools.cache
def _running(forward: _Function, methods: tuple[tuple[str, _Function], ...], stock: _Function) -> _Function:
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if kwargs.get("output_attentions"):
            if not compiling:
                module._match.spelled_out = "its weights are asked for"
            return stock(module, *args, **kwargs)
        view = View(module, {})
        view._replaced.update({name: partial(method, view) for name, method in methods})
        if not compiling:
            Seen.why = Seen.none
        result = forward(view, *args, **kwargs)
        if not compiling and Seen.why is not Seen.single:
            module._match.spelled_out = Seen.why
        return tuple(map(_returned, result)) if type(result) is tuple else _returned(result)

    return run


def _returned(result: Any) -> Any:
    if not isinstance(result, Scores):
        return result
    return result.value() if torch.compiler.is_compiling() else Weights.of(result)  # a compiler drops what is not used


def _call(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """``owner.name(...)`` in the code, or ``owner @ ...``."""
    if name == "@":
        return scores.call(operator.matmul, owner, *args)
    if owner is torch:
        result = scores.call(getattr(torch, name), *args, **kwargs)
    elif isinstance(owner, (torch.Tensor, Scores)):
        return scores.call(getattr(torch.Tensor, name), owner, *args, **kwargs)
    else:
        return getattr(owner, name)(*args, **kwargs)
    if name == "tensor" and type(args[0]) in (int, float):
        result.number = args[0]
    return result


class _Calls(ast.NodeTransformer):
    """``a @ b``, ``a.matmul(b)``, ``torch.bmm(a, b)`` ... become calls of ours."""

    products = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        self.products += 1
        return self._ours(node, ast.Constant("@"), node.left, [node.right], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if not isinstance(called, ast.Attribute) or called.attr not in (*_PRODUCTS, "tensor"):
            return node
        self.products += called.attr != "tensor"
        return self._ours(node, ast.Constant(called.attr), called.value, node.args, node.keywords)

    def _ours(
        self, node: ast.AST, name: ast.expr, owner: ast.expr, args: list[ast.expr], kwargs: list[ast.keyword]
    ) -> ast.AST:
        ours = ast.Call(ast.Name(_OURS, ast.Load()), [owner, name, *args], kwargs)
        return ast.copy_location(ours, node)


@functools.cache
def _waiting(function: Any) -> _Function | None:
    """``function`` with our calls, if it has a softmax and two products at least, and its source is at hand."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or code.co_freevars or code.co_flags & inspect.CO_GENERATOR:
        return None
    if not any("softmax" in name.lower() for name in code.co_names) or not _ASKS.isdisjoint(code.co_names):
        return None
    if any(str(getattr(function.__globals__.get(n), "__module__", "")).startswith("einops") for n in code.co_names):
        return None
    tree = _source(code.co_filename)
    if tree is None or not _same(_compiled(tree, code), code):  # none, or the file is another by now
        return None
    tree, calls = copy.deepcopy(tree), _Calls()
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef) and _line(each) == code.co_firstlineno and each.name == code.co_name:
            calls.generic_visit(each)
    ours = _compiled(ast.fix_missing_locations(tree), code)
    if calls.products < 2 or ours is None:
        return None
    copied = types.FunctionType(ours, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    return with_global(copied, _OURS, _call)


@functools.cache
def _source(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None


def _line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _compiled(tree: ast.Module, like: types.CodeType) -> types.CodeType | None:
    """The code of the function in ``tree`` that stands where that of ``like`` does."""
    todo = [compile(tree, like.co_filename, "exec", flags=like.co_flags & _FUTURE, dont_inherit=True)]
    while todo:
        code = todo.pop()
        if (code.co_name, code.co_firstlineno) == (like.co_name, like.co_firstlineno):
            return code
        todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return None


def _same(one: types.CodeType | None, other: types.CodeType) -> bool:
    if one is None or (one.co_code, one.co_names, one.co_varnames) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
    ):
        return False
    pairs = list(zip(one.co_consts, other.co_consts))
    return len(one.co_consts) == len(other.co_consts) and all(
        _same(a, b) if isinstance(a, types.CodeType) and isinstance(b, types.CodeType) else a == b for a, b in pairs
    )
