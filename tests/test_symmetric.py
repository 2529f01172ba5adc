"""Symmetric memory: what one rank writes the others see, exchanges count alike, and what fails says who and what."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse.kernels import comm
from shardfuse.kernels.comm.reduce_op import all_reduce_rmsnorm_shape
from shardfuse.kernels.signals import CHUNKS, COUNTERS, EPOCH, PHASES, STATE, ExchangeTimeout, Signals, raise_flags
from shardfuse.parallel import symmetric_bodies, symmetric_channel, symmetric_probe
from shardfuse.parallel.mesh import SINGLE, Group, everyone
from shardfuse.parallel.symmetric import Channel, SymmetricArena, arena_bytes, model_slots
from shardfuse.parallel.symmetric_bodies import MemoryUnavailable, wait_words
from shardfuse.parallel.symmetric_sizes import ALIGN, layout, own_slots, pad_bytes, text

ROWS, WIDTH = 3, 5
SLOT = 4 * 4 * ROWS * WIDTH  # up to four ranks' rows in fp32
TIMEOUT_S = 60.0


def _arena(group: Group | None = None, **options: Any) -> SymmetricArena:
    return SymmetricArena.of(group or everyone(), **{"device": "cpu", "timeout_s": TIMEOUT_S, **options})


def _said(run: Callable[[], Any], error: type[BaseException] = RuntimeError) -> str:
    """What ``run`` raises, in a worker process."""
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def _exchange(channel: Channel, value: float, chunk: int = 0) -> tuple[Signals, torch.Tensor]:
    """An all-gather of rows full of ``value`` + rank, flags and all; (signals, what this rank got [R, ROWS, WIDTH])."""
    peers, signals = channel.begin((channel.size, ROWS, WIDTH), torch.float32, op="test")
    _push(peers, signals, value, chunk)
    got = _pull(peers, signals, chunk)
    channel.end()
    return signals, got


def _push(peers: list[torch.Tensor], signals: Signals, value: float, chunk: int = 0) -> None:
    for peer in peers:
        peer[signals.rank].fill_(value + signals.rank)
    raise_flags(signals, 0, chunk, range(len(peers)))


def _pull(peers: list[torch.Tensor], signals: Signals, chunk: int = 0) -> torch.Tensor:
    assert signals.epoch is not None
    assert not wait_words(signals.pads[signals.rank][0, :, chunk], signals.epoch, TIMEOUT_S)
    return peers[signals.rank].clone()


def _expected(size: int, value: float) -> torch.Tensor:
    return (value + torch.arange(size)).reshape(size, 1, 1).expand(size, ROWS, WIDTH)


def _run_exchanges(channel: Channel, count: int) -> list[int | None]:
    """Exchanges with a check of each one's data; their epochs."""
    epochs = []
    for step in range(count):
        signals, got = _exchange(channel, 10.0 * step, chunk=step % 3)
        assert torch.equal(got.cpu(), _expected(channel.size, 10.0 * step)), f"step {step}"
        epochs.append(signals.epoch)
    return epochs


# --- memory and exchanges ---------------------------------------------------------------------------------------------


