"""Several virtual ranks in the emulator of PTX: what it says of the order of their accesses, and of the package's ops.

The ops run in a process of its own, since that replaces Triton's driver and this one interprets its kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_search import explore
from ptx_ranks import together
from thread_group import Network, groups

from shardfuse.kernels.dev.ptx.ranks.clocks import Region
from shardfuse.kernels.dev.ptx.ranks.schedules import SCHEDULES, Schedule, schedule
from shardfuse.kernels.dev.ptx.ranks.world import Deadlock, World
from shardfuse.kernels.runtime.dispatch import triton_version

# ------------------------------------------------------------------------------ the memory model, in kernels by hand

STORE = "st.global.b32 [%rd2], %r9;"  # rank 0 to rank 1's data
LOAD = "ld.global.b32 %r3, [%rd2];"
LATE = Schedule(late=1)
READ = "read of what was written by rank 0"


def _raised(how: str) -> str:
    return STORE + how


def _awaited(load: str, then: str = "") -> str:
    return f"$WAIT: {load} %r1, [%rd3]; setp.eq.s32 %p2, %r1, 0; @%p2 bra $WAIT; {then} {LOAD}"


RELEASES = {  # -> whether another rank's acquire at .sys orders what came before
    "st.release.sys.global.b32 [%rd3], %r8;": True,
    "st.release.gpu.global.b32 [%rd3], %r8;": False,
    "st.relaxed.sys.global.b32 [%rd3], %r8;": False,
    "fence.acq_rel.sys; st.relaxed.sys.global.b32 [%rd3], %r8;": True,
    "fence.acq_rel.gpu; st.relaxed.sys.global.b32 [%rd3], %r8;": False,
    "fence.sc.sys; st.relaxed.sys.global.b32 [%rd3], %r8;": True,
    "membar.sys; st.volatile.global.b32 [%rd3], %r8;": True,
    "membar.gl; st.volatile.global.b32 [%rd3], %r8;": False,
    "atom.global.sys.release.exch.b32 %r2, [%rd3], %r8;": True,
    "atom.global.sys.relaxed.exch.b32 %r2, [%rd3], %r8;": False,
    "atom.global.gpu.acq_rel.add.u32 %r2, [%rd3], %r8;": False,
    "red.release.sys.global.add.u32 [%rd3], %r8;": True,
}
ACQUIRES = {  # of a release at .sys
    ("ld.acquire.sys.global.b32", ""): True,
    ("ld.acquire.gpu.global.b32", ""): False,
    ("ld.relaxed.sys.global.b32", ""): False,
    ("ld.relaxed.sys.global.b32", "fence.acq_rel.sys;"): True,
    ("ld.relaxed.sys.global.b32", "fence.acq_rel.gpu;"): False,
    ("ld.volatile.global.b32", "membar.sys;"): True,
    ("ld.volatile.global.b32", ""): False,
}


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize("order", [Schedule(), LATE, Schedule(flags="late")], ids=["turns", "late", "flags-late"])
def test_what_a_release_passes_on(how: str, order: Schedule) -> None:
    reports, _ = together([_raised(how), _awaited("ld.acquire.sys.global.b32")], order)
    assert any(READ in report and "`ld.global.b32" in report for report in reports) != RELEASES[how], reports
    assert bool(reports) != RELEASES[how]


@pytest.mark.parametrize(("load", "then"), ACQUIRES)
def test_what_an_acquire_learns(load: str, then: str) -> None:
    bodies = [_raised("st.release.sys.global.b32 [%rd3], %r8;"), _awaited(load, then)]
    reports, _ = together(bodies, Schedule())
    assert any(READ in report for report in reports) != ACQUIRES[load, then], reports


def test_a_flag_that_is_an_ordinary_store_races() -> None:
    reports, _ = together([_raised("st.global.b32 [%rd3], %r8;"), _awaited("ld.acquire.sys.global.b32")], Schedule())
    assert any(READ in report and "ld.acquire" in report for report in reports), reports


def test_stores_to_another_rank_are_late_until_they_are_released() -> None:
    """The value itself is old, where only the flag has got there; a release takes both along."""
    kept = "st.global.b32 [%rd2+4], %r3;"  # what rank 1 has read
    for how, value in (("relaxed", 0), ("release", 7)):
        raised = f"st.{how}.sys.global.b32 [%rd3], %r8; $MORE: ld.acquire.sys.global.b32 %r1, [%rd1];"
        raised += "setp.eq.s32 %p2, %r1, 0; @%p2 bra $MORE;"  # the launch, which ends late, would take it along too
        answered = _awaited("ld.acquire.sys.global.b32") + kept + "st.release.sys.global.b32 [%rd1], %r8;"
        _, words = together([_raised(raised), answered], Schedule())
        assert words.data[1, 1] == value


def test_a_release_passes_on_what_was_acquired() -> None:
    """Rank 0 stores to rank 2 and tells rank 1, which tells rank 2."""
    told = "$ONE: ld.acquire.sys.global.b32 %r1, [%rd3]; setp.eq.s32 %p2, %r1, 0; @%p2 bra $ONE;"
    read = "$TWO: ld.acquire.sys.global.b32 %r1, [%rd5]; setp.eq.s32 %p2, %r1, 0; @%p2 bra $TWO;"
    read += "ld.global.b32 %r3, [%rd4];"
    for order, well in (("release", True), ("relaxed", False)):
        bodies = [
            "st.global.b32 [%rd4], %r9; st.release.sys.global.b32 [%rd3], %r8;",
            told + f"st.{order}.sys.global.b32 [%rd5], %r8;",
            read,
        ]
        reports, _ = together(bodies, Schedule())
        assert bool(reports) != well


def test_a_write_over_what_a_peer_may_still_read_is_reported() -> None:
    """Rank 1 reads its data and then tells rank 0, which writes them: with a flag that it does not wait for, a race."""
    read = LOAD + "st.release.sys.global.b32 [%rd1], %r8;"
    waits = "$WAIT: ld.acquire.sys.global.b32 %r1, [%rd1]; setp.eq.s32 %p2, %r1, 0; @%p2 bra $WAIT;"
    assert together([waits + STORE, read + "bar.warp.sync -1;"], Schedule(late=0))[0] == []
    reports, _ = together([STORE, read], Schedule(late=0))
    assert any("write over what may still be read by rank 1" in report for report in reports), reports


def test_blocks_of_one_rank_race_unless_something_orders_them() -> None:
    """Each block stores to its own rank's data; a chain of counts at .gpu orders them, as the last to arrive knows."""
    counted = "atom.global.gpu.{}.add.u32 %r2, [%rd1], %r8; setp.ne.s32 %p2, %r2, 1; @%p2 bra $END; ld.global.b32 %r3, "
    body = "mov.u32 %r4, %ctaid.x; mul.wide.u32 %rd9, %r4, 4; add.s64 %rd9, %rd9, %rd0; st.global.b32 [%rd9], %r9;"
    for order, well in (("acq_rel", True), ("relaxed", False)):
        last = counted.format(order) + "[%rd0]; ld.global.b32 %r3, [%rd0+4];"
        reports, _ = together([body + last], Schedule(), blocks=2)
        assert bool(reports) != well, reports
        assert well or "another block of rank 0" in reports[0]


