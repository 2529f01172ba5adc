"""Find where a foreign decoder can be cut into pipeline stages, by running its stock forward on stand-ins.

Part 0 holds the modules that run before the first layer (embeddings), part i + 1 is layer i, and the last part holds
the modules that run after the layers, with head and loss. A trial replaces every layer by a stand-in that returns
zeros, and every other module with parameters by one that returns zeros of the module's shapes, so the trial costs
nothing and the model may be on meta. Object identity and autograd then show whether each layer's input is the previous
layer's result, and whether any other argument depends on parameters or tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ...trial import trial
from ..probing import Foreign, foreign
from ..view import Stand, View

BATCH, LENGTH = 2, 3  # the tokens of a trial
ON_STAND_INS = "on stand-ins for its modules its forward"


class Inner(View):
    """A view that can be called: it runs the stock forward of its module on itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._module, "_stock", type(self._module)).forward(self, *args, **kwargs)


class Blank:
    """Stands in for a module on another stage: returns zeros of the shapes that the module returns."""

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {id(each): _on_meta(each) for each in (*module.parameters(), *module.buffers())}
        self.twin = copy.deepcopy(module, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with torch.no_grad():
            result = self.twin(*args, **kwargs)
        device = given[0].device if given else torch.device("cpu")
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device=device), result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.twin, name)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]


class Cut:
    """The parts of ``model``, whose output embeddings are its child ``head``.

    ``packed``: a layer returns a tuple with the hidden states first. Raises :class:`Refused`, or :class:`Foreign` if
    the stock forward fails on stand-ins.
    """

    def __init__(self, model: Any, head: str, packed: bool) -> None:
        path = layer_list(model)
        if path is None:
            raise Refused("it has no nn.ModuleList of layers")
        *owner, self.name = path.split(".")
        self.owner = tuple(owner)  # the path of the module with the list
        self.layers = tuple(model.get_submodule(path))  # including layers that this rank has dropped
        self.packed = packed
        self.takes = next(iter(inspect.signature(self.layers[0].forward).parameters))
        with foreign("its get_input_embeddings"):
            self.embedding = model.get_input_embeddings().weight.shape[-1]
        for module in self._on_the_way(model):
            if any(param is not None for param in module._parameters.values()):
                raise Refused(f"its {type(module).__name__} has parameters of its own beside its layers")
            hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
            if module is not model and hooked:
                raise Refused(f"its {type(module).__name__} has hooks")
        self.blanks = {
            path: Blank(module)
            for path, module in self.beside(model)
            if path != head and next(module.parameters(), None) is not None
        }
        trials = [_Trial(self, model, head, embedded) for embedded in (False, True)]
        if not all(map(_same, *(trial.given for trial in trials))):
            raise Refused("what its layers get depends on the tokens, which only the first stage has")
        self.width = trials[0].handed[0].shape[-1]
        self.before, self.behind = trials[0].before, trials[0].behind | {head}
        self.tied = self._tied(model)  # parameters of both ends, by name: the paths of their modules

    @property
    def last(self) -> int:
        return len(self.layers) + 1

    def part_of(self, path: str) -> int | None:
        """The part that a module of :meth:`beside` belongs to; None: every stage has the module."""
        return 0 if path in self.before else self.last if path in self.behind else None

    def holds(self, path: str, parts: Container[int]) -> bool:
        """Whether a stage of ``parts`` holds the module at ``path``; both ends hold the modules of a tied parameter."""
        part = self.part_of(path)
        tied = any(path in paths for paths in self.tied.values())
        return part is None or part in parts or (tied and (0 in parts or self.last in parts))

    def beside(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules outside the list of layers, each with its path; containers of the list are left out."""
        way = (*self.owner, self.name)
        for depth, module in enumerate(self._on_the_way(model)):
            for name, child in module.named_children():
                if name != way[depth]:
                    yield ".".join((*self.owner[:depth], name)), child

    def _on_the_way(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(".".join(self.owner[:depth])) for depth in range(len(self.owner) + 1)]

    def view(self, model: nn.Module, layers: list[Any], replaced: dict[str, Any], **attributes: Any) -> Any:
        """A view of ``model`` with other ``layers``, and with the modules in ``replaced`` instead of those at the same
        paths.

        Every module on the path to the layers has the ``attributes``.
        """
        inner: Any = layers
        way = (*self.owner, self.name)
        for depth in range(len(self.owner), -1, -1):
            path = ".".join(self.owner[:depth])
            here = {at.rpartition(".")[2]: each for at, each in replaced.items() if at.rpartition(".")[0] == path}
            inner = Inner(model.get_submodule(path), {**attributes, **here, way[depth]: inner})
        return inner

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Split a layer's arguments into the hidden states and the others."""
        if args:
            return args[0], args[1:], kwargs
        return kwargs[self.takes], (), {name: value for name, value in kwargs.items() if name != self.takes}

    def returned(self, hidden: torch.Tensor) -> Any:
        """A layer's return value for these hidden states."""
        return (hidden,) if self.packed else hidden

    def _tied(self, model: nn.Module) -> dict[str, frozenset[str]]:
        parts: dict[nn.Parameter, dict[str, int]] = {}
        for path, module in self.beside(model):
            part = self.part_of(path)
            if part is None and path in self.blanks:
                raise Refused(f"its forward does not call {path}, which has parameters")
            if path in self.before and path in self.behind:
                raise Refused(f"{path} runs before its layers and behind them")
            for param in module.parameters():
                parts.setdefault(param, {})[path] = -1 if part is None else part
        for index, layer in enumerate(self.layers):
            for param in layer.parameters():
                parts.setdefault(param, {})[".".join((*self.owner, self.name, str(index)))] = index + 1
        names = {param: name for name, param in model.named_parameters()}
        for paths in parts.values():
            if len(set(paths.values())) > 1 and set(paths.values()) != {0, self.last}:
                raise Refused(f"{' and '.join(paths)} share a parameter")
        shared = {param: frozenset(paths) for param, paths in parts.items() if len(set(paths.values())) > 1}
        for path in frozenset[str]().union(*shared.values()):
            if any(param not in shared for param in model.get_submodule(path).parameters()):
                raise Refused(f"{path} has parameters beside the one that embeddings and head share")
        return {names[param]: paths for param, paths in shared.items()}


def layer_list(model: nn.Module) -> str | None:
    """The path of the nn.ModuleList with the most parameters, among those outside any other list."""
    lists = dict(_outermost_lists(model))
    sizes = {path: sum(param.numel() for param in each.parameters()) for path, each in lists.items()}
    return max(sizes, key=lambda path: sizes[path], default=None)


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


def cut_of(model: Any, head: str) -> Cut:
    """The parts of ``model``. ValueError if the model is not a simple chain of layers."""
    whys: list[tuple[int, str]] = []
    for packed in (False, True):
        try:
            return Cut(model, head, packed)
        except _Unchained as why:  # expected if the layers return the other form
            whys.append((2, str(why)))
        except Refused as why:
            whys.append((0, str(why)))
        except Foreign as error:
            whys.append((1, str(error)))
    raise ValueError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {min(whys)[1]}; spread it with zero=1 to 3, or "
        "over tensor-parallel ranks"
    )


