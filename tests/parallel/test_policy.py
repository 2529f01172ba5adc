"""The choice of a collective's mode: by measurement, by request, and equal on all ranks."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from policy_case import CPU, MODEL, WHERE, call_of, choose_pure, forget, profile_of, row_of
from torch.autograd import forward_ad

from shardfuse.kernels.runtime import autograd
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import SINGLE, Group, tp_group
from shardfuse.parallel.overlap import link_profile, policy
from shardfuse.parallel.overlap.link_model import GATHER, NORM, REDUCE, SCATTER, Call
from shardfuse.parallel.overlap.link_profile import DEVICE, OPS, WITH_HOST, Profile, Row, bucket
from shardfuse.parallel.overlap.plan import DEFAULT_PIECES, MARGIN, OverlapPlan, best_pieces, pure_selection

SHAPE: dict[str, Any] = {"tokens": 64, "features_in": 32, "features_out": 16, "dtype": torch.float32, "device": CPU}


# --- by measurement ---------------------------------------------------------------------------------------------------

seconds = st.floats(1e-7, 1e3)
rows = st.builds(
    Row,
    op=st.sampled_from(OPS),
    dtype=st.just("fp32"),
    ranks=st.just(2),
    link=st.just("node"),
    bucket=st.just(WHERE),
    plain_s=seconds,
    chunked_s=st.dictionaries(st.sampled_from([1, 2, 4, 8]), seconds),
    kernel_s=st.none() | seconds,
    noise=st.floats(0, 2),
    clock=st.just(WITH_HOST),
)


@given(row=rows, unavailable=st.none() | st.just("no memory"), device_type=st.sampled_from(["cpu", "cuda"]))
def test_a_path_that_measured_no_faster_than_plain_is_never_taken(row: Row, unavailable: str | None, device_type: str):
    plan = choose_pure(profile_of(row), call_of(row.op), unavailable=unavailable, device_type=device_type)
    assert plan == choose_pure(profile_of(row), call_of(row.op), unavailable=unavailable, device_type=device_type)
    sides = {("chunked", pieces): each for pieces, each in row.chunked_s.items()}
    if row.kernel_s is not None and unavailable is None:
        sides["kernel", 1] = row.kernel_s
    bar = row.plain_s * (1 - max(MARGIN, row.noise))
    won = {side: each for side, each in sides.items() if each < bar}
    if won:
        assert sides[plan.kind, plan.pieces] == min(won.values())
    else:
        assert (plan.kind, plan.pieces) == ("plain", 1)
    assert "measured" in plan.reason


def test_a_measurement_stands_for_its_bucket_ranks_and_dtype_alone():
    assert choose_pure(profile_of(row_of())).kind == "chunked"
    assert choose_pure(profile_of(row_of()), call_of(T=60, K=40, N=15)).kind == "chunked"
    for other in (call_of(T=256), call_of(K=128), call_of(N=64), call_of(SCATTER), call_of()._replace(R=4)):
        assert choose_pure(profile_of(row_of()), other).kind == "plain"
    assert choose_pure(profile_of(row_of()), call_of()._replace(dtype=torch.bfloat16)).kind == "plain"
    between_machines = pure_selection(profile_of(row_of()), "network", call_of(), unavailable=None, device_type="cpu")
    assert between_machines.kind == "plain"


def test_the_hosts_time_counts_for_the_few_tokens_of_decoding_alone():
    """Training hides it: there a plan is chosen by the device's time."""
    few, many = call_of(T=64), call_of(T=80)  # of one bucket
    rows = [row_of(chunked={1: 5.0}, clock=WITH_HOST), row_of(chunked={2: 4.0}, clock=DEVICE)]
    plan = choose_pure(profile_of(*rows), few)
    assert plan[:2] == ("chunked", 1)
    assert plan.reason.startswith("measured with the host's time (t64-")
    plan = choose_pure(profile_of(*rows), many)
    assert plan[:2] == ("chunked", 2)
    assert plan.reason.startswith("measured (t64-")
    assert best_pieces(profile_of(*rows), "node", few) == 1
    assert best_pieces(profile_of(*rows), "node", many) == 2
    for row, other in zip(rows, (many, few)):
        assert choose_pure(profile_of(row), other).kind == "plain"


def test_pieces_that_have_no_rows_are_not_taken():
    where = bucket(2, 32, 16)
    row = Row(GATHER, "fp32", 2, "node", where, 10.0, {1: 5.0, 4: 1.0}, clock=WITH_HOST)
    assert choose_pure(profile_of(row), call_of(T=2)).pieces == 1


