"""A table of embeddings split over ranks by tokens, for classes that scale embeddings by a constant (Gemma's) too."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from ....kernels.runtime.dispatch import Choice
from ....parallel.core.mesh import Group
from ....parallel.core.sharding import local_tensor
from ...embedding import look_up
from ..probing import Foreign, apart, foreign
from ..swap import Fused, Match, become
from . import shard


class _Table(Match):
    def __init__(self, module: Any) -> None:
        super().__init__(("embedding",))
        self.num_embeddings = int(module.num_embeddings)
        # The constant factor, as the stock class rounds it in each dtype.
        self.scales = {}
        for dtype in _DTYPES:
            with contextlib.suppress(Foreign):
                self.scales[dtype] = float(_stock(module, torch.ones(1, 1, dtype=dtype))[0, 0])


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class FusedTable(Fused):
    """Each rank looks up the tokens of its part of the table; the sum over the ranks is the stock result."""

    weight: nn.Parameter
    num_embeddings: int
    padding_idx: int | None

    def fused_forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = local_tensor(self.weight)
        if input.is_meta:  # a pipeline stage ran this as a stand-in for another stage
            return weight.new_empty(*input.shape, weight.shape[1], device="meta")
        x = look_up(self, input, weight, self._match.group, self.num_embeddings, self.padding_idx)
        scales = self._match.scales
        scale = scales.get(weight.dtype, scales[torch.float64])
        return x if scale == 1.0 else x * scale

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._match is None:  # an instance that was made by calling the class
            return super().stock_forward(*args, **kwargs)
        return self.fused_forward(*args, **kwargs)

    def runs(self, device: torch.device) -> list[tuple[str, Choice]]:
        return [("embedding", Choice("reference", "torch's own embedding, of this rank's tokens"))]


class Table:
    """Turns an nn.Embedding into a :class:`FusedTable`, when ``Head.split`` asks: the head may share its weight."""

    fused = FusedTable

    def match(self, module: nn.Module) -> Match | None:
        if (
            not isinstance(module, nn.Embedding)
            or "forward" in module.__dict__
            or set(module._parameters) != {"weight"}
        ):
            return None
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return None
        drawn = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        match = _Table(module)
        try:
            found = _stock(module, drawn)
        except Foreign:
            return None
        scale = match.scales.get(torch.float64)
        return match if scale is not None and torch.equal(found, drawn * scale) else None

    def split(self, module: nn.Module, group: Group) -> str | None:
        """Split ``module`` over ``group``, or return the reason why it stays whole."""
        match: Any = apart(self.match, module)
        if match is None:
            return f"its table is a {type(module).__name__}, which is not split"
        if (why := shard.uneven([match.num_embeddings], group)) is not None:  # it may have more rows than the head
            return why
        become(module, self, match)
        shard.split_parameter(module, "weight", group)
        match.group = group
        return None


@torch.no_grad()
def _stock(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """The stock class's embeddings of tokens 0, 1, ... with ``weight`` [V, D], on the CPU."""
    twin, tokens = copy.copy(module), torch.arange(len(weight))
    with foreign("its forward"):  # which may read a buffer that has no values yet
        buffers = {name: None if each is None else each.cpu() for name, each in module._buffers.items()}
        twin.__dict__ |= {"_parameters": {"weight": nn.Parameter(weight)}, "_buffers": buffers, "padding_idx": None}
        result: torch.Tensor = twin.forward(tokens)
    return result
