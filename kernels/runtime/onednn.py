"""oneDNN's matrix product as torch ships it: what it can take here, the product, and weights in oneDNN's own layout.

On a CPU ``F.linear`` in fp32 is MKL's, whose fast code runs on Intel's processors only. oneDNN's runs on all with the
same instructions, and applies an activation, or adds or multiplies another matrix, before it stores a result. torch has
no public name for it: the op is the one that Inductor emits for a frozen ``nn.Linear``. It has no derivative (a result
silently wants no gradient), ignores autocast, and cannot be traced, so only ``kernels/linear/onednn.py`` calls it, for
forward and backward, outside autograd.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import sealing

# Activations that oneDNN applies to a result: the op's name and algorithm.
POST_OPS = {
    "identity": ("none", ""),
    "relu": ("relu", ""),
    "gelu_erf": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
PACKS = os.environ.get("SHARDFUSE_PACK_WEIGHTS", "1") != "0"
_SAMPLES = 32  # elements of a packed weight that are compared with the weight at each call


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity"
) -> torch.Tensor:
    """act(x @ W^T + b), of POST_OPS: x [T, D], W [F, D] of any strides or packed, b [F] -> [T, F], contiguous."""
    name, algorithm = POST_OPS[activation]
    return _ops().default(x, _laid_out(weight), _dense(bias), name, (), algorithm)


def product_with(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operation: str
) -> torch.Tensor:
    """(x @ W^T + b) + other, or times other, for the ``operation`` "add" or "mul": other [T, F]."""
    return _ops().binary(x, other.contiguous(), _laid_out(weight), _dense(bias), operation)


def _dense(bias: torch.Tensor | None) -> torch.Tensor | None:
    """``bias`` without gaps: the op would read it as if it had none."""
    return bias if bias is None or bias.is_contiguous() else bias.contiguous()


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` in rows or in columns that do not overlap."""
    if weight.layout is not torch.strided:  # packed
        return weight
    (rows, columns), (down, right) = weight.shape, weight.stride()
    apart = min(down, right) > 0 and (down >= columns * right or right >= rows * down)
    return weight if apart else weight.contiguous()


@functools.cache
def _ops() -> Any:
    return torch.ops.mkldnn._linear_pointwise


def why_not(dtype: torch.dtype) -> str | None:
    """Why oneDNN cannot multiply matrices of ``dtype`` in this process, or None."""
    if not _lacks:
        probe()
    return _lacks[dtype] if dtype in _lacks else f"oneDNN has no products in {str(dtype).removeprefix('torch.')}"


