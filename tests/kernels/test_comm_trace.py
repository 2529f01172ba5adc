"""What the kernels really do with flags and slots, held against the protocol's model.

Ranks that are processes run exchanges of every kind while a recorder (comm_recorder.py) writes down each access that a
kernel or the host makes to a pad of flags or to a slot. Then ``conforms`` (comm_trace.py) has the last word.

The same recorder sees bugs that are seeded into what runs, and real ranks are killed in the middle of what they send.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import comm_model
import pytest
import torch.distributed as dist
from comm_model import Exchange
from comm_recorder import Call, Recorder, active, around, made, two_shot
from comm_search import explore
from comm_trace import Event, ProtocolError, conforms
from launched import _shared_memory
from symmetric_case import make_pool
from triton.runtime.interpreter import InterpreterBuilder

from shardfuse.kernels.comm import reduce, transport
from shardfuse.kernels.runtime import signals as signals_module
from shardfuse.kernels.runtime.signals import ExchangeTimeout, following, rows_of
from shardfuse.parallel.core.mesh import everyone
from shardfuse.parallel.overlap.memory.backends import wait_words
from shardfuse.parallel.overlap.memory.pool import Channel, SymmetricMemoryPool

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.interpret

SLOT = 1 << 13  # bytes
WRAP = 2**31 - 4
PATIENCE = 1.5  # seconds that a wait may take where it is in vain: more than ranks that share cores are apart


@contextlib.contextmanager
def _pool(**options: Any) -> Iterator[SymmetricMemoryPool]:
    pool = make_pool(**options)
    try:
        yield pool
    finally:
        pool.close()


# --- they keep to the protocol ----------------------------------------------------------------------------------------

CALLS = {  # shards that are even, short and empty; no rows at all
    2: [
        *(Call("gather", 7, 2), Call("scatter", 7), Call("reduce", 7), Call("one-shot", 7), Call("two-shot", 7)),
        *(Call("scatter", 1), Call("gather", 1, 2), Call("two-shot", 1), Call("gather", 0), Call("one-shot", 0)),
    ],
    3: [
        *(Call("gather", 7, 3), Call("reduce", 4), Call("two-shot", 8), Call("scatter", 4), Call("one-shot", 2)),
        *(Call("gather", 4, 2), Call("reduce", 0)),
    ],
}
ORDERS = {("raise", "RELEASE", "SYSTEM"), ("wait", "ACQUIRE", "SYSTEM"), ("count", "ACQUIRE_RELEASE", "GPU")}


def _model_of(calls: list[Call], world: int) -> list[Exchange]:
    return [call.as_model(world) for call in calls]


def _decoding(calls: list[Call]) -> list[Call]:
    """Those that the device can count."""
    return [call for call in calls if call.op in ("one-shot", "two-shot")]


def _recorded_body(rank: int, world: int, first_epoch: int) -> list[tuple[list[Event], set[tuple[str, str, str]]]]:
    """All calls back to back, with flags that come late: what was recorded of host- and device-counted channels."""
    with _pool(timeout_s=60.0, first_epoch=first_epoch) as pool, pytest.MonkeyPatch.context() as patch:
        channels = [pool.channel("host", SLOT), pool.channel("device", SLOT)]
        pool.settle()
        host, device = (Recorder(channel, patch, late=random.Random(rank)) for channel in channels)
        for number, call in enumerate(CALLS[world]):
            assert made(call, number, channels[0], host), call
            if call in _decoding(CALLS[world]):
                assert made(call, number, channels[1], device, device_counts=True), f"{call}, counted by the device"
        return [(recorder.events, recorder.orders) for recorder in (host, device)]


@pytest.mark.parametrize(("world", "first_epoch"), [(2, WRAP), (3, -3)])
def test_what_ranks_do_is_what_the_model_does(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, world: int, first_epoch: int
) -> None:
    """Flag by flag and chunk by chunk, in exchanges of all kinds on one channel; a late rank changes no result."""
    monkeypatch.setitem(comm_model.OPS, "two_shot", two_shot)
    host, device = zip(*ranks(world, _recorded_body, first_epoch))
    for recorded, calls in ((host, CALLS[world]), (device, _decoding(CALLS[world]))):
        trace, orders = zip(*recorded)
        assert [event[1] for event in trace[0] if event[0] == "begin"] == [
            following(first_epoch + i) for i in range(len(calls))
        ]
        conforms(trace, _model_of(calls, world))
        assert all(found == ORDERS for found in orders)


def test_the_models_program_of_two_rounds_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every order of two ranks' steps, like those of comm_model.py."""
    monkeypatch.setitem(comm_model.OPS, "two_shot", two_shot)
    result = explore(comm_model.model(2, [Exchange("two_shot", (T,), 2) for T in (3, 1, 2)]))
    assert not result.rule, result.trace


