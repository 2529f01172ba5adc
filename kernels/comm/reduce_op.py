"""``all_reduce_rmsnorm``: what follows a row-parallel product in a step of decoding, in one launch."""

from __future__ import annotations

import math

import torch

from ..runtime import autograd, device, dispatch
from ..runtime.dispatch import Choice
from ..runtime.dtypes import no_kernel
from ..runtime.signals import CHUNKS, EPOCH, ExchangeTimeout, Signals, describe, following, reached
from . import reduce_reference as reference
from .reduce_config import WIDEST, Norm, flagged_programs, pick_shots, slot_shape

Optional = torch.Tensor | None
_OP = "all_reduce_rmsnorm"


def all_reduce_rmsnorm(
    x: torch.Tensor,
    weight: Optional = None,
    *,
    peers: list[torch.Tensor],
    signals: Signals,
    residual: Optional = None,
    bias: Optional = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    shots: int | None = None,
    programs: int | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = RMSNorm(s) * (weight_offset + weight), s = sum over ranks of x, + bias + residual, in one launch.

    An all-reduce in one or two rounds of stores into the memory of all ranks, and ``rms_norm`` with a residual where it
    arrives. Each row is added up in fp32 in order of rank, so all ranks hold the same bits, and the same again when the
    call is repeated. With signals whose epoch the device counts, a CUDA graph may capture it and replay it.

    Args:
        x: [T, D], this rank's addend, in bf16, fp16 or fp32, D up to 16384. T = 0 makes the exchange all the same.
        weight: [D], or None for y = s / sqrt(mean(s^2) + eps).
        peers: each rank's slot for this exchange in x's dtype, of :func:`all_reduce_rmsnorm_shape`; where the device
            counts, both slots, [2, ...].
        signals: the exchange's flags. ``SymmetricMemoryPool.channel(...)`` makes both
            (``parallel/overlap/memory/pool.py``).
        residual: [T, D] or None; the same on every rank, as are bias and weight.
        bias: [D] or None, added once: that of a row-parallel layer.
        eps, weight_offset: as in ``rms_norm``.
        shots: 1 or 2 rounds; None takes what :func:`all_reduce_rmsnorm_shape` chose.
        programs: how many programs a rank runs, the same on all; None takes 64. Fewer are for ranks that share a GPU,
            whose programs must all fit on it at once.
        impl: "auto", "triton" or "reference". The reference waits for nobody: it is for ranks in one process, when all
            their addends (``reduce_reference.send_addend``, with two shots then ``send_sums``) are in place.

    Returns:
        (y, s), both [T, D] in the dtype to which x and residual promote. s is rounded once; in two rounds the sum is
        rounded to x's dtype before bias and residual are added.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit.
        RuntimeError: something wants a gradient; impl="triton" where Triton cannot run; the reference without addends.
        ExchangeTimeout: on a CPU, a peer did not come in time. On a GPU the channel says so later.
    """
    shots, programs = _check(x, weight, peers, signals, residual, bias, shots, programs)
    if not (eps >= 0 and abs(weight_offset) < math.inf):
        raise ValueError(f"{_OP}: eps={eps}, weight_offset={weight_offset}: expected at least 0 and a finite offset")
    given = [t for t in (x, weight, residual, bias) if t is not None]
    choice = all_reduce_choice(x.device, x.shape[1], impl, *[t.dtype for t in given])
    dispatch.count(_OP, choice.impl)
    norm = Norm(weight, None, eps, weight_offset)
    if not choice.triton:
        y, s = _reference(x, peers, signals, bias, residual, norm, shots, programs)
        return y, s
    from . import reduce  # Triton, only when a kernel runs

    y, s = reduce.all_reduce_rmsnorm(
        x, peers, signals, bias=bias, residual=residual, norm=norm, shots=shots, programs=programs
    )
    if x.is_cpu:
        failure = describe(signals.report, signals.rank, f"{_OP} of {list(x.shape)}")
        if failure is not None:
            raise ExchangeTimeout(failure)
    return y, s


def all_reduce_rmsnorm_shape(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    ranks: int,
    on: torch.device,
    *,
    shots: int | None = None,
    programs: int | None = None,
) -> tuple[int, ...]:
    """The shape of the slot that :func:`all_reduce_rmsnorm` of [T, D] wants from a channel."""
    shots = shots or pick_shots(tokens, width, dtype.itemsize, ranks)
    return slot_shape(tokens, width, ranks, shots, programs or flagged_programs(device.architecture(on)))


def all_reduce_choice(on: torch.device, width: int, impl: str = "auto", *dtypes: torch.dtype) -> Choice:
    """Which implementation ``all_reduce_rmsnorm`` takes for rows of ``width`` in ``dtypes`` on ``on``, and why."""
    too_wide = f"rows of {width} columns have no kernel (up to {WIDEST} have)" if width > WIDEST else None
    unsupported = autograd.transformed() or no_kernel(*dtypes) or too_wide
    return dispatch.choose(_OP, on, impl, unsupported=unsupported)


def _check(
    x: torch.Tensor,
    weight: Optional,
    peers: list[torch.Tensor],
    signals: Signals,
    residual: Optional,
    bias: Optional,
    shots: int | None,
    programs: int | None,
) -> tuple[int, int]:
    """The number of rounds and of programs, if everything fits."""
    if x.dim() != 2 or not x.is_floating_point() or x.shape[1] == 0:
        raise ValueError(f"{_OP}: x is {x.dtype} {list(x.shape)}: expected floating-point rows [T, D]")
    for name, tensor, shape in (
        ("weight", weight, x.shape[1:]),
        ("bias", bias, x.shape[1:]),
        ("residual", residual, x.shape),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape or not tensor.is_floating_point() or tensor.device != x.device:
            raise ValueError(
                f"{_OP}: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} but x {x.dtype} "
                f"{list(x.shape)} on {x.device}: expected floating-point {list(shape)} there"
            )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual, bias)):
        raise RuntimeError(
            f"{_OP} has no gradient, and an operand wants one: call it under torch.no_grad(), as serving does; "
            "RowParallelLinear and rms_norm(residual=...) differentiate"
        )
    if programs is not None and not 1 <= programs <= CHUNKS:
        raise ValueError(f"{_OP}: programs={programs}: expected 1 to {CHUNKS}, the same on every rank")
    if shots not in (None, 1, 2):
        raise ValueError(f"{_OP}: shots={shots}: expected 1, 2 or None")
    programs = programs or flagged_programs(device.architecture(x.device))
    tokens, width = x.shape
    shots = shots or pick_shots(tokens, width, x.element_size(), len(peers))
    slot: tuple[int, ...] = slot_shape(tokens, width, len(peers), shots, programs)
    both = signals.epoch is None
    slot = (2, *slot) if both else slot
    for rank, peer in enumerate(peers):
        fits = tuple(peer.shape) == slot and peer.dtype is x.dtype
        if not fits or not (peer[0] if both else peer).is_contiguous():
            raise ValueError(
                f"{_OP}: peers[{rank}] is {peer.dtype} {list(peer.shape)}: expected contiguous {x.dtype} "
                f"{list(slot)} for {shots} shots; begin the exchange with all_reduce_rmsnorm_shape(...)"
            )
    if len(signals.pads) != len(peers):
        raise ValueError(f"{_OP}: {len(peers)} peers but flags of {len(signals.pads)} ranks: pass one exchange's")
    return shots, programs


def _reference(
    x: torch.Tensor,
    peers: list[torch.Tensor],
    signals: Signals,
    bias: Optional,
    residual: Optional,
    norm: Norm,
    shots: int,
    programs: int,
) -> list[torch.Tensor]:
    rank, tokens = signals.rank, len(x)
    epoch = signals.epoch
    if epoch is None:
        epoch = following(int(signals.state[EPOCH]))
        peers = [peer[epoch % 2] for peer in peers]
    missing = [
        source for source in range(len(peers)) if not _arrived(signals.pads[rank][:shots, source], epoch, programs)
    ]
    if missing:
        raise RuntimeError(
            f"{_OP}: impl='reference' waits for nobody, and nothing has come from rank {missing[0]} in exchange "
            f"{epoch}: ranks that are processes take impl='triton', or all_reduce and rms_norm"
        )
    turns = programs if shots == 2 else None
    reference.send_addend(x, peers, rank, shots=shots, turns=turns)
    if shots == 1:
        found = reference.total(peers, rank, tokens)
    else:
        reference.send_sums(peers, rank, tokens, turns=turns)
        found = reference.sums(peers[rank], tokens)
    if signals.epoch is None:
        signals.state[EPOCH] = epoch
    return reference.finish(found, bias, residual, norm, x.dtype)


def _arrived(flags: torch.Tensor, epoch: int, programs: int) -> bool:
    """Whether all flags [phases, CHUNKS] of a source that programs raise have reached ``epoch``."""
    return all(reached(flag, epoch) for flag in flags[:, :programs].flatten().tolist())