def probe() -> None:
    """Find out what oneDNN can do here, once: torch.compile, which cannot, then reads the answers."""
    broken = _why_broken()
    for dtype, short in ((torch.float32, ""), (torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        asks = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported", None) if short and not broken else None
        lacks = None if not short or (asks is not None and asks()) else f"oneDNN has no products in {short} here"
        _lacks[dtype] = broken or lacks


_lacks: dict[torch.dtype, str | None] = {}


def _why_broken() -> str | None:
    """Why there is no product in fp32: it is tried, on eight numbers, with every post-op that is relied upon.

    Not in 16 bits: virtual machines that advertise instructions and trap on them would end the process.
    """
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return f"torch {torch.__version__} has no torch.ops.mkldnn._linear_pointwise"
    fp32 = functools.partial(torch.tensor, dtype=torch.float32, device="cpu")  # whatever the defaults are
    x, weight = fp32([[1.0, -2.0], [3.0, 0.5]]), fp32([[0.5, 1.0], [-1.0, 2.0]])
    z = fp32([[-1.5 + 1.0, -5.0 - 1.0], [2.0 + 1.0, -2.0 - 1.0]])
    bias = fp32([1.0, 0.0, -1.0])[::2]
    expected = {
        "identity": z,
        "relu": z.relu(),
        "gelu_erf": torch.nn.functional.gelu(z),
        "gelu_tanh": torch.nn.functional.gelu(z, approximate="tanh"),
        "silu": torch.nn.functional.silu(z),
        "add": z + x,
        "mul": z * x,
    }
    with torch.no_grad():
        for name, right in expected.items():
            try:
                with_other = name in ("add", "mul")
                y = product_with(x, x, weight, bias, name) if with_other else product(x, weight, bias, name)
            except (RuntimeError, TypeError, AttributeError) as error:
                return f"oneDNN in torch {torch.__version__} refuses a product with {name!r} ({error})"
            if not torch.allclose(y, right, 1e-4, 1e-4):
                return f"oneDNN in torch {torch.__version__} computes a product with {name!r} wrong"
    return None


# --- packed weights ---------------------------------------------------------------------------------------------------


class _Packed(NamedTuple):
    """Weights on the same x as one matrix in oneDNN's own layout, one below the other."""

    weights: tuple[weakref.ref[torch.Tensor], ...]
    numbers: tuple[int, ...]  # their ids
    states: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
    views: tuple[torch.Tensor, ...]  # of their samples, in their own memory
    samples: torch.Tensor  # what these held
    packed: torch.Tensor

    def of(self, weights: Sequence[torch.Tensor]) -> bool:
        if len(weights) != len(self.weights):
            return False
        for reference, weight in zip(self.weights, weights):  # noqa: SIM110 - a generator takes three times as long
            if reference() is not weight:
                return False
        return True

    def unmoved(self) -> bool:
        """Whether torch counts no change of any weight. Only then may the views be read."""
        for reference, state in zip(self.weights, self.states):
            weight = reference()
            if weight is None or _state(weight) != state:
                return False
        return True


class _Everything(NamedTuple):
    """All packed copies, their views, and their samples in one tensor."""

    copies: list[_Packed]
    views: list[torch.Tensor]
    samples: torch.Tensor

    @classmethod
    def of(cls, copies: list[_Packed]) -> _Everything:
        samples = [torch.empty(0, device="cpu"), *(held.samples for held in copies)]
        return cls(copies, [view for held in copies for view in held.views], torch.cat(samples))


_packed: dict[int, _Packed] = {}  # by the id of each weight: no weight is packed twice
_seen: dict[int, weakref.ref[torch.Tensor]] = {}  # what asked to be packed, and is alive
_changes = 0
_everything: _Everything | None = None  # that is packed; None: to be collected


@contextlib.contextmanager
def serving(*, compare: bool = True) -> Iterator[None]:
    """Within the block this thread's calls without gradients are inference, also of layers in training mode.

    The samples of all packed weights are compared here, at once, and not again at each call within the block; with
    ``compare=False`` they are taken for unchanged.
    """
    outer, here.serving = here.serving, True
    if compare and not outer:
        _compare_samples()
    try:
        yield
    finally:
        here.serving = outer


class _Here(threading.local):
    serving = False  # whether this thread is in the block


here = _Here()


def pack(weights: Sequence[torch.Tensor], tokens: int) -> None:
    """Keep ``weights`` [F_i, D], one or several on the same x, in oneDNN's own layout for products of about ``tokens``
    rows, until one of them changes.

    Not at once, but when the same objects come a second time: a view made for one call is not worth it. It takes as
    many bytes again; ``SHARDFUSE_PACK_WEIGHTS=0`` saves them. Nothing is kept of weights that others take away and
    bring back (FSDP2, DeepSpeed), or of whose changes torch keeps no count, nor a second copy for other companions.
    """
    held = _packed.get(id(weights[0]))
    if held is not None and held.of(weights):
        return
    again = [_comes_again(weight) for weight in weights]  # each is asked
    if not all(again) or any(id(weight) in _packed for weight in weights):
        return
    for weight in weights:
        dense = weight.is_contiguous() or weight.t().is_contiguous()
        if weight.is_inference() or not weight.numel() or not dense or _taken_away(weight):
            return
    sealing.refuse(f"oneDNN would pack a weight of {' + '.join(str(list(weight.shape)) for weight in weights)}")
    detached, numbers = [weight.detach() for weight in weights], tuple(map(id, weights))
    views, states = tuple(map(_sample, detached)), tuple(map(_state, weights))
    matrix = detached[0] if len(detached) == 1 else torch.cat(detached)
    # For one row oneDNN chooses a layout that every other number of rows would have it change again.
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, max(tokens, 2))
    gone = tuple(weakref.ref(weight, lambda _: _forget(numbers)) for weight in weights)
    _remember(_Packed(gone, numbers, states, views, torch.cat(views), packed))


def _comes_again(weight: torch.Tensor) -> bool:
    number = id(weight)
    seen = _seen.get(number)
    if seen is not None and seen() is weight:
        return True
    _seen[number] = weakref.ref(weight, lambda _: _seen.pop(number, None))
    return False


def changes() -> int:
    """How often something was packed or dropped in this process."""
    return _changes


def _remember(held: _Packed) -> None:
    global _everything, _changes
    _packed.update(dict.fromkeys(held.numbers, held))
    _everything, _changes = None, _changes + 1


def _forget(numbers: Sequence[int]) -> None:
    global _everything, _changes
    for number in numbers:
        _packed.pop(number, None)
    _everything, _changes = None, _changes + 1


def packed(weight: torch.Tensor) -> torch.Tensor:
    """What is kept of ``weight``, if the weight is still what it was; else the weight."""
    found = packed_together((weight,))
    return weight if found is None else found


def packed_together(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What is kept of ``weights`` as one matrix, if each is still what it was."""
    held = _packed.get(id(weights[0])) if _packed else None
    if held is None or not held.of(weights):
        return None
    if held.unmoved() and (here.serving or torch.equal(torch.cat(held.views), held.samples)):
        return held.packed
    _forget(held.numbers)
    return None


def _compare_samples() -> None:
    """Keep nothing of weights that are not what was packed: torch does not count writes through ``weight.data``."""
    global _everything
    if _everything is None:
        _everything = _Everything.of(list({held.numbers: held for held in _packed.values()}.values()))
    copies, views, samples = _everything
    for held in copies:
        if not held.unmoved():  # its views may not be read
            _forget(held.numbers)
    if _everything is None:
        _compare_samples()
    elif copies and not torch.equal(torch.cat(views), samples):
        for held in copies:
            if not torch.equal(torch.cat(held.views), held.samples):
                _forget(held.numbers)


def serves(weight: torch.Tensor) -> bool:
    """Whether ``weight`` was last asked to be packed: whether this is inference."""
    seen = _seen.get(id(weight)) if _seen else None
    return seen is not None and seen() is weight


def drop(weight: torch.Tensor) -> None:
    """Keep nothing of ``weight``, nor of what was packed with it."""
    if _seen:
        _seen.pop(id(weight), None)
        held = _packed.get(id(weight))
        if held is not None:
            _forget(held.numbers)


def packed_bytes(weight: torch.Tensor) -> int:
    """How many bytes are kept of ``weight``, beside its own."""
    held = _packed.get(id(weight))
    alive = held is not None and any(reference() is weight for reference in held.weights)
    return weight.numel() * weight.element_size() if alive else 0


def _state(weight: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return weight._version, weight.data_ptr(), weight.shape, weight.stride()


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Elements of ``weight`` at equal distances in memory, as a view."""
    size = weight.numel()
    count = min(_SAMPLES, size)
    return weight.as_strided((count,), (max(1, (size - 1) // max(1, count - 1)),))


def _taken_away(weight: torch.Tensor) -> bool:
    """Whether another package frees the memory of ``weight`` between calls and fills it again."""
    if hasattr(weight, "ds_id"):  # DeepSpeed's ZeRO 3
        return True
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for state in [reference() for reference in list(states.values())]:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one
            groups = [getattr(state, "_fsdp_param_group", None)]
        for param in itertools.chain.from_iterable(getattr(group, "fsdp_params", ()) for group in groups):
            whole = getattr(param, "_unsharded_param", None)
            if weight is whole or weight is getattr(whole, "_local_tensor", None):
                return True
    return False
