"""Convert the steps that bias attention scores into the additive mask of torch's SDPA."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..view import version

# A bias at or below this value removes a key from the softmax, unless all biases of its row are as low.
LOW = -3e4
# ("+", tensor); ("*", number); ("mask", mask, the mask value that keeps a score, the fill value of the others, the
# scores' dtype); ("view", the dimensions before the last two, their new sizes)
Step = tuple[Any, ...]
BLIND = object()  # gradients are on, and some row consists of low values alone


class _Kept(NamedTuple):
    key: Any
    mask: Any
    tensors: list[Any]  # its other sources, kept alive so that no tensor reuses their addresses


# The latest mask for each last source tensor, which all layers of a model receive.
_kept: Any = WeakTensorKeyDictionary()


def shared_mask(steps: tuple[Step, ...], dtype: torch.dtype) -> Any:
    """The mask in ``dtype``, or BLIND; layers with the same steps share one tensor."""
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
    if bias.dtype.itemsize > dtype.itemsize:  # round differences from a row's maximum
        top = bias.detach().amax(-1, keepdim=True)
        bias = bias - top.masked_fill(top <= LOW, 0.0)
    if torch.is_grad_enabled():
        # In the stock forward a row without any key has uniform weights and gradients; SDPA's gradients differ.
        blind = (bias <= LOW).all(-1, keepdim=True)
        if torch.compiler.is_compiling() or not _host_may_read(bias):
            bias = bias.masked_fill(blind, 0.0)  # let it see all keys, as transformers' own SDPA masks do
        elif blind.any():
            return BLIND
    # Kernels multiply by log2(e), which must not turn a finite value into an infinite one.
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
