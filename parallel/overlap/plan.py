"""The plan for a product and its collective, and the choice of the best plan by the figures of a node's profile.

Everything here is a pure function of a profile (:mod:`link_profile`), an operation and its shape, so ranks with the
same profile choose the same plan. :mod:`policy` makes the ranks agree on a profile and applies the caller's options.
With ``overlap="auto"`` the first rule that applies decides:

    1. a measured bucket: the fastest plan that can run, by the clock that fits the call (:func:`clock_for`); one other
       than plain only if it beat plain by more than MARGIN and by more than the measurement's noise
    2. a CPU: plain, because gloo's threads share the cores that form the products
    3. measured links: the plan that the cost model (:mod:`link_model`) ranks first; one other than plain only from
       MODEL_TOKENS on and with a predicted gain above MODEL_MARGIN
    4. published figures alone: plain; the reason names the predicted gain, so the user knows what to measure
"""

from __future__ import annotations

from typing import NamedTuple

from ...kernels.runtime.dtypes import short_name
from ..core.mesh import Group
from . import link_model
from .link_model import Call
from .link_profile import DEVICE, WITH_HOST, Profile, Row, bucket
from .memory.sizes import DECODE_TOKENS
from .strategies import Chunked, InKernel, Plain, Strategy

MARGIN = 0.03  # of plain's time: another plan must beat plain by more
MODEL_MARGIN = 0.10  # the same for predicted times
MODEL_TOKENS = 1024  # with fewer, latency dominates, where the model is least accurate: plain unless measured
DEFAULT_PIECES = 2  # of a shard, without any figures
CALIBRATE = "shardfuse bench calibrate"
NOTHING = "nothing to send or to multiply"


class OverlapPlan(NamedTuple):
    """How one collective and the product beside it run."""

    kind: str = "plain"  # "kernel", "chunked" or "plain"; "refused", in `explain` alone, where forward would raise
    pieces: int = 1  # chunked: of each rank's shard, or of all rows for an all-reduce
    reason: str = ""
    exposed_s: float | None = None  # expected seconds of communication that no product hides; None: unknown

    def strategy(self, group: Group) -> Strategy:
        """The strategy that runs this plan."""
        if self.kind == "chunked":
            return Chunked(group, self.pieces)
        return InKernel(group) if self.kind == "kernel" else Plain(group)


def pure_selection(
    profile: Profile | None, link: str, call: Call, *, unavailable: str | None, device_type: str
) -> OverlapPlan:
    """The choice under ``overlap="auto"``; ``unavailable`` is the reason why the kernel cannot run, or None."""
    if call.T < 1 or min(call.K, call.N) < 1:
        return OverlapPlan(reason=NOTHING)
    if profile is None:
        return OverlapPlan(reason=f"nothing is known of this node's links: {CALIBRATE}")
    if profile.dry:
        return OverlapPlan(reason="the profile comes from a dry run, whose figures mean nothing")
    row = measured_row(profile, link, call)
    if row is not None:
        return _by_measurement(profile, link, call, row, unavailable)
    if device_type == "cpu":
        why = "gloo works on the cores that form the products"
        return OverlapPlan(reason=f"{why}, and this shape was not measured: {CALIBRATE}")
    return _by_model(profile, link, call, unavailable)


def clock_for(tokens: int) -> str:
    """The clock whose time a call of so many tokens costs: the device's where it is behind the host, as in training.

    In a step of decoding the device is done before the host has made the next call, so the host's time counts.
    """
    return WITH_HOST if tokens <= DECODE_TOKENS else DEVICE


def measured_row(profile: Profile, link: str, call: Call) -> Row | None:
    """The measurement of the bucket of ``call`` by the clock that fits it, or None."""
    where = bucket(call.T, call.K, call.N)
    return profile.table.get((call.op, short_name(call.dtype), call.R, link, where, clock_for(call.T)))