def _views_body(rank: int, world: int) -> None:
    arena = _arena()
    channel = arena.channel("gather", SLOT)
    assert (arena.rank, arena.size, channel.rank, channel.size) == (rank, world, rank, world)
    starts = []
    for step in range(5):
        peers, signals = channel.begin((world, ROWS, WIDTH), torch.float32)
        assert signals.table.tolist() == [[t.data_ptr() for t in tensors] for tensors in (peers, signals.pads)]
        assert all(tensor.data_ptr() % ALIGN == 0 for tensors in (peers, signals.pads) for tensor in tensors)
        assert [pad.shape for pad in signals.pads] == [(PHASES, world, CHUNKS)] * world
        assert all(peer.shape == (world, ROWS, WIDTH) for peer in peers)
        assert (signals.rank, signals.epoch, signals.timeout_s) == (rank, step + 1, TIMEOUT_S)
        assert signals.state.shape == (STATE,)
        starts.append(peers[rank].data_ptr())
        _push(peers, signals, 100.0 * step)
        assert torch.equal(_pull(peers, signals), _expected(world, 100.0 * step))
        channel.end()
    assert starts[0] != starts[1]
    assert starts == [starts[0], starts[1]] * 2 + [starts[0]]  # slots take turns
    assert arena.channel("gather", SLOT // 2) is channel  # shared by whoever asks for it
    assert _arena() is arena
    arena.check()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_a_rank_writes_its_peers_see(ranks: Any, world: int):
    ranks(world, _views_body)


def test_poisoned_slots_never_show_what_was_sent_two_exchanges_ago():
    arenas = SymmetricArena.virtual(2, 1 << 16)
    channels = [arena.channel("gather", SLOT) for arena in arenas]
    shape = (2, ROWS, WIDTH)
    for step in range(4):
        begun = [channel.begin(shape, torch.float32) for channel in channels]
        assert all(bool(peers[rank].isnan().all()) for rank, (peers, _) in enumerate(begun)), f"step {step}"
        for peers, signals in begun:
            _push(peers, signals, 1.0)
        for channel in channels:
            channel.end()


WRAPS = {
    "through 2^31, rebased": (2**31 - 4, 3, [2**31 - 3, 2**31 - 2, 2**31 - 1, *range(-(2**31), -(2**31) + 7)]),
    "through 2^31": (2**31 - 4, 2**30, [2**31 - 3, 2**31 - 2, 2**31 - 1, *range(-(2**31), -(2**31) + 7)]),
    "through 0": (-4, 4, list(range(-3, 7))),
}


def _wrap_body(rank: int, world: int, first: int, every: int, expected: list[int]) -> None:
    arena = _arena(first_epoch=first, rebase_every=every)
    channel = arena.channel("gather", SLOT)
    assert _run_exchanges(channel, len(expected)) == expected
    arena.barrier()
    own = _exchange(channel, 0.0)[0].pads[rank]
    behind = (channel.epoch - own.to(torch.int64)).remainder(2**32)
    # Flags that nobody raises are brought along by a rebase, and stay where they were without one.
    rebases = (len(expected)) // every
    assert int(behind[1].min()) == int(behind[1].max()) == len(expected) + 1 - rebases * every


@pytest.mark.parametrize("name", WRAPS)
def test_epochs_wrap_and_flags_are_rebased(ranks: Any, name: str):
    ranks(2, _wrap_body, *WRAPS[name])


def _groups_body(rank: int, world: int) -> list[str]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = Group(pairs[rank % 2], rank // 2, 2, None)
    whole, part = _arena(), _arena(pair, bytes=1 << 16)
    assert whole is not part
    channels = whole.channel("gather", SLOT), part.channel("gather", SLOT), part.channel("reduce", SLOT)
    begun = [channel.begin((channel.size, ROWS, WIDTH), torch.float32) for channel in channels]
    starts = [peer.data_ptr() for peers, _ in begun for peer in peers]
    assert len(set(starts)) == len(starts)
    for index, (peers, signals) in enumerate(begun):  # all three under way at once
        _push(peers, signals, 1000.0 * index + 10.0 * (rank % 2 if index else 0))
    for index, (channel, (peers, signals)) in enumerate(zip(channels, begun)):
        value = 1000.0 * index + 10.0 * (rank % 2 if index else 0)
        assert torch.equal(_pull(peers, signals), _expected(channel.size, value))
        channel.end()
    for channel in channels[:2]:
        _run_exchanges(channel, 3)
    assert (channels[0].epoch, channels[1].epoch, channels[2].epoch) == (4, 4, 1)
    return [part.budget().splitlines()[0], _said(lambda: part.channel("gather", 1 << 20), ValueError)]


def test_two_arenas_and_subgroups_side_by_side(ranks: Any):
    for rank, (title, error) in enumerate(ranks(4, _groups_body)):
        members = [rank % 2, rank % 2 + 2]
        assert title == f"symmetric memory of the group of global ranks {members}, on each of 2 ranks"
        assert f"of the group of global ranks {members}: the channels 'barrier'" in error


def _inference_body(rank: int, world: int) -> None:
    channel = _arena().channel("gather", SLOT)
    with torch.inference_mode():
        _run_exchanges(channel, 2)
    peers, signals = channel.begin((world, ROWS, WIDTH), torch.float32)  # views that inference mode made
    assert not any(tensor.is_inference() for tensor in (*peers, *signals.pads, signals.table, signals.state))
    weight = torch.ones((), requires_grad=True)
    _push(peers, signals, 2.0)
    (weight * _pull(peers, signals)).sum().backward()
    channel.end()
    assert weight.grad == _expected(world, 2.0).sum()


def test_inference_mode_leaves_nothing_that_training_cannot_use(ranks: Any):
    ranks(2, _inference_body)


# --- growth and budget ------------------------------------------------------------------------------------------------


def _growth_body(rank: int, world: int) -> None:
    arena = _arena()
    gather, last = arena.channel("gather", SLOT), arena.channel("last", SLOT)
    _run_exchanges(gather, 3)
    _run_exchanges(last, 2)
    assert arena.channel("gather", 16 * SLOT) is gather  # moves the other one
    assert _run_exchanges(gather, 2) == [4, 5]
    assert _run_exchanges(last, 2) == [3, 4]
    peers, _ = gather.begin((16 * SLOT // 4,), torch.float32)
    assert peers[rank].nbytes == 16 * SLOT
    assert "cannot move while an exchange is under way: exchange (channel 'gather', torch.float32 [960])" in _said(
        lambda: arena.channel("gather", 17 * SLOT)
    )


def test_channels_grow_between_exchanges_and_go_on_counting(ranks: Any):
    ranks(2, _growth_body)


def _reserve_body(rank: int, world: int) -> str:
    room = layout({**own_slots(world), "gather": SLOT}, world)[1]
    arena = _arena(bytes=room)
    gather = arena.channel("gather", SLOT)
    _run_exchanges(gather, 1)
    error = _said(lambda: arena.channel("reduce", SLOT), ValueError)
    needed = int(error.partition("make it with bytes=")[2].split()[0])
    assert _arena(bytes=needed) is arena
    _run_exchanges(arena.channel("reduce", SLOT), 2)
    assert _run_exchanges(gather, 1) == [2]
    return error


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_would_do(ranks: Any):
    errors = ranks(2, _reserve_body)
    assert errors[0] == errors[1]
    assert (
        "the channels 'barrier' (2 x 0 B), 'probe' (2 x 16.0 KiB), 'gather' (2 x 240 B), 'reduce' (2 x 240 B) take "
        in errors[0]
    )


def test_budget_is_a_table_of_bytes_by_channel():
    (arena, _) = SymmetricArena.virtual(2, 64 << 10)
    arena.channel("gather", 1000)
    assert arena.budget() == textwrap.dedent("""\
        symmetric memory, on each of 2 ranks
          channel  slots         bytes
          barrier  2 x 0 B       1.0 KiB
          probe    2 x 16.0 KiB  33.0 KiB
          gather   2 x 1000 B    3.0 KiB
          total                  37.0 KiB of 64.0 KiB""")
    assert text(3 << 30) == "3.0 GiB"


@pytest.mark.parametrize(("ranks_", "tokens"), [(2, 7), (3, 7), (8, 4096)])
def test_a_models_channels_fill_its_arena_to_the_byte(ranks_: int, tokens: int):
    sizes = {"hidden": 24, "tokens": tokens, "dtype": torch.bfloat16, "ranks": ranks_}
    slots, needed = model_slots(**sizes), arena_bytes(**sizes)
    shapes = {
        "gather": [(tokens, 24)],
        "reduce": [comm.reduce_scatter_shape(tokens, 24, ranks_), comm.all_reduce_shape(tokens, 24, ranks_)],
    }
    for name, shots in (("decode", 1), ("decode2", 2)):
        shapes[name] = [
            all_reduce_rmsnorm_shape(
                rows, 24, torch.bfloat16, ranks_, torch.device("cpu"), shots=shots, programs=programs
            )
            for rows in range(65)
            for programs in (None, CHUNKS)  # on a CPU, on a GPU
        ]
    assert slots == {name: max(2 * math.prod(shape) for shape in those) for name, those in shapes.items()}
    assert model_slots(**sizes, ffn=96) == {name: 4 * nbytes for name, nbytes in slots.items()}
    for room, fits in ((needed, True), (needed - 1, False)):
        arena = SymmetricArena.virtual(ranks_, room)[0]
        for name in ("gather", "reduce", "decode"):
            arena.channel(name, slots[name])
        if fits:
            arena.channel("decode2", slots["decode2"])
        else:
            with pytest.raises(ValueError, match=f"bytes={needed} or more"):
                arena.channel("decode2", slots["decode2"])


# --- whoever does not come --------------------------------------------------------------------------------------------


def _barrier_body(rank: int, world: int) -> list[str]:
    arena = _arena(Group(dist.new_group([2, 0, 1], sort_ranks=False), (rank + 1) % 3, 3, None))
    channel = arena.channel("gather", SLOT)
    for _ in range(3):
        arena.barrier()
    if rank == 1:
        return []
    said = [_said(lambda: arena.barrier(0.2), ExchangeTimeout), _said(arena.barrier), _said(arena.check)]
    return [*said, _said(lambda: channel.begin((1,), torch.float32))]


def test_a_barrier_names_who_does_not_come(ranks: Any):
    said = ranks(3, _barrier_body)
    for rank in (0, 2):
        first, *later = said[rank]
        assert first.startswith(
            f"barrier: rank {(rank + 1) % 3} waited 0.2 s in vain for rank 2 (its flag stands at 3), epoch 4: "
        )
        assert all(f"broken since: {first}; close() it on every rank" in text for text in later)
        assert len(later) == 3


def _rebase_body(rank: int, world: int) -> str:
    arena = _arena(timeout_s=0.2, rebase_every=2)
    channel = arena.channel("gather", SLOT)
    _run_exchanges(channel, 2)
    if rank == 0:
        return ""
    return _said(lambda: channel.begin((1,), torch.float32), ExchangeTimeout)


def test_a_rebase_waits_no_longer_than_a_barrier(ranks: Any):
    assert "rank 1 waited 0.2 s in vain for rank 0" in ranks(2, _rebase_body)[1]


VICTIM = """
    import os, signal, sys, time
    import torch.distributed as dist
    from shardfuse.kernels.signals import ExchangeTimeout
    from shardfuse.parallel import symmetric
    from shardfuse.parallel.mesh import everyone

    rank, meeting = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
    arena = symmetric.SymmetricArena.of(everyone(), device="cpu", bytes=1 << 20)
    arena.barrier()
    if rank == 1:
        symmetric.raise_flags = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        arena.barrier(0.5)
    except ExchangeTimeout as error:
        print(f"{time.monotonic() - started:.2f} {error}", flush=True)
    os._exit(0)
"""


def test_a_killed_rank_is_named_and_leaves_nothing_behind(tmp_path: Path):
    shared = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(VICTIM), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, -signal.SIGKILL, 0], ended
    for rank in (0, 2):
        seconds, _, message = ended[rank][0].partition(" ")
        assert f"barrier: rank {rank} waited 0.5 s in vain for rank 1 (its flag stands at 1)" in message
        assert 0.5 <= float(seconds) < 20.0
    assert set(os.listdir("/dev/shm")) <= shared


# --- what kernels report ----------------------------------------------------------------------------------------------


def test_a_reported_timeout_names_the_exchange_and_breaks_the_channel():
    (arena, _) = SymmetricArena.virtual(2, 1 << 16)
    channel, other = arena.channel("reduce", SLOT), arena.channel("gather", SLOT)
    for _ in range(2):
        channel.begin((ROWS, WIDTH), torch.float16)
        channel.end()
    _, signals = channel.begin((2, ROWS, WIDTH), torch.bfloat16, op="linear_reduce_scatter")
    signals.report.copy_(torch.tensor([1, 0, 1, 5, 3, 2, 0, 0]))  # as a kernel does that gave up
    with pytest.raises(ExchangeTimeout) as caught:
        channel.end()
    assert str(caught.value).startswith(
        "linear_reduce_scatter (channel 'reduce', torch.bfloat16 [2, 3, 5]): rank 0 waited in vain for data from rank "
        "1 (chunk 5, exchange 3; its flag stands at 2)"
    )
    assert isinstance(caught.value, TimeoutError)
    for use in (channel.check, arena.check, lambda: channel.begin((1,), torch.int8)):
        with pytest.raises(RuntimeError, match=r"channel 'reduce' is broken since: linear_reduce_scatter"):
            use()
    other.begin((ROWS, WIDTH), torch.float16)
    other.end()


def test_a_report_of_an_earlier_exchange_is_told_with_that_ones_name():
    (arena,) = SymmetricArena.virtual(1, 1 << 16)
    channel = arena.channel("decode", SLOT)
    for tokens in (1, 2, 3):
        _, signals = channel.begin((tokens, WIDTH), torch.float32, op="all_reduce_rmsnorm")
        channel.end()
    signals.report.copy_(torch.tensor([1, 1, 0, 0, 2, 1, 0, 0]))
    with pytest.raises(ExchangeTimeout, match=r"torch.float32 \[2, 5\]\): rank 0 waited in vain for sums from rank 0"):
        arena.check()


# --- the probe --------------------------------------------------------------------------------------------------------


def _probe_body(rank: int, world: int) -> list[str | None]:
    arena = _arena()
    channel = arena.channel("gather", SLOT)
    answers = [arena.probe(), arena.probe()]
    assert arena._channels["probe"].epoch == 2
    _run_exchanges(channel, 2)
    return answers


@pytest.mark.parametrize("world", [2, 3])
def test_probe_of_good_memory(ranks: Any, world: int):
    assert ranks(world, _probe_body) == [[None, None]] * world


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Workers live on: whatever a test breaks in one is mended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def _silent(signals: Signals, phase: int, chunk: int, to: Any) -> None:
    """A rank that does not raise its flag at rank 2 in the second exchange."""
    raise_flags(signals, phase, chunk, to if signals.epoch == 1 else [0, 1])


def _garbled(source: int, target: int, size: int, exchange: int, device: torch.device) -> torch.Tensor:
    """A link that loses the last word on the way from rank 0 to rank 1, in the second slot."""
    row = PATTERN(source, target, size, exchange, device)
    if (source, target, exchange) == (0, 1, 1):
        row[-1] = 0
    return row


PATTERN = symmetric_probe._pattern
FAULTS = {
    "no flag": (
        "raise_flags",
        _silent,
        r"^probe: rank 2 saw no flag of rank 0 within 1 s \(phase 0, exchange 2; .* at 1\)$",
    ),
    "wrong word": (
        "_pattern",
        _garbled,
        r"^probe: what rank 0 sent to rank 1 arrived there with 1 of 1024 words wrong",
    ),
}


def _bad_probe_body(rank: int, world: int, name: str) -> tuple[str | None, str]:
    arena = _arena()
    attribute, fault, _ = FAULTS[name]
    with _patched(symmetric_probe, attribute, fault if rank == 0 else getattr(symmetric_probe, attribute)):
        why = arena.probe(timeout_s=1.0)
    assert arena.probe() == why
    return why, _said(lambda: arena.channel("gather", SLOT).begin((1,), torch.float32))


@pytest.mark.parametrize("name", FAULTS)
def test_probe_of_bad_memory_names_the_pair_on_every_rank(ranks: Any, name: str):
    (why, later), *others = ranks(3, _bad_probe_body, name)
    assert others == [(why, later)] * 2
    assert re.search(FAULTS[name][2], why), why
    assert "\n" not in why
    assert f"this arena is broken since: {why}" in later


def _refuse(path: str, *_: Any) -> str:
    raise PermissionError(1, "Operation not permitted", path)


def _elsewhere(path: str, *_: Any) -> str:
    return "/dev/null"


UNREACHABLE = {
    "refused": ("readlink", _refuse, "Operation not permitted: the ranks have to run on one machine"),
    "another's": ("readlink", _elsewhere, "is not the memory of rank 0: the ranks have to run on one machine"),
    "not its token": ("pread", lambda *_: b"", "is not the memory of rank 0: the ranks have to run on one machine"),
}


def _unreachable_body(rank: int, world: int, name: str) -> tuple[str | None, str]:
    arena = _arena()
    function, fault, _ = UNREACHABLE[name]
    with _patched(symmetric_bodies.os, function, fault if rank == 1 else getattr(os, function)):
        error = _said(arena.barrier, MemoryUnavailable)
        why = arena.probe()
    gc.collect()  # errors hold the frames they came through, and what was mapped there
    assert _memory_held() == (0, 0)
    return why, error


@pytest.mark.parametrize("name", UNREACHABLE)
def test_memory_that_one_rank_cannot_have_is_refused_on_all(ranks: Any, name: str):
    answers = ranks(2, _unreachable_body, name)
    paths = []
    for why, error in answers:
        for said in (why, error):
            assert said.startswith("symmetric memory cannot be had: rank 1: /proc/")
            assert UNREACHABLE[name][2] in said
        paths.append(why)
    assert paths[0] == paths[1]


def _no_room(fd: int, offset: int, length: int) -> None:
    raise OSError(28, "No space left on device")


def _no_room_body(rank: int, world: int) -> str:
    with _patched(symmetric_bodies.os, "posix_fallocate", _no_room if rank == 0 else os.posix_fallocate):
        return _said(_arena().barrier, MemoryUnavailable)


def test_memory_that_is_short_is_an_error_at_once(ranks: Any):
    errors = ranks(2, _no_room_body)
    assert errors == ["symmetric memory cannot be had: rank 0: [Errno 28] No space left on device"] * 2


# --- torch's own ------------------------------------------------------------------------------------------------------


class _Handle:
    """What torch's rendezvous returns, of a group of one."""

    def __init__(self, local: torch.Tensor) -> None:
        self.local = local

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        assert (rank, dtype, storage_offset) == (0, torch.uint8, 0)
        return self.local.view(sizes)


def _torch_body(monkeypatch: pytest.MonkeyPatch, rendezvous: Callable[..., Any]) -> symmetric_bodies._TorchBody:
    stand_in = types.ModuleType("torch.distributed._symmetric_memory")
    vars(stand_in).update(empty=lambda n, dtype, device: torch.full((n,), 7, dtype=dtype), rendezvous=rendezvous)
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(dist, "_symmetric_memory", stand_in, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return symmetric_bodies._TorchBody(lambda: SINGLE, torch.device("cuda", 0))


def test_memory_of_gpus_comes_from_a_rendezvous(monkeypatch: pytest.MonkeyPatch):
    buffer = _torch_body(monkeypatch, lambda local, pg: _Handle(local)).allocate(512)
    assert [tensor.tolist() for tensor in buffer.tensors] == [[0] * 512]
    assert buffer.addresses == [buffer.tensors[0].data_ptr()]
    assert buffer.nbytes == 512


def test_gpus_without_a_link_are_told_by_torchs_own_words(monkeypatch: pytest.MonkeyPatch):
    def rendezvous(local: torch.Tensor, pg: Any) -> Any:
        raise RuntimeError("no peer access between devices 0 and 1")

    with pytest.raises(MemoryUnavailable, match="cannot be had: rank 0: no peer access between devices 0 and 1"):
        _torch_body(monkeypatch, rendezvous).allocate(512)


def _shared_gpu_body(rank: int, world: int) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        arena = _arena(device="cuda:0", rebase_every=3)
        why = arena.probe()
        _run_exchanges(arena.channel("gather", SLOT), 8)
        arena.barrier()
        arena.close()
    return why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's symmetric memory is on GPUs")
def test_processes_that_share_a_gpu(ranks: Any):
    assert ranks(2, _shared_gpu_body) == [None, None]


# --- its end ----------------------------------------------------------------------------------------------------------


def _memory_held() -> tuple[int, int]:
    """(file descriptors, mappings) of symmetric memory in this process."""
    files = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    return sum("memfd:shardfuse" in file for file in files), Path("/proc/self/maps").read_text().count(
        "/memfd:shardfuse"
    )


def _freed_body(rank: int, world: int) -> None:
    gc.collect()  # of tests before
    assert _memory_held() == (0, 0)
    arena = _arena()
    channel = arena.channel("gather", SLOT)
    peers = channel.begin((world, ROWS, WIDTH), torch.float32)[0]
    assert _memory_held() == (world, world)
    dist.barrier()
    dist.destroy_process_group()
    peers[rank].fill_(1.0)  # a view holds its memory, and no more
    for use in (arena.barrier, lambda: arena.channel("new", 1), arena.probe, arena.check):
        assert "this arena was closed, or its process group destroyed" in _said(use)
    del peers
    assert _memory_held() == (0, 0)


def test_an_arena_goes_with_its_group(ranks: Any):
    ranks(2, _freed_body)


def _kept_body(rank: int, world: int) -> None:
    """Somebody holds a destroyed group, as modules do."""
    kept = Group(dist.new_group([0, 1]), rank, world, None)
    old = _arena(kept)
    old.barrier()
    dist.destroy_process_group(kept.pg)
    again = Group(dist.new_group([0, 1]), rank, world, None)
    new = _arena(again)
    assert new is not old
    assert "this arena was closed" in _said(old.barrier)
    new.barrier()
    assert "process group has been destroyed" in _said(lambda: _arena(kept), ValueError)
    new.close()
    new.close()
    assert _arena(again) is not new
    assert "closed" in _said(new.barrier)
    _arena(again).barrier()


def test_a_new_group_never_meets_an_old_arena(ranks: Any):
    ranks(2, _kept_body)


def _cycles_body(rank: int, world: int, cycles: int) -> None:
    group = everyone()
    gc.collect()  # of tests before: the cycles need no collection
    counts = []
    for _ in range(cycles):
        arena = _arena(group, bytes=64 << 10)
        arena.channel("gather", SLOT)
        arena.barrier()
        arena.close()
        counts.append(_memory_held())
    assert counts == [(0, 0)] * cycles


def test_fifty_arenas_leak_neither_files_nor_mappings(ranks: Any):
    ranks(2, _cycles_body, 50)


# --- virtual ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_epoch", [0, 2**31 - 3])
def test_virtual_ranks_take_turns_in_one_thread(first_epoch: int):
    """Rank 0 sends before rank 1 has so much as asked for the channel."""
    world = 3
    arenas = SymmetricArena.virtual(world, 1 << 16, first_epoch=first_epoch)
    channels: list[Channel] = []
    for step in range(5):
        begun = []
        for rank, arena in enumerate(arenas):
            channel = arena.channel("gather", SLOT)
            peers, signals = channel.begin((world, ROWS, WIDTH), torch.float32)
            _push(peers, signals, float(step))
            begun.append((channel, peers, signals))
            channels[rank:] = [channel]
        for channel, peers, signals in begun:
            assert torch.equal(_pull(peers, signals), _expected(world, float(step)))
            channel.end()
    assert len({channel.epoch for channel in channels}) == 1
    assert [arena.probe() for arena in arenas] == [None] * world


def test_virtual_ranks_with_a_thread_each_meet_and_rebase():
    world, failures = 3, []
    arenas = SymmetricArena.virtual(world, 1 << 16, timeout_s=TIMEOUT_S, rebase_every=2, first_epoch=2**31 - 4)

    def run(arena: SymmetricArena) -> None:
        try:
            _run_exchanges(arena.channel("gather", SLOT), 7)
            arena.barrier()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(arena,)) for arena in arenas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert {arena._channels["gather"].epoch for arena in arenas} == {-(2**31) + 3}


def test_channels_of_virtual_ranks_stay_where_they_are():
    arenas = SymmetricArena.virtual(2, 1 << 16)
    for arena in arenas:
        channel = arena.channel("gather", SLOT)
        channel.begin((1,), torch.float32)
        channel.end()
    arenas[0].channel("behind", SLOT)  # moves nothing
    with pytest.raises(
        RuntimeError, match="channel 'gather' is in use, and the other virtual ranks have its addresses"
    ):
        arenas[0].channel("gather", 2 * SLOT)


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_device_counted_exchanges_see_both_slots():
    arenas = SymmetricArena.virtual(2, 1 << 16, first_epoch=6)
    channel, host = arenas[1].channel("decode", SLOT), arenas[1].channel("host", SLOT)
    peers, signals = channel.device_counted((ROWS, WIDTH), torch.float32, op="all_reduce_rmsnorm")
    host.begin((ROWS, WIDTH), torch.float32)
    host.end()
    assert signals.epoch is None
    assert signals.state[EPOCH] == 6
    assert not signals.state[COUNTERS:].any()
    assert [peer.shape for peer in peers] == [(2, ROWS, WIDTH)] * 2
    stride = peers[0].stride(0) * 4
    assert signals.table.tolist() == [[peer.data_ptr() for peer in peers], [pad.data_ptr() for pad in signals.pads]]
    start = signals.pads[0].data_ptr() + pad_bytes(2)
    assert [peers[0][slot].data_ptr() for slot in (0, 1)] == [start, start + stride]
    assert all((pad == 6).all() for pad in signals.pads)
    with pytest.raises(RuntimeError, match="the device counts its exchanges, so the host cannot"):
        channel.begin((1,), torch.float32)
    with pytest.raises(RuntimeError, match="the host counts its exchanges, so the device cannot"):
        host.device_counted((1,), torch.float32)
    with pytest.raises(RuntimeError, match="channel 'decode' is in use, and captured graphs may hold its addresses"):
        arenas[1].channel("decode", 2 * SLOT)


def test_graph_capture(monkeypatch: pytest.MonkeyPatch):
    """The host's count cannot be captured, and memory cannot be had inside a capture; the rest can."""
    (arena,) = SymmetricArena.virtual(1, 1 << 16)
    channel, decode = arena.channel("gather", SLOT), arena.channel("decode", SLOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert symmetric_channel.capturing()
    with pytest.raises(RuntimeError, match=r"channel 'gather': begin\(\) inside graph capture: .*device_counted"):
        channel.begin((1,), torch.float32)
    with pytest.raises(RuntimeError, match=r"first use, which cannot be inside graph capture: probe\(\) the arena"):
        decode.device_counted((1,), torch.float32)
    monkeypatch.undo()
    arena.settle()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    decode.device_counted((1,), torch.float32)


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_misuse_of_a_channel_says_what_to_do():
    (arena,) = SymmetricArena.virtual(1, 1 << 16)
    channel = arena.channel("gather", 64)
    with pytest.raises(RuntimeError, match=r"channel 'gather': end\(\) without begin\(\)"):
        channel.end()
    with pytest.raises(ValueError, match=r"\[4, 5\] takes 80 bytes and a slot has 64; ask for channel\('gather', 80\)"):
        channel.begin((4, 5), torch.float32)
    channel.begin((0, 5), torch.float32, op="all_gather_linear")
    with pytest.raises(
        RuntimeError, match=r"all_gather_linear \(channel 'gather'.*\), number 1, has not ended: end\(\)"
    ):
        channel.begin((1,), torch.float32)
    with pytest.raises(ValueError, match="slot_bytes=-1: expected 0 or more"):
        arena.channel("other", -1)


def test_misuse_of_an_arena_says_what_to_do():
    for wrong, message in (
        (lambda: SymmetricArena.of(SINGLE, device="cpu"), "a group of one rank has nobody to exchange with"),
        (lambda: SymmetricArena.virtual(0, 1), "world=0: expected at least 1"),
        (lambda: SymmetricArena.virtual(2, 1 << 16, "meta"), "device=meta: expected a CPU or a GPU"),
        (
            lambda: SymmetricArena.virtual(2, 1 << 16, timeout_s=0.0),
            "timeout_s=0.0: expected a number of seconds above 0",
        ),
        (lambda: SymmetricArena.virtual(2, 100), "the arena may take 100; make it with bytes=34816 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def _misuse_body(rank: int, world: int) -> list[str]:
    arena = _arena()
    assert "the group's arena is on cpu; close() it first" in _said(
        lambda: SymmetricArena.of(everyone(), device="cuda:0"), ValueError
    )
    channel = arena.channel("gather", 64 if rank == 0 else 128)
    said = _said(lambda: channel.begin((1,), torch.float32))
    arena.channel("gather", 128)
    assert _arena(timeout_s=2.5) is arena
    assert channel.begin((1,), torch.float32)[1].timeout_s == 2.5
    return [said]


def test_ranks_that_ask_for_different_channels_are_told(ranks: Any):
    (first,), (second,) = ranks(2, _misuse_body)
    assert first == second
    assert (
        "rank 0 has channels with slots of {'barrier': 0, 'probe': 16384, 'gather': 64} and bytes=None, rank 1 {"
        in first
    )
    assert "all ranks have to make the same calls in the same order" in first


WITHOUT_TRITON = """
    import sys
    sys.modules["triton"] = None
    import torch
    from shardfuse.parallel.symmetric import SymmetricArena
    arena = SymmetricArena.virtual(1, 1 << 16)[0]
    arena.channel("gather", 64).begin((4,), torch.float32)
    arena.channel("gather", 64).end()
    arena.barrier()
    print(arena.probe(), "torch.distributed._symmetric_memory" in sys.modules)
"""


def test_works_without_triton_and_without_torchs_symmetric_memory():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TRITON)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["None", "False"], done.stderr
