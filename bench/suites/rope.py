"""``apply_rope``: q and k rotated in one launch, against a copy of as many bytes, and against other implementations.

Rotation is memory-bound: each element is read once and written once, and the target compares it with a copy of as many
bytes. Peers: eager torch as in transformers' models, torch.compile of that, and Liger's kernel (in place, q and k in
one launch) if installed. On a CPU the peer is the plain-torch rotation with full-width tables, q and k one after the
other.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.cases.rope import SPEC
from ...kernels.dev.registry import Case
from ...kernels.rope import apply_rope
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import check_case
from ..harness.stock import compiled
from ..harness.timing import Timing, compare, input_sets

TARGETS = {
    "against a copy of the same bytes, 4096 tokens x 4096 and wider": 0.95,
    "against a copy of the same bytes, smaller, 1024 tokens and up": 0.90,
    "against every other peer": 1.0,
    "CPU, against the rotation in plain torch": 0.97,
}
LARGE_COPY, COPY, PEERS, CPU = TARGETS.values()

FORWARD, BOTH = "forward, us", "forward + backward, us"
DRY = next(case for case in SPEC.tagged("test") if case.sizes["B"] and case.sizes["S"])
COMPILED = 1  # of a short run's cases
FEW_TOKENS = 1024  # with fewer the launch dominates, and a share of the bandwidth is meaningless
LARGE = 4096  # tokens, and elements of q and k for each, from which on the launch no longer counts


@dataclass(frozen=True)
class Operands:
    """Leaves q [..., N, H] and k [..., K, H], their results' gradients, and tables: ours and the peers'."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    cos: torch.Tensor  # [S, P/2] fp32
    sin: torch.Tensor
    full_cos: torch.Tensor  # [S, 1, P], one for each element; in q's dtype, as in transformers
    full_sin: torch.Tensor
    plain: tuple[torch.Tensor, torch.Tensor]  # the same in fp32, the sine of each pair's first element negated

    @classmethod
    def of(cls, case: Case, device: torch.device, seed: int) -> Operands:
        inputs = SPEC.make_inputs(case, device, seed)
        q, k, dq, dk, cos, sin = (inputs[name] for name in ("q", "k", "dq_out", "dk_out", "cos", "sin"))
        spread = _neighbours if case.options["interleaved"] else _halves
        full_cos, full_sin, signed_sin = (spread(*pair).unsqueeze(-2) for pair in ((cos, cos), (sin, sin), (-sin, sin)))
        as_stock = full_cos.to(case.dtype), full_sin.to(case.dtype)
        return cls(case, q, k, dq, dk, cos, sin, *as_stock, (full_cos, signed_sin))

    @property
    def interleaved(self) -> bool:
        return bool(self.case.options["interleaved"])

    @cached_property
    def copied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and target of a copy that moves as many bytes as the rotation."""
        source = torch.empty(_bytes(self.case) // 2, dtype=torch.uint8, device=self.q.device).random_()
        return source, torch.empty_like(source)


def _halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat((a, b), dim=-1)


def _neighbours(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack((a, b), dim=-1).flatten(-2)


Side = Callable[[Operands], Any]


def cases(settings: Settings) -> list[Case]:
    if settings.dry:
        return [DRY]
    if not settings.cuda:
        return SPEC.tagged("bench-cpu")
    found = SPEC.tagged("bench")
    return [case for case in found if "short" in case.tags] if settings.short else found


def plan(settings: Settings) -> list[Measurement]:
    found = cases(settings)
    row = partial(_row, settings)
    if not settings.cuda and not settings.dry:
        peer_name = "plain torch, full-width tables"
        rows = [row(case, FORWARD, peer_name, _plain, CPU) for case in found]
        return rows + [row(case, BOTH, peer_name, partial(_trained, _plain), CPU) for case in found]
    rows = [row(case, FORWARD, "copy of the bytes", _copy, _copy_target(case)) for case in found]
    rows += [row(case, FORWARD, "eager", _eager, PEERS) for case in found]
    rows += [row(case, BOTH, "eager", partial(_trained, _eager), PEERS) for case in found if not _inplace(case)]
    liger = None if settings.dry else _liger()
    if liger is not None:
        in_halves = [case for case in found if case.sizes["B"] and not case.options["interleaved"]]
        rows += [row(case, FORWARD, "Liger, in place", liger, PEERS) for case in in_halves]
    for case in () if settings.dry else found[:COMPILED] if settings.short else found:
        rows.append(row(case, FORWARD, "torch.compile", _Compiled(), PEERS, slow=True))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for case in cases(settings):
        if case.name in names:
            for verdict in check_case(SPEC, case, settings.device, settings.impl):
                yield case.name, verdict


def warm(settings: Settings, name: str) -> None:
    for case in cases(settings):
        if case.name == name:
            SPEC.run(SPEC.make_inputs(case, settings.device, 0), case, settings.impl)


def _inplace(case: Case) -> bool:
    return bool(case.options["inplace"])


def _copy_target(case: Case) -> float | None:
    B, S, N, K, H = (case.sizes[letter] for letter in "BSNKH")
    tokens = max(B, 1) * S
    if tokens < FEW_TOKENS:
        return None
    return LARGE_COPY if min(tokens, (N + K) * H) >= LARGE else COPY


def _bytes(case: Case) -> int:
    """Bytes that a rotation reads and writes: q and k (in place their rotated elements), and the tables."""
    B, S, N, K, H, P = (case.sizes[letter] for letter in "BSNKHP")
    width = P if _inplace(case) else H
    return 2 * max(B, 1) * S * (N + K) * width * case.dtype.itemsize + S * P * 4


def _row(
    settings: Settings, case: Case, metric: str, peer_name: str, peer: Side, target: float | None, *, slow: bool = False
) -> Measurement:
    call = partial(_rotated, impl=settings.impl, inplace=_inplace(case) and metric == FORWARD)
    ours = partial(_trained, call) if metric == BOTH else call
    moved = _bytes(case) * (2 if metric == BOTH else 1)

    def run() -> tuple[Timing, Timing]:
        sets = [Operands.of(case, settings.device, i) for i in range(input_sets(_bytes(case), settings.device))]
        with torch.set_grad_enabled(metric == BOTH):
            return compare(
                [partial(ours, each) for each in sets],
                [partial(peer, each) for each in sets],
                settings.device,
                seconds=settings.seconds,
                dry=settings.dry,
            )

    return Measurement(case.name, metric, peer_name, target, run, slow=slow, work=Work(0, moved))


def _trained(call: Side, operands: Operands) -> object:
    """The rotated results, and the gradients rotated back."""
    o = operands
    return torch.autograd.grad(call(o), (o.q, o.k), (o.dq, o.dk))


def _rotated(operands: Operands, *, impl: str, inplace: bool) -> object:
    o = operands
    return apply_rope(o.q, o.k, o.cos, o.sin, interleaved=o.interleaved, inplace=inplace, impl=impl)


# --- peers ------------------------------------------------------------------------------------------------------------


def _eager(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """As in transformers' models: x * cos + rotate_half(x) * sin, in x's dtype."""
    o = operands
    return _stock(o.q, o.full_cos, o.full_sin, o.interleaved), _stock(o.k, o.full_cos, o.full_sin, o.interleaved)


def _stock(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary = cos.shape[-1]
    whole = rotary == x.shape[-1]
    head = x if whole else x[..., :rotary]
    if interleaved:
        partners = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        partners = torch.cat((-head[..., rotary // 2 :], head[..., : rotary // 2]), dim=-1)
    rotated = head * cos + partners * sin
    return rotated if whole else torch.cat((rotated, x[..., rotary:]), dim=-1)


def _plain(operands: Operands) -> tuple[torch.Tensor, ...]:
    """Three operations for q and three for k, whole heads in halves."""
    cos, sin = operands.plain
    half = operands.q.shape[-1] // 2
    return tuple(torch.addcmul(x * cos, x.roll(half, dims=-1), sin).to(x.dtype) for x in (operands.q, operands.k))


class _Compiled:
    """:func:`_eager` through torch.compile, compiled at its first use."""

    def __init__(self) -> None:
        self._stock: Callable[..., torch.Tensor] | None = None

    def __call__(self, operands: Operands) -> object:
        if self._stock is None:
            self._stock = compiled(_both)
        o = operands
        return self._stock(o.q, o.k, o.full_cos, o.full_sin, o.interleaved)


def _both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _stock(q, cos, sin, interleaved), _stock(k, cos, sin, interleaved)


def _copy(operands: Operands) -> torch.Tensor:
    source, target = operands.copied
    return target.copy_(source)


def _liger() -> Side | None:
    """Liger's rotation of q and k in place; None if it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction

    def run(operands: Operands) -> object:
        o = operands
        cos, sin = (table.squeeze(-2).unsqueeze(0) for table in (o.full_cos, o.full_sin))  # [1, S, P]
        return function.apply(o.q.transpose(1, 2), o.k.transpose(1, 2), cos, sin)

    return run


BENCHMARK = Benchmark(
    name="rope",
    summary="apply_rope, q and k in one launch, against a copy of the same bytes, eager, torch.compile and Liger",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("rope",),
    sources=("bench/harness/stock.py",),
)