@pytest.mark.parametrize(
    ("raiser", "threads", "between", "well"),
    [
        (1, 32, "bar.warp.sync -1;", True),
        (1, 32, "", False),
        (1, 64, "bar.warp.sync -1;", True),  # of one of two warps
        (1, 64, "", False),
        (40, 64, "bar.sync 0;", True),
        (40, 64, "bar.warp.sync -1;", False),
        (40, 64, "", False),
    ],
)
@pytest.mark.parametrize("loads", [False, True], ids=["stores", "loads"])
def test_a_release_by_another_thread_of_the_block(
    raiser: int, threads: int, between: str, well: bool, loads: bool
) -> None:
    """Thread 0 accesses rank 1's data, and another one raises the flag: what orders the two, rank 1 knows too."""
    access = LOAD if loads else STORE
    raised = f"setp.eq.s32 %p3, %r0, 0; @%p3 {access} {between} setp.eq.s32 %p4, %r0, {raiser};"
    raised += "@%p4 st.release.sys.global.b32 [%rd3], %r8;"
    waits = "$WAIT: ld.acquire.sys.global.b32 %r1, [%rd3]; setp.eq.s32 %p2, %r1, 0; @%p2 bra $WAIT;"
    then = f"setp.eq.s32 %p3, %r0, 0; @%p3 {STORE if loads else LOAD}"
    reports, words = together([raised, waits + then], LATE, threads=threads)
    assert bool(reports) != well, reports
    assert loads or words.data[1, 0] == 7  # in the end


def test_a_launch_comes_after_the_one_before() -> None:
    body = "ld.global.b32 %r3, [%rd0]; add.s32 %r3, %r3, 1; st.global.b32 [%rd0], %r3;"
    reports, words = together([body], Schedule(), times=3)
    assert reports == []
    assert words.data[0, 0] == 3


