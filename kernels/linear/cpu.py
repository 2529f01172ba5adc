"""Which products ``auto`` gives to oneDNN on a CPU: by a table of measurements, never by a clock in a forward.

A table (``runtime/tuning.py``) belongs to a processor (``runtime/processor.py``). For a kind of call and a size of
weight it says from how many tokens on oneDNN is faster:

    train         forward and backward, weights as they lie. Calls without gradients count here, too, unless their
                  weights are packed: a recomputed forward then runs what the first one ran
    packed        inference with packed weights, no activation
    packed_act    the same with an activation in the product's epilogue
    served, served_act
                  the two within ``onednn.serving``, where no call compares its weight with the packed one; a table
                  without them has ``packed`` and ``packed_act`` in their place

Weights count by the power of two below F D; what lies beyond the table's sizes is as its last one.
``shardfuse bench calibrate --cpu`` measures a table for the processor at hand; ``cpu_tables.py`` says which decide on a
processor that has none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence

import torch

from ..runtime import autograd, dispatch, library, onednn, processor, tuning
from ..runtime.dispatch import OneDNN
from . import cpu_tables
from .cpu_tables import NEVER, InForce

_SUFFIXES = {"identity": "", "any": "_either"}


def kind_of(activation: str, pack: bool) -> str:
    """Which rows of the table speak of a call; ``activation`` "any": of two, with one and without."""
    if not pack:
        return "train"
    return ("served" if onednn.here.serving else "packed") + _SUFFIXES.get(activation, "_act")


def wins(x: torch.Tensor, weight: torch.Tensor, activation: str, pack: bool) -> bool:
    """Whether ``auto`` gives act(x @ weight^T) to oneDNN, by the table alone. Python overhead is measurable here."""
    if torch.compiler.is_compiling():  # sizes may be symbolic, and a graph must not be tied to them
        return False
    thresholds = _read() if _thresholds is None else _thresholds
    if not thresholds or x.dtype is not torch.float32 or not x.is_cpu:
        return False
    size, elements = weight.numel(), x.numel()
    if type(size) is not int or type(elements) is not int:  # torch.jit traces
        return False
    if elements < thresholds[kind_of(activation, pack)][size.bit_length()] * weight.size(-1):
        return False
    if type(x) not in library.PLAIN or type(weight) not in library.PLAIN:  # a subclass knows what its product is
        return False
    return not (dispatch.row_invariant() or torch.is_autocast_enabled("cpu") or autograd.transformed())


def offer(
    x: torch.Tensor | None, weights: Sequence[torch.Tensor], dtype: torch.dtype, activation: str, pack: bool
) -> OneDNN:
    """What oneDNN has to offer a call in ``dtype``; without ``x`` of as many tokens as it takes, without ``weights`` of
    any size."""
    lacks = autograd.transformed() or onednn.why_not(dtype)
    if lacks:
        return OneDNN(lacks)
    won = x is None or wins(x, weights[0], activation, pack)
    if torch.compiler.is_compiling():
        return OneDNN(why="torch's own product while torch.compile traces")
    return _offer(kind_of(activation, pack), weights[0].numel() if weights else None, dtype, won)


@functools.lru_cache(maxsize=4096)
def _offer(kind: str, size: int | None, dtype: torch.dtype, won: bool) -> OneDNN:
    if _disagreement:
        return OneDNN(why=_disagreement)
    decides = in_force()
    if not decides.tables:
        return OneDNN(why=decides.said())
    if dtype != torch.float32:
        return OneDNN(why="torch's own product; the table of this processor is of fp32")
    asked, thresholds = kind.replace("_either", ""), _read()[kind]
    if size is None:
        some = any(tokens != NEVER for tokens in thresholds)
        source = decides.tables[0].sources[asked] if decides.own else decides.said()
        return OneDNN(None, some, f"faster for some sizes and numbers of tokens, the reference for others ({source})")
    tokens, why = thresholds[size.bit_length()], decides.why(asked, size.bit_length())
    if tokens == NEVER:
        return OneDNN(why=f"torch's own product is faster ({why})" if decides.own else f"torch's own product: {why}")
    when = "faster" if tokens == 1 else f"faster from {tokens} tokens on, the reference for fewer"
    return OneDNN(None, won, f"{when} ({why})" if decides.own else f"{when}: {why}")


def fingerprint() -> str:
    """What this process's choices on a CPU follow from."""
    if _disagreement:
        return _disagreement
    thresholds = in_force().thresholds
    digest = hashlib.sha256(repr(sorted(thresholds.items())).encode()).hexdigest()[:8] if thresholds else "none"
    return f"{processor.architecture()}, {onednn.why_not(torch.float32) or 'oneDNN'}, table {digest}"


def said() -> str:
    """Which table decides in this process, for ``shardfuse env``."""
    return _disagreement or onednn.why_not(torch.float32) or in_force().said()


@functools.cache
def in_force() -> InForce:
    """What decides on this processor."""
    return cpu_tables.in_force(processor.architecture())


def settle_for_stock(why: str) -> None:
    """From now on ``auto`` takes no oneDNN in this process: ranks that share a layer would choose differently."""
    global _disagreement, _thresholds
    _disagreement, _thresholds = why, {}
    _offer.cache_clear()


def forget() -> None:
    """Read the table anew, after one was written, and in tests."""
    global _disagreement, _thresholds
    _disagreement, _thresholds = "", None
    in_force.cache_clear()
    _offer.cache_clear()


tuning.also_forget.append(forget)

_disagreement = ""
# By kind: for each number of bits of F D the tokens from which on oneDNN wins. Empty: there is no table.
_thresholds: dict[str, Sequence[int]] | None = None


def _read() -> dict[str, Sequence[int]]:
    global _thresholds
    if _thresholds is None:
        decides = in_force()
        usable = bool(decides.tables) and onednn.why_not(torch.float32) is None
        _thresholds = dict(decides.thresholds) if usable else {}
        for kind in ("packed", "served") if usable else ():
            _thresholds[f"{kind}_either"] = [*map(min, _thresholds[kind], _thresholds[f"{kind}_act"])]
    return _thresholds


onednn.probe()  # now, as torch.compile cannot
with contextlib.suppress(ValueError):  # a broken table says so at the first call
    _read()
