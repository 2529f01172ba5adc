"""A cost model of a product with a collective beside it: alpha and beta of the links, and the product's own time.

It is an estimate for shapes that were not measured. R ranks each form a product [T, K] @ [K, N]; the collective handles
n bytes. A ring collective costs (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations
in MPICH", IJHPCA 19(1), 2005; pushing straight to each of R - 1 peers moves the same bytes)

    all-gather, reduce-scatter    start + (R - 1) alpha + (R - 1) / R n / beta
    all-reduce                    start + 2 (R - 1) alpha + 2 (R - 1) / R n / beta

where ``start`` is the latency of a call, ``alpha`` that of a step and ``beta`` the bytes that a rank sends in a second.
For an all-gather n counts the gathered [T, K], for a reduce-scatter and an all-reduce the partial sums [T, N].

The product's time G comes from ``kernels/runtime/cost.py`` on a chip that it knows, so pieces that leave
multiprocessors idle cost more; it is never below the time at the measured rate. On other chips G is 2 T K N over that
rate.

    plain     one after the other: C + G
    chunked   this rank's shard in one product, the others' in p pieces of [T / (R p), K] (an all-reduce: T / p rows). A
              gathered piece is multiplied when it has arrived, after this rank's shard; a partial sum is sent when it
              has been formed, this rank's shard last. The transfer of a piece costs start + alpha + bytes / beta, and
              ``piece_s`` on the host, which limits how small pieces can be
    kernel    the same with one launch of the product, in ``KERNEL_CHUNKS`` pieces a shard that a copy engine moves.
              all_reduce_rmsnorm follows its product, so nothing hides it, but it needs no call and no ring: one shot
              costs alpha + (R - 1) n / beta, every rank pushing to all at once, two shots 2 (alpha + (R - 1) / R n /
              beta), as Chan et al. count direct exchanges ("Collective communication: theory, practice, and
              experience", CCPE 19(13), 2007), with beta the rate to a peer. Both sides leave out the norm's own pass

During a transfer a product runs at the share ``hides`` of its speed: NCCL's kernels take multiprocessors, gloo's
threads take cores (all of them, so the share is 0), a copy engine takes neither (1). A sum of received partial sums
passes through memory once. "Exposed" is the total minus the products: the communication that no product hides, and the
slowdown of the products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.comm.reduce_config import pick_shots
from ...kernels.linear.config import pick_config
from ...kernels.linear.gemm import Gemm
from ...kernels.runtime import cost
from ...kernels.runtime.chips import CHIPS
from ...kernels.runtime.dtypes import KERNEL_FLOATS, short_name
from .link_profile import COLLECTIVES, OPS, Link, Profile

GATHER, SCATTER, REDUCE, NORM = OPS
PIECES = (1, 2, 4)  # of a shard; an all-reduce, in which no rows are local, has twice as many
KERNEL_CHUNKS = 4
KERNEL_START_S = 1e-5  # flags, and the wait of the first tile: an assumption


class Call(NamedTuple):
    """One use of an operation: each of R ranks forms a product [T, K] @ [K, N]."""

    op: str
    T: int
    K: int
    N: int
    dtype: torch.dtype
    R: int


class Estimate(NamedTuple):
    """Seconds: the total, and the communication that no product hides."""

    total_s: float
    exposed_s: float


Span = tuple[float, float]  # the seconds at which something begins and ends


class Timeline(NamedTuple):
    """When a call's pieces travel and are multiplied, in seconds from its start, up to the sum of what has arrived."""

    transfers: list[Span]
    products: list[Span]

    @property
    def end_s(self) -> float:
        return max(end for _, end in self.transfers + self.products)

    def later(self, seconds: float) -> Timeline:
        """The same, begun so much later."""
        return Timeline(*([(begin + seconds, end + seconds) for begin, end in spans] for spans in self))


