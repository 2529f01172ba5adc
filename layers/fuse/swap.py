"""Change a module's class and keep everything else: its parameters, children and hooks, and all references to it.

The new class derives from the stock one and has its name, so ``isinstance``, ``state_dict``, checkpoints and lookups by
name work as before, and every method that it does not replace is the stock one. Other objects of the stock class do not
change. FSDP2 changes the class of a wrapped module in the same way.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from ...kernels.linear import functional, linear_act_choice
from ...kernels.runtime import autograd, dispatch
from ...kernels.runtime.dispatch import Choice
from ...parallel.core import mappings
from ...parallel.core.mesh import SINGLE, Group
from ...parallel.core.sharding import is_dtensor, local_tensors, part_of, placed_by, spec_of
from ..module import ShardedModule
from .probing import apart
from .saving import saving, takes_state


class Match:
    """A matcher's finding in one module, and the split of that module over ranks."""

    ops: tuple[str, ...]  # run by the fused forward, with the layers they replace: "linear_act(fc1; relu)", "rms_norm"
    kinds: Mapping[str, type]  # the children whose parameters are read instead of calling them: their classes

    def __init__(self, ops: tuple[str, ...], kinds: Mapping[str, type] | None = None) -> None:
        self.ops, self.kinds = ops, kinds or {}
        self.matcher: Any = None  # the matcher that found it
        self.group: Group = SINGLE  # the ranks over which the module is split
        self.whole: str | None = None  # the reason why it is whole in a split model
        self.ranks: Group = SINGLE  # the ranks over which the model is split
        self.lives: Any = None  # the module's class and number of attributes when a LiveView of it was looked into
        self.sequence: Any = None  # the Sequence that divides its tokens among the ranks
        # In a split model: the ways to the module (an empty one) and the children whose whole parameters it reads.
        self.reads_whole: tuple[tuple[str, ...], ...] = ()

    def of_copy(self, module: nn.Module, original: nn.Module, memo: dict[int, Any]) -> Match:
        """The match for ``module``, a deep copy of this match's module ``original``."""
        match = copy.copy(self)
        match.sequence = copy.deepcopy(self.sequence, memo)
        return match


# Context managers around the forward of every fused module, outside of torch.compile. Hooks would look like a user's.
observers: list[Callable[[nn.Module], AbstractContextManager[None]]] = []


