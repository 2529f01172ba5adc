"""Which matcher knows which module of a model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .matchers.attention import Attention, PackedAttention
from .matchers.feed_forward import FeedForward, SpelledOut
from .matchers.head import Head
from .matchers.norms import Norm
from .probing import apart, listening, told
from .swap import Fused, Match, become


class Matcher(Protocol):
    """Finds modules of one kind."""

    @property
    def fused(self) -> type[Fused]:
        """The class of the fused modules: a subclass of :class:`Fused` with a ``fused_forward``."""

    def match(self, module: nn.Module) -> Match | None:
        """Return the match in ``module``, or None. The module stays unchanged and may be on the meta device.

        It runs in a thread of its own, outside every mode of torch's. An error that it raises is no answer: ``fuse``
        raises it with the module's path.
        """

    # A matcher may also have split(module, match, group): it splits a fused module over ranks, or returns the reason
    # why the module stays whole.


MATCHERS: tuple[Matcher, ...] = (FeedForward(), SpelledOut(), Norm(), Attention(), Head())

OVER_RANKS: tuple[Matcher, ...] = (PackedAttention(),)


class Found(NamedTuple):
    module: nn.Module
    matcher: Matcher
    match: Match


def find(candidates: Sequence[tuple[str, nn.Module]], matchers: Sequence[Matcher] = MATCHERS) -> list[Found]:
    """What the first of ``matchers`` that knows it found in each of the modules, which come with their paths.

    Raises RuntimeError, with the module's path, for an error of a matcher.
    """
    return apart(_find, candidates, matchers)


def _find(candidates: Sequence[tuple[str, nn.Module]], matchers: Sequence[Matcher]) -> list[Found]:
    found = []
    for path, module in candidates:
        for matcher in matchers:
            if (match := _looked(path, module, matcher)) is not None:
                found.append(Found(module, matcher, match))
                break
    return found


def _looked(path: str, module: nn.Module, matcher: Matcher) -> Match | None:
    try:
        return matcher.match(module)
    except Exception as error:
        raise RuntimeError(
            f"fuse: {named(matcher)} could not look at {path or 'the model'} ({type(module).__name__}): "
            f"{told(error)}; leave the module out with filter_fn, and please report it"
        ) from error


def named(matcher: Any) -> str:
    """The matcher's class, for people."""
    kind = type(matcher)
    ours = kind.__module__.startswith(__package__ or "")
    return f"our matcher {kind.__name__}" if ours else f"your matcher {kind.__module__}.{kind.__qualname__}"


def errors_of(path: str, module: nn.Module) -> list[str]:
    """The errors that the module's own code raised when the matchers looked at it, or that of a matcher."""
    with listening() as found:
        try:
            _find([(path, module)], MATCHERS)
        except RuntimeError as error:
            found.append(str(error))
        return found


def fusible(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of ``model`` that are stock and have their class's forward in Python, each with its path."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if not isinstance(module, (Fused, torch.jit.ScriptModule))
        and "forward" not in module.__dict__
        and not any(is_lazy(param) for param in module._parameters.values() if param is not None)
    ]


def preview(model: nn.Module) -> nn.Module | None:
    """A model that shares the parameters of ``model``, and is fused; None where there is nothing to fuse.

    Its modules, buffers, lists and dictionaries are its own, and its hooks do nothing: ``model`` stays unchanged also
    if the other one runs.
    """
    twin = _Twins().of(model)
    found = find(fusible(twin))
    for each in found:
        become(*each)
    return twin if found else None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Twins:
    """A twin of each module, in which every reference to a module is to its twin."""

    def __init__(self) -> None:
        self.made: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if module in self.made or isinstance(module, torch.jit.ScriptModule):
            return self.made.get(module, module)
        try:
            twin = object.__new__(type(module))
        except TypeError:  # a class that is built on another one of Python's
            twin = copy.copy(module)
        self.made[module] = twin
        own = twin.__dict__
        own.update({name: self._mapped(value) for name, value in module.__dict__.items() if name not in _HOOKS})
        own.update({name: OrderedDict.fromkeys(module.__dict__.get(name, ()), _nothing) for name in _HOOKS})
        with torch.no_grad():
            own["_buffers"] = {n: None if x is None else x.clone() for n, x in module._buffers.items()}
        return twin

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.of(value)
        if type(value) in (list, tuple, set):
            return type(value)(map(self._mapped, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._mapped(each)) for key, each in value.items())
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.of(value.__self__))
        return value


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a hook."""
