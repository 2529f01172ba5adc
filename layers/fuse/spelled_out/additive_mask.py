"""The bias of attention scores, from the steps that build it up, as the additive mask of torch's SDPA."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..view import version

# A mask's value from here down leaves nothing of a score, unless all values of its row are as low.
LOW = -3e4
# ("+", tensor); ("*", number); ("mask", mask, its value that keeps scores, what others become, the scores' dtype);
# ("view", dimensions before the last two, what they become)
Step = tuple[Any, ...]
BLIND = object()  # there are rows of nothing but low values, and gradients are wanted


class _Kept(NamedTuple):
    key: Any
    mask: Any
    tensors: list[Any]  # of which it was made, but for the last: no others take their place in memory


# By the last tensor that goes into a mask, which all layers of a model get: what was made of it last.
_kept: Any = WeakTensorKeyDictionary()


def shared_mask(steps: tuple[Step, ...], dtype: torch.dtype) -> Any:
    """The mask in ``dtype``, or BLIND: one tensor for all layers that come with the same steps."""
    *tensors, last = [each for step in steps for each in step if isinstance(each, torch.Tensor)]
    if torch.compiler.is_compiling() or not _host_may_read(last) or any(x.requires_grad for x in (*tensors, last)):
        return _mask(steps, dtype)
    known = [tuple(map(_identity, step)) for step in steps]
    key = (known, dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    kept = _kept.get(last)
    if kept is None or kept.key != key:
        kept = _kept[last] = _Kept(key, _mask(steps, dtype), tensors)
    return kept.mask


def _identity(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    return x.data_ptr(), x.shape, x.stride(), x.dtype, version(x), stream


def _host_may_read(x: torch.Tensor) -> bool:
    return not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _mask(steps: tuple[Step, ...], dtype: torch.dtype) -> Any:
    bias = _bias(steps)
    if bias.dtype.itemsize > dtype.itemsize:  # what counts are differences from the largest of a row: those are rounded
        top = bias.detach().amax(-1, keepdim=True)
        bias = bias - top.masked_fill(top <= LOW, 0.0)
    if torch.is_grad_enabled():
        # A row without a key is uniform in the stock forward, and so is its gradient; SDPA's is not.
        blind = (bias <= LOW).all(-1, keepdim=True)
        if torch.compiler.is_compiling() or not _host_may_read(bias):
            bias = bias.masked_fill(blind, 0.0)  # it sees all of them, as in transformers' own masks for SDPA
        elif blind.any():
            return BLIND
    # Kernels multiply by log2(e), which must not make a row infinite that was not.
    finite = bias.clamp(min=torch.finfo(dtype).min / 2)
    return torch.where(bias.isneginf(), bias, finite).to(dtype)


def _bias(steps: tuple[Step, ...]) -> torch.Tensor:
    bias: Any = None
    for name, *values in steps:
        if name == "+":
            bias = values[0] if bias is None else bias + values[0]
        elif name == "*":
            bias = bias * values[0]
        elif name == "mask":
            mask, kept, value, dtype = values
            before = torch.zeros((), dtype=dtype, device=mask.device)
            before = before if bias is None else bias.to(torch.promote_types(bias.dtype, dtype))
            bias = torch.where(mask, before, value) if kept else torch.where(mask, value, before)
        elif any(size != 1 for size in bias.shape[:-2]):
            lead, after = values
            bias = bias.expand(*lead, *bias.shape[-2:]).reshape(*after, *bias.shape[-2:])
        else:
            bias = bias.reshape(bias.shape[-2:])
    result: torch.Tensor = bias
    return result
