"""A linear layer whose products run in fp8, training included."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.runtime.checks import check_impl, whole_number
from ..kernels.runtime.names import expected
from ..kernels.scaled_linear import fp8_linear
from .module import Layer

RECIPES = ("delayed", "current", "rowwise")


class Fp8Linear(Layer, nn.Linear):
    """``nn.Linear`` with forward and gradients in fp8 (e4m3; e5m2 for the output's gradient).

    Parameters and ``state_dict`` are nn.Linear's, in any precision; every call quantises them anew.

    ``recipe`` chooses the scales. "current": each tensor's largest magnitude, which takes an extra pass over it.
    "delayed": the largest magnitude of the last ``amax_history`` calls times 2^``margin``, which needs no extra pass;
    larger values saturate. "rowwise": a scale for each row along the contracted dimension of each product, which has
    the least error, and quantises x, weight and gradient twice.

    The history is not in the ``state_dict``: after loading, scales start at 1 and adapt within one call. Delayed
    scaling keeps one history per process and counts calls, not steps. Evaluation counts as a call, and so does the
    recomputation of activation checkpointing, which may therefore use another scale than the first call; the other
    recipes are exact there. ``impl`` and ``fuse_wgrad_accumulation`` are as in ``linear_act``.

    Raises ValueError for an unknown recipe, or an ``amax_history`` below 1.
    """

    amax_history: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str = "delayed",
        amax_history: int = 16,
        margin: int = 0,
        fuse_wgrad_accumulation: bool = False,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if recipe not in RECIPES:
            raise ValueError(f"recipe={recipe!r}: {expected(recipe, RECIPES)}")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            whole_number(name, size)
        whole_number("amax_history", amax_history)
        check_impl(impl)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = recipe
        self.margin = margin
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.impl = impl
        # fp32, held as the integers of its bits: module.to(torch.bfloat16) converts buffers of floats.
        history = torch.zeros(3, amax_history, dtype=torch.int32, device=device) if recipe == "delayed" else None
        self.register_buffer("amax_history", history, persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        history = self._buffers.get("amax_history")  # nn.Linear's constructor runs before it exists
        if history is not None:
            history.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(
            x,
            self.weight,
            self.bias,
            scaling="row" if self.recipe == "rowwise" else "tensor",
            histories=None if self.amax_history is None else self.amax_history.view(torch.float32),
            margin=self.margin,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"
