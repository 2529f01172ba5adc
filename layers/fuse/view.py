"""Run a stock forward with other children: it gets a view of the module as ``self`` for one call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from ..module import shadowed


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


class LiveView(View):
    """A view that reads its module's attributes as fast as the module: it has the module's own dictionary.

    :meth:`of` makes one where that changes nothing.
    """

    __slots__ = ("_module", "_replaced")

    @staticmethod
    def of(module: Any, replaced: dict[str, Any]) -> View:
        """A view of a fused ``module`` with some children replaced, live if it can be.

        It cannot where the dictionary has attributes that a view must not find there: methods bound to the module, and
        what the module's class hides. A method that takes the place of another attribute after the first call runs on
        the module itself.
        """
        if torch.compiler.is_compiling():
            return View(module, replaced)
        own = module.__dict__
        match, kind = own["_match"], (type(module), len(own))
        if match.lives != kind:
            methods = types.MethodType in map(type, own.values())
            if methods or any(name in own for name in (*replaced, *_hidden(_kind(module)))):
                return View(module, replaced)
            match.lives = kind
        view = LiveView.__new__(LiveView)
        _set(view, "__dict__", own)
        _set(view, "_module", module)
        _set(view, "_replaced", replaced)
        return view

    def __getattr__(self, name: str) -> Any:
        replaced = self._replaced
        if name in replaced:
            return replaced[name]
        children = self._modules  # what nn.Module finds last
        if name in children and not shadowed(_kind(self._module), name):
            return children[name]
        return super().__getattr__(name)


_set, _kind = object.__setattr__, cast(Any, type)


@functools.cache
def _hidden(kind: Any) -> tuple[str, ...]:
    """The names that a view must not find in the dictionary of a module of this class: its own, and properties'."""
    found = {name for base in kind.__mro__ for name, value in vars(base).items() if hasattr(value, "__set__")}
    return ("forward", *sorted(found - {"__dict__", "__weakref__", "__class__"}))


class Shared:
    """Layers that share an input: calling the first runs all of them. A layer called with another input runs alone."""

    def __init__(self, layers: dict[str, Any], run: Any) -> None:
        self.layers, self.run = layers, run
        self.input: Any = None  # with its version, None where torch counts none
        self.results: dict[str, Any] = {}
        self.apart = False  # whether some layer ran alone

    def stands(self) -> dict[str, Any]:
        """The stand-ins that a view has for the layers."""
        return {name: _Part(layer, self, name) for name, layer in self.layers.items()}

    def call(self, name: str, x: Any) -> Any:
        if self.input is None:
            self.input = x, None if torch.compiler.is_compiling() or x.is_inference() else x._version
            self.results = dict(zip(self.layers, self.run(x, tuple(self.layers.values()))))
            return self.results.pop(name)
        given, version = self.input
        if name in self.results and x is given and (version is None or x._version == version):
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
