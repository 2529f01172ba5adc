"""Launches of the kernels in ``triton.py``: from tensors to arguments."""

from __future__ import annotations

import torch
import triton

from ..runtime import device
from . import triton as kernels
from .reference import Loss


def _blocks(width: int, where: torch.device) -> tuple[int, int]:
    """(columns that a program handles at once, its warps).

    Long rows get many threads: then fewer rows are in flight, and the second reading of a row finds it in the cache.
    """
    arch = device.architecture(where)
    if arch == device.INTERPRETER:
        return 32, 4
    block = min(triton.next_power_of_2(max(width, 1024)), 8192)
    threads = block // 8  # 16 bytes each of what is 16 bits wide; more of them would leave too few registers
    return block, threads // (64 if arch.startswith("gfx") else 32)


def _common(logits: torch.Tensor, targets: torch.Tensor, loss: Loss) -> dict[str, object]:
    assert logits.stride(1) == 1 or logits.shape[1] <= 1
    return {
        "logits_ptr": logits,
        "targets_ptr": targets.contiguous(),
        "stride": logits.stride(0),
        "first": loss.first,
        "columns": loss.columns,
        "ignore_index": loss.ignore_index,
        "softcap": loss.softcap,
        "SMOOTH": loss.label_smoothing > 0,
        "ALIGN": device.divisor(loss.columns),
    }


def statistics(logits: torch.Tensor, targets: torch.Tensor, loss: Loss, out: torch.Tensor) -> None:
    """Write those of logits [t, n] and targets [t] to ``out`` [4, t], rows contiguous."""
    block, warps = _blocks(loss.columns, logits.device)
    args = _common(logits, targets, loss) | {"stats_ptr": out, "pitch": out.stride(0), "BLOCK": block}
    if len(logits):
        device.launch(
            kernels._statistics_kernel,
            (len(logits),),
            args,
            num_warps=warps,
            num_stages=2,
            on=logits,
            config=f"{block}-w{warps}",
        )


def gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    stats: torch.Tensor | None,
    gain: torch.Tensor | None,
    loss: Loss,
    losses: torch.Tensor | None,
) -> None:
    """As in ``reference.py``: stats [R, 4, t] and gain [t] are contiguous or None; losses go to ``losses`` [t]."""
    block, warps = _blocks(logits.shape[1], logits.device)
    args = _common(logits, targets, loss) | {
        "stats_ptr": stats,
        "gain_ptr": gain,
        "losses_ptr": losses,
        "pitch": 0 if stats is None else stats.shape[2],
        "ranks": 0 if stats is None else stats.shape[0],
        "width": logits.shape[1],
        "vocab_size": loss.vocab_size,
        "smoothing": float(loss.label_smoothing),
        "uniform": loss.label_smoothing / loss.vocab_size,
        "z_loss": float(loss.z_loss),
        "BLOCK": block,
    }
    if logits.numel():
        device.launch(
            kernels._gradient_kernel,
            (len(logits),),
            args,
            num_warps=warps,
            num_stages=2,
            on=logits,
            config=f"{block}-w{warps}",
        )
