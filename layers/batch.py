"""What a decoder takes: batches of whole sequences [B, S], and packed ones [T]."""

from __future__ import annotations

from typing import Any

import torch

from ..parallel.documents import Documents, cu_seqlens


def check_batch(
    tokens: torch.Tensor,
    targets: torch.Tensor | None,
    positions: torch.Tensor | None = None,
    *,
    longest: int,
    ranks: int,
) -> tuple[int, int]:
    """B and S of ``tokens`` [B, S], with ``targets`` of the same shape and ``positions`` [S] or [B, S].

    ``longest`` is the model's longest sequence; ``ranks`` split the tokens under sequence parallelism, else it is 1.
    Raises ValueError for anything else than whole numbers, for other shapes, and for sizes that do not fit.
    """
    _check_numbers(tokens=tokens, targets=targets, positions=positions)
    if tokens.dim() != 2 or (targets is not None and targets.shape != tokens.shape):
        given = "" if targets is None else f" and targets {list(targets.shape)}"
        raise ValueError(
            f"expected tokens [B, S] and targets of the same shape, not tokens {list(tokens.shape)}{given}"
        )
    batch, length = tokens.shape
    if positions is not None and positions.shape not in ((length,), tokens.shape):
        raise ValueError(f"positions {list(positions.shape)}: expected [{length}] or {list(tokens.shape)}")
    if length > longest:
        raise ValueError(f"sequences of {length} tokens: this model was made for at most {longest}")
    if tokens.numel() % ranks:
        raise ValueError(
            f"sequence parallelism wants the {batch} x {length} tokens of a batch to divide by {ranks} ranks: change "
            "batch size or length, or pass sequence_parallel=False"
        )
    return batch, length


def check_packed(
    tokens: torch.Tensor,
    targets: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    *,
    longest: int,
    ranks: int,
) -> int:
    """A bound of the lengths of the sequences that ``cu_seqlens`` [sequences + 1] finds in ``tokens`` [T].

    ``max_seqlen`` is the caller's bound. The other arguments and the errors are those of :func:`check_batch`.
    """
    _check_numbers(tokens=tokens, targets=targets)
    if tokens.dim() != 1 or (targets is not None and targets.shape != tokens.shape):
        given = "" if targets is None else f" and targets {list(targets.shape)}"
        raise ValueError(
            f"with cu_seqlens, expected tokens [T] and targets of the same shape, not tokens {list(tokens.shape)}"
            f"{given}"
        )
    if len(tokens) % ranks:
        raise ValueError(
            f"sequence parallelism wants the {len(tokens)} tokens of a batch to divide by {ranks} ranks: pad the last "
            "sequence, or pass sequence_parallel=False"
        )
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens {list(cu_seqlens.shape)}: expected [sequences + 1], 0 first and T last")
    bound = max_seqlen
    if bound is None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bound = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    if bound is not None and bound > longest:
        raise ValueError(f"a sequence of {bound} tokens: this model was made for at most {longest}")
    return min(len(tokens), longest) if bound is None else bound


def attention_in(
    batch: int, length: int, positions: torch.Tensor | None, documents: Documents | None, device: torch.device
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The positions of a batch [B, S], and the keywords with which a block attends within its sequences.

    ``positions`` [S] or [B, S] default to 0 to S - 1. With ``documents`` the result is that of a packed batch, with
    positions [B*S].
    """
    if positions is None:
        positions = torch.arange(length, device=device)
    if documents is None:
        return positions, {"batch_size": batch}
    positions = positions.expand(batch, length)
    packed = {"cu_seqlens": cu_seqlens(positions, documents), "max_seqlen": documents.longest}
    return positions.reshape(-1), packed


def _check_numbers(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} are {tensor.dtype}: expected whole numbers, torch.int64 or torch.int32")