def pieces_of(call: Call) -> tuple[int, ...]:
    """The numbers of pieces worth considering: every piece has at least one row."""
    if call.op == NORM:
        return ()
    each, factor = (call.T, 2) if call.op == REDUCE else (call.T // call.R, 1)
    return tuple(factor * pieces for pieces in PIECES if factor * pieces <= max(each, factor))


def predict(profile: Profile, link: str, call: Call, kind: str, pieces: int = 1) -> Estimate | None:
    """The predicted time of ``call`` by the path ``kind``; None where the profile lacks a figure that this needs."""
    of = profile.links.get(link, {}).get(COLLECTIVES[call.op])
    if of is None or call.T < 1:
        return None
    whole = gemm_seconds(profile, call.T, call)
    if whole is None:
        return None
    if kind == "plain":
        exposed = collective_seconds(of, call)
        return Estimate(whole + exposed, exposed)
    if kind == "chunked":
        return None if call.op == NORM else _chunked(profile, of, call, pieces)
    return _one_launch(profile, of, call, whole) if call.op == NORM else _kernel(profile, call, whole)


def collective_seconds(link: Link, call: Call) -> float:
    """The time of the call's collective alone."""
    rounds = 2 if call.op in (REDUCE, NORM) else 1
    steps = rounds * (call.R - 1)
    return link.start_s + steps * link.alpha_s + rounds * _sent_bytes(call) / link.bytes_per_s


def gemm_seconds(profile: Profile, rows: int, call: Call) -> float | None:
    """The time of the product of ``rows`` of the call's tokens alone; None where neither rate nor chip is known."""
    rate = profile.gemm_flops.get(short_name(call.dtype))
    at_rate = 2.0 * rows * call.K * call.N / rate if rate else 0.0
    on_chip = _on_chip(profile.arch, rows, call.K, call.N, call.dtype)
    return max(at_rate, on_chip) or None


def kernel_timeline(profile: Profile, call: Call) -> Timeline | None:
    """The pieces of ``call`` by the path "kernel", not of ``all_reduce_rmsnorm``; None where a figure is missing."""
    whole = gemm_seconds(profile, call.T, call)
    if whole is None or profile.copy_bytes_per_s is None:
        return None
    remote = (call.R - 1) * KERNEL_CHUNKS
    transfer = _moved_bytes(call) / (call.R * KERNEL_CHUNKS) / profile.copy_bytes_per_s
    timeline = _consumed if call.op == GATHER else _produced
    return timeline(whole / call.R, [whole / (call.R * KERNEL_CHUNKS)] * remote, transfer, 1.0).later(KERNEL_START_S)


@functools.lru_cache(4096)
def _on_chip(arch: str, M: int, K: int, N: int, dtype: torch.dtype) -> float:
    """The chip model's time; 0 for a chip that it does not know."""
    if arch not in CHIPS or min(M, K, N) < 1 or dtype not in KERNEL_FLOATS:
        return 0.0
    gemm = Gemm("nt", M, N, K, dtype, dtype)
    return cost.predict(CHIPS[arch], gemm, pick_config(arch, gemm)).time_us * 1e-6


def _chunked(profile: Profile, link: Link, call: Call, pieces: int) -> Estimate | None:
    count = pieces if call.op == REDUCE else call.R * pieces
    own = 0.0 if call.op == REDUCE else gemm_seconds(profile, -(-call.T // call.R), call)
    piece = gemm_seconds(profile, -(-call.T // count), call)
    if own is None or piece is None:
        return None
    remote = count if call.op == REDUCE else count - pieces
    if call.op == REDUCE:
        transfer = link.start_s + 2 * (call.R - 1) * link.alpha_s + 2 * _sent_bytes(call) / count / link.bytes_per_s
    else:
        transfer = link.start_s + link.alpha_s + _moved_bytes(call) / count / link.bytes_per_s
    timeline = _consumed if call.op == GATHER else _produced
    total = timeline(own, [piece] * remote, transfer, profile.hides).end_s
    if call.op == SCATTER:
        total += _sum_seconds(profile, call)
    total = max(total, (remote + 1) * profile.piece_s)
    return Estimate(total, max(0.0, total - own - remote * piece))


def _kernel(profile: Profile, call: Call, whole: float) -> Estimate | None:
    timeline = kernel_timeline(profile, call)
    if timeline is None or profile.copy_bytes_per_s is None:
        return None
    total = timeline.end_s
    if call.op != GATHER:
        total += _sum_seconds(profile, call)
    if call.op == REDUCE:  # the sums go back to every rank, and nothing hides that
        total += _sent_bytes(call) / profile.copy_bytes_per_s
    return Estimate(total, max(0.0, total - whole))


def _one_launch(profile: Profile, link: Link, call: Call, whole: float) -> Estimate | None:
    """The time of ``all_reduce_rmsnorm`` after its product."""
    if profile.copy_bytes_per_s is None:
        return None
    shots = pick_shots(call.T, call.N, call.dtype.itemsize, call.R)
    sent = (call.R - 1) * _moved_bytes(call) if shots == 1 else 2 * _sent_bytes(call)
    exposed = shots * link.alpha_s + sent / profile.copy_bytes_per_s
    return Estimate(whole + exposed, exposed)


def _moved_bytes(call: Call) -> int:
    """The bytes that the collective handles: the gathered tokens, or the partial sums."""
    return call.T * (call.K if call.op == GATHER else call.N) * call.dtype.itemsize


def _sent_bytes(call: Call) -> float:
    """The bytes that a rank sends in an all-gather, in a reduce-scatter, and in half of an all-reduce."""
    return (call.R - 1) / call.R * _moved_bytes(call)


def _sum_seconds(profile: Profile, call: Call) -> float:
    """The time to read R partial sums of this rank's rows and to write their sum."""
    if profile.memory_bytes_per_s is None:
        return 0.0
    return (call.R + 1) * call.T / call.R * call.N * call.dtype.itemsize / profile.memory_bytes_per_s


def _consumed(own: float, pieces: Sequence[float], transfer: float, hides: float) -> Timeline:
    """Products first of ``own`` rows, then of ``pieces``, which arrive one after another."""
    busy = len(pieces) * transfer
    transfers = [(index * transfer, (index + 1) * transfer) for index in range(len(pieces))]
    products = [(0.0, _worked(0.0, own, busy, hides))]
    for piece, (_, arrival) in zip(pieces, transfers):
        begin = max(products[-1][1], arrival)
        products.append((begin, _worked(begin, piece, busy, hides)))
    return Timeline(transfers, products)


def _produced(own: float, pieces: Sequence[float], transfer: float, hides: float) -> Timeline:
    """The partial sums ``pieces`` are formed and sent in order, then the ``own`` ones are formed."""
    transfers: list[Span] = []
    products: list[Span] = []
    now = sent = 0.0
    for piece in pieces:
        end = _worked(now, piece, sent, hides)
        begin = max(end, sent)
        products.append((now, end))
        transfers.append((begin, begin + transfer))
        now, sent = end, begin + transfer
    products.append((now, _worked(now, own, sent, hides)))
    return Timeline(transfers, products)


def _worked(start: float, work: float, busy_until: float, rate: float) -> float:
    """The end of a product of ``work`` seconds from ``start``, at ``rate`` of full speed until ``busy_until``."""
    window = max(0.0, busy_until - start)
    if work <= window * rate:
        return start + (work / rate if work else 0.0)
    return start + window + (work - window * rate)
