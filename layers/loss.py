"""Cross-entropy over logits whose vocabulary is sharded. ``linear_cross_entropy`` and ``linear_log_probs``, which never
store the logits, come from ``parallel/cross_entropy.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.cross_entropy.op import check_reduction, check_targets
from ..kernels.runtime import autograd
from ..parallel.core import collectives
from ..parallel.core.mesh import SINGLE, Group
from ..parallel.cross_entropy import linear_cross_entropy, linear_log_probs

__all__ = ["linear_cross_entropy", "linear_log_probs", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group = SINGLE,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of ``logits`` [T, V/R] against ``targets`` [T] (ids in the whole vocabulary).

    The logits are never gathered: the ranks exchange one maximum and two sums per token (Shoeybi et al., "Megatron-LM",
    arXiv:1909.08053, section 3). The arithmetic is fp32, or fp64 for fp64 logits, and so is the result: a scalar, or
    [T] for ``reduction="none"``; it is the same on every rank. Rank r holds the r-th slice of the vocabulary. Backward
    overwrites the softmax that forward saved, so that only one buffer of the logits' size exists.

    A target outside the vocabulary that is not ``ignore_index`` raises on a CPU. On a GPU a check would make the host
    wait, so there it makes the loss NaN, and raises only under ``SHARDFUSE_DEBUG=1``.

    Gathered logits [T, V] on every rank would count every score R times, which their shape alone does not show: pass
    ``vocab_size``, V, to have them refused.

    Raises ValueError for shapes that do not fit, an unknown ``reduction``, or a target outside the vocabulary.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"cross-entropy wants logits [T, V/R] and targets [T], but got {list(logits.shape)} and "
            f"{list(targets.shape)}; flatten batch and sequence first"
        )
    if vocab_size is not None and logits.shape[1] * group.size != vocab_size:
        raise ValueError(
            f"cross-entropy: logits {list(logits.shape)} on each of {group.size} ranks for vocab_size={vocab_size}: "
            f"expected [{len(logits)}, {vocab_size // group.size}], this rank's part of the vocabulary; for gathered "
            "logits use F.cross_entropy"
        )
    check_reduction("cross-entropy", reduction)
    check_targets("cross-entropy", targets, logits.shape[1] * group.size, ignore_index)
    if group.size == 1:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction=reduction)

    losses = _VocabParallelCrossEntropy.apply(logits, targets, group, ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses [T], 0 where ignored, from logits [T, V/R]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: Group, ignore_index: int) -> torch.Tensor:
        shard = logits.shape[1]
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32

        peak = logits.amax(dim=-1) if len(logits) else logits.new_empty(0)
        peak = collectives.all_reduce(peak.to(wide), group, site="loss.max", op="max")
        scores = logits - peak[:, None]  # [T, V/R], in peak's dtype, which is wide

        column = targets - group.rank * shard
        here = (column >= 0) & (column < shard)
        column = column.masked_fill(~here, 0)[:, None]
        target_score = scores.gather(1, column).squeeze(1).masked_fill(~here, 0)

        exps = scores.exp_()
        sums = collectives.all_reduce(torch.stack((exps.sum(dim=-1), target_score)), group, site="loss.sum")
        ignored = targets == ignore_index
        outside = ((targets < 0) | (targets >= shard * group.size)) & ~ignored
        losses = (sums[0].log() - sums[1]).masked_fill(ignored, 0).masked_fill(outside, float("nan"))

        ctx.save_for_backward(exps, sums[0], column, here, ignored)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exps, total, column, here, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0)
        scale = (grad / total)[:, None]
        out = exps * scale if autograd.keeps_graph() else exps.mul_(scale)  # a later pass would need them again
        out.scatter_add_(1, column, -(grad * here)[:, None])
        return out.to(ctx.dtype), None, None, None
