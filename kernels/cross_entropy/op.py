"""What calls of the cross-entropy check, wherever the logits come from."""

from __future__ import annotations

import os

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..runtime.names import expected

REDUCTIONS = ("mean", "sum", "none")


def check_reduction(op: str, reduction: str) -> None:
    """ValueError for a reduction that there is not."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction={reduction!r}: {expected(reduction, REDUCTIONS)}")


def check_targets(op: str, targets: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    """ValueError for a target that is neither in the vocabulary nor ``ignore_index``.

    Only where looking is cheap: on a CPU. On a GPU it would stop the host, so it is done under ``SHARDFUSE_DEBUG=1``
    only; elsewhere such a target makes the loss NaN.
    """
    if targets.numel() == 0 or torch.compiler.is_compiling() or isinstance(targets, FakeTensor):
        return
    if targets.device.type != "cpu" and os.environ.get("SHARDFUSE_DEBUG", "0") == "0":
        return
    wrong = ((targets < 0) | (targets >= vocab_size)) & (targets != ignore_index)
    if wrong.any():
        raise ValueError(
            f"{op}: target {targets[wrong][0].item()} is neither in the vocabulary of {vocab_size} nor "
            f"ignore_index={ignore_index}"
        )
