"""transformers' tensor-parallel plan (``base_model_tp_plan``) of a model that ``fuse`` has split: the same names."""

from __future__ import annotations

import re

from torch import nn

from ...linear import ColumnParallelLinear, RowParallelLinear
from ..matchers.norms import FusedNorm
from .split_linear import SplitLinear


def tp_plan(model: nn.Module) -> dict[str, str]:
    """The split of ``model`` by ``fuse(model, mesh)``, in transformers' terms: {"layers.*.mlp.up": ...}.

    The names are those in the base model, as in a config's ``base_model_tp_plan``. The plan leaves out modules for
    which transformers has no term (Conv1D, parameters with one value per head), and head and embedding, which are
    outside the base model.
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
    """transformers' term for the split of ``module``; ``packed``: a layer beside it packs several parts."""
    if isinstance(module, ColumnParallelLinear):
        return "colwise"
    if isinstance(module, SplitLinear) and not module.transposed:
        return "colwise_gather_output"
    if isinstance(module, RowParallelLinear):
        return "rowwise_split_input" if packed else "rowwise"
    return "replicated_with_grad_allreduce" if isinstance(module, FusedNorm) and module._match.group.size > 1 else None
