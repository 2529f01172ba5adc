"""The forward of a feed-forward module as a graph, in which products and activations become fused ops.

torch.fx traces the module's own forward with its children as opaque calls, so matching depends on the computation, not
on the name of the class: dropout, a residual and the order of factors stay as written. These patterns match:

    act(linear(x))                                   one product with the activation in its epilogue
    act(gate(x)) * up(x), or the factors exchanged   one gated product
    act(gate) * up of chunks of one linear(x)        the same on slices of the packed weight
    linear(any of these)                             both layers as one function, which keeps less for backward
"""

from __future__ import annotations

import copy
import dis
import inspect
import linecache
import operator
import re
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .. import products
from ..probing import Foreign, foreign
from .activations import activation_of

Forward = Callable[..., Any]


class Part(NamedTuple):
    """The layers that one fused op replaces."""

    first: tuple[str, ...]
    last: str | None
    packed: bool


@dataclass(frozen=True)
class Rewritten:
    """A forward with fused ops."""

    forward: Forward  # takes the module and its arguments; replaces the class's forward
    takes: tuple[str, ...]
    read: tuple[str, ...]  # children that the fused ops read and no longer call
    ops: tuple[str, ...]  # "gated_linear(gate_proj, up_proj; silu)", "linear_act(down_proj)"
    parts: tuple[Part, ...]
    names: frozenset[str]  # all attribute and global names in the forward's code


class _Opaque(fx.Tracer):
    """Treats each child as one opaque call.

    While it traces, torch.fx has the calls and attributes of all modules pass here, those of other threads as well.
    """

    proxy_buffer_attributes = True  # keeps Python from reading their values

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def rewrite(module: nn.Module, training: bool) -> Rewritten | None:
    """``module``'s forward in the mode ``training``, with every match fused; None where nothing matches.

    A trace records one outcome of each decision made in Python. This function therefore traces only a forward whose
    arguments are all required and whose code reads nothing but attributes of the module. At each call the caller must
    check that all arguments are tensors and that the attributes have their traced values.
    """
    takes = arguments_of(module)
    if takes is None:
        return None
    stand_in = copy.copy(module)  # the model must not see the mode change
    stand_in.__dict__["training"] = training
    code = _Code(module)
    if code.asks_too_much():
        return None
    try:
        with foreign("its forward, traced,"):  # it may depend on values, shapes or types
            graph = _Opaque().trace(stand_in)
    except Foreign:
        return None
    if not _is_pure(graph, module):
        return None
    found = _Rewriter(module, graph)
    found.run()
    if not found.said or _works_in_place(graph, module):
        return None
    names = code.names()
    return Rewritten(
        _compiled(graph, module), takes, tuple(sorted(found.read)), tuple(found.said), tuple(found.parts), names
    )


def arguments_of(module: nn.Module) -> tuple[str, ...] | None:
    """The names of the arguments of ``module``'s forward, or None where some may be left out."""
    takes = list(inspect.signature(module.forward).parameters.values())
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not each.empty for each in takes):
        return None
    return tuple(each.name for each in takes)


