"""Run attention that a module writes out, softmax(q k^T) v as products and a softmax, with deferred scores.

The module's forward, or the method that it calls for attention, runs from its own source, with two changes. Matrix
products become calls of ours, which return :class:`~.scores.Scores`. ``torch.tensor(number)`` becomes a call that
remembers the number.
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
from . import score_steps as score_steps  # its import fills the table STEPS
from . import scores
from .scores import Scores, Seen, Weights

_OURS = "_shardfuse_call"  # the name of our function in the code
_PRODUCTS = ("matmul", "bmm", "baddbmm")
_CHOOSES = {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"}  # its user chose the attention
# Code with these names cannot run on Scores: they are not tensors to it, and an autograd function would not see their
# graph and changes the gradient mode.
_ASKS = {"is_tensor", "type", "Tensor", "apply", "no_grad", "set_grad_enabled", "inference_mode"}
_Function = Callable[..., Any]
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def attending(kind: Any, bound: dict[str, Any]) -> _Function | None:
    """The forward of the class ``kind`` with deferred scores and the global names ``bound``; None: it writes out no
    attention.

    Call it with the module or a view of it. After each call ``module._match.spelled_out`` is the reason why scores were
    computed, "" if they were not.
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
        replaced = {name: partial(method, view) for name, method in methods}
        vars(view)["_replaced"] = replaced
        vars(view).update(replaced)
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
    return result.value() if torch.compiler.is_compiling() else Weights.of(result)  # a compiler drops unused values


def _call(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run ``owner.name(...)``, or ``owner @ ...``, of the module's code."""
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
    """Turns ``a @ b``, ``a.matmul(b)``, ``torch.bmm(a, b)`` ... into calls of ours."""

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
    """``function`` with our calls; None without a softmax, two products and readable source."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or code.co_freevars or code.co_flags & inspect.CO_GENERATOR:
        return None
    if not any("softmax" in name.lower() for name in code.co_names) or not _ASKS.isdisjoint(code.co_names):
        return None
    if any(str(getattr(function.__globals__.get(n), "__module__", "")).startswith("einops") for n in code.co_names):
        return None
    tree = _source(code.co_filename)
    if tree is None or not _same(_compiled(tree, code), code):  # no source, or the file has changed
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
    """The compiled function in ``tree`` with the name and line of ``like``."""
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
