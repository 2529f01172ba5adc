"""``all_gather_linear``, ``linear_reduce_scatter``, ``linear_all_reduce``: one exchange each, without autograd.

R ranks share T tokens: rank r owns rows [r * per, (r + 1) * per) of them, per = ceil(T / R), and the last ranks may own
fewer or none. ``peers`` and ``signals`` are two halves of one exchange over symmetric memory, which
``SymmetricMemoryPool.channel(...).begin(...)`` makes (``parallel/overlap/memory/pool.py``); every rank calls the same
op, in the same order.

Layers do not call the ops. They take the same steps, :func:`compute_gathered` and :func:`scatter_sum`, through the
strategies (``parallel/overlap/strategies.py``) of the autograd functions in ``parallel/linear.py`` and
``parallel/mlp.py``. An op takes these steps for one rank, on the peers and signals that it is given. So the kernel
tests and the benchmark also run virtual ranks, which have no process group.

All-gather and product in one kernel: Jangda et al., "Breaking the computation and communication abstraction barrier"
(CoCoNet, ASPLOS 2022); with tiles that wait for flags: Chang et al., "FLUX" (arXiv:2406.06858), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..linear import Product, functional
from ..runtime import autograd, dispatch
from ..runtime.dispatch import Choice
from ..runtime.dtypes import KERNEL_FLOATS, no_kernel
from ..runtime.signals import (
    CHUNKS,
    ExchangeTimeout,
    Gathered,
    Scattered,
    Signals,
    describe,
    raise_flags,
    reached,
    rows_of,
)
from . import reduce_reference, reference, transport
from .reduce_config import WIDEST, Norm, gathered_slot_shape

Peers = list[torch.Tensor]
Optional = torch.Tensor | None


def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    peers: Peers,
    signals: Signals,
    activation: str = "identity",
    gated: bool = False,
    pieces: int | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """act(X @ W_i^T + b_i) of all ranks' rows X [T, K], which arrive while the first of them are multiplied.

    Args:
        x: this rank's rows [T_r, K] in bf16, fp16 or fp32.
        weight: [F, K], or up to three [F_i, K] that share the gather (q, k, v).
        bias: [F] or None; with several weights a sequence of these, or None.
        peers: [T, K] of each rank, in x's dtype. This rank's holds X afterwards, until the channel's next exchange.
        signals: the exchange's flags.
        activation: as in ``linear_act``.
        gated: with two weights, gate and up, return act(g) * u alone.
        pieces: in which a rank's rows are sent, each with a flag of its own; None chooses by their number.
        impl: "auto", "triton" or "reference". The reference waits for nobody: it is for ranks in one process, whose
            rows are all in place (``reference.push_rows``) and whose flags are all up (``signals.raise_flags``).

    Returns:
        [T, F], or a tuple of [T, F_i].

    Raises:
        ValueError: shapes, dtypes or names that do not fit.
        RuntimeError: impl="triton" where Triton cannot run; something wants a gradient; the reference without flags.
    """
    op = "gated_linear" if gated else "linear_act"
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    whole = peers[signals.rank]
    functional.check(whole, weights, biases, activation, op=op)
    first, last = rows_of(signals.rank, len(peers), whole.shape[0])
    _check("all_gather_linear", x, (last - first, whole.shape[1]), peers, whole.shape, signals, weights, biases)
    pieces = transport.pieces_for(-(-whole.shape[0] // len(peers))) if pieces is None else pieces
    if not 1 <= pieces <= CHUNKS:
        raise ValueError(f"all_gather_linear: pieces={pieces}: expected 1 to {CHUNKS}, the same on every rank")
    choice = _choose("all_gather_linear", x, impl)
    if not choice.triton:
        _check_arrived("all_gather_linear", signals, 1, pieces)
        reference.push_rows(x, peers, signals.rank)
        ys = list(reference.all_gather_linear(peers, signals.rank, weights, biases, activation, gated))
    else:
        kind = Product.gated_linear if gated else Product.linear_act
        product = kind(x.contiguous(), weights, biases, activation, choice)
        ys = compute_gathered(product, peers, signals, pieces)
        _raise_if_late("all_gather_linear", x, signals)
    return ys[0] if gated or isinstance(weight, torch.Tensor) else tuple(ys)


def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional = None,
    *,
    peers: Peers,
    signals: Signals,
    residual: Optional = None,
    norm: Norm | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of s = sum over ranks of x @ W^T, + bias + residual; with ``norm`` (norm(s), s).

    The product's tiles go to the owners of their rows as they are finished, those of other ranks first. A second launch
    waits for them and adds them up in fp32 in order of rank: bitwise the same each time.

    Args:
        x: [T, K], all rows, this rank's features, in bf16, fp16 or fp32.
        weight: [N, K], this rank's columns of a row-parallel layer's.
        bias: [N] or None, added once.
        peers: each rank's slot, in x's dtype, of :func:`reduce_scatter_shape`.
        signals: the exchange's flags.
        residual: [T_r, N] or None: this rank's rows of what is added.
        norm: what follows, or None.
        impl: as in :func:`all_gather_linear`; the reference wants the addends of all ranks in place
            (``reduce_reference.send_addend``).

    Returns:
        s [T_r, N] in x's dtype (promoted with the residual's), or (y, s).

    Raises:
        ValueError, RuntimeError: as in :func:`all_gather_linear`.
        ExchangeTimeout: on a CPU, a peer did not come in time. On a GPU the channel says so later.
    """
    return _send_and_add("linear_reduce_scatter", x, weight, bias, peers, signals, residual, norm, impl)


def linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional = None,
    *,
    peers: Peers,
    signals: Signals,
    residual: Optional = None,
    norm: Norm | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """All rows of the same, [T, N], on every rank: the owners send their sums on before bias, residual and norm.

    ``peers`` are slots of :func:`all_reduce_shape`, the residual is [T, N]. With impl="reference" the owners' sums have
    to be in place as well (``reduce_reference.send_sums``).
    """
    return _send_and_add("linear_all_reduce", x, weight, bias, peers, signals, residual, norm, impl)


def reduce_scatter_shape(tokens: int, width: int, ranks: int) -> tuple[int, int, int]:
    """The shape of the slot that :func:`linear_reduce_scatter` to [T, N] wants from a channel: addends by source."""
    return ranks, -(-tokens // ranks), width


def all_reduce_shape(tokens: int, width: int, ranks: int) -> tuple[int, int]:
    """The same for :func:`linear_all_reduce`: addends by source, then the sums."""
    return gathered_slot_shape(tokens, width, ranks)


def compute_gathered(product: Product, peers: Peers, signals: Signals, pieces: int) -> list[torch.Tensor]:
    """The results of ``product`` on the rows of all ranks, of which it has this rank's: the step that layers share with
    :func:`all_gather_linear`. Its rows are contiguous. They have left when this ends, also where it fails.
    """
    sent = transport.start_push(product.rows[0], peers, signals, pieces)
    try:
        ys = product.of(peers[signals.rank]).compute(Gathered(peers, signals, pieces))
        if not any(y.numel() for y in ys):  # no product has waited, and all ranks have to hear of each other
            transport.wait_for_rows(signals, pieces)
    finally:
        sent()
    return ys


def scatter_sum(
    product: Product,
    peers: Peers,
    signals: Signals,
    *,
    bias: Optional = None,
    residual: Optional = None,
    norm: Norm | None = None,
    gather: bool,
) -> Callable[[], list[torch.Tensor]]:
    """Send ``product``, this rank's addend [T, N], to the owners of its rows; what is returned, called once, waits for
    all ranks' and adds them up (``reduce.reduce_scattered``): the step that layers share with the two other ops.
    """
    from . import reduce  # Triton, only when a kernel runs

    if product.tokens:
        product.send(Scattered(peers, signals))
    else:  # no tile raises a flag, and all ranks have to hear of each other
        raise_flags(signals, 0, 0, range(len(peers)))
    sizes = product.tokens, product.width, product.rows[0].dtype
    return partial(
        reduce.reduce_scattered, peers, signals, *sizes, bias=bias, residual=residual, norm=norm, gather=gather
    )


def _send_and_add(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    peers: Peers,
    signals: Signals,
    residual: Optional,
    norm: Norm | None,
    impl: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    gather = op == "linear_all_reduce"
    functional.check(x, [weight], [bias], "identity")
    (tokens, _), width, ranks = x.shape, weight.shape[0], len(peers)
    shape = all_reduce_shape(tokens, width, ranks) if gather else reduce_scatter_shape(tokens, width, ranks)
    _check(op, x, x.shape, peers, shape, signals, [weight], [bias, residual])
    first, last = (0, tokens) if gather else rows_of(signals.rank, ranks, tokens)
    if residual is not None and residual.shape != (last - first, width):
        raise ValueError(f"{op}: residual is {list(residual.shape)}: expected {[last - first, width]}, as the result")
    _check_after(op, x, width, residual, norm)
    choice = _choose(op, x, impl, width)
    if not choice.triton:
        _check_arrived(op, signals, 2 if gather else 1, 1)
        found = _reference_sum(x, weight, peers, signals, gather)
        outs = reduce_reference.finish(found, bias, residual, norm, x.dtype)
    else:
        product = Product.linear_act(x, [weight], [None], "identity", choice)
        outs = scatter_sum(product, peers, signals, bias=bias, residual=residual, norm=norm, gather=gather)()
        _raise_if_late(op, x, signals)
    return outs[0] if norm is None else (outs[0], outs[1])


def _reference_sum(x: torch.Tensor, weight: torch.Tensor, peers: Peers, signals: Signals, gather: bool) -> torch.Tensor:
    rank, tokens = signals.rank, x.shape[0]
    reduce_reference.send_addend(x @ weight.t(), peers, rank, shots=2)
    if not gather:
        first, last = rows_of(rank, len(peers), tokens)
        return reduce_reference.total(peers, rank, tokens, shots=2)[: last - first]
    reduce_reference.send_sums(peers, rank, tokens)
    return reduce_reference.sums(peers[rank], tokens)


def _choose(op: str, x: torch.Tensor, impl: str, width: int = 0) -> Choice:
    unsupported = f"rows of {width} columns have no kernel (up to {WIDEST} have)" if width > WIDEST else None
    unsupported = autograd.transformed() or no_kernel(x.dtype) or unsupported
    choice = dispatch.choose(op, x.device, impl, unsupported=unsupported)
    dispatch.count(op, choice.impl)
    return choice


def _check(
    op: str,
    x: torch.Tensor,
    x_shape: Sequence[int],
    peers: Peers,
    slot_shape: Sequence[int],
    signals: Signals,
    weights: Sequence[torch.Tensor],
    others: Sequence[Optional],
) -> None:
    """ValueError for rows and slots that do not fit, RuntimeError where a gradient is wanted or the device counts."""
    if list(x.shape) != list(x_shape) or x.dtype != peers[0].dtype:
        raise ValueError(f"{op}: x is {x.dtype} {list(x.shape)}: expected {peers[0].dtype} {list(x_shape)}")
    if len(peers) != len(signals.pads):
        raise ValueError(f"{op}: {len(peers)} peers but flags of {len(signals.pads)} ranks: pass one exchange's")
    for rank, peer in enumerate(peers):
        if list(peer.shape) != list(slot_shape) or peer.dtype != x.dtype or not peer.is_contiguous():
            raise ValueError(
                f"{op}: peers[{rank}] is {peer.dtype} {list(peer.shape)}: expected contiguous {x.dtype} "
                f"{list(slot_shape)}; begin the exchange with that shape"
            )
    if any(weight.dtype != x.dtype for weight in weights):
        raise ValueError(f"{op}: x is {x.dtype} and the weights are not: cast them, autocast does not reach in here")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights, *others)):
        raise RuntimeError(
            f"{op} has no gradient, and an operand wants one: call it under torch.no_grad(), or use the layers, which "
            "differentiate (overlap='kernel')"
        )
    if signals.epoch is None:
        raise RuntimeError(f"{op}: the host counts its exchanges: begin one with channel.begin(shape, dtype)")