@pytest.mark.parametrize(
    ("profile", "call", "reason"),
    [
        (None, call_of(), "nothing is known"),
        (profile_of(row_of()), call_of(T=0), "nothing to send"),
        (profile_of(row_of(), dry=True), call_of(), "dry run"),
        (profile_of(), call_of(), "gloo works on the cores"),
    ],
    ids=["no profile", "no tokens", "dry", "unmeasured"],
)
def test_plain_says_why(profile: Profile | None, call: Call, reason: str):
    plan = choose_pure(profile, call)
    assert plan.kind == "plain"
    assert reason in plan.reason


# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _named(content: str, folder: Path) -> Iterator[Path]:
    """SHARDFUSE_LINKS names a file with ``content``."""
    path = folder / "links.json"
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(link_profile.VARIABLE, str(path))
        yield path


def _text(profile: Profile, **changes: Any) -> str:
    return json.dumps(profile.record() | changes)


GOOD = profile_of(row_of(noise=0.01), links=MODEL.links, gemm_flops={"fp32": 1e9}, origin={"torch": "2"})


def test_a_profile_survives_the_disk(tmp_path: Path):
    with _named(_text(GOOD), tmp_path):
        assert link_profile.load(CPU) == GOOD


ROW = GOOD.record()["rows"][0]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (_text(GOOD)[:-20], "cut short"),
        ("[]", "expected an object"),
        (_text(GOOD, format=1), "format 1, and this version reads 2; write one with"),
        (_text(GOOD, arch="sm_90", device="NVIDIA H100"), "measured on NVIDIA H100"),
        (_text(GOOD, surprise=1), "unknown field 'surprise'"),
        (_text(GOOD, hides=1.5), "hides is 1.5"),
        (_text(GOOD, hides="much"), "hides is 'much'"),
        (_text(GOOD, gemm_flops={"fp32": 0}), "gemm_flops.fp32"),
        (_text(GOOD, links={"bus": {}}), "links.bus"),
        (_text(GOOD, links={"node": {"all_gather": {"alpha_s": 1.0}}}), "field 'bytes_per_s' is missing"),
        (_text(GOOD, rows=[ROW | {"op": "sum"}]), "op is 'sum'"),
        (_text(GOOD, rows=[ROW | {"clock": "sun"}]), "clock is 'sun', expected one of device, with_host"),
        (_text(GOOD, rows=[{k: v for k, v in ROW.items() if k != "clock"}]), "field 'clock' is missing"),
        (_text(GOOD, rows=[ROW | {"plain_s": -1.0}]), "plain_s is -1.0"),
        (_text(GOOD, rows=[ROW | {"chunked_s": {"0": 1.0}}]), "numbers of pieces"),
        (_text(GOOD, rows=[ROW | {"chunked_s": {"1": float("nan")}}]), "chunked_s.1"),
        (_text(GOOD, rows=[ROW, ROW]), "two rows"),
    ],
    ids=lambda value: value if " " in value and len(value) < 40 else "",
)
def test_a_broken_file_is_refused_by_name(content: str, fault: str, tmp_path: Path):
    with _named(content, tmp_path) as path, pytest.raises(ValueError) as caught:
        link_profile.load(CPU)
    assert str(path) in str(caught.value)
    assert fault in str(caught.value)
    assert "shardfuse bench calibrate" in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(link_profile.VARIABLE, str(tmp_path / "nowhere.json"))
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        link_profile.load(CPU)


# --- by request -------------------------------------------------------------------------------------------------------


def test_one_rank_has_nothing_to_choose():
    for overlap in policy.OVERLAPS:
        assert policy.select(GATHER, SINGLE, **SHAPE, overlap=overlap, strict=True).kind == "plain"


def _asked(rank: int, world: int) -> dict[str, Any]:
    group = tp_group(dist.group.WORLD)
    found: dict[str, Any] = {
        overlap: policy.select(GATHER, group, **SHAPE, overlap=overlap) for overlap in policy.OVERLAPS
    }
    calls = {
        "strict": lambda: policy.select(GATHER, group, **SHAPE, overlap="kernel", strict=True),
        "op": lambda: policy.select("all_gather", group, **SHAPE),
        "overlap": lambda: policy.select(GATHER, group, **SHAPE, overlap="yes"),
    }
    for name, call in calls.items():
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    found["preview"] = policy.preview(GATHER, group, **SHAPE)
    found["once"] = policy.select(GATHER, group, **SHAPE) is policy.select(GATHER, group, **SHAPE)
    found["counted"] = list(collectives.calls)
    return found


@pytest.mark.ranks
def test_what_is_asked_for_is_honoured_or_refused(ranks: Any):
    for found in ranks(2, _asked_after_reset):
        assert found["none"].kind == found["auto"].kind == "plain"
        assert "gloo works on the cores" in found["auto"].reason
        assert found["preview"] == found["auto"]
        assert (found["chunked"].kind, found["chunked"].pieces) == ("chunked", DEFAULT_PIECES)
        assert found["kernel"].kind == "plain"
        assert found["kernel"].reason in found["strict"]
        assert found["strict"].startswith("RuntimeError: all_gather_linear: overlap='kernel' was asked for")
        assert "pass overlap='auto'" in found["strict"]
        assert found["op"].startswith("ValueError: op='all_gather'")
        assert found["overlap"] == "ValueError: overlap='yes': expected one of auto, kernel, chunked, none"
        assert found["once"]
        assert found["counted"] == []  # agreement is not part of the computation