# --- bugs, seeded into what runs --------------------------------------------------------------------------------------

Seed = Callable[[pytest.MonkeyPatch, Channel, Recorder], None]


def _resets(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    """A flag that was seen is set to 0."""
    pad = recorder.pads[channel.rank].numpy()  # past what is recorded of torch

    def compare(inner: Any, builder: Any, ptr: Any, *rest: Any) -> Any:
        found = inner(builder, ptr, *rest)
        for address, seen in zip(ptr.data.ravel().tolist(), found.data.ravel().tolist()):
            flag = recorder.flag(address)
            if flag is not None and seen == recorder.epoch:
                pad[flag[1:]] = 0
        return found

    around(patch, InterpreterBuilder, "create_atomic_cas", compare)


def _releases_nothing(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    """Kernels raise flags with relaxed stores."""

    def exchange(inner: Any, builder: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if recorder.flag(int(ptr.data.ravel()[0])) is not None:
            sem = type(sem).RELAXED
        return inner(builder, op, ptr, value, mask, sem, scope)

    around(patch, InterpreterBuilder, "create_atomic_rmw", exchange)


def _fences_nothing(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    """The host raises flags without a fence."""
    patch.setattr(signals_module, "fence", lambda: None)


def _waits_for_the_last_epoch(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    def before(inner: Any, peers: Any, signals: Any, *rest: Any, **options: Any) -> Any:
        return inner(peers, signals._replace(epoch=signals.epoch - 1), *rest, **options)

    around(patch, reduce, "reduce_scattered", before)


def _has_one_slot(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    channel._slots = [slots[:1].expand(2, -1) for slots in channel._slots]
    channel._tables[1] = channel._tables[0]


def _raises_both_pieces_flags(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    def raised(inner: Any, signals: Any, phase: int, chunk: int, to: list[int]) -> None:
        for piece in (0, 1) if chunk == 0 else ():
            inner(signals, phase, piece, to)

    around(patch, transport, "raise_flags", raised)


def _sends_to_the_next_rank(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    for table in channel._tables:
        table[0] = table[0].roll(-1)


class Bug(NamedTuple):
    """A way to get the protocol wrong, where it is tried, and what notices."""

    call: Call
    world: int
    seed: Seed
    noticed: frozenset[str]  # "result", "timeout", "orders", "trace": what shows it every time
    says: str  # the trace's or the timeout's complaint
    schedule: str = ""  # "late": rank 1 begins when rank 0 has ended; "reads late": when rank 0 is an exchange ahead


BUGS = {
    "flag-reset": Bug(Call("gather", 4), 2, _resets, frozenset({"timeout"}), "its flag stands at 0"),
    "missing-release": Bug(Call("scatter", 4), 2, _releases_nothing, frozenset({"orders"}), ""),
    "missing-release-by-the-host": Bug(Call("gather", 4), 2, _fences_nothing, frozenset({"orders"}), ""),
    "epoch-off-by-one": Bug(
        Call("scatter", 4), 2, _waits_for_the_last_epoch, frozenset({"result", "trace"}),
        "it is not that exchange's time", "late",
    ),
    "early-reuse": Bug(
        Call("gather", 4), 2, _has_one_slot, frozenset({"result", "trace"}),
        "it is not that exchange's time", "reads late",
    ),
    "raised-too-early": Bug(
        Call("gather", 6, 2), 3, _raises_both_pieces_flags, frozenset({"trace"}), "early read: nothing makes"
    ),
    "wrong-peer-sent": Bug(Call("scatter", 6), 3, _sends_to_the_next_rank, frozenset({"result"}), ""),
}  # fmt: skip


def _reads_late(patch: pytest.MonkeyPatch, channel: Channel, recorder: Recorder) -> None:
    """Rank 1 reads nothing of its first exchange before rank 0's first flag of the second one."""

    def load(inner: Any, builder: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        if recorder.epoch == 1 and recorder.in_own_slots(active(ptrs, mask)):
            assert not wait_words(recorder.pads[1][0, :1, 0], 2, 60.0)
        return inner(builder, ptrs, mask, *rest, **options)

    if channel.rank == 1:
        around(patch, InterpreterBuilder, "create_masked_load", load)


def _seeded_body(rank: int, world: int, name: str, seeded: bool) -> tuple[str, list[Event], set[tuple[str, str, str]]]:
    """Exchanges with a bug or without: what came out, and what was recorded."""
    bug = BUGS[name]
    late = bug.schedule == "late"
    in_vain = late or "timeout" in bug.noticed
    with _pool(timeout_s=PATIENCE if in_vain else 60.0) as pool, pytest.MonkeyPatch.context() as patch:
        channel = pool.channel("bug", SLOT)
        pool.settle()
        recorder = Recorder(channel, patch)
        if seeded:
            bug.seed(patch, channel, recorder)
        if bug.schedule == "reads late":
            _reads_late(patch, channel, recorder)
        if late and rank == 1:
            dist.barrier()
        try:
            right = [made(bug.call, number, channel, recorder) for number in range(1 if late else 2)]
            outcome = "right" if all(right) else "wrong"
        except ExchangeTimeout as error:
            outcome = str(error)
        if late and rank == 0:
            dist.barrier()
        return outcome, recorder.events, recorder.orders


def _noticed(bug: Bug, recorded: list[Any], says: str) -> set[str]:
    """By what a run gives itself away; ``says`` is part of what a timeout or ``conforms`` has to say."""
    outcomes, trace, orders = zip(*recorded)
    found = {"result"} if "wrong" in outcomes else set()
    late = [outcome for outcome in outcomes if outcome not in ("right", "wrong")]
    if late:  # so the trace has no end
        assert all(says in outcome for outcome in late), late
        return found | {"timeout"}
    if not all(used <= ORDERS for used in orders):
        found.add("orders")
    refusal = _refusal(trace, bug)
    assert not refusal or says in refusal, refusal
    return found | {"trace"} if refusal else found


def _refusal(trace: list[list[Event]], bug: Bug) -> str:
    """Why ``conforms`` refuses a trace, "" if it does not."""
    exchanges = sum(event[0] == "begin" for event in trace[0])
    try:
        conforms(trace, _model_of([bug.call] * exchanges, bug.world))
    except ProtocolError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_what_runs_is_noticed(ranks: Any, name: str) -> None:
    bug = BUGS[name]
    assert _noticed(bug, ranks(bug.world, _seeded_body, name, True), bug.says) >= bug.noticed


@pytest.mark.parametrize(("name", "noticed"), [("early-reuse", set()), ("epoch-off-by-one", {"timeout"})])
def test_without_the_bug_the_same_schedule_is_safe(ranks: Any, name: str, noticed: set[str]) -> None:
    """Two slots hold what is read late, and who is not there yet is waited for."""
    bug = BUGS[name]
    recorded = ranks(bug.world, _seeded_body, name, False)
    assert _noticed(bug, recorded, "rank 0 waited in vain for data from rank 1 (chunk 0, exchange 1") == noticed


# --- ranks that die ---------------------------------------------------------------------------------------------------


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_after_a_piece(patch: pytest.MonkeyPatch) -> None:
    def raised(inner: Any, signals: Any, phase: int, chunk: int, to: Any) -> None:
        if chunk == 1:
            _dies()
        inner(signals, phase, chunk, to)

    around(patch, transport, "raise_flags", raised)


def _dies_after_a_tile(patch: pytest.MonkeyPatch) -> None:
    """It has counted it, and the second one would have the flags raised."""

    def exchange(inner: Any, *args: Any) -> Any:
        before = inner(*args)
        _dies()
        return before

    around(patch, InterpreterBuilder, "create_atomic_rmw", exchange)


def _dies_between_two_rounds(patch: pytest.MonkeyPatch) -> None:
    """Its first program has sent what others add up."""
    around(patch, InterpreterBuilder, "create_atomic_cas", lambda *_: _dies())


class Death(NamedTuple):
    """How rank 0 dies in its second exchange, and what its peers say then."""

    call: Call
    device_counts: bool
    dies: Callable[[pytest.MonkeyPatch], None]
    says: str


DEATHS = {
    "gather": Death(
        Call("gather", 7, 2), False, _dies_after_a_piece,
        "all_gather_linear of [{mine}, 32]: rank {rank} waited in vain for data from rank 0 (chunk 1, exchange 2; "
        "its flag stands at 1)",
    ),
    "scatter": Death(
        Call("scatter", 7), False, _dies_after_a_tile,
        "linear_reduce_scatter of [7, 32]: rank {rank} waited in vain for data from rank 0 (chunk 0, exchange 2; "
        "its flag stands at 1)",
    ),
    "two-shot": Death(
        Call("two-shot", 7), True, _dies_between_two_rounds,
        "all_reduce_rmsnorm of [7, 32]: rank {rank} waited in vain for sums from rank 0 (chunk 0, exchange 2; "
        "its flag stands at 1)",
    ),
}  # fmt: skip


def _one_of_three(rank: int, name: str, folder: str) -> None:
    """A rank of a group in which rank 0 dies. What it is told is left in a file."""
    death = DEATHS[name]
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=3)
    with pytest.MonkeyPatch.context() as patch, _pool(timeout_s=60.0) as pool:
        channel = pool.channel("dying", SLOT)
        pool.settle()
        assert made(death.call, 0, channel, None, death.device_counts)
        SymmetricMemoryPool.of(everyone(), device="cpu", timeout_s=PATIENCE)
        if rank == 0:
            death.dies(patch)
        dist.barrier()
        started = time.monotonic()
        with pytest.raises(ExchangeTimeout) as caught:
            made(death.call, 1, channel, None, death.device_counts)
        told = {"seconds": time.monotonic() - started, "message": str(caught.value)}
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(told))


def fork_ranks(folder: str) -> None:
    """Three ranks for each death, all at once. They have this process's imports, which take seconds, and no more."""
    forked = {}
    for name in DEATHS:
        for rank in range(3):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    _one_of_three(rank, name, folder)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            forked[pid] = f"{name}-{rank}"
    ended = {forked[pid]: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked}
    print(json.dumps(ended))


def test_a_rank_killed_in_the_middle_is_named_by_all_others(tmp_path: Path) -> None:
    shared = _shared_memory()
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]; import interpreter, test_comm_trace; "
        "interpreter.install(); interpreter.allow(); test_comm_trace.fork_ranks(sys.argv[3])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(SUPPORT), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        printed, complained = started.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, complained
    expected = {f"{name}-{rank}": 0 if rank else -signal.SIGKILL for name in DEATHS for rank in range(3)}
    assert json.loads(printed) == expected, complained
    for name, death in DEATHS.items():
        for rank in (1, 2):
            told = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            first, last = rows_of(rank, 3, death.call.T)
            assert told["message"].startswith(death.says.format(rank=rank, mine=last - first))
            assert PATIENCE <= told["seconds"] < 20.0
    assert _shared_memory() <= shared
