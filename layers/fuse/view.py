"""A stock forward that sees other children: a view of the module for one call, passed to the forward as ``self``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def names_in(forward: Any) -> frozenset[str]:
    """The names that a forward's code reads; none where it cannot run on a :class:`View`: super() wants the module."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None or "__class__" in code.co_freevars else frozenset(code.co_names)


class View:
    """``module`` with some attributes replaced. Reads of all others, and all writes, reach the module."""

    forward = None  # transformers' wrapper of a checkpointed layer's forward looks whether it is the outermost one

    def __init__(self, module: Any, replaced: dict[str, Any]) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_replaced"] = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class Shared:
    """Layers of one input that run together when the first of them is called; for another input a layer runs alone."""

    def __init__(self, layers: dict[str, Any], run: Any) -> None:
        self.layers, self.run = layers, run
        self.input: Any = None  # and how often it had been overwritten
        self.results: dict[str, Any] = {}
        self.apart = False  # whether some layer ran alone

    def call(self, name: str, x: Any) -> Any:
        if self.input is None:
            self.input = x, _version(x)
            self.results = dict(zip(self.layers, self.run(x, tuple(self.layers.values()))))
        if name in self.results and x is self.input[0] and _version(x) == self.input[1]:
            return self.results.pop(name)
        self.apart = True
        return self.layers[name](x)


def _version(x: Any) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class Stand:
    """What a view has in the place of ``layer``: called, it runs ``run``; its attributes are the layer's."""

    def __init__(self, layer: Any, run: Callable[[Any], Any]) -> None:
        self._layer, self._run = layer, run

    def __call__(self, x: Any) -> Any:
        return self._run(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
