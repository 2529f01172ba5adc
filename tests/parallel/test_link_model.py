"""The cost model's predictions for collectives, chunks and kernels, and for the shipped profiles."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_case import LINK, MODEL, choose_pure, profile_of

from shardfuse.parallel.overlap import link_model, link_profile
from shardfuse.parallel.overlap.link_model import GATHER, NORM, REDUCE, SCATTER, Call
from shardfuse.parallel.overlap.link_profile import OPS, Link
from shardfuse.parallel.overlap.plan import MODEL_MARGIN, MODEL_TOKENS, pure_selection


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (GATHER, 3 * 1.0 + 3 / 4 * (8 * 5 * 4) / 4.0),
        (SCATTER, 3 * 1.0 + 3 / 4 * (8 * 7 * 4) / 4.0),
        (REDUCE, 6 * 1.0 + 6 / 4 * (8 * 7 * 4) / 4.0),
    ],
)
def test_collectives_cost_what_the_formulas_say(op: str, expected: float):
    call = Call(op, 8, 5, 7, torch.float32, 4)
    assert link_model.collective_seconds(LINK, call) == pytest.approx(expected)
    plain = link_model.predict(MODEL, "node", call, "plain")
    assert plain == pytest.approx((8 * 5 * 7 + expected, expected))  # 2 FLOP/s: one multiply-add a second


def _timed(op: str, piece_s: float, transfer_s: float, hides: float, pieces: int = 1) -> link_model.Estimate:
    """Two ranks with simple numbers: a shard's product takes ``pieces * piece_s``."""
    call = Call(op, 4 * pieces, 1, 1, torch.float32, 2)
    rows = call.T if op == REDUCE else call.T // 2  # in all pieces together
    nbytes = rows // pieces * 4
    link = Link(0.0, 0.0, nbytes / transfer_s)
    profile = profile_of(
        links={"node": dict.fromkeys(link_profile.COLLECTIVES.values(), link)},
        gemm_flops={"fp32": 2 * (rows // pieces) / piece_s},
        hides=hides,
    )
    found = link_model.predict(profile, "node", call, "chunked", pieces)
    assert found is not None
    return found


def test_chunks_hide_what_there_is_to_hide():
    # Own shard 3 s; the other's arrives after 2 s and takes 3 s more: the transfer is hidden.
    assert _timed(GATHER, 3.0, 2.0, 1.0) == pytest.approx((6.0, 0.0))
    # It arrives after 5 s: 2 s of waiting.
    assert _timed(GATHER, 3.0, 5.0, 1.0) == pytest.approx((8.0, 2.0))
    # Nothing runs during the transfer: as plain.
    assert _timed(GATHER, 3.0, 5.0, 0.0) == pytest.approx((11.0, 5.0))
    # At half speed for 5 s: 2.5 s of the 3 are done when it arrives, and 3.5 are left.
    assert _timed(GATHER, 3.0, 5.0, 0.5) == pytest.approx((8.5, 2.5))
    # The other's addend is computed first and travels during the own one.
    assert _timed(SCATTER, 3.0, 2.0, 1.0) == pytest.approx((6.0, 0.0))
    assert _timed(SCATTER, 3.0, 5.0, 1.0) == pytest.approx((8.0, 2.0))
    # Two pieces of an all-reduce, 3 s each: nothing hides the second one's sum.
    assert _timed(REDUCE, 3.0, 2.0, 1.0, pieces=2) == pytest.approx((8.0, 2.0))


def test_a_kernels_pieces_wait_for_rows_and_rows_for_pieces():
    # A shard's product takes 4 s, in pieces of 1 s; a piece of the other's travels for 2 s.
    profile = dataclasses.replace(MODEL, copy_bytes_per_s=2.0)
    gather, scatter = (
        link_model.kernel_timeline(profile, Call(op, 8, 1, 1, torch.float32, 2)) for op in (GATHER, SCATTER)
    )
    assert gather is not None
    assert scatter is not None
    start = link_model.KERNEL_START_S
    travel, formed = [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 4), (4, 5), (5, 6), (6, 7), (8, 9)]
    assert gather == link_model.Timeline(travel, formed).later(start)
    travel, formed = [(1, 3), (3, 5), (5, 7), (7, 9)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 8)]
    assert scatter == link_model.Timeline(travel, formed).later(start)
    assert (gather.end_s, scatter.end_s) == (9 + start, 9 + start)