def test_a_wait_that_nothing_ends_is_a_deadlock_with_its_names() -> None:
    bodies = [_awaited("ld.acquire.sys.global.b32").replace("%rd3", "%rd1"), _awaited("ld.acquire.sys.global.b32")]
    with pytest.raises(Deadlock) as caught:
        together(bodies, Schedule())
    first, *waits = str(caught.value).splitlines()
    assert "none of these waits will end" in first
    assert [line.partition(":")[0] for line in waits] == ["rank 0", "rank 1"]
    for rank, line in enumerate(waits):
        assert "block 0 of k, PTX line " in line
        assert f"waits for flag [phase 0, source 0, chunk 0] of rank {rank}, which stands at 0" in line


@pytest.mark.parametrize("order", [Schedule(flags="late"), Schedule(order="random", flags="random", seed=3)])
def test_late_flags_are_seen_in_the_end(order: Schedule) -> None:
    """Each rank raises its peer's flag, then waits for its own."""
    wait = "$WAIT: ld.acquire.sys.global.b32 %r1, [%rd{}]; setp.eq.s32 %p2, %r1, 0; @%p2 bra $WAIT;"
    raised = "st.release.sys.global.b32 [%rd{}], %r8;"
    assert together([raised.format(3) + wait.format(1), raised.format(1) + wait.format(3)], order)[0] == []


def test_a_schedule_has_a_name() -> None:
    assert schedule("random", 5) == Schedule(order="random", blocks="random", flags="random", stores=0.3, seed=5)
    with pytest.raises(ValueError, match="no schedule called 'soon': known are turns, "):
        schedule("soon")


def _gathers(rank: int, joins: bool, data: torch.Tensor, world: World, network: Network) -> None:
    """Rank 0 writes the data, all ranks that ``joins`` gather something, and rank 1 reads the data."""
    with network.joined():
        if rank == 0:
            world.host_writes(0, data)
        if joins:
            found: list[Any] = [None, None]
            dist.all_gather_object(found, f"of rank {rank}")
            assert found == ["of rank 0", "of rank 1"]
        if rank == 1:
            clock = int(world.host[1]), world.host_time[1], world.host_view[1]
            world.host_access(1, data.data_ptr(), data.nbytes, False, *clock)


@pytest.mark.parametrize("order", [Schedule(), LATE], ids=["turns", "late"])
@pytest.mark.parametrize("joining", [(True, True), (False, False), (True, False)], ids=["all", "none", "one"])
def test_a_collective_orders_the_hosts_of_its_ranks(joining: tuple[bool, bool], order: Schedule) -> None:
    """And a rank that waits for one that never comes is a deadlock."""
    world, data = World(2, order, limit_s=60.0), torch.zeros(4, dtype=torch.int32)
    world.watch([Region(data.data_ptr(), data.nbytes, 0, "slots")])
    with groups(world) as network:
        for rank, joins in enumerate(joining):
            world.start(f"rank {rank}", rank, functools.partial(_gathers, rank, joins, data, world, network))
        if joining == (True, False):
            with pytest.raises(Deadlock, match=r"rank 0: waits in AllGather 0 in group .* for rank 1"):
                world.run()
        else:
            world.run()
    raced = any(READ in report for report in world.reports)
    assert raced == (not all(joining)), world.reports


# ------------------------------------------------------------------------------------------------ the package's ops

compiled = pytest.mark.codegen(seconds=10)
needs_triton = pytest.mark.skipif(
    triton_version() is None or shutil.which("gcc") is None,
    reason="Triton or gcc is not installed: gcc compiles the stub of CUDA's driver",
)
SUPPORT = Path(__file__).parents[1] / "support"
OPS = ("all_gather_linear", "sent dgrad", "linear_all_reduce", "all_reduce_rmsnorm")
# One fault of each kind.
FAULTS = [
    "flags are raised relaxed: all_reduce_rmsnorm t4",
    "flags are raised at .gpu: all_reduce_rmsnorm t4",
    "flags are read relaxed: all_reduce_rmsnorm t11",
    "flags are read at .gpu: all_reduce_rmsnorm t4",
    "the flag of a source that is none is read: all_reduce_rmsnorm t4",
    "another source's flag is read: all_gather_linear",
    "the last epoch's flag is enough: all_reduce_rmsnorm t4",
    "a flag that was seen is reset: all_reduce_rmsnorm t4",
    "a barrier is missing (1): all_reduce_rmsnorm t4",
    "no proxy fence behind the wait",
    "tiles are counted relaxed: linear_reduce_scatter",
    "one slot for every exchange: all_reduce_rmsnorm t4",
    "the flag comes with the first tile: linear_reduce_scatter",
    "no tile is the last: linear_reduce_scatter",
    "flags go to the next rank: linear_reduce_scatter",
    "the first block to end counts the exchange",
    "flags before the rows",
    "flags of the other stream's piece",
    "streams ahead of the own rows",
    "an exchange ends before its copies",
    "pieces without rows raise no flag",
]


