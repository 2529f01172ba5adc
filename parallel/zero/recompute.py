"""Activation checkpointing for graphs that several backward passes traverse.

A recomputed region keeps its inputs and runs again when backward reaches it, to form the tensors that its nodes had
saved. Under a pipeline schedule that splits backward many passes read a region: one for the gradient of its input,
later one for each group of parameters. ``torch.utils.checkpoint`` runs it again for each pass. Within
``autograd.split_backward`` this module runs a region again once, and each tensor then lives until the node that saved
it is freed, as it would without checkpointing: after the only pass of a whole backward, or after the weights' pass of a
split one.

The method is Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ...kernels.runtime import autograd


def recomputed(fn: Callable[..., Any], x: torch.Tensor, *args: Any, random: bool) -> Any:
    """Run ``fn(x, *args)`` and keep only x; backward recomputes the rest. ``args`` get no gradient.

    ``random``: ``fn`` draws from torch's generators; its second run then draws the same numbers.

    Raises RuntimeError in backward if x was overwritten since, or the second run of ``fn`` computes something else.
    """
    if not autograd.splitting():
        return checkpoint(fn, x, *args, use_reentrant=False, preserve_rng_state=random)
    region = _Region(fn, x, args, random)
    with saved_tensors_hooks(region.pack, _Saved.unpack):
        return fn(x, *args)


class _Saved:
    """The placeholder of a tensor that a node of the region saved."""

    __slots__ = ("__weakref__", "region", "value")

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.value: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        if self.value is None:
            self.region.run_again()
        assert self.value is not None
        return self.value


class _Region:
    """One run of ``fn``, with its recomputation and the nodes that need their saved tensors."""

    def __init__(self, fn: Callable[..., Any], x: torch.Tensor, args: tuple[Any, ...], random: bool) -> None:
        self.call: Any = fn, args
        self.x, self.needs_grad, self.version = x.detach(), x.requires_grad, x._version
        self.saved: list[tuple[weakref.ref[_Saved], Any]] = []  # and the form of each tensor
        self.autocast = [_autocast_of(kind) for kind in {"cpu", x.device.type}]
        self.draws = (torch.get_rng_state(), *get_device_states(x)) if random else None

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(self)
        self.saved.append((weakref.ref(saved), _looks(tensor)))
        return saved

    def run_again(self) -> None:
        fn, args = self.call
        if self.x._version != self.version:
            raise RuntimeError("the input of a recomputed region was written to between forward and backward")
        found = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            if found == len(self.saved) or self.saved[found][1] != _looks(tensor):
                raise RuntimeError(
                    f"a recomputed region saves {_looks(tensor)} where its forward saved something else: it has to "
                    "compute the same in every run"
                )
            saved = self.saved[found][0]()
            tensor = tensor.detach()
            if saved is not None:  # otherwise the node was freed
                saved.value = tensor
            found += 1
            if found == len(self.saved):
                raise _Done
            return tensor

        with contextlib.ExitStack() as stack:
            for again in (torch.enable_grad(), self._redrawn(), *(autocast() for autocast in self.autocast)):
                stack.enter_context(again)
            stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
            stack.enter_context(contextlib.suppress(_Done))
            fn(self.x.detach().requires_grad_(self.needs_grad), *args)
        if found < len(self.saved):
            raise RuntimeError(
                f"a recomputed region saved {len(self.saved)} tensors in forward and {found} now: it has to compute "
                "the same in every run"
            )
        self.call = self.draws = None  # the region does not run a third time

    @contextlib.contextmanager
    def _redrawn(self) -> Iterator[None]:
        """Within the block torch's generators have their states from before forward."""
        if self.draws is None:
            yield
            return
        on_cpu, devices, states = self.draws
        kind = self.x.device.type
        with torch.random.fork_rng(devices, device_type=kind if kind != "cpu" else "cuda"):
            torch.set_rng_state(on_cpu)
            set_device_states(devices, states, device_type=kind)
            yield


class _Done(Exception):
    """Raised once all saved tensors exist again: the rest of forward need not run."""


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _autocast_of(kind: str) -> Callable[[], Any]:
    """A function that makes a context with the current autocast of ``kind``."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
