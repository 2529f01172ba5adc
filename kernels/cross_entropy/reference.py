"""The cross-entropy of a vocabulary projection in plain torch, whole and in the parts that chunks and ranks need.

With a = h @ W^T + b the logits of a token, y its target, V the vocabulary, e the label smoothing, k the z-loss:

    z     a, or c tanh(a / c) under a soft-cap c                      (Gemma 2, arXiv:2408.00118, section 2)
    lse   log sum_v exp(z_v)
    loss  (1 - e) (lse - z_y) + e (lse - mean_v z_v) + k lse^2        (z-loss: PaLM, arXiv:2204.02311, section 5)

    dz_v  exp(z_v - lse) (1 + 2 k lse) - (1 - e) [v = y] - e / V
    da_v  dz_v, times 1 - (z_v / c)^2 under a soft-cap

What other columns of the vocabulary, on other ranks, have to know of these is four numbers per token, the *statistics*:
the largest z, the sum of exp(z - largest), z_y where y is among these columns (else 0), and the sum of z (0 without
smoothing). They combine by :func:`combine`, in any grouping; of no columns at all they are (-inf, 0, 0, 0).

The loss of a token with target ``ignore_index`` is 0 and so is its gradient. Of a target outside the vocabulary both
are NaN; nothing is read for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

STATISTICS = 4  # numbers per token


class Loss(NamedTuple):
    """What is computed, and of which columns of the vocabulary."""

    vocab_size: int  # V, over all ranks
    first: int  # the first column here
    columns: int  # how many there are; logits may have more, which are padding and count for nothing
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None

    def part(self, first: int, width: int) -> Loss:
        """The columns [first, first + width) of these."""
        return self._replace(first=self.first + first, columns=max(0, min(width, self.columns - first)))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What losses and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    loss: Loss,
    reduction: str = "none",
) -> torch.Tensor:
    """Losses [T], their sum or mean; hidden [T, D], weight [V, D], a whole vocabulary. Torch has its gradients."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.shape[1] == loss.columns else logits[:, : loss.columns]
    z = logits.to(accumulator(logits.dtype))
    if loss.softcap is not None:
        z = loss.softcap * torch.tanh(z / loss.softcap)
    found = F.cross_entropy(
        z, targets.long(), ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing, reduction=reduction
    )
    if not loss.z_loss:
        return found
    ignored = targets == loss.ignore_index
    extra = loss.z_loss * z.logsumexp(1).masked_fill(ignored, 0).square()
    if reduction == "none":
        return found + extra
    return found + (extra.sum() if reduction == "sum" else extra.sum() / (~ignored).sum())


def statistics(logits: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
    """[4, t] of logits [t, n] and targets [t]."""
    z = _scores(logits, loss)
    found = z.new_zeros(STATISTICS, len(z))
    if not loss.columns:
        found[0] = -float("inf")
        return found
    found[0] = z.amax(1)
    found[2], found[3] = _target_score(z, targets, loss), z.sum(1) if loss.label_smoothing else 0
    found[1] = (z - _shift(found[0])[:, None]).exp_().sum(1)
    return found


def combine(stats: torch.Tensor) -> torch.Tensor:
    """The statistics [4, t] of all columns from those of R disjoint parts, [R, 4, t]."""
    peaks, sums, scores, totals = stats.unbind(1)  # [R, t] each
    peak = peaks.amax(0)
    exps = (sums * (peaks - _shift(peak)).exp()).sum(0)
    return torch.stack((peak, exps, scores.sum(0), totals.sum(0)))


def losses(stats: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
    """[t], from the statistics [4, t] of the whole vocabulary."""
    peak, exps, score, total = stats
    shift, smoothing = _shift(peak), loss.label_smoothing
    found = exps.log() + (1 - smoothing) * (shift - score)
    if smoothing:
        found = found + smoothing * (shift - total / loss.vocab_size)
    if loss.z_loss:
        found = found + loss.z_loss * (shift + exps.log()).square()
    ignored, outside = _kinds(targets, loss)
    return found.masked_fill(ignored, 0).masked_fill(outside, float("nan"))


def gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    stats: torch.Tensor | None,
    gain: torch.Tensor | None,
    loss: Loss,
) -> torch.Tensor:
    """Make of logits [t, n] their gradient, in place; returns what :func:`losses` does.

    ``stats`` [R, 4, t] are of all columns of the vocabulary, in R parts; None: they are all here. ``gain`` [t] are the
    gradients of the losses; None: ones.
    """
    z = _scores(logits, loss)
    slope = None if loss.softcap is None else 1 - (z / loss.softcap).square()
    if stats is None:
        peak, score = z.amax(1), _target_score(z, targets, loss)
        total = z.sum(1) if loss.label_smoothing else torch.zeros_like(peak)
        # In fp32 and fp64 z is the logits themselves: they are not needed any more.
        z = z.sub_(_shift(peak)[:, None]).exp_()
        stats = torch.stack((peak, z.sum(1), score, total))
    else:
        stats = combine(stats)
        z = z.sub_(_shift(stats[0])[:, None]).exp_()
    peak, exps, _, _ = stats
    found = losses(stats, targets, loss)

    ignored, outside = _kinds(targets, loss)
    gain = torch.ones_like(peak) if gain is None else gain.to(peak.dtype)
    gain = gain.masked_fill(ignored, 0).masked_fill(outside, float("nan"))
    slant = 1 + 2 * loss.z_loss * (_shift(peak) + exps.log()) if loss.z_loss else 1
    z.mul_((gain * slant / exps)[:, None])
    if loss.label_smoothing:
        z.sub_((gain * (loss.label_smoothing / loss.vocab_size))[:, None])
    if loss.columns:
        column, here = _column(targets, loss)
        z.scatter_add_(1, column, -((1 - loss.label_smoothing) * gain * here)[:, None])
    if slope is not None:
        z.mul_(slope)
    if z.data_ptr() != logits.data_ptr():
        logits[:, : loss.columns] = z
    logits[:, loss.columns :] = 0
    return found


def _scores(logits: torch.Tensor, loss: Loss) -> torch.Tensor:
    """z [t, columns]; a view of the logits where nothing is to be done."""
    z = logits[:, : loss.columns]
    z = z.to(accumulator(z.dtype))
    return z if loss.softcap is None else (z / loss.softcap).tanh_().mul_(loss.softcap)


def _shift(peak: torch.Tensor) -> torch.Tensor:
    """What to subtract before exp: the largest score, and 0 where all are -inf, whose exp then is 0 and not NaN."""
    return peak.masked_fill(peak == -float("inf"), 0)


def _target_score(z: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
    column, here = _column(targets, loss)
    return z.gather(1, column).squeeze(1).masked_fill(~here, 0)


def _column(targets: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Where among these columns the targets are, [t, 1], and whether they are among them at all, [t]."""
    column = targets.long() - loss.first
    here = (column >= 0) & (column < loss.columns)
    return column.masked_fill(~here, 0)[:, None], here


def _kinds(targets: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are ignored, and which are neither that nor in the vocabulary."""
    ignored = targets == loss.ignore_index
    return ignored, ((targets < 0) | (targets >= loss.vocab_size)) & ~ignored
