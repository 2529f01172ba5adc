"""``rms_norm`` in inference on a CPU, in four launches: torch's own, which has no kernel there, takes seven.

    y = x / hypot(|x|, sqrt(D eps)) * sqrt(D) * w,    as    sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(D eps)) / sqrt(D)

Measured on an AMD EPYC (Zen 5, two cores): 5 us instead of 8 for one token of width 512, 8.5 instead of 11.5 for 32,
260 instead of 440 for 512 of width 4096. Training keeps torch's own, so that a recomputed forward, of which the first
run wants no gradients either, has the same bits.
"""

from __future__ import annotations

import functools
import math

import torch

from ..runtime import autograd, dispatch, library, onednn


def takes(impl: str, s: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether :func:`rms_norm` may run, of tensors that torch's own function takes as they are, if they fit."""
    if torch.compiler.is_compiling() or not onednn.here.serving or torch.is_grad_enabled():
        return False
    if "reference" in (impl, dispatch.default_impl()) or not (s.is_cpu and s.dtype is torch.float32 and s.dim()):
        return False
    if type(s) not in library.PLAIN or (weight is not None and type(weight) not in library.PLAIN):
        return False
    fits = weight is None or weight.shape == s.shape[-1:]
    return fits and not (library.watched() or autograd.transformed())


def rms_norm(s: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As ``reference.rms_norm``: s [..., D] and weight [D] in fp32, no offset -> [..., D]."""
    width = s.shape[-1]
    offset, zero = _constants(eps, width)
    y = s / torch.hypot(torch.linalg.vector_norm(s, dim=-1, keepdim=True), offset)
    if weight is None:
        return y.mul_(math.sqrt(width))
    return torch.addcmul(zero, y, weight, value=math.sqrt(width), out=y)


@functools.lru_cache(64)
def _constants(eps: float, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """sqrt(D eps), and what a product is added to."""
    cpu = torch.device("cpu")
    return torch.tensor(math.sqrt(width * eps), dtype=torch.float32, device=cpu), torch.zeros((), device=cpu)
