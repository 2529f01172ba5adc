"""The operations that deferred attention scores (``scores.py``) can record, and the SDPA call that ends them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from ....kernels.runtime import dispatch
from ..view import version
from .additive_mask import BLIND, LOW, shared_mask
from .scores import STEPS, Made, Scores, Seen, mode_of, note


def _matmul(made: Made, a: Any, b: Any) -> Any:
    if isinstance(a, Scores):
        return _attend(a, b)
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor or a.dim() not in (3, 4) or a.dim() != b.dim():
        return None
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2] or not a.is_floating_point() or a.dtype != b.dtype:
        return None
    if a.shape[-2] == 1:
        note(Seen.single)
        return None
    return Scores(made, a, b.transpose(-1, -2), torch.Size((*a.shape[:-1], b.shape[-1])), _lowered(a))


def _baddbmm(made: Made, bias: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    scores = _matmul(made, batch1, batch2)
    if not isinstance(scores, Scores) or not _is_number(beta) or not _is_number(alpha) or not _fits(bias, scores):
        return None
    return scores.then(made, scale=float(alpha), steps=(("+", bias), ("*", float(beta))))


def _add(made: Made, a: Any, b: Any) -> Any:
    scores, bias = (a, b) if isinstance(a, Scores) else (b, a)
    if scores.soft or not _fits(bias, scores) or not bias.is_floating_point():
        return None
    dtype = torch.promote_types(scores.dtype, bias.dtype)
    return scores.then(made, dtype=dtype, steps=(*scores.steps, ("+", bias)))


def _mul(made: Made, a: Any, b: Any) -> Any:
    scores, by = (a, b) if isinstance(a, Scores) else (b, a)
    return _times(made, scores, by) if _is_number(by) else None


def _div(made: Made, a: Any, b: Any) -> Any:
    return _times(made, a, 1.0 / b) if isinstance(a, Scores) and _is_number(b) and b != 0 else None


def _times(made: Made, scores: Scores, by: float) -> Any:
    if scores.soft:
        return None
    steps = (*scores.steps, ("*", by)) if scores.steps else ()
    return scores.then(made, scale=scores.scale * by, steps=steps)


def _masked_fill(made: Made, scores: Any, mask: Any, value: Any) -> Any:
    return _filled(made, scores, mask, value, False)


def _where(made: Made, condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Scores):
        return _filled(made, a, condition, b, True)
    return _filled(made, b, condition, a, False)


def _where_of(made: Made, scores: Any, condition: Any, other: Any) -> Any:
    return _where(made, condition, scores, other)


def _filled(made: Made, scores: Any, mask: Any, value: Any, kept: bool) -> Any:
    """Record a fill: scores stay where ``mask`` equals ``kept`` and become ``value`` elsewhere."""
    value = getattr(value, "number", value)
    if not isinstance(scores, Scores) or scores.soft or not _is_number(value) or value > LOW:
        return None
    if not _fits(mask, scores) or mask.dtype != torch.bool:
        return None
    return scores.then(made, steps=(*scores.steps, ("mask", mask, kept, float(value), scores.dtype)))


def _view(made: Made, scores: Scores, *sizes: Any) -> Any:
    shape = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)
    if len(shape) < 3:  # may be a dtype
        return None
    if -1 in shape:
        shape[shape.index(-1)] = math.prod(scores.shape) // max(1, -math.prod(shape))
    if shape[-1] != scores.shape[-1] or shape[-2] != scores.shape[-2] or math.prod(shape) != math.prod(scores.shape):
        return None
    steps = (*scores.steps, ("view", scores.shape[:-2], shape[:-2])) if scores.steps else ()
    return scores.then(made, shape=torch.Size(shape), steps=steps)


def _softmax(made: Made, scores: Scores, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Any:
    if scores.soft or dim not in (-1, scores.ndim - 1) or not isinstance(_stacklevel, int):
        return None
    if dtype is None:  # autocast computes softmax in fp32
        dtype = scores.dtype if scores.mode[1] is None else torch.promote_types(scores.dtype, torch.float32)
    return scores.then(made, dtype=dtype, soft=True)


def _dropout(made: Made, scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return scores
    scores.value("attention weights are dropped: torch's SDPA would draw other ones")
    return None


def _cast(made: Made, scores: Scores, dtype: Any) -> Any:
    dtype = dtype.dtype if made[0] is torch.Tensor.type_as else dtype
    return scores.then(made, dtype=dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _float(made: Made, scores: Scores) -> Any:
    return scores.then(made, dtype=torch.float32)


def _contiguous(made: Made, scores: Scores) -> Any:
    return scores.then(made)


def _of(names: str, *owners: Any) -> Iterable[Any]:
    return [getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)]


_T = torch.Tensor
STEPS |= {
    **dict.fromkeys((operator.matmul, *_of("matmul bmm", torch, _T)), _matmul),
    **dict.fromkeys(_of("baddbmm", torch, _T), _baddbmm),
    **dict.fromkeys((operator.add, *_of("add __add__ __radd__", torch, _T)), _add),
    **dict.fromkeys((operator.mul, *_of("mul multiply __mul__ __rmul__", torch, _T)), _mul),
    **dict.fromkeys((operator.truediv, *_of("div divide true_divide __truediv__", torch, _T)), _div),
    **dict.fromkeys(_of("masked_fill", torch, _T), _masked_fill),
    torch.where: _where,
    _T.where: _where_of,
    **dict.fromkeys(_of("view reshape", torch, _T), _view),
    **dict.fromkeys(_of("softmax", torch, F, _T), _softmax),
    F.dropout: _dropout,
    **dict.fromkeys(_of("to type type_as", _T), _cast),
    _T.float: _float,
    _T.contiguous: _contiguous,
}


# ------------------------------------------------------------------------------------------------------- attention


def _attend(weights: Scores, v: Any) -> Any:
    """``weights @ v`` by SDPA, or None where it needs the weights themselves."""
    lead, dtype = weights.shape[:-2], weights.dtype
    if not weights.soft or type(v) is not torch.Tensor or v.shape[:-1] != (*lead, weights.shape[-1]):
        return None
    low = _lowered(v)
    if any(version(x) != times for x, times in weights.read) or low == v.dtype != dtype:
        return None  # computing the scores raises, or the stock product does
    mask = shared_mask(weights.steps, low) if weights.steps else None
    if mask is BLIND:
        weights.value("some query sees no key, as padding on the left does, and SDPA would give it another gradient")
        return None
    ranks = (1,) * (2 - len(lead)) + tuple(lead)  # the kernels need four dimensions
    q, k, v = (x.reshape(*ranks, *x.shape[-2:]).to(low) for x in (weights.q, weights.k, v))
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    note("")
    dispatch.count("attention", "sdpa")
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=weights.scale)
    return out.reshape(*lead, *out.shape[-2:]).contiguous()  # contiguous, as the result of a product is


def _lowered(x: torch.Tensor) -> torch.dtype:
    """The dtype of a product of ``x`` here: autocast's, or that of ``x``."""
    return x.dtype if x.dtype == torch.float64 else mode_of(x)[1] or x.dtype


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _fits(x: Any, scores: Any) -> bool:
    """Whether ``x`` is a tensor that broadcasts to the scores' shape without enlarging it."""
    if type(x) is not torch.Tensor or not 2 <= x.dim() <= scores.ndim:
        return False
    return all(x.shape[i] == 1 or x.shape[i] == scores.shape[i] for i in range(-x.dim(), 0))