def _asked_after_reset(rank: int, world: int) -> dict[str, Any]:
    collectives.reset_counts()
    return _asked(rank, world)


def test_a_kernel_that_can_run_is_taken_where_it_won(monkeypatch: pytest.MonkeyPatch):
    group = Group(pg := _Pg(), 0, 2, None)
    agreed = policy._Agreed(profile_of(row_of(kernel_s=4.0)), "node")
    monkeypatch.setattr(policy, "_agreed", {(id(pg), CPU): agreed})
    monkeypatch.setattr(policy, "_without_kernel", lambda *args: None)
    asked: list[Any] = []
    monkeypatch.setattr(policy, "kernel_unavailable", lambda *args: asked.append(args))
    for _ in range(2):
        assert policy.select(GATHER, group, **SHAPE).kind == "kernel"
        assert policy.select(GATHER, group, **SHAPE, overlap="kernel", strict=True).kind == "kernel"
    assert len(asked) == 1
    monkeypatch.setattr(agreed, "link", "network")
    agreed.plans.clear()
    with pytest.raises(RuntimeError, match="the group spans machines"):
        policy.select(GATHER, group, **SHAPE, overlap="kernel", strict=True)


class _Pg:
    """A mock process group without communication."""


def test_an_unneeded_kernel_is_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    group = Group(pg := _Pg(), 0, 2, None)
    monkeypatch.setattr(policy, "_agreed", {(id(pg), CPU): policy._Agreed(profile_of(row_of()), "node")})
    monkeypatch.setattr(policy, "kernel_unavailable", lambda *args: pytest.fail("asked"))
    assert policy.select(GATHER, group, **SHAPE).kind == "chunked"
    assert policy.select(GATHER, group, **SHAPE, overlap="none").kind == "plain"


def test_under_torch_compile_strict_refuses(monkeypatch: pytest.MonkeyPatch):
    group = Group(_Pg(), 0, 2, None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert policy.select(GATHER, group, **SHAPE, overlap="chunked").kind == "plain"
    with pytest.raises(RuntimeError, match=r"under torch\.compile only the plain composition runs: leave"):
        policy.select(GATHER, group, **SHAPE, overlap="chunked", strict=True)


def test_a_choice_under_a_transform_is_not_taken_outside(monkeypatch: pytest.MonkeyPatch):
    """No kernel accepts a call inside, so a sum or product that first asked there would stay plain for ever."""
    group = Group(pg := _Pg(), 0, 2, None)
    monkeypatch.setattr(policy, "_agreed", {(id(pg), CPU): policy._Agreed(profile_of(), "node", unavailable=None)})
    monkeypatch.setattr(policy, "_without_kernel", lambda *args: autograd.transformed())
    chosen: list[OverlapPlan] = []

    def choose(x: torch.Tensor) -> torch.Tensor:
        chosen.append(policy.select(GATHER, group, **SHAPE, overlap="kernel"))
        return x

    with forward_ad.dual_level():
        choose(torch.ones(1))
    torch.func.vmap(choose)(torch.ones(1))
    choose(torch.ones(1))
    torch.func.vmap(choose)(torch.ones(1))
    assert [plan.kind for plan in chosen] == ["plain", "plain", "kernel", "plain"]


def test_a_capture_takes_what_was_agreed_before(monkeypatch: pytest.MonkeyPatch):
    """Only for exchanges that the device counts: a replay cannot repeat the host's count."""
    group, asked = Group(pg := _Pg(), 0, 2, None), SHAPE | {"overlap": "kernel", "impl": "triton"}
    agreed = policy._Agreed(profile_of(), "node", "cuda")
    monkeypatch.setattr(policy, "_agreed", known := {})
    monkeypatch.setattr(policy, "_capturing", lambda device: True)
    monkeypatch.setattr(policy, "kernel_unavailable", lambda *args: pytest.fail("asked in a capture"))
    monkeypatch.setattr(policy, "_without_kernel", lambda *args: None)
    for _ in range(2):  # no agreement yet; then a profile, but no tested memory
        plan = policy.select(NORM, group, **asked, device_counted=True)
        assert plan.kind == "plain"
        assert "the ranks have not agreed before: run the same step once outside of it" in plan.reason
        known[id(pg), CPU] = agreed
    agreed.unavailable = None
    assert policy.select(NORM, group, **asked, device_counted=True).kind == "kernel"
    assert policy.select(NORM, group, **asked) == (OverlapPlan(reason="a CUDA graph is being captured"))
    with pytest.raises(RuntimeError, match="but a CUDA graph is being captured"):
        policy.select(REDUCE, group, **asked, strict=True)


def test_the_norms_sum_is_one_launch_or_plain(monkeypatch: pytest.MonkeyPatch):
    group = Group(pg := _Pg(), 0, 2, None)
    row = Row(NORM, "fp32", 2, "node", WHERE, 10.0, {}, 5.0, clock=WITH_HOST)
    agreed = policy._Agreed(profile_of(row), "node", unavailable=None)
    monkeypatch.setattr(policy, "_agreed", {(id(pg), CPU): agreed})
    plan = policy.select(NORM, group, **SHAPE, overlap="chunked")
    assert (plan.kind, plan.reason) == ("plain", "all_reduce_rmsnorm is one launch: there is nothing to cut")
    assert "the norm runs the reference" in policy.select(NORM, group, **SHAPE, overlap="kernel").reason
    assert choose_pure(profile_of(row), call_of(NORM), unavailable=None).kind == "kernel"
    assert choose_pure(profile_of(), call_of(NORM), unavailable=None).kind == "plain"


def test_choices_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch):
    group = Group(pg := _Pg(), 0, 2, None)
    agreed = policy._Agreed(profile_of(), "node")
    monkeypatch.setattr(policy, "_agreed", {(id(pg), CPU): agreed})
    monkeypatch.setattr(policy, "REMEMBERED", 3)
    for tokens in range(1, 9):
        policy.select(GATHER, group, **SHAPE | {"tokens": tokens})
        assert len(agreed.plans) <= 3