class _Code:
    """The code that a module's forward may run, without that of torch, the standard library and the module's children.

    It follows by name: methods, properties and functions of the module, global functions, functions of imported
    modules, and functions inside decorators.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.code: set[types.CodeType] = set()
        self.unknown = False  # some code cannot be inspected
        self._follow(type(module).forward)

    def names(self) -> frozenset[str]:
        return frozenset(name for code in self.code for name in code.co_names)

    def asks_too_much(self) -> bool:
        """Whether the code writes anything, or asks for types, modes or random numbers, which a trace would freeze."""
        writes = any(step.opname in _WRITES for code in self.code for step in dis.get_instructions(code))
        return self.unknown or writes or not self.names().isdisjoint(_ASKS)

    def _follow(self, value: Any) -> None:
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, type) and _is_foreign(value):
            self.unknown = True
        if not isinstance(value, types.FunctionType) or not _is_foreign(value) or value.__code__ in self.code:
            return
        names: set[str] = set()
        todo = [value.__code__]
        while todo:
            code = todo.pop()
            self.code.add(code)
            names.update(code.co_names)
            todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        scope = value.__globals__
        for name in names:
            self._follow(inspect.getattr_static(type(self.module), name, None))
            self._follow(vars(self.module).get(name))
            held = scope.get(name)
            self._follow(held)
            if isinstance(held, types.ModuleType) and _is_foreign(held):
                for each in names:
                    self._follow(vars(held).get(each))
        for cell in value.__closure__ or ():
            self._follow(cell.cell_contents)
        self._follow(getattr(value, "__wrapped__", None))


def _is_foreign(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).partition(".")[0] not in _KNOWN


_KNOWN = (sys.stdlib_module_names | {"torch"}) - {"__main__"}
_WRITES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR"}
_ASKS = {
    *("isinstance", "issubclass", "type", "hasattr", "getattr", "callable", "id", "vars", "globals", "config"),
    *("is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled", "get_autocast_dtype", "is_scripting"),
    *("random", "rand", "randn", "randint", "bernoulli", "np", "numpy", "time", "environ"),
}


def _is_pure(graph: fx.Graph, module: nn.Module) -> bool:
    """Whether ``graph`` changes nothing in place, makes no tensors of its own, and calls direct children only."""
    own = {*module._parameters, *module._buffers}
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "get_attr" and name not in own:
            return False
        if node.op == "call_module" and name not in module._modules:
            return False
        if node.op in ("call_function", "call_method"):
            in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
            if in_place or node.kwargs.get("out") is not None:
                return False
    return True


def _works_in_place(graph: fx.Graph, module: nn.Module) -> bool:
    """Whether a node left in ``graph`` overwrites its input, which is unsafe because fusing has reordered the nodes."""
    for node in graph.nodes:
        if node.kwargs.get("inplace") or (
            node.op == "call_module" and getattr(module.get_submodule(str(node.target)), "inplace", False)
        ):
            return True
    return False


_IN_PLACE = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "and", "or", "xor")} | {"setitem"}


def _compiled(graph: fx.Graph, module: nn.Module) -> Forward:
    """The function of ``graph``, one for all equal forwards, so that torch.compile compiles a model's layers once."""
    code = graph.python_code("self")
    # Children that are not called: nn.Module's own lookup takes longer than all else in the function.
    source = re.sub(r"= self\.(\w+)$", lambda found: _child(module, found), code.src, flags=re.MULTILINE)
    key = (source, tuple(sorted((name, id(value)) for name, value in code.globals.items())))
    if key not in _forwards:
        name = f"<shardfuse: forward {len(_forwards)}, of {type(module).__name__}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # for tracebacks
        scope = dict(code.globals)
        exec(compile(source, name, "exec"), scope)  # noqa: S102  # generated by torch.fx from the module's forward
        _forwards[key] = scope["forward"]
    return _forwards[key]


def _child(module: nn.Module, found: re.Match[str]) -> str:
    return f"= self._modules[{found[1]!r}]" if found[1] in module._modules else found[0]


_forwards: dict[tuple[Any, ...], Forward] = {}


