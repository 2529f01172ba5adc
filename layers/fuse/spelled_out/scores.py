"""Deferred attention scores: if a module only forms softmax(scores) v, torch's SDPA computes the result.

:class:`Scores` represents q k^T and records the operations on it: a scale, biases, masks, a softmax, changes of shape
and dtype. Its product with v becomes ``scaled_dot_product_attention``, which stores no scores. For every other use,
dropout of the weights included, the recorded calls compute the scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..view import version
from .additive_mask import Step

Made = tuple[Any, Any, Any]  # a function, its arguments, its keyword arguments
Mode = tuple[bool, torch.dtype | None]  # whether gradients are on, and autocast's dtype


# The recorder of each deferrable function. It gets the call and its arguments, and returns the deferred result, or None
# if the call cannot be deferred.
STEPS: dict[Any, Callable[..., Any]] = {}


class Seen:
    """The reason why the first scores of a forward were computed; "" if attention ran without them."""

    none = "its products are not those of softmax(q k^T) v"
    single = "the scores of a single query are small"
    why = none


class Scores:
    """q [..., S, H] times k^T [..., H, T] and the operations since; usable wherever a tensor is."""

    def __init__(
        self,
        made: Made,
        q: torch.Tensor,
        k: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        scale: float = 1.0,
        steps: tuple[Step, ...] = (),
        soft: bool = False,
        before: Scores | None = None,
    ) -> None:
        self.made = made  # the latest call
        self.q, self.k = q, k
        self.shape, self.dtype = shape, dtype
        self.scale, self.steps = scale, steps  # scale * q k^T + bias, which the steps build up
        self.soft = soft  # whether a softmax has been applied
        self.mode: Mode = mode_of(q) if before is None else before.mode
        # The tensors that the call reads, with their versions at that time.
        self.read = [(x, version(x)) for x in (*made[1], *made[2].values()) if isinstance(x, torch.Tensor)]
        if before is not None:
            self.read += before.read
        self.before, self.followers = before, 0  # the scores that these derive from, and the number derived from these
        self.computed: torch.Tensor | None = None

    def value(self, why: str = "more than softmax(scores) v is done with its scores") -> torch.Tensor:
        """Compute the scores by the recorded calls. RuntimeError if gradients have been switched off since."""
        if self.mode[0] and not torch.is_grad_enabled():
            raise RuntimeError(
                "the attention of a fused model reads its scores while gradients are off, possibly in a "
                "torch.autograd.Function, which would lose their graph: leave the module out with fuse(filter_fn=...)"
            )
        return self.compute(why)

    def compute(self, why: str = "its weights were read") -> torch.Tensor:
        """Compute the scores by the recorded calls, in the mode of the first one.

        Raises RuntimeError if a tensor that they read has been overwritten.
        """
        if self.computed is None:
            if any(version(x) != times for x, times in self.read):
                raise RuntimeError(
                    "a fused model computes attention weights when they are read, and queries, keys (a static cache, "
                    "perhaps) or a mask have been overwritten since: read them earlier, or unfuse the model"
                )
            note(why)
            func, args, kwargs = self.made
            with _modes(self):
                self.computed = func(*_values(args), **_values(kwargs))
        return self.computed

    def then(
        self,
        made: Made,
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        steps: tuple[Step, ...] | None = None,
        soft: bool | None = None,
    ) -> Scores:
        """New scores after one more call, ``made``, which changes the given properties."""
        self.followers += 1
        return Scores(
            made,
            self.q,
            self.k,
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self.scale if scale is None else scale,
            self.steps if steps is None else steps,
            self.soft if soft is None else soft,
            before=self,
        )

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        func = getattr(torch.Tensor, name, None)
        return partial(call, func, self) if callable(func) else getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, *args, **(kwargs or {}))


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``func``; return deferred scores where it can be deferred, else its result."""
    step, result = STEPS.get(func), None
    if func in _WRITES and isinstance(args[0], Scores):
        _check_alone(args[0])
    if step is not None and all(_may_wait(each) for each in args if isinstance(each, Scores)):
        try:
            result = step((func, args, kwargs), *args, **kwargs)
        except TypeError:  # a form of the arguments that the recorder does not know
            result = None
    return func(*_values(args), **_values(kwargs)) if result is None else result


def _may_wait(scores: Scores) -> bool:
    return scores.computed is None and scores.mode == mode_of(scores.q)


def _check_alone(scores: Scores) -> None:
    """Raise if other deferred scores derive from these, which are about to be overwritten."""
    others, before = scores.followers, scores.before
    while before is not None:
        others, before = max(others, before.followers - 1), before.before
    if others:
        raise RuntimeError(
            "the attention of a fused model overwrites scores from which other scores derive: leave the module out "
            "with fuse(filter_fn=...)"
        )


def _writes(name: str) -> bool:
    dunder = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__init_subclass__")
    return dunder or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_WRITES = {getattr(torch.Tensor, name) for name in dir(torch.Tensor) if _writes(name)}


def mode_of(x: torch.Tensor) -> Mode:
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), cast


@contextlib.contextmanager
def _in_mode(grad: bool, kind: str, cast: torch.dtype | None) -> Iterator[None]:
    with torch.set_grad_enabled(grad), torch.autocast(kind, dtype=cast, enabled=cast is not None):
        yield


def _modes(scores: Scores) -> AbstractContextManager[None]:
    if scores.mode == mode_of(scores.q):
        return contextlib.nullcontext()
    return _in_mode(scores.mode[0], scores.device.type, scores.mode[1])


def _values(values: Any) -> Any:
    if type(values) in (tuple, list):
        return type(values)([_values(each) for each in values])
    if type(values) is dict:
        return {name: _values(each) for name, each in values.items()}
    return values.value() if isinstance(values, Scores) else values


def note(why: str) -> None:
    if not torch.compiler.is_compiling() and (not why or Seen.why is Seen.none):
        Seen.why = why


def _operator(func: Any) -> Callable[..., Any]:
    return lambda self, *others: call(func, self, *others)


_COMPARE = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in (set(dir(torch.Tensor)) - set(dir(object)) | _COMPARE) - set(vars(Scores)):
    if (
        _name.startswith("__")
        and callable(getattr(torch.Tensor, _name))
        and _name not in ("__setstate__", "__torch_dispatch__")
    ):
        setattr(Scores, _name, _operator(getattr(torch.Tensor, _name)))


class Weights(torch.Tensor):
    """The tensor that a module returns for its scores: reading it computes it, with its autograd graph."""

    scores: Scores

    @staticmethod
    def of(scores: Scores) -> Weights:
        weights: Weights = torch.Tensor._make_wrapper_subclass(
            Weights, scores.shape, dtype=scores.dtype, device=scores.device
        )
        weights.scores = scores
        return weights

    def value(self) -> torch.Tensor:
        value = self.scores.compute()
        with torch._C.DisableTorchFunctionSubclass():
            lost = self.requires_grad and not value.requires_grad
        if lost and torch.is_grad_enabled():
            raise RuntimeError(
                "attention weights of a fused model come out of a reentrant checkpoint without a graph: checkpoint "
                "with use_reentrant=False, or unfuse the model"
            )
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype and requires_grad need no values
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Weights, Weights.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Weights, lambda each: each.value().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)