class Fused(nn.Module):
    """The base class of fused modules: their class derives from a subclass of this one, then from the stock class."""

    _stock: type[nn.Module]
    _match: Any = None  # the matcher's Match; None for an instance made by calling the class

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the stock class, with this module's parameters."""
        return self._stock.forward(self, *args, **kwargs)

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward with our ops; ``self._match`` is what the matcher found."""
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        stock = self._match is None or self.why_stock() is not None
        run = self.stock_forward if stock else self.fused_forward
        if not observers or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer(self))
            return run(*args, **kwargs)

    def _forward_on_local(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`_forward`, with this rank's plain tensors in the place of parameters that are whole on every rank."""
        if self._match is None:
            return self._forward(*args, **kwargs)
        held = _hold_local(self, self._match.reads_whole)
        try:
            return self._forward(*args, **kwargs)
        except RuntimeError as error:
            autograd.refuse_transform(error)
            if _MIXED not in str(error):
                raise
            raise RuntimeError(
                f"a tensor that this {type(self).__name__} computes with is a DTensor, since fuse split the model over "
                f"{self._match.ranks.size} ranks: read parameters from their modules, within forward, and do what "
                "makes others of them (pruning, a parametrization with buffers, ...) before fuse(model, mesh)"
            ) from error
        finally:
            for params, name, param, local in held:
                if params.get(name) is local:  # otherwise forward has put another parameter there
                    params[name] = param
                    _keep_data(param, local)

    def _getattr_on_local(self, name: str) -> Any:
        """A whole parameter is read as a plain tensor where a checkpoint runs part of a forward again, in backward."""
        value = nn.Module.__getattr__(self, name)
        if isinstance(value, DTensor) and torch._C._current_graph_task_id() >= 0 and torch.is_grad_enabled():
            return local_tensors(value)[0] if value._spec.is_replicated() else value
        return value

    def on_whole_sequences(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``run``, which needs whole sequences, also if the module gets this rank's part of them."""
        sequence = None if self._match is None else self._match.sequence
        if sequence is None or not sequence.active:
            return run(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))

        def gather(x: Any) -> Any:  # applies to the hidden states and tensors added to them
            if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[:2] != first.shape[:2]:
                return x
            return mappings.gather_from(x, sequence.group, dim=1, site="stock.in")

        args, kwargs = tuple(map(gather, args)), {name: gather(value) for name, value in kwargs.items()}
        split = partial(mappings.split_to, group=sequence.group, dim=1, site="stock.out")
        return on_result(run(*args, **kwargs), split)

    def extra_repr(self) -> str:
        """What the stock class says, and what runs."""
        why = None if self._match is None else self.why_stock()
        said = "" if self._match is None else f"fused: {', '.join(self._match.ops)}" if why is None else f"stock: {why}"
        return ", ".join(filter(None, [self._stock.extra_repr(self), said]))

    def why_stock(self) -> str | None:
        """The reason why the stock forward runs although the module is fused, or None. Here: changed children."""
        return unlike(self, self._match.kinds)

    def runs(self, device: torch.device) -> list[tuple[str, Choice]]:
        """The ops that forward runs on ``device``, each with its choice of implementation: for ``explain``."""
        if self._match is None or self.why_stock() is not None:
            return []
        dtype = next((param.dtype for param in self.parameters()), torch.float32)
        whole = f"; whole on every rank: {self._match.whole}" if self._match.whole else ""
        choices = [(op, self._choice(op, dtype, device)) for op in self._match.ops]
        return [(op, replace(choice, reason=choice.reason + whole)) for op, choice in choices]

    def _choice(self, said: str, dtype: torch.dtype, device: torch.device) -> Choice:
        """The implementation of an op written "linear_act(fc1; relu)"; on a CPU it depends on the child's size."""
        op, _, of = said.partition("(")
        if op not in ("linear_act", "gated_linear"):
            return dispatch.choose(op, device)
        children, _, activation = of.rstrip(")").partition(";")
        weight = getattr(self._modules.get(children.partition(",")[0]), "weight", None)
        if weight is None:
            return linear_act_choice(dtype, device, op=op)
        (weight,) = local_tensors(weight)
        return functional.layer_choice(weight, device, "auto", activation.strip() or "identity", self.training, op)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a stock module's whole plain tensors also into parameters that are split over ranks."""
        for name, param in self._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(param, DTensor) and isinstance(value, torch.Tensor):
                spec = spec_of(param)
                if placed_by(spec, param):
                    state_dict[prefix + name] = part_of(value, param, spec)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "_match"}, memo))
        twin.__dict__["_match"] = None if self._match is None else self._match.of_copy(twin, self, memo)
        return twin

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            f"torch.jit.script does not read the forward of a fused {type(self).__name__}: script the stock model "
            "(shardfuse.unfuse), or use torch.compile or torch.export"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"nn.DataParallel copies the modules for each call, and threads would share what a fused "
            f"{type(self).__name__} knows of itself: use DistributedDataParallel, one process for each GPU"
        )

    def share_memory(self) -> Any:
        """torch's, which ends the process where a parameter is a DTensor: refused there, with a RuntimeError."""
        if any(is_dtensor(param) for param in self.parameters()):
            raise RuntimeError(
                f"share_memory: the parameters of this {type(self).__name__} are spread over ranks, which are "
                "processes already; share a stock model, loaded from full_state_dict(model)"
            )
        return super().share_memory()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without the match, whose functions and classes have no importable name; unpickling matches again."""
        if self._match is not None and (self._match.group.size > 1 or self._match.reads_whole):
            raise TypeError(
                f"this {type(self).__name__} is split over {self._match.ranks.size} ranks and cannot be pickled: save "
                "full_state_dict(model), and load it into a model that is built and fused anew"
            )
        return _again, (self._stock, self._match.matcher), {k: v for k, v in self.__dict__.items() if k != "_match"}


def _hold_local(module: nn.Module, ways: tuple[tuple[str, ...], ...]) -> list[tuple[Any, ...]]:
    """Returns what to put back: for each parameter the dictionary that holds it, its name there, itself and its
    plain tensor.

    Within another call the parameters are plain already, and nothing changes.
    """
    held: list[tuple[Any, ...]] = []
    for way in ways:
        owner: Any = module
        for name in way:
            owner = None if owner is None else owner._modules.get(name)
        if owner is None:
            continue
        owners = (owner,)
        if "parametrizations" in owner._modules:  # torch.nn.utils.parametrize computes parameters from others
            owners = (owner, *owner._modules["parametrizations"].children())
        for each in owners:
            params = each._parameters
            for name, param in params.items():
                if isinstance(param, DTensor) and param._spec.is_replicated():
                    held.append((params, name, param))
    if not held:
        return held
    plain = local_tensors(*[param for _, _, param in held])
    for (params, name, _), local in zip(held, plain):
        params[name] = local
    return [(*each, local) for each, local in zip(held, plain)]


def _keep_data(param: Any, local: torch.Tensor) -> None:
    """Copy into ``param`` what forward put in the place of its plain tensor's data."""
    if type(local) is not torch.Tensor or torch.compiler.is_compiling() or autograd.transformed() is not None:
        return
    own = param._local_tensor
    if local.data_ptr() != own.data_ptr():
        own.data.copy_(local.data)


