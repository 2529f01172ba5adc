"""Run a stock forward with other children: it gets a view of the module as ``self`` for one call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def names_in(forward: Any) -> frozenset[str]:
    """The names that a forward's code reads; empty if it calls super(), which cannot run on a :class:`View`."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None or "__class__" in code.co_freevars else frozenset(code.co_names)


def _runs_on_views(method: Any) -> bool:
    """Whether a method gets the view as ``self``: the module's own methods do, those of torch get the module."""
    return not str(method.__module__).startswith("torch.") and "__class__" not in method.__code__.co_freevars


class View:
    """``module`` with some attributes replaced. Reads of all others, and all writes, reach the module."""

    forward = None  # transformers' wrapper of a checkpointed layer's forward looks for the outermost forward

    def __init__(self, module: Any, replaced: dict[str, Any]) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_replaced"] = replaced
        for name, value in replaced.items():  # found before __getattr__ is asked
            self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if type(value) is types.MethodType and value.__self__ is self._module and _runs_on_views(value.__func__):
            return partial(value.__func__, self)  # torch.compile supports partial, but not methods of views
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class Shared:
    """Layers that share an input: calling the first runs all of them. A layer called with another input runs alone."""

    def __init__(self, layers: dict[str, Any], run: Any) -> None:
        self.layers, self.run = layers, run
        self.input: Any = None  # with its version
        self.results: dict[str, Any] = {}
        self.apart = False  # whether some layer ran alone

    def stands(self) -> dict[str, Any]:
        """The stand-ins that a view has for the layers."""
        return {name: _Part(layer, self, name) for name, layer in self.layers.items()}

    def call(self, name: str, x: Any) -> Any:
        if self.input is None:
            self.input = x, version(x)
            self.results = dict(zip(self.layers, self.run(x, tuple(self.layers.values()))))
            return self.results.pop(name)
        if name in self.results and x is self.input[0] and version(x) == self.input[1]:
            return self.results.pop(name)
        self.apart = True
        return self.layers[name](x)


def version(x: Any) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class Stand:
    """A view's stand-in for ``layer``: called, it calls ``run``; its attributes are the layer's."""

    def __init__(self, layer: Any, run: Callable[[Any], Any]) -> None:
        self._layer, self._run = layer, run

    def __call__(self, x: Any) -> Any:
        return self._run(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Part(Stand):
    """The stand-in for the layer ``name`` of a :class:`Shared`."""

    def __init__(self, layer: Any, shared: Shared, name: str) -> None:
        self._layer, self._shared, self._name = layer, shared, name

    def __call__(self, x: Any) -> Any:
        return self._shared.call(self._name, x)


def with_globals(function: Any, values: dict[str, Any]) -> Any:
    """A copy of ``function`` with the global names in ``values`` bound to these values."""
    scope = {**function.__globals__, **values}
    scope.pop("__name__", None)  # with it torch.compile would guard the names of that module
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    return copied


def with_global(function: Any, name: str, value: Any) -> Any:
    """A copy of ``function`` with one global name bound to ``value``, cached while its other names stay bound."""
    scope = function.__globals__
    bound = frozenset((each, id(scope[each])) for each in function.__code__.co_names if each in scope)
    return _kept(function, name, value, bound)


@functools.cache
def _kept(function: Any, name: str, value: Any, _: frozenset[tuple[str, int]]) -> Any:
    return with_globals(function, {name: value})