class Refused(Exception):
    """The reason why a model cannot be cut."""


class _Unchained(Refused):
    pass


def accepted(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments among ``given`` that the model's forward takes."""
    takes = inspect.signature(model.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    return {name: value for name, value in given.items() if anything or name in takes}


def returns(out: Any, loss: torch.Tensor) -> bool:
    """Whether the model returned its head's loss unchanged."""
    return (out["loss"] if isinstance(out, Mapping) else out[0]) is loss and (loss.is_inference() or loss._version == 0)


class _Trial:
    """A run of ``model`` on stand-ins: it records the modules before and after the layers, and the layers' arguments.

    ``embedded``: the model gets embeddings, as on a later stage, which has no tokens.
    """

    def __init__(self, cut: Cut, model: Any, head: str, embedded: bool) -> None:
        self.cut = cut
        self.before: set[str] = set()
        self.behind: set[str] = set()
        self.given: list[Any] = []  # each layer's arguments beside the hidden states
        self.handed: list[torch.Tensor] = []  # each layer's result
        self.marks: list[torch.Tensor] = []  # in other modules' results before the last layer ran
        self.random = torch.empty(0)
        self.loss = torch.empty(0)
        param = next(model.parameters())
        self.device = torch.device("cpu") if param.is_meta else param.device
        replaced = {path: self._instead(path, model, module) for path, module in cut.beside(model)}
        replaced[head] = Stand(model.get_submodule(head), self._logits)
        layers = [Slot(layer, partial(self._layer, index)) for index, layer in enumerate(cut.layers)]
        view = cut.view(model, layers, replaced | {"loss_function": self._loss}, device=self.device, **IN_TRAINING)
        tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64, device=self.device)
        tokens[0, 1] = getattr(model.config, "pad_token_id", None) or 0  # transformers does not warn here
        given = {"labels": tokens, "use_cache": False}
        if embedded:
            given["inputs_embeds"] = tokens.new_zeros(BATCH, LENGTH, cut.embedding, dtype=param.dtype)
        else:
            given["input_ids"] = tokens
        with trial(model), torch.enable_grad(), foreign(ON_STAND_INS, Refused):
            out = view(**accepted(model, given))
        self._check(out)

    def _check(self, out: Any) -> None:
        if len(self.given) != len(self.cut.layers):
            raise Refused("its layers do not run once each")
        if not returns(out, self.loss):
            raise Refused("it adds to the loss of its head")
        used = torch.autograd.grad(self.loss, [*self.marks, *self.handed], allow_unused=True)
        if used[-1] is None or any(each is not None for each in used[:-1]):
            raise Refused("what is behind its layers depends on more than the last one")

    def _layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs = self.cut.taken(args, kwargs)
        if index != len(self.given):
            raise Refused("its layers do not run once each, in their order")
        if index == 0:
            self.random = torch.get_rng_state()
        elif hidden is not self.handed[-1]:
            raise _Unchained("its layers do not get the result of the layer before as it is")
        elif not torch.equal(self.random, torch.get_rng_state()):
            raise Refused("it draws random numbers between its layers")
        if hidden.dim() != 3 or hidden.shape[:2] != (BATCH, LENGTH):
            raise Refused(f"its layers get {list(hidden.shape)} for tokens {[BATCH, LENGTH]}")
        if (other := _not_plain((*args, *kwargs.values()))) is not None:
            raise Refused(f"it hands its layers a {type(other).__name__}, through which they may share values")
        if any(each.requires_grad for each in _tensors((args, kwargs))):
            raise Refused("its layers get arguments beside hidden states that depend on its parameters")
        self.given.append((args, kwargs))
        self.handed.append(torch.zeros_like(hidden, requires_grad=True))
        return self.cut.returned(self.handed[-1])

    def _instead(self, path: str, model: Any, module: nn.Module) -> Any:
        """The stand-in for a module outside the layers."""
        if path in self.cut.blanks:
            return Slot(module, partial(self._called, path))
        if not any(buffer.is_meta for buffer in module.buffers()):
            return module
        twin = copy.deepcopy(module).to_empty(device=self.device)
        with foreign("its _init_weights"):
            for each in twin.modules():
                model._init_weights(each)
        return twin

    def _called(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Zeros that depend, for autograd, on the module's parameters and its input."""
        layers = len(self.given)
        if 0 < layers < len(self.cut.layers):
            raise Refused(f"{path} runs between its layers")
        (self.behind if layers else self.before).add(path)
        mark = torch.zeros((), device=self.device, requires_grad=True)
        if not layers:
            self.marks.append(mark)
        given = mark + sum(x.sum() * 0 for x in _tensors((args, kwargs)) if x.is_floating_point())
        result = self.cut.blanks[path](*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: x + given.to(x.dtype) if x.is_floating_point() else x, result)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sum(-1, keepdim=True).repeat(1, 1, 2)

    def _loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if logits.shape[:-1] != (BATCH, LENGTH):
            raise _Unchained(f"its logits are {list(logits.shape)} for tokens {[BATCH, LENGTH]}")
        self.loss = logits.sum()
        return self.loss


IN_TRAINING = {"training": True, "gradient_checkpointing": False}  # checkpointing covers layers only


class Slot:
    """A view's stand-in for a layer: called, it calls ``run``; its attributes are the layer's."""

    def __init__(self, layer: Any, run: Callable[..., Any]) -> None:
        self._layer, self._run = layer, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


_PLAIN = (torch.Tensor, torch.dtype, torch.device, bool, int, float, str, type(None))


def _not_plain(value: Any) -> Any:
    """The first object in ``value`` that is no tensor or setting, or is an empty container to fill; or None."""
    if isinstance(value, _PLAIN):
        return None
    if not isinstance(value, tuple | list | dict) or (not value and not isinstance(value, tuple)):
        return value
    inside = value.values() if isinstance(value, dict) else value
    return next((found for found in map(_not_plain, inside) if found is not None), None)


def _same(ours: Any, theirs: Any) -> bool:
    (mine, spec), (yours, other) = tree_flatten(ours), tree_flatten(theirs)
    return spec == other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(mine, yours)
    )
