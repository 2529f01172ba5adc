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
``shardfuse bench calibrate --cpu`` measures a table for the processor at hand; two ship.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime import autograd, dispatch, library, onednn, processor, tuning
from ..runtime.dispatch import OneDNN

OP = "linear_cpu"
KINDS = ("train", "packed", "packed_act", "served", "served_act")
SOURCES = ("linear/onednn.py", "runtime/onednn.py")
_NEVER = 1 << 62
_SUFFIXES = {"identity": "", "any": "_either"}


@dataclass(frozen=True)
class CpuConfig:
    """From how many tokens on oneDNN is faster; 0: never."""

    from_tokens: int = 0


def kind_of(activation: str, pack: bool) -> str:
    """Which rows of the table speak of a call; ``activation`` "any": of two, with one and without."""
    if not pack:
        return "train"
    return ("served" if onednn.here.serving else "packed") + _SUFFIXES.get(activation, "_act")


def bucket(kind: str, features: int) -> str:
    """The key of weights with ``features`` = F D elements."""
    return f"{kind}-fp32-s{features.bit_length() - 1}"


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
    if not _read():
        how = "shardfuse bench calibrate --cpu measures one"
        return OneDNN(why=f"no table says where oneDNN is faster on this processor ({processor.architecture()}); {how}")
    if dtype != torch.float32:
        return OneDNN(why="torch's own product; the table of this processor is of fp32")
    measured = _measured(kind.replace("_either", ""), {entry.bucket for entry in _entries()})
    source = next(entry.source for entry in _entries() if entry.bucket.startswith(f"{measured}-"))
    if size is None:
        some = any(tokens != _NEVER for tokens in _read()[kind])
        return OneDNN(None, some, f"faster for some sizes and numbers of tokens, the reference for others ({source})")
    tokens = _read()[kind][size.bit_length()]
    if tokens == _NEVER:
        return OneDNN(why=f"torch's own product is faster ({source})")
    return OneDNN(None, won, f"faster from {tokens} tokens on, the reference for fewer ({source})")


def fingerprint() -> str:
    """What this process's choices on a CPU follow from."""
    entries = sorted((entry.bucket, str(entry.config)) for entry in _entries())
    if _disagreement:
        return _disagreement
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()[:8] if entries else "none"
    return f"{processor.architecture()}, {onednn.why_not(torch.float32) or 'oneDNN'}, table {digest}"


def settle_for_stock(why: str) -> None:
    """From now on ``auto`` takes no oneDNN in this process: ranks that share a layer would choose differently."""
    global _disagreement, _thresholds
    _disagreement, _thresholds = why, {}
    _offer.cache_clear()


def forget() -> None:
    """Read the table anew, after one was written, and in tests."""
    global _disagreement, _thresholds
    _disagreement, _thresholds = "", None
    _offer.cache_clear()


tuning.also_forget.append(forget)

_disagreement = ""
# By kind: for each number of bits of F D the tokens from which on oneDNN wins. Empty: there is no table.
_thresholds: dict[str, list[int]] | None = None


def _read() -> dict[str, list[int]]:
    global _thresholds
    if _thresholds is None:
        arch = processor.architecture()
        found = {entry.bucket for entry in _entries()}
        usable = found and onednn.why_not(torch.float32) is None
        _thresholds = {kind: _by_bits(arch, _measured(kind, found), found) for kind in KINDS} if usable else {}
        for kind in ("packed", "served") if usable else ():
            _thresholds[f"{kind}_either"] = [*map(min, _thresholds[kind], _thresholds[f"{kind}_act"])]
    return _thresholds


def _measured(kind: str, found: set[str]) -> str:
    """The kind of which a table with the buckets ``found`` has measurements, for ``kind``."""
    return kind if any(each.startswith(f"{kind}-") for each in found) else kind.replace("served", "packed")


def _by_bits(arch: str, kind: str, found: set[str]) -> list[int]:
    sizes = sorted(size for size in range(64) if bucket(kind, 1 << size) in found)
    thresholds = [_NEVER] * 65
    for bits in range(1, 65):
        if sizes:
            size = min(max(bits - 1, sizes[0]), sizes[-1])
            measured = max((each for each in sizes if each <= size), default=sizes[0])
            config = tuning.lookup(arch, OP, bucket(kind, 1 << measured), CpuConfig)
            if config is not None and config.from_tokens:
                thresholds[bits] = config.from_tokens
    return thresholds


def _entries() -> list[tuning.Entry]:
    return tuning.entries(processor.architecture(), OP)


onednn.probe()  # now, as torch.compile cannot
with contextlib.suppress(ValueError):  # a broken table says so at the first call
    _read()
