"""The forward pass of a thread, and the attributes of the model that it replaces until its end.

A pass makes the model's configurations select our attention function, or modules run our forward. Other threads may run
the same model meanwhile, so every replacement calls the original for them. When the last pass over a model ends, the
originals are back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ...layers.attention.paged import PagedBatch


@dataclass
class Pass:
    """One forward pass of a served model.

    Attributes:
        batch: of the step; None for a comparison pass, which runs the modeling file's own eager attention.
        order: the modules that call :meth:`attend`, in order; None while the probe learns it.
        reached: the modules that have called it.
        wide: whether a comparison pass computes attention in fp32.
        unlike_causal: whether some mask was not causal, with or without a window; found while the probe learns.
    """

    batch: PagedBatch | None
    order: Sequence[nn.Module] | None = None
    reached: list[nn.Module] = field(default_factory=list)
    wide: bool = False
    unlike_causal: bool = False

    @property
    def learning(self) -> bool:
        return self.batch is not None and self.order is None

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """q [1, N/R, T, H], k [1, K/R, T, H], v [1, K/R, T, Hv] of ``module`` -> [1, T, N/R, Hv].

        The n-th call of a pass is the n-th layer of the cache. ``options`` are those of ``PagedBatch.attend``.

        Raises RuntimeError if the modules call in another order than in the probe.
        """
        assert self.batch is not None
        index = len(self.reached)
        if self.order is not None and (index >= len(self.order) or self.order[index] is not module):
            raise RuntimeError(
                f"attention call {index} of this step came from a {type(module).__name__} where the engine saw another "
                "layer when it was built: make a new engine after changing a model's layers"
            )
        self.reached.append(module)
        rows = [x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v)]
        return self.batch.attend(index, *rows, **options).unsqueeze(0)

    def check_end(self) -> None:
        """Raise RuntimeError if some layer did not attend."""
        if self.order is not None and len(self.reached) != len(self.order):
            raise RuntimeError(
                f"{len(self.reached)} of {len(self.order)} layers attended in this step: make a new engine after "
                "changing a model's layers"
            )


class _Here(threading.local):
    current: Pass | None = None


_here = _Here()


def current() -> Pass | None:
    """The pass that this thread computes; None outside of the engine."""
    return _here.current


class Loan(NamedTuple):
    """An attribute of an object, and its replacement during a pass."""

    owner: Any
    name: str
    value: Any


class _Lent:
    def __init__(self, before: Any) -> None:
        self.before, self.passes = before, 0


_NOTHING = object()
_lock = threading.Lock()
_lent: dict[tuple[int, str], _Lent] = {}


@contextlib.contextmanager
def computing(this: Pass, loans: Sequence[Loan]) -> Iterator[None]:
    """Let this thread compute ``this`` pass, with ``loans`` replacing the attributes that they name.

    Raises RuntimeError at the end if some layer did not attend.
    """
    taken = 0
    try:
        with _lock:
            for owner, name, value in loans:
                entry = _lent.setdefault((id(owner), name), _Lent(owner.__dict__.get(name, _NOTHING)))
                entry.passes += 1
                taken += 1
                owner.__dict__[name] = value
        _here.current = this
        yield
        this.check_end()
    finally:
        _here.current = None
        with _lock:
            for owner, name, _ in loans[:taken]:
                _give_back(owner, name)


def _give_back(owner: Any, name: str) -> None:
    entry = _lent[id(owner), name]
    entry.passes -= 1
    if entry.passes:
        return
    del _lent[id(owner), name]
    if entry.before is _NOTHING:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = entry.before


def before(owner: Any, name: str) -> Any:
    """The value of the attribute outside of passes; None if ``owner`` itself does not have it."""
    with _lock:
        entry = _lent.get((id(owner), name))
        found = owner.__dict__.get(name) if entry is None else entry.before
    return None if found is _NOTHING else found
