"""Launches of the kernels in ``triton.py``: from tensors to arguments."""

from __future__ import annotations

import math

import torch
import triton

from ..runtime import device
from ..runtime.chips import described
from . import triton as kernels
from .reference import Loss


def _blocks(width: int, arch: str) -> tuple[int, int]:
    """(columns that a program handles at once, its warps).

    Long rows get many threads: then fewer rows are in flight (:func:`programs`).
    """
    if arch == device.INTERPRETER:
        return 32, 4
    block = min(triton.next_power_of_2(max(width, 1024)), 8192)
    threads = block // 8  # 16 bytes each of what is 16 bits wide; more of them would leave too few registers
    return block, threads // (64 if arch.startswith("gfx") else 32)


def programs(rows: int, width: int, itemsize: int, arch: str, sms: int, cache_bytes: int) -> int:
    """How many programs go through ``rows``, each of which is read twice, the second time from the cache.

    One for each row. But where the rows in flight at once (as many on each SM as its warps allow) exceed the cache, as
    many for each SM as the cache holds rows, if it holds one.
    """
    if arch == device.INTERPRETER:
        return min(rows, sms)
    warps = _blocks(width, arch)[1]
    fitting = cache_bytes // max(1, sms * width * itemsize)
    return min(rows, fitting * sms) if 0 < fitting < described(arch).max_warps_per_sm // warps else rows


def _machine(where: torch.device) -> tuple[str, int, int]:
    """(architecture, its SMs, bytes of its last cache)."""
    arch = device.architecture(where)
    sms = described(arch).sms if where.type == "meta" else device.program_slots(where)
    return arch, sms, device.cache_bytes(where)


def _align(logits: torch.Tensor) -> int:
    """The largest of 16, 8, .., 1 that divides the width of logits [t, n] and the distance of their rows."""
    return math.gcd(16, logits.shape[1], logits.stride(0))


def _common(logits: torch.Tensor, targets: torch.Tensor, loss: Loss) -> dict[str, object]:
    assert logits.stride(1) == 1 or logits.shape[1] <= 1
    return {
        "logits_ptr": logits,
        "targets_ptr": targets.contiguous(),
        "stride": logits.stride(0),
        "width": logits.shape[1],
        "first": loss.first,
        "columns": loss.columns,
        "ignore_index": loss.ignore_index,
        "softcap": loss.softcap,
        "SMOOTH": loss.label_smoothing > 0,
        "ALIGN": _align(logits),
        "PADDED": loss.columns < logits.shape[1],
    }


def statistics(logits: torch.Tensor, targets: torch.Tensor, loss: Loss, out: torch.Tensor) -> None:
    """Write those of logits [t, n] and targets [t] to ``out`` [4, t], rows contiguous."""
    block, warps = _blocks(loss.columns, device.architecture(logits.device))
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
    block, warps = _blocks(logits.shape[1], device.architecture(logits.device))
    args = _common(logits, targets, loss) | {
        "stats_ptr": stats,
        "gain_ptr": gain,
        "losses_ptr": losses,
        "rows": len(logits),
        "pitch": 0 if stats is None else stats.shape[2],
        "ranks": 0 if stats is None else stats.shape[0],
        "vocab_size": loss.vocab_size,
        "smoothing": float(loss.label_smoothing),
        "uniform": loss.label_smoothing / loss.vocab_size,
        "z_loss": float(loss.z_loss),
        "BLOCK": block,
    }
    if logits.numel():
        rows, width = logits.shape
        count = rows if stats is not None else programs(rows, width, logits.itemsize, *_machine(logits.device))
        args["LOOP"] = count < rows
        device.launch(
            kernels._gradient_kernel,
            (count,),
            args,
            num_warps=warps,
            num_stages=2,
            on=logits,
            config=f"{block}-w{warps}",
        )