# --- agreement --------------------------------------------------------------------------------------------------------


def _different_files(rank: int, world: int, folder: str, contents: list[str]) -> tuple[Any, Any, bool]:
    """A rank's choice, and its choice from its own file alone."""
    with _named(contents[rank], Path(folder, str(rank))):
        group = tp_group(dist.group.WORLD)
        alone = policy.preview(GATHER, group, **SHAPE)
        together = policy.select(GATHER, group, **SHAPE)
        return alone, together, policy.preview(GATHER, group, **SHAPE) == together


@pytest.mark.ranks
def test_all_ranks_take_what_rank_0_has_on_disk(ranks: Any, tmp_path: Path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    contents = [_text(profile_of(row_of(chunked={1: 9.0, 4: 5.0}))), _text(profile_of(row_of(chunked={1: 20.0})))]
    first, second = ranks(2, _different_files, str(tmp_path), contents)
    assert (first[0].pieces, second[0].kind) == (4, "plain")  # they would have deadlocked
    assert first[1] == second[1] == first[0]
    assert first[2]
    assert second[2]


def _broken_file(rank: int, world: int, folder: str) -> list[str]:
    messages = []
    with _named("{" if rank == 0 else _text(GOOD), Path(folder, str(rank))):
        group = tp_group(dist.group.WORLD)
        for _ in range(2):  # no left-over state makes the second one hang
            with pytest.raises(ValueError) as caught:
                policy.select(GATHER, group, **SHAPE)
            messages.append(str(caught.value))
    policy.select(GATHER, group, **SHAPE)
    return messages


@pytest.mark.ranks
def test_a_file_that_rank_0_cannot_read_is_refused_on_every_rank(ranks: Any, tmp_path: Path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first, second = ranks(2, _broken_file, str(tmp_path))
    assert first == second
    assert str(tmp_path / "0" / "links.json") in first[0]


def _forgotten(rank: int, world: int, folder: str) -> tuple[str, str]:
    group = tp_group(dist.group.WORLD)
    before = policy.select(GATHER, group, **SHAPE).kind
    with _named(_text(profile_of(row_of())), Path(folder, str(rank))):
        forget(group)
        return before, policy.select(GATHER, group, **SHAPE).kind


@pytest.mark.ranks
def test_ranks_agree_anew_when_they_are_told_to(ranks: Any, tmp_path: Path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert ranks(2, _forgotten, str(tmp_path)) == [("plain", "chunked")] * 2


def _gone(rank: int, world: int) -> tuple[int, int]:
    """The cached state of a group during its life, and after."""
    pg = dist.new_group([0, 1])
    key = id(pg)
    policy.select(GATHER, tp_group(pg), **SHAPE)
    policy.select(GATHER, tp_group(dist.group.WORLD), **SHAPE)
    there = sum(known == key for known, _ in policy._agreed)
    dist.destroy_process_group(pg)
    del pg
    gc.collect()
    return there, sum(known == key for known, _ in policy._agreed)


@pytest.mark.ranks
def test_what_a_group_agreed_on_goes_with_it(ranks: Any):
    assert ranks(2, _gone) == [(1, 0)] * 2