_MIXED = "got mixed torch.Tensor and DTensor"  # torch's words


def on_first(args: tuple[Any, ...], kwargs: dict[str, Any], function: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with ``function`` applied to the first one."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    name, value = next(iter(kwargs.items()))
    return args, {**kwargs, name: function(value)}


def on_result(out: Any, function: Any) -> Any:
    """``out``, hidden states or a tuple that begins with them, with ``function`` applied to the hidden states."""
    return (function(out[0]), *out[1:]) if isinstance(out, tuple) else function(out)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of ``module`` other than parameters, buffers and children."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


# And what transformers' loading marks; no forward reads it.
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_match", "_is_hf_initialized"))
_PLAIN_VALUES = (bool, int, float, str, tuple)


def again(settings: Mapping[str, Any], module: nn.Module, original: nn.Module) -> dict[str, Any]:
    """The ``settings`` of ``original`` for its copy ``module``; a setting changed since the match stays changed."""
    now, before = vars(module), vars(original)
    return {name: now.get(name) if before.get(name) is value else value for name, value in settings.items()}


def changed(module: nn.Module, settings: Mapping[str, Any]) -> str | None:
    """The first difference between ``settings`` (from :func:`settings_of`) and those of ``module`` now, or None."""
    now = module.__dict__
    for name, value in settings.items():
        other = now.get(name)
        same = other is value or (type(value) in _PLAIN_VALUES and type(other) is type(value) and other == value)
        if not same:
            return f"{name} was {value!r} when it was fused, and is {other!r}"
    return None


_PLAIN = (nn.Parameter, torch.Tensor, FakeTensor)
_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def unlike(module: nn.Module, kinds: Mapping[str, type]) -> str | None:
    """The reason why a child named in ``kinds`` must be called, as it was replaced or has hooks; or None.

    Adapters (peft) replace children, and quantisers their weights. Engines hook children or (accelerate) replace their
    forward.
    """
    if not kinds:
        return None
    if any(_GLOBAL_HOOKS):
        return "there are hooks for all modules"
    children = module._modules
    for name, kind in kinds.items():
        child: Any = children.get(name)
        own: Any = type(child)
        if own is not kind and getattr(own, "_stock", own) is not kind:
            return f"{name} is a {own.__name__}"
        own = child.__dict__  # a module's own search for an attribute takes three times as long
        weight = own["_parameters"].get("weight")
        if weight is not None and type(weight) not in _PLAIN and not isinstance(child, (ShardedModule, Fused)):
            return f"the weight of {name} is a {type(weight).__name__}"
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return f"{name} has hooks"
        if "forward" in own:
            return f"{name} has a forward of its own"
    return None


@functools.cache
def fused_class(base: Any, stock: Any, reads_whole: bool = False) -> type[Any]:
    """A subclass of ``stock`` with the methods of ``base`` and the stock forward's signature, for transformers.

    ``reads_whole``: for modules of a split model that read parameters which are whole on every rank.
    """

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (self._forward_on_local if reads_whole else self._forward)(*args, **kwargs)

    own = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    if takes_state(stock):
        own["save_pretrained"] = saving(stock.save_pretrained)
    if reads_whole and stock.__getattr__ is nn.Module.__getattr__:
        own["__getattr__"] = Fused._getattr_on_local
    return type(stock.__name__, (base, stock), {**own, "_stock": stock, "forward": forward})


def become(module: nn.Module, matcher: Any, match: Match) -> None:
    """Turn ``module`` into the fused class of ``matcher``, in place."""
    match.matcher = matcher
    module.__dict__["_match"] = match
    stock: Any = type(module)
    module.__class__ = fused_class(matcher.fused, stock)


def read_whole(module: Any, ways: tuple[tuple[str, ...], ...]) -> None:
    """Let a fused ``module`` read the whole parameters at the ends of these ways, of child to child, as plain ones."""
    module._match.reads_whole = ways
    module.__class__ = fused_class(module._match.matcher.fused, module._stock, True)


def _again(stock: Any, matcher: Any) -> nn.Module:
    """An empty module that becomes a fused ``stock`` once it gets the state of one."""
    module: Any = stock.__new__(stock)
    module.__class__ = _becoming(stock)
    module.__dict__["_matcher"] = matcher
    return module


@functools.cache
def _becoming(stock: Any) -> type[Any]:
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        matcher = self.__dict__.pop("_matcher")
        self.__class__ = stock
        self.__setstate__(state)
        match = apart(matcher.match, self)
        if match is not None:
            become(self, matcher, match)

    return type(stock.__name__, (stock,), {"__setstate__": __setstate__})


def restore(module: nn.Module) -> None:
    """Undo :func:`become` on a fused ``module``; leave other modules alone."""
    if isinstance(module, Fused):
        module.__class__ = module._stock  # type: ignore[assignment]
        del module.__dict__["_match"]
