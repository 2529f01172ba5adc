"""transformers' tensor-parallel plan (``base_model_tp_plan``) of a model that ``fuse`` has split: the same names."""

from __future__ import annotations

import re

from torch import nn

from ...linear import ColumnParallelLinear, RowParallelLinear
from ..matchers.norms import FusedNorm
from .split_linear import SplitLinear


def tp_plan(model: nn.Module) -> dict[str, str]:
    """How ``model``, split by ``fuse(model, mesh)``, is split, in the words of transformers: {"layers.*.mlp.up": ...}.

    The names are those in the base model, as in a config's ``base_model_tp_plan``; what that has no word for (Conv1D,
    parameters with one number for each head) is left out. Head and embedding are not the base model's.
    """
    base: nn.Module = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    plan: dict[str, str] = {}
    for path, parent in base.named_modules():
        children = dict(parent.named_children())
        packed = any(isinstance(child, SplitLinear) and child.exchange for child in children.values())
        for name, child in children.items():
            word = _word(child, packed)
            if word is not None:
                plan[re.sub(r"\b\d+\b", "*", f"{path}.{name}" if path else name)] = word
    return plan


def _word(module: nn.Module, packed: bool) -> str | None:
    """transformers' name of how ``module`` is split; ``packed``: a layer beside it packs several parts."""
    if isinstance(module, ColumnParallelLinear):
        return "colwise"
    if isinstance(module, SplitLinear) and not module.transposed:
        return "colwise_gather_output"
    if isinstance(module, RowParallelLinear):
        return "rowwise_split_input" if packed else "rowwise"
    return "replicated_with_grad_allreduce" if isinstance(module, FusedNorm) and module._match.group.size > 1 else None
