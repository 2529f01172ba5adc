"""Norms over the model width, whose parameters know the group that shares them.

Tensor parallelism without sequence parallelism normalises every token on every rank: the weights are replicated and
so are their gradients. With sequence parallelism a rank normalises its own tokens [T/R, D] only, so the gradients are
summed over the group in backward (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.norm import layer_norm, norm_choice, rms_norm
from ..kernels.runtime.checks import whole_number
from ..parallel.overlap.partial_sum import PartialSum, fused_allreduce_norm
from .dropout import Dropout
from .module import Init, Runs, ShardedModule
from .options import LayerOptions, NormKwargs, Unpack


class _Norm(ShardedModule):
    """What the two norms share: one weight for each feature, and their forward."""

    op: str
    weight: torch.Tensor
    _norm: Callable[..., Any]  # set by a subclass: the op with this layer's parameters

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        **options: Unpack[NormKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, NormKwargs)
        super().__init__(shared)
        self.hidden_size = whole_number("hidden_size", hidden_size)
        self.eps = eps
        self.weight_offset = weight_offset
        self.impl = shared.impl
        self.add_parameter("weight", (hidden_size,), None, Init(constant=1.0 - weight_offset))
        self.reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        dropout: Dropout | None = None,
        stream: int = 0,
        carry: bool = False,
    ) -> Any:
        """norm(x); with ``residual`` (norm(s), s) of s = residual + dropout(x); with ``carry`` (norm(x), x).

        Use that second result in place of x: the norm's backward kernel then adds up the gradients of both results.
        """
        if residual is None:
            return self._norm(x, carry=True) if carry else self._norm(x)
        dropped: dict[str, Any] = {}
        if dropout is not None:
            p, rng_key, row_start = dropout
            dropped = {"dropout_p": p, "rng_key": rng_key, "row_start": row_start, "stream": stream}
        return self._norm(x, residual=residual, **dropped)

    def runs(self, device: torch.device) -> Runs:
        return [(self.op, norm_choice(self.op, device, self.impl, self.weight.dtype))]

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset:g}" if self.weight_offset else ""
        return f"{self.hidden_size}, eps={self.eps}{offset}, {self.sharding_repr()}"


class LayerNorm(_Norm):
    """``nn.LayerNorm(hidden_size)``; x [..., D] (with sequence parallelism [T/R, D]).

    ``weight_offset`` is added to the weight. The other keyword arguments (``mesh``, ``sequence_parallel``, ``impl``,
    ``params``, ``dtype``, ``device``) are documented in :class:`~shardfuse.layers.options.LayerOptions`.
    """

    op = "layer_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        weight_offset: float = 0.0,
        **options: Unpack[NormKwargs],
    ) -> None:
        super().__init__(hidden_size, eps, weight_offset=weight_offset, **options)
        self.add_parameter("bias", (hidden_size,) if bias else None, None, Init(constant=0.0))
        self.reset_parameters()

    def _norm(self, x: torch.Tensor, **options: Any) -> Any:
        weight, bias = self.local_repeated("weight", "bias", site="norm")
        return layer_norm(x, weight, bias, eps=self.eps, weight_offset=self.weight_offset, impl=self.impl, **options)


class RMSNorm(_Norm):
    """``nn.RMSNorm(hidden_size)`` (Zhang and Sennrich, arXiv:1910.07467); x [..., D] as in :class:`LayerNorm`.

    ``weight_offset`` is added to the weight: 1.0 for Gemma's norms, whose weights are kept around 0. The other keyword
    arguments (``mesh``, ``sequence_parallel``, ``impl``, ``params``, ``dtype``, ``device``) are documented in
    :class:`~shardfuse.layers.options.LayerOptions`.
    """

    op = "rms_norm"

    def _norm(self, x: torch.Tensor, **options: Any) -> Any:
        (weight,) = self.local_repeated("weight", site="norm")
        return rms_norm(x, weight, eps=self.eps, weight_offset=self.weight_offset, impl=self.impl, **options)

    def after_sum(self, partial_sum: PartialSum, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(s), s) of s = residual + the sum over the ranks of ``partial_sum``, in one launch."""
        (weight,) = self.local("weight")
        return fused_allreduce_norm(
            partial_sum, residual, weight, eps=self.eps, weight_offset=self.weight_offset, impl=self.impl
        )