def _answers(*options: str) -> list[dict[str, Any]]:
    return _lines([sys.executable, "-m", "shardfuse.kernels.dev.ptx.ranks", "--json", *options])


def _lines(command: list[str]) -> list[dict[str, Any]]:
    """What a process of its own prints, a line of JSON each."""
    unwanted = ("TRITON_INTERPRET", "SHARDFUSE_POISON")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | {
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SUPPORT)]))
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _are_right(answers: list[dict[str, Any]], ranks: int) -> None:
    """Results and order; and every rank has run the kernels that the op launches, as often as all others."""
    wrong = [f"{each['program']} {each['schedule']}: {'; '.join(each['why'])}" for each in answers if not each["ok"]]
    assert not wrong, "\n".join(wrong)
    for each in answers:
        assert len(each["launches"]) == ranks
        assert all(of_rank == each["launches"][0] != {} for of_rank in each["launches"]), each


@functools.cache
def _sample() -> list[dict[str, Any]]:
    faults = [part for fault in FAULTS for part in ("--fault", fault)]
    return _answers("--part", "2/3", "--in-turn", "2", *faults)


@compiled
@needs_triton
def test_the_ops_are_right_under_every_schedule() -> None:
    """A third of the programs, each under two schedules, with two ranks for sm_90; all by make emulate-ranks."""
    answers = [each for each in _sample() if "program" in each]
    _are_right(answers, 2)
    assert {each["schedule"] for each in answers} == set(SCHEDULES)
    for op in (*OPS, "gathered dgrad", "sent dgrad"):
        assert len({each["schedule"] for each in answers if each["program"].startswith(op)}) >= 2, op
    assert sum(each["late stores"] for each in answers) > 1000
    assert sum(each["late flags"] for each in answers) > 50
    kernels = {name for each in answers for name in each["launches"][0]}
    assert kernels == {"_gemm_kernel", "_reduce_kernel", "_wait_kernel"}


# What the emulator finds of what the protocol's model calls so. A read that comes before the write that it should have
# seen is a wrong result.
SAME = {
    "early read": {"early read", "wrong result"},
    "reuse before consumption": {"reuse before consumption"},
    "stuck": {"stuck"},
    "epochs disagree": {"early read", "stuck"},
}