@pytest.mark.parametrize(
    ("T", "expected"), [(8, 1.0 + 3 * (8 * 7 * 4) / 8.0), (2**16, 2 * 1.0 + 6 / 4 * (2**16 * 28) / 8.0)]
)
def test_a_norms_sum_costs_one_shot_or_two(T: int, expected: float):
    profile = dataclasses.replace(MODEL, copy_bytes_per_s=8.0)
    call = Call(NORM, T, 5, 7, torch.float32, 4)
    assert link_model.predict(profile, "node", call, "kernel") == pytest.approx((T * 5 * 7 + expected, expected))
    plain = link_model.predict(profile, "node", call, "plain")
    assert plain == link_model.predict(profile, "node", call._replace(op=REDUCE), "plain")
    assert link_model.predict(MODEL, "node", call, "kernel") is None  # the rate to a peer is unknown


@given(
    op=st.sampled_from(OPS),
    T=st.integers(1, 4096),
    R=st.sampled_from([2, 3, 8]),
    hides=st.floats(0, 1),
    pieces=st.sampled_from([1, 2, 4]),
    rate=st.floats(1e6, 1e15),
    bandwidth=st.floats(1e6, 1e12),
)
def test_estimates_lie_between_the_products_and_everything_in_turn(
    op: str, T: int, R: int, hides: float, pieces: int, rate: float, bandwidth: float
):
    profile = profile_of(
        links={"node": dict.fromkeys(link_profile.COLLECTIVES.values(), Link(1e-6, 1e-6, bandwidth))},
        gemm_flops={"fp32": rate},
        copy_bytes_per_s=bandwidth,
        hides=hides,
    )
    call = Call(op, T, 64, 32, torch.float32, R)
    for kind in ("plain", "kernel") if op == NORM else ("plain", "chunked", "kernel"):
        found = link_model.predict(profile, "node", call, kind, pieces)
        assert found is not None
        assert 0 <= found.exposed_s <= found.total_s < math.inf
        assert found.total_s >= link_model.gemm_seconds(profile, T, call) * (1 - 1e-9)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_shipped_figures_are_told_and_measured_links_need_a_margin(arch: str):
    profile = link_profile.shipped(arch)
    assert profile is not None
    assert not profile.measured
    assert not profile.rows
    kinds = set()
    for T in (16, 1024, 16384):
        for R in (2, 8):
            call = Call(REDUCE, T, 8192 // R, 8192, torch.bfloat16, R)
            projected = choose_pure(profile, call, device_type="cuda")
            assert projected.kind == "plain"
            assert projected.reason.startswith("projected")
            assert "shardfuse bench calibrate" in projected.reason
            plan = choose_pure(dataclasses.replace(profile, measured=True), call, device_type="cuda")
            assert plan.reason.startswith("modelled from this node's links")
            kinds.add(plan.kind)
            if plan.kind != "plain":
                assert f"projected: {plan.kind} might take 0." in projected.reason
                assert T >= MODEL_TOKENS
                plain, best = (link_model.predict(profile, "node", call, *way) for way in (("plain", 1), plan[:2]))
                assert best.total_s < plain.total_s * (1 - MODEL_MARGIN)
                assert plan.exposed_s == best.exposed_s < plain.exposed_s
    assert kinds == {"plain", "chunked"}
    assert "between machines" in pure_selection(profile, "network", call, unavailable=None, device_type="cuda").reason


def test_every_shipped_profile_is_read_and_names_its_sources():
    files = sorted(link_profile.SHIPPED.glob("*.json"))
    assert [file.stem for file in files] == ["cpu", "sm_100", "sm_80", "sm_90"]
    for file in files:
        profile = link_profile.read(file)
        assert profile.arch == file.stem
        assert profile.sources
        assert profile == link_profile.parse(profile.record(), "again")