def _check_after(op: str, x: torch.Tensor, width: int, residual: Optional, norm: Norm | None) -> None:
    """ValueError for what follows a sum and does not fit it; RuntimeError where the norm wants a gradient."""
    given = {"residual": residual, "the norm's weight": norm and norm.weight, "the norm's bias": norm and norm.bias}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if tensor.dtype not in {x.dtype, *KERNEL_FLOATS} or tensor.device != x.device or tensor.shape[-1] != width:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: expected bf16, fp16 or fp32, "
                f"or x's {x.dtype}, {width} wide, on {x.device}"
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(f"{op} has no gradient, and {name} wants one: call it under torch.no_grad()")


def _check_arrived(op: str, signals: Signals, phases: int, flags: int) -> None:
    """RuntimeError unless all flags of all ranks are up: the reference waits for nobody."""
    assert signals.epoch is not None
    for source, raised in enumerate(signals.pads[signals.rank][:phases, :, :flags].unbind(1)):
        if not all(reached(flag, signals.epoch) for flag in raised.flatten().tolist()):
            raise RuntimeError(
                f"{op}: the reference runs here, which waits for nobody, and nothing has come from rank {source} in "
                f"exchange {signals.epoch}: ranks that are processes take impl='triton', or a collective and a product"
            )


def _raise_if_late(op: str, x: torch.Tensor, signals: Signals) -> None:
    """On a CPU a launch is over when it returns."""
    failure = describe(signals.report, signals.rank, f"{op} of {list(x.shape)}") if x.is_cpu else None
    if failure is not None:
        raise ExchangeTimeout(failure)
