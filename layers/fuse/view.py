"""A stock forward that sees other children: a view of the module for one call, passed to the forward as ``self``."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def names_in(forward: Any) -> frozenset[str]:
    """The names that a forward's code reads; none where it cannot run on a :class:`View`: super() wants the module."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None or "__class__" in code.co_freevars else frozenset(code.co_names)


def _runs_on_views(method: Any) -> bool:
    """Whether a method of the module sees what the view replaces: its own ones do, those of torch see the module."""
    return not str(method.__module__).startswith("torch.") and "__class__" not in method.__code__.co_freevars


class View:
    """``module`` with some attributes replaced. Reads of all others, and all writes, reach the module."""

    forward = None  # transformers' wrapper of a checkpointed layer's forward looks whether it is the outermost one

    def __init__(self, module: Any, replaced: dict[str, Any]) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_replaced"] = replaced

    def __getattr__(self, name: str) -> Any:
        if name in self._replaced:
            return self._replaced[name]
        value = getattr(self._module, name)
        if type(value) is types.MethodType and value.__self__ is self._module and _runs_on_views(value.__func__):
            return partial(value.__func__, self)  # torch.compile knows it, and no methods of views
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class Shared:
    """Layers of one input that run together when the first of them is called; for another input a layer runs alone."""

    def __init__(self, layers: dict[str, Any], run: Any) -> None:
        self.layers, self.run = layers, run
        self.input: Any = None  # and how often it had been overwritten
        self.results: dict[str, Any] = {}
        self.apart = False  # whether some layer ran alone

    def stands(self) -> dict[str, Any]:
        """What a view has in the places of the layers."""
        return {name: Stand(layer, partial(self.call, name)) for name, layer in self.layers.items()}

    def call(self, name: str, x: Any) -> Any:
        if self.input is None:
            self.input = x, version(x)
            self.results = dict(zip(self.layers, self.run(x, tuple(self.layers.values()))))
        if name in self.results and x is self.input[0] and version(x) == self.input[1]:
            return self.results.pop(name)
        self.apart = True
        return self.layers[name](x)


def version(x: Any) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class Stand:
    """What a view has in the place of ``layer``: called, it runs ``run``; its attributes are the layer's."""

    def __init__(self, layer: Any, run: Callable[[Any], Any]) -> None:
        self._layer, self._run = layer, run

    def __call__(self, x: Any) -> Any:
        return self._run(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def with_globals(function: Any, values: dict[str, Any]) -> Any:
    """``function`` with some global names bound to ``values``."""
    scope = {**function.__globals__, **values}
    scope.pop("__name__", None)  # torch.compile would take it for that module, and guard what its names are there
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    return copied


def with_global(function: Any, name: str, value: Any) -> Any:
    """``function`` with one global name bound to ``value``; the same one, while its other names are bound as before."""
    scope = function.__globals__
    bound = frozenset((each, id(scope[each])) for each in function.__code__.co_names if each in scope)
    return _kept(function, name, value, bound)


@functools.cache
def _kept(function: Any, name: str, value: Any, _: frozenset[tuple[str, int]]) -> Any:
    return with_globals(function, {name: value})