def _models_bugs() -> dict[str, Any]:
    """The seeded bugs of test_comm_model.py."""
    path = Path(__file__).with_name("test_comm_model.py")
    spec = importlib.util.spec_from_file_location("comm_model_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._BUGS


def _found_by_both(faults: list[dict[str, Any]]) -> set[str]:
    """Check that the emulator found each fault, and the model the same one, of the same kind; returns the model's."""
    missed = [each["fault"] for each in faults if not each["ok"]]
    assert not missed, missed
    bugs, same = _models_bugs(), set[str]()
    for each in faults:
        if each["model"]:
            bug = bugs[each["model"]]
            subject = bug.subject if bug.change is None else bug.subject.changed(bug.change)
            rule = explore(subject, **bug.options).rule
            assert SAME[rule] & set(each["kinds"]), (each, rule)
            same.add(each["model"])
    return same


@compiled
@needs_triton
def test_seeded_faults_are_found_as_the_protocols_model_finds_them() -> None:
    """Those of the protocol by both; those of a kernel's barriers and proxies by the emulator."""
    faults = [each for each in _sample() if "fault" in each]
    assert len(faults) == len(FAULTS)
    assert len(_found_by_both(faults)) == 16


@pytest.mark.nightly(seconds=45)
@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_every_fault_is_found(arch: str) -> None:
    faults = _answers("--faults", "--arch", arch)
    assert len(faults) >= 50
    assert len(_found_by_both(faults)) == 16


@pytest.mark.nightly(seconds=60)
@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize("options", [("4", "--in-turn", "2"), ("8", "--in-turn", "1"), ("3", "--in-turn", "1")])
def test_more_ranks(options: tuple[str, ...]) -> None:
    _are_right(_answers("--ranks", *options), int(options[0]))


@pytest.mark.nightly(seconds=15)
@pytest.mark.codegen
@needs_triton
def test_ranks_give_up_where_one_never_comes() -> None:
    """By the clock of their GPUs, and each says for which rank it has waited."""
    answers = _answers(
        "--ranks", "3", "--absent", "1", "--schedule", "turns", "--schedule", "flags-late", "--part", "1/3"
    )
    assert [each["why"] for each in answers if not each["ok"]] == []
    assert all("ExchangeTimeout: " in each["why"][0] for each in answers)


# What a step of a module's training consists of: its exchanges in kernels, by channel, and the collectives of its
# process group: x is gathered again for the weights' gradients, and the norms' gradients are added up.
STEPS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "mlp, sequence parallel": ({"gather": 2, "reduce": 2}, {"gathers": 1}),
    "linears, sequence parallel": ({"gather": 2, "reduce": 2}, {"gathers": 1}),
    "block": ({"reduce": 5, "decode": 1}, {}),  # two of them in inference
    "mlp, sequence parallel, recompute 2": ({"gather": 3, "reduce": 2}, {}),
    "mlp, recompute 1": ({"reduce": 2}, {}),
    "block, sequence parallel": ({"gather": 4, "reduce": 4}, {"gathers": 2, "sums": 2}),
}
# Those that an MLP of these sizes can have.
MODULE_FAULTS = (
    "flags are raised relaxed",
    "flags before the rows",
    "flags are raised at .gpu",
    "flags are read relaxed",
    "flags are read at .gpu",
    "the flag of a source that is none is read",
    "the last epoch's flag is enough",
    "a flag that was seen is reset",
    "streams ahead of the own rows",
    "flags of the other stream's piece",
)


def _modules(arch: str, ranks: int, part: str, *faults: str) -> list[dict[str, Any]]:
    """The answers for modules, whose exchanges are all in kernels; every fault has been found in the first module."""
    answers = _lines([sys.executable, "-c", "import ptx_layers; ptx_layers.main()", arch, str(ranks), part, *faults])
    found, answers = [each for each in answers if "fault" in each], [each for each in answers if "program" in each]
    assert len(found) == len(faults)
    assert [each["fault"] for each in found if not each["ok"]] == []
    _are_right(answers, ranks)
    for each in answers:
        exchanges, collectives = STEPS[each["module"]]
        assert each["exchanges"] == [exchanges] * ranks, each
        assert [_by_kind(of_rank) for of_rank in each["collectives"]] == [collectives] * ranks, each
        for of_rank in each["launches"]:  # in two steps
            assert of_rank["_reduce_kernel"] == 2 * (exchanges["reduce"] + exchanges.get("decode", 0)), each
            assert of_rank["_gemm_kernel"] > 0
    return answers


def _by_kind(calls: dict[str, int]) -> dict[str, int]:
    """A rank's calls of its group: two ranks add up by a message each way."""
    assert set(calls) <= {"AllGather", "AllReduce", "Message"}, calls
    found = {"gathers": calls.get("AllGather", 0), "sums": calls.get("AllReduce", 0) + calls.get("Message", 0) // 2}
    return {kind: count for kind, count in found.items() if count}


@compiled
@needs_triton
def test_a_feed_forward_module() -> None:
    """Over DTensors and a process group, forward and backward; faults of the protocol are found through it."""
    answers = _modules("sm_90", 2, "1/6", *MODULE_FAULTS[:2])
    assert [each["module"] for each in answers] == ["mlp, sequence parallel"] * 2


@pytest.mark.nightly(seconds=60)
@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize(("arch", "ranks", "faults"), [("sm_90", 2, MODULE_FAULTS), ("sm_90", 4, ()), ("sm_80", 2, ())])
def test_modules_forward_and_backward(arch: str, ranks: int, faults: tuple[str, ...]) -> None:
    """MLPs, a column- with a row-parallel layer, and decoder blocks: results, and gradients laid out as parameters."""
    answers = _modules(arch, ranks, "1/1", *faults)
    assert {each["module"] for each in answers} == set(STEPS)
    assert {each["schedule"] for each in answers} == set(SCHEDULES)


@pytest.mark.nightly(seconds=40)
@pytest.mark.codegen
@needs_triton
def test_as_many_blocks_as_usual() -> None:
    """64 of a kernel whose blocks have flags of their own."""
    _are_right(_answers("--blocks", "0", "--in-turn", "1"), 2)