class _Rewriter:
    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module, self.graph = module, graph
        self.read: set[str] = set()
        self.said: list[str] = []
        self.parts: list[Part] = []

    def run(self) -> None:
        for match in (self._gated, self._activated):
            for node in list(self.graph.nodes):
                if node.users and (hidden := match(node)) is not None:
                    self._replace(node, *hidden)

    def _replace(self, node: fx.Node, x: fx.Node, first: tuple[str, ...], activation: str, packed: bool) -> None:
        """Fuse the hidden layer ``node``, and the linear layer after it if nothing else reads ``node``, into one op."""
        users = list(node.users)
        last = users[0] if len(users) == 1 and self._linear(users[0]) == node else None
        end = node if last is None else last
        with self.graph.inserting_before(end):
            layers = tuple(self.graph.get_attr(name) for name in first)
            if last is None:
                new = self.graph.call_function(products.hidden, (x, layers, activation, packed))
            else:
                out = self.graph.get_attr(str(last.target))
                new = self.graph.call_function(products.feed_forward, (x, layers, out, activation, packed))
        end.replace_all_uses_with(new)
        self._erase(end)
        self.read.update(first if last is None else (*first, str(last.target)))
        op = "gated_linear" if packed or len(first) == 2 else "linear_act"
        self.said.append(f"{op}({', '.join(first)}; {activation})")
        if last is not None:
            self.said.append(f"linear_act({last.target})")
        self.parts.append(Part(first, None if last is None else str(last.target), packed))

    def _erase(self, node: fx.Node) -> None:
        """Remove ``node``, and every node that it alone read."""
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for each in inputs:
            if not each.users and each.op != "placeholder":
                self._erase(each)

    # --- patterns: (x, the first layers' names, the activation, whether one layer is packed), or None

    def _activated(self, node: fx.Node) -> tuple[fx.Node, tuple[str, ...], str, bool] | None:
        if (found := self._activation(node)) is None:
            return None
        z, activation = found
        x = self._linear(z)
        return None if x is None or len(z.users) > 1 else (x, (str(z.target),), activation, False)

    def _gated(self, node: fx.Node) -> tuple[fx.Node, tuple[str, ...], str, bool] | None:
        if not _is_call(node, operator.mul, torch.mul, "mul") or len(node.args) != 2:
            return None
        for act, up in (node.args, node.args[::-1]):
            if not isinstance(act, fx.Node) or not isinstance(up, fx.Node) or len(act.users) > 1 or len(up.users) > 1:
                continue
            if (found := self._activation(act)) is None:
                continue
            gate, activation = found
            if len(gate.users) > 1:
                continue
            x = self._linear(gate)
            if x is not None and self._linear(up) is x and gate is not up:
                return x, (str(gate.target), str(up.target)), activation, False
            packed = self._halves(gate, up)
            if packed is not None:
                return packed[0], (packed[1],), activation, True
        return None

    def _halves(self, gate: fx.Node, up: fx.Node) -> tuple[fx.Node, str] | None:
        """(x, the layer's name) if gate and up are the first and the second half of one linear layer's result."""
        for half, place in ((gate, 0), (up, 1)):
            if not _is_call(half, operator.getitem) or half.args[1] != place or half.args[0] is not gate.args[0]:
                return None
        chunk = gate.args[0]
        if not isinstance(chunk, fx.Node) or not _is_call(chunk, torch.chunk, "chunk") or len(chunk.users) > 2:
            return None
        z, *rest = chunk.args
        said = dict(zip(("chunks", "dim"), rest)) | chunk.kwargs
        if said != {"chunks": 2, "dim": -1} or not isinstance(z, fx.Node) or len(z.users) > 1:
            return None
        x = self._linear(z)
        return None if x is None else (x, str(z.target))

    # --- parts

    def _linear(self, node: Any) -> fx.Node | None:
        """The input x of ``node`` if it is a linear layer, else None."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        x = node.args[0]
        return x if isinstance(x, fx.Node) and products.is_linear(self.module.get_submodule(str(node.target))) else None

    def _activation(self, node: fx.Node) -> tuple[fx.Node, str] | None:
        """(z, the activation's name) if ``node`` is an activation of z, else None."""
        if not node.args or not isinstance(node.args[0], fx.Node) or len(node.all_input_nodes) > 1:
            return None
        rest, kwargs = node.args[1:], {name: value for name, value in node.kwargs.items() if name != "inplace"}
        function: Callable[..., Any]
        if node.op == "call_module":
            child = self.module.get_submodule(str(node.target))
            if rest or kwargs or any(True for _ in child.parameters()):
                return None
            function = child.forward
        elif node.op == "call_function" and callable(node.target):
            function = node.target
        elif node.op == "call_method" and isinstance(node.target, str):
            function = getattr(torch.Tensor, node.target)
        else:
            return None
        name = activation_of(lambda z: function(z, *rest, **kwargs))
        if name is None:
            return None
        if node.op == "call_module":
            self.read.add(str(node.target))
        return node.args[0], name


def _is_call(node: fx.Node, *targets: Any) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets
