"""The loss of a vocabulary projection without stored logits, over a vocabulary split among tensor-parallel ranks.

``kernels/cross_entropy`` processes the logits chunk by chunk; this module adds the communication and autograd.

    reduction                       logits formed           communication, for each token
    "mean", "sum"                   once, in forward        4 numbers per rank, chunk by chunk, under the next product
    "none", log-probabilities       in both directions      4 numbers per rank, in one all-gather
    any, without gradients          in forward              4 numbers per rank, in one all-gather
    any, under torch.compile, R > 1 in both directions      4 numbers per rank, in one all-gather

Backward sums the gradient of the hidden states over the ranks, or scatters the sum, as a column-parallel layer does
(Shoeybi et al., arXiv:1909.08053, section 3), at ``site + ".in.grad"``; the statistics travel at
``site + ".statistics"``, the gathered hidden states at ``site + ".in"``.

For a scalar loss forward already forms the gradients of the *sum*, and backward multiplies them by one number: the
incoming gradient, divided by the number of targets under "mean". That number is on the device, so a factor of 1 cannot
be skipped. For 16-bit weights the multiplication is part of the cast from the fp32 sum, which is needed anyway; for
fp32 ones it is done in place, one pass over the weight beside products that pass over it T times. Because it is applied
last, the gradient of logits stays at order 1, where it cannot overflow for any number of tokens and any GradScaler (in
fp16, probabilities below 6e-8 are lost). The same pass adds the product to a ``main_grad``; forward, which may have no
backward, does not touch it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..kernels.cross_entropy import chunks, op, reference, schemas
from ..kernels.cross_entropy.reference import STATISTICS, Loss
from ..kernels.linear import cpu, functional
from ..kernels.runtime import autograd, dispatch
from ..kernels.runtime.dispatch import Choice
from .core import collectives, mappings
from .core.mesh import SINGLE, Group
from .core.operands import close_grads, open_params
from .core.sharding import local_tensors, unwrap
from .overlap.strategies import InFlight, Pending

IGNORE_INDEX = -100  # torch's default: a target that does not count
NAME = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = SINGLE,
    sequence_parallel: bool = False,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
    fuse_wgrad_accumulation: bool = False,
    chunk_tokens: int | None = None,
    impl: str = "auto",
    site: str = "loss",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without its logits, over a split vocabulary.

    Args:
        hidden: [..., D], the same on every rank; with ``sequence_parallel`` this rank's [T/R, D], gathered here.
        weight: [V/R, D], rank r's the r-th slice of the vocabulary. DTensor or plain, as ``bias``, [V/R] or None.
        targets: [...] (all T tokens), int64 or int32, ids in the whole vocabulary.
        ignore_index: the target of tokens that do not count.
        label_smoothing: as in ``F.cross_entropy``.
        z_loss: the factor of the squared log-sum-exp of a token's scores, which is added to its loss.
        softcap: c, where scores are c tanh(logits / c).
        reduction: "mean" over the targets that count, "sum" or "none".
        vocab_size: V, where the ranks have more rows than that: the last ones are padding and do not count.
        fuse_wgrad_accumulation: backward adds the gradients of weight and bias to their ``main_grad``.
        chunk_tokens: tokens whose logits are in memory at once; None chooses, see ``kernels/cross_entropy/chunks.py``.
        impl: "auto", "triton", "onednn" or "reference"; see ``kernels/runtime/dispatch.py``. fp64 runs the reference.

    Returns:
        A scalar, or [...] for "none", in fp32 (fp64 for fp64), the same on every rank. As in ``F.cross_entropy``, where
        no target counts the mean is NaN and the sum 0, and all gradients are 0.

    Raises:
        ValueError: operands or options that do not fit; on a CPU, and elsewhere under ``SHARDFUSE_DEBUG=1``, a target
            outside the vocabulary, which otherwise makes the loss and its gradients NaN.
        RuntimeError: impl="triton" where Triton cannot run; fuse_wgrad_accumulation under torch.compile.

    Besides operands and gradients, memory holds a chunk of logits and, for "mean" and "sum" with a 16-bit weight, the
    fp32 sum of its gradient. "none" has no such sum and takes four products instead of three: if the weight's gradient
    is large compared to the logits, ``reduction="none"`` followed by a mean takes less memory and more time.
    """
    operands = hidden, weight, targets, bias, group, sequence_parallel
    options = (ignore_index, label_smoothing, z_loss, softcap, vocab_size, chunk_tokens)
    op.check_reduction(NAME, reduction)
    call = _prepare(NAME, *operands, *options, fuse_wgrad_accumulation, reduction, impl, site)
    return _run(call, hidden, weight, targets, bias)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = SINGLE,
    sequence_parallel: bool = False,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    vocab_size: int | None = None,
    fuse_wgrad_accumulation: bool = False,
    chunk_tokens: int | None = None,
    impl: str = "auto",
    site: str = "loss",
) -> torch.Tensor:
    """Each target's log-probability, [...] in fp32 (fp64), differentiable; 0 for targets that are ``ignore_index``.

    The result is the negative of :func:`linear_cross_entropy` with ``reduction="none"``; operands, options and errors
    are those of that function.
    """
    operands = hidden, weight, targets, bias, group, sequence_parallel
    options = (ignore_index, 0.0, 0.0, softcap, vocab_size, chunk_tokens)
    call = _prepare("linear_log_probs", *operands, *options, fuse_wgrad_accumulation, "none", impl, site)
    return 0.0 - _run(call, hidden, weight, targets, bias)  # unlike neg, this produces no -0.0


class _Call(NamedTuple):
    """The options of one call."""

    name: str
    loss: Loss
    group: Group
    sequence_parallel: bool
    reduction: str
    fuse_wgrad_accumulation: bool
    chunk: int | None
    choice: Choice
    dtype: torch.dtype  # of the computation
    site: str
    grad: bool  # whether autograd is on: inside an autograd function's forward it always reads off
    alone: bool  # whether the autograd functions leave the collectives of the hidden states to the caller

    def exchange(self, stats: torch.Tensor) -> Pending:
        """Start to gather the ranks' statistics [4, t]; the result is [R, 4, t].

        It sums slots, of which each rank fills its own, because only sums can run in the background here.
        """
        slots = stats.new_zeros(self.group.size, *stats.shape)
        slots[self.group.rank] = stats
        return Pending(collectives.start_all_reduce(slots, self.group, site=f"{self.site}.statistics"))


def _run(
    call: _Call, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    compiling = torch.compiler.is_compiling()
    if call.group.size > 1 and compiling:
        if call.sequence_parallel:
            hidden = mappings.all_gather_from(hidden, call.group, dim=0, site=f"{call.site}.in")
        else:
            hidden = mappings.copy_to(hidden, call.group, site=f"{call.site}.in")
        weight, bias = local_tensors(weight, bias)
        call = call._replace(alone=True)
    elif _is_small(call, hidden, weight):
        rows, weight, bias = functional.cast(
            (functional.as_rows(hidden), *local_tensors(weight, bias)), [call.dtype] * 3
        )
        flat = targets if targets.dim() == 1 else targets.reshape(-1)
        try:
            found = reference.linear_cross_entropy(rows, weight, bias, flat, call.loss, call.reduction)
        except IndexError:  # torch's message does not name the size of the vocabulary
            _check_targets(call, targets)
            raise
        return found if call.reduction != "none" or targets.dim() == 1 else found.view(targets.shape)
    _check_targets(call, targets)
    trains = call.grad and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if call.reduction != "none" and trains and not (compiling and call.group.size > 1):
        return _Total.apply(call, targets, hidden, weight, bias)
    losses = _PerToken.apply(call, targets, hidden, weight, bias)
    return losses if call.reduction == "none" else _reduced(call, losses, targets)


def _check_targets(call: _Call, targets: torch.Tensor) -> None:
    op.check_targets(call.name, targets, call.loss.vocab_size, call.loss.ignore_index)


def _reduced(call: _Call, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total = losses.sum()
    return total if call.reduction == "sum" else total / _counted(call, targets)


def _counted(call: _Call, targets: torch.Tensor) -> torch.Tensor:
    """The number of targets that count: a scalar on the device, so that the host need not wait for it."""
    return (targets != call.loss.ignore_index).sum()


def _is_small(call: _Call, hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether stock calls on the whole logits are best: on a CPU, if the logits fit one chunk."""
    if call.choice.impl != "reference" or call.group.size > 1 or call.fuse_wgrad_accumulation:
        return False
    if autograd.transformed() is not None:  # needs torch's own functions, regardless of memory and chunk_tokens
        return True
    if call.chunk is not None:
        return False
    if torch.compiler.is_compiling() or not hidden.is_cpu:
        return False
    return hidden.shape[:-1].numel() * weight.shape[0] * hidden.element_size() <= chunks.LEAST_BYTES


class _Total(torch.autograd.Function):
    """The sum or the mean of the losses; forward also forms the gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, targets: torch.Tensor, hidden: torch.Tensor, weight: Any, bias: Any
    ) -> torch.Tensor:
        rows, weight, bias = _open(ctx, call, hidden, weight, bias)
        want = list(ctx.needs_input_grad[2:])
        operands = rows, weight, bias, targets.reshape(-1)
        grads: Any
        if call.group.size == 1:
            losses, *grads = schemas.once(*operands, *call.loss, call.chunk, want, call.choice.impl)
        else:
            with InFlight() as flights:
                exchange = lambda stats: flights.add(call.exchange(stats)).wait
                losses, *grads = chunks.once(*operands, call.loss, call.choice, want, call.chunk, exchange)
        loss = losses.sum()
        inverse = None
        if call.reduction == "mean":
            counted = _counted(call, targets)
            loss = loss / counted
            inverse = counted.clamp(min=1).to(loss.dtype).reciprocal()  # without targets gradients are 0, not 0 / 0
        ctx.call = call
        ctx.save_for_backward(inverse, *(grad if w else None for grad, w in zip(grads, want)))
        return loss

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        inverse, drows, *formed = ctx.saved_tensors
        _, _, want_hidden, *want_params = autograd.needed_grads(ctx)
        scale = (dloss if inverse is None else dloss * inverse).view(1, 1)
        reuse = not autograd.keeps_graph()
        dhidden = None
        dparams: list[torch.Tensor | None] = []
        with InFlight() as flights:
            if want_hidden:
                summing = flights.add(_reduce(ctx, _scaled(drows, scale, drows.dtype, reuse)))
            into = autograd.destinations(ctx, ctx.buffers)
            for i, (grad, want, buffer) in enumerate(zip(formed, want_params, into)):
                factor = scale if i == 0 else scale[0]
                if not want:
                    dparams.append(None)
                elif buffer is not None:
                    buffer.addcmul_(grad, factor)
                    dparams.append(None)
                else:
                    dparams.append(_scaled(grad, factor, ctx.dtypes[1 + i], reuse))
            if want_hidden:
                dhidden = summing.wait()
        return None, None, *close_grads(ctx, dhidden, dparams)


class _PerToken(torch.autograd.Function):
    """The losses [...]; forward keeps their statistics, and backward forms the logits again."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, targets: torch.Tensor, hidden: torch.Tensor, weight: Any, bias: Any
    ) -> torch.Tensor:
        rows, weight, bias = _open(ctx, call, hidden, weight, bias)
        flat = targets.reshape(-1)
        stats = schemas.statistics(rows, weight, bias, flat, *call.loss, call.chunk, call.choice.impl)
        if call.group.size > 1:
            stats = collectives.all_gather(stats, call.group, site=f"{call.site}.statistics")
            stats = reference.combine(stats.view(call.group.size, STATISTICS, -1))
        ctx.call = call
        ctx.save_for_backward(rows, weight, bias, flat, stats)
        losses = reference.losses(stats, flat, call.loss)
        return losses if targets.dim() == 1 else torch.ops.aten._unsafe_view.default(losses, targets.shape)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dlosses: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        rows, weight, bias, targets, stats = ctx.saved_tensors
        operands = rows, weight, bias, targets
        _, _, *want = autograd.needed_grads(ctx)
        gain = dlosses.reshape(-1).to(stats.dtype).contiguous()
        into = autograd.destinations(ctx, ctx.buffers)
        grads: Any
        if any(buffer is not None for buffer in into):
            grads = chunks.again(*operands, stats, gain, call.loss, call.choice, want, call.chunk, into)
        else:
            grads = schemas.again(*operands, stats, gain, *call.loss, call.chunk, want, call.choice.impl)
        drows, dweight, dbias = (
            grad if w and buffer is None else None for grad, w, buffer in zip(grads, want, [None, *into])
        )
        dhidden = None if drows is None else _reduce(ctx, drows).wait()
        return None, None, *close_grads(ctx, dhidden, [dweight, dbias])


def _open(ctx: Any, call: _Call, hidden: torch.Tensor, weight: Any, bias: Any) -> list[Any]:
    """Rows of all tokens, weight and bias as plain tensors in the computation's dtype."""
    plain = open_params(ctx, hidden, (weight, bias), call.fuse_wgrad_accumulation and call.grad)
    hidden, weight, bias = functional.cast((hidden, *plain), [call.dtype] * 3)
    if call.sequence_parallel and not call.alone:
        hidden = collectives.all_gather(hidden, call.group, site=f"{call.site}.in")
    ctx.shape = hidden.shape
    return [functional.as_rows(hidden), weight, bias]


def _reduce(ctx: Any, drows: torch.Tensor) -> Pending:
    """Start to sum this rank's partial gradient of the rows: the gradient of the hidden states."""
    call = ctx.call
    dhidden = drows.view(ctx.shape)
    if call.alone or call.group.size == 1:
        return Pending(lambda: dhidden)
    start = collectives.start_reduce_scatter if call.sequence_parallel else collectives.start_all_reduce
    return Pending(start(dhidden, call.group, site=f"{call.site}.in.grad"))


def _scaled(grad: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, reuse: bool) -> torch.Tensor:
    """grad * scale in ``dtype``, in one pass; in grad's memory where ``reuse`` and the dtype allow it.

    ``scale`` has dimensions, so that torch multiplies in its fp32: GradScaler's 65536 is infinite in fp16.
    """
    if torch.compiler.is_compiling():
        return (grad * scale).to(dtype)
    if grad.dtype == dtype and reuse:
        return grad.mul_(scale)
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


# ---------------------------------------------------------------------------------------------------- checks


def _prepare(
    name: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    sequence_parallel: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    vocab_size: int | None,
    chunk_tokens: int | None,
    fuse_wgrad_accumulation: bool,
    reduction: str,
    impl: str,
    site: str,
) -> _Call:
    """Validate and count one call."""
    sequence_parallel = sequence_parallel and group.size > 1
    if torch.compiler.is_compiling():
        own_weight, own_bias = local_tensors(weight, bias)
    else:
        (own_weight, own_bias), _ = unwrap((weight, bias))
    _check_operands(name, hidden, own_weight, targets, own_bias, group if sequence_parallel else SINGLE)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing={label_smoothing}: expected 0 to 1")
    if z_loss < 0:
        raise ValueError(f"{name}: z_loss={z_loss}: expected at least 0")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap={softcap}: expected more than 0, or None")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{name}: chunk_tokens={chunk_tokens}: expected at least 1, or None to choose")
    rows = own_weight.shape[0]
    vocab_size = rows * group.size if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= rows * group.size:
        raise ValueError(
            f"{name}: vocab_size={vocab_size}, but the weight has {rows} rows on each of {group.size} ranks: expected "
            f"1 to {rows * group.size}"
        )
    dtype, device = _dtype(name, hidden, own_weight, own_bias), hidden.device
    offer = cpu.offer(hidden, (own_weight,), dtype, "identity", False) if hidden.is_cpu or impl == "onednn" else None
    choice = functional.linear_act_choice(dtype, device, impl, op=name, offer=offer)
    dispatch.count(NAME, choice.impl)
    whole = Loss(vocab_size, 0, vocab_size, ignore_index, label_smoothing, z_loss, softcap)
    loss = whole.part(group.rank * rows, rows)
    grad = torch.is_grad_enabled()
    options = (reduction, fuse_wgrad_accumulation, chunk_tokens, choice, dtype, site, grad)
    return _Call(name, loss, group, sequence_parallel, *options, alone=False)


def _check_operands(
    name: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    gathered: Group,
) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{name}: hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}: expected [..., D] and "
            "[V/R, D] (as nn.Linear stores it)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {list(bias.shape)}: expected [{weight.shape[0]}]")
    expected = list(hidden.shape[:-1])
    if gathered.size > 1 and expected:
        expected[0] *= gathered.size
    if list(targets.shape) != expected:
        tokens = f"{expected}, one for each of {gathered.size} ranks' tokens" if gathered.size > 1 else f"{expected}"
        raise ValueError(
            f"{name}: targets have shape {list(targets.shape)} and hidden {list(hidden.shape)}: expected {tokens}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: targets are {targets.dtype}: expected torch.int64 or torch.int32")
    for what, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: hidden is on {hidden.device} but {what} on {tensor.device}; move them together")


def _dtype(name: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """The dtype of the computation: autocast's, or that of all operands."""
    autocast = functional.autocast_dtype(hidden)
    for what, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.is_floating_point() or (autocast is not None and tensor.dtype == torch.float64):
            raise ValueError(f"{name}: {what} is {tensor.dtype}: expected a floating-point type that autocast takes")
        if autocast is None and tensor.dtype != hidden.dtype:
            raise ValueError(f"{name}: hidden is {hidden.dtype} but {what} is {tensor.dtype}; cast them to one dtype")
    return autocast or hidden.dtype