def fastest(row: Row, *, unavailable: str | None, most: int | None = None) -> tuple[str, int]:
    """(kind, pieces) of the fastest plan of a measured row; plain unless another won by more than margin and noise.

    ``most`` bounds the number of pieces: a bucket may hold shapes with fewer rows than the one that was measured.
    """
    sides = {
        ("chunked", pieces): seconds for pieces, seconds in row.chunked_s.items() if most is None or pieces <= most
    }
    if row.kernel_s is not None and unavailable is None:
        sides["kernel", 1] = row.kernel_s
    best = min(sides, key=sides.__getitem__, default=("plain", 1))
    won = best in sides and sides[best] < row.plain_s * (1 - max(MARGIN, row.noise))
    return best if won else ("plain", 1)


def _by_measurement(profile: Profile, link: str, call: Call, row: Row, unavailable: str | None) -> OverlapPlan:
    """The fastest plan of a measured bucket."""
    most = call.T if call.op == link_model.REDUCE else call.T // call.R
    kind, pieces = fastest(row, unavailable=unavailable, most=most)
    host = " with the host's time" if row.clock == WITH_HOST else ""
    where = f"measured{host} ({row.bucket} {row.dtype}, {row.ranks} ranks)"
    exposed = exposed_time(profile, link, call, kind, pieces)
    if kind == "plain":
        return OverlapPlan("plain", 1, f"{where}: nothing else is faster", exposed)
    seconds = row.chunked_s[pieces] if kind == "chunked" else row.kernel_s
    assert seconds is not None
    return OverlapPlan(kind, pieces, f"{where}: {seconds / row.plain_s:.2f} of plain's time", exposed)


def _by_model(profile: Profile, link: str, call: Call, unavailable: str | None) -> OverlapPlan:
    """The plan with the lowest predicted time; plain unless another wins by MODEL_MARGIN."""
    source = "modelled from this node's links" if profile.measured else "projected"
    advice = f"not measured on this node: {CALIBRATE}"
    plain = link_model.predict(profile, link, call, "plain")
    if plain is None:
        between = "between machines" if link == "network" else "of this kind"
        return OverlapPlan(reason=f"the profile has no figures for links {between}: {CALIBRATE}")
    if call.T < MODEL_TOKENS:
        return OverlapPlan("plain", 1, f"{source}: too few tokens to trust a model; {advice}", plain.exposed_s)
    plans = [("chunked", pieces) for pieces in link_model.pieces_of(call)]
    plans += [] if unavailable else [("kernel", 1)]
    found = {plan: link_model.predict(profile, link, call, *plan) for plan in plans}
    totals = {plan: estimate.total_s for plan, estimate in found.items() if estimate is not None}
    best = min(totals, key=totals.__getitem__, default=None)
    if best is None or totals[best] >= plain.total_s * (1 - MODEL_MARGIN):
        return OverlapPlan("plain", 1, f"{source}: no gain worth the risk; {advice}", plain.exposed_s)
    why = f"{source}: {totals[best] / plain.total_s:.2f} of plain's time, {advice}"
    if not profile.measured:  # published figures justify an expectation, not a choice
        return OverlapPlan("plain", 1, f"projected: {best[0]} might take {why.partition(': ')[2]}", plain.exposed_s)
    return OverlapPlan(*best, why, exposed_time(profile, link, call, *best))


def best_pieces(profile: Profile | None, link: str, call: Call) -> int:
    """The number of pieces where the caller asked for chunks: as measured, else as modelled, else DEFAULT_PIECES."""
    possible = link_model.pieces_of(call)
    if profile is not None and possible:
        row = measured_row(profile, link, call)
        if row is not None and row.chunked_s and not profile.dry:
            return min(row.chunked_s, key=row.chunked_s.__getitem__)
        found = {pieces: link_model.predict(profile, link, call, "chunked", pieces) for pieces in possible}
        totals = {pieces: estimate.total_s for pieces, estimate in found.items() if estimate is not None}
        if totals:
            return min(totals, key=totals.__getitem__)
    return min(DEFAULT_PIECES, max(possible, default=1))


def exposed_time(profile: Profile | None, link: str, call: Call, kind: str, pieces: int = 1) -> float | None:
    estimate = None if profile is None else link_model.predict(profile, link, call, kind, pieces)
    return None if estimate is None else estimate.exposed_s
