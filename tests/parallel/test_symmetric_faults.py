"""Faults of symmetric memory: missing ranks, links that lose words, failed allocations, misuse.

The errors name the rank and the fault.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from symmetric_case import ROWS, SLOT, WIDTH, make_pool, memory_held, run_exchanges, said_by

from shardfuse.kernels.runtime.signals import ExchangeTimeout, Signals, raise_flags
from shardfuse.parallel.core.mesh import SINGLE, Group, everyone
from shardfuse.parallel.overlap.memory import backends, probe
from shardfuse.parallel.overlap.memory.backends import MemoryUnavailable
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool

# --- missing ranks ----------------------------------------------------------------------------------------------------


def _barrier_body(rank: int, world: int) -> list[str]:
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return []
    pool = make_pool(Group(group, rank - 1, 3, None))
    channel = pool.channel("gather", SLOT)
    for _ in range(3):
        pool.barrier()
    if rank == 3:
        return []
    said = [said_by(lambda: pool.barrier(0.2), ExchangeTimeout), said_by(pool.barrier), said_by(pool.check)]
    return [*said, said_by(lambda: channel.begin((1,), torch.float32))]


def test_a_barrier_names_who_does_not_come(ranks: Any):
    said = ranks(4, _barrier_body)
    for rank in (1, 2):  # 0 and 1 in the group
        first, *later = said[rank]
        assert first.startswith(
            f"barrier of the group of global ranks [1, 2, 3]: rank {rank - 1} waited 0.2 s in vain for rank 2 "
            "(its flag stands at 3), epoch 4: "
        )
        assert all(f"broken since: {first}; close() it on every rank" in text for text in later)
        assert len(later) == 3


def _rebase_body(rank: int, world: int) -> str:
    pool = make_pool(timeout_s=0.2, rebase_every=2)
    channel = pool.channel("gather", SLOT)
    run_exchanges(channel, 2)
    if rank == 0:
        return ""
    return said_by(lambda: channel.begin((1,), torch.float32), ExchangeTimeout)


def test_a_rebase_waits_no_longer_than_a_barrier(ranks: Any):
    assert "rank 1 waited 0.2 s in vain for rank 0" in ranks(2, _rebase_body)[1]


VICTIM = """
    import os, signal, sys, time
    import torch.distributed as dist
    from shardfuse.kernels.runtime.signals import ExchangeTimeout
    from shardfuse.parallel.overlap.memory import pool as symmetric
    from shardfuse.parallel.core.mesh import everyone

    rank, meeting = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
    pool = symmetric.SymmetricMemoryPool.of(everyone(), device="cpu", bytes=1 << 20)
    pool.barrier()
    if rank == 1:
        symmetric.raise_flags = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        pool.barrier(0.5)
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


# --- the kernels' reports ---------------------------------------------------------------------------------------------


def test_a_reported_timeout_names_the_exchange_and_breaks_the_channel():
    (pool, _) = SymmetricMemoryPool.virtual(2, 1 << 16)
    channel, other = pool.channel("reduce", SLOT), pool.channel("gather", SLOT)
    for _ in range(2):
        channel.begin((ROWS, WIDTH), torch.float16)
        channel.end()
    _, signals = channel.begin((2, ROWS, WIDTH), torch.bfloat16, op="linear_reduce_scatter")
    signals.report.copy_(torch.tensor([1, 0, 1, 5, 3, 2, 0, 0]))  # like a kernel that gave up
    with pytest.raises(ExchangeTimeout) as caught:
        channel.end()
    assert str(caught.value).startswith(
        "linear_reduce_scatter (channel 'reduce', torch.bfloat16 [2, 3, 5]): rank 0 waited in vain for data from rank "
        "1 (chunk 5, exchange 3; its flag stands at 2)"
    )
    assert isinstance(caught.value, TimeoutError)
    for use in (channel.check, pool.check, lambda: channel.begin((1,), torch.int8)):
        with pytest.raises(RuntimeError, match=r"channel 'reduce' is broken since: linear_reduce_scatter"):
            use()
    other.begin((ROWS, WIDTH), torch.float16)
    other.end()


def test_a_report_of_an_earlier_exchange_is_told_with_that_ones_name():
    (pool,) = SymmetricMemoryPool.virtual(1, 1 << 16)
    channel = pool.channel("decode", SLOT)
    for tokens in (1, 2, 3):
        _, signals = channel.begin((tokens, WIDTH), torch.float32, op="all_reduce_rmsnorm")
        channel.end()
    signals.report.copy_(torch.tensor([1, 1, 0, 0, 2, 1, 0, 0]))
    with pytest.raises(ExchangeTimeout, match=r"torch.float32 \[2, 5\]\): rank 0 waited in vain for sums from rank 0"):
        pool.check()


# --- the probe --------------------------------------------------------------------------------------------------------


def _probe_body(rank: int, world: int) -> list[str | None]:
    pool = make_pool()
    channel = pool.channel("gather", SLOT)
    answers = [pool.probe(), pool.probe()]
    assert pool._channels["probe"].epoch == 2
    run_exchanges(channel, 2)
    return answers


@pytest.mark.parametrize("world", [2, 3])
def test_probe_of_good_memory(ranks: Any, world: int):
    assert ranks(world, _probe_body) == [[None, None]] * world


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Patch within the block and restore afterwards: the workers serve later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def _silent(signals: Signals, phase: int, chunk: int, to: Any) -> None:
    """A rank that does not raise its flag at rank 2 in the second exchange."""
    raise_flags(signals, phase, chunk, to if signals.epoch == 1 else [0, 1])


def _garbled(source: int, target: int, size: int, exchange: int, device: torch.device) -> torch.Tensor:
    """A link that loses the last word from rank 0 to rank 1, in the second slot."""
    row = PATTERN(source, target, size, exchange, device)
    if (source, target, exchange) == (0, 1, 1):
        row[-1] = 0
    return row


PATTERN = probe._pattern
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
    pool = make_pool()
    attribute, fault, _ = FAULTS[name]
    with _patched(probe, attribute, fault if rank == 0 else getattr(probe, attribute)):
        why = pool.probe(timeout_s=1.0)
    assert pool.probe() == why
    return why, said_by(lambda: pool.channel("gather", SLOT).begin((1,), torch.float32))


@pytest.mark.parametrize("name", FAULTS)
def test_probe_of_bad_memory_names_the_pair_on_every_rank(ranks: Any, name: str):
    (why, later), *others = ranks(3, _bad_probe_body, name)
    assert others == [(why, later)] * 2
    assert re.search(FAULTS[name][2], why), why
    assert "\n" not in why
    assert f"this pool is broken since: {why}" in later


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
    pool = make_pool()
    function, fault, _ = UNREACHABLE[name]
    with _patched(backends.os, function, fault if rank == 1 else getattr(os, function)):
        error = said_by(pool.barrier, MemoryUnavailable)
        why = pool.probe()
    gc.collect()  # errors hold their frames, and with them mapped memory
    assert memory_held() == (0, 0)
    return why, error


@pytest.mark.parametrize("name", UNREACHABLE)
def test_memory_that_one_rank_cannot_have_is_refused_on_all(ranks: Any, name: str):
    answers = ranks(2, _unreachable_body, name)
    paths = []
    for why, error in answers:
        for said in (why, error):
            assert said.startswith("symmetric memory is unavailable: rank 1: /proc/")
            assert UNREACHABLE[name][2] in said
        paths.append(why)
    assert paths[0] == paths[1]


def _no_room(fd: int, offset: int, length: int) -> None:
    raise OSError(28, "No space left on device")


def _no_room_body(rank: int, world: int) -> str:
    with _patched(backends.os, "posix_fallocate", _no_room if rank == 0 else os.posix_fallocate):
        return said_by(make_pool().barrier, MemoryUnavailable)


def test_memory_that_is_short_is_an_error_at_once(ranks: Any):
    errors = ranks(2, _no_room_body)
    assert errors == ["symmetric memory is unavailable: rank 0: [Errno 28] No space left on device"] * 2


# --- torch's own ------------------------------------------------------------------------------------------------------


class _Handle:
    """The result of torch's rendezvous for a group of one."""

    def __init__(self, local: torch.Tensor) -> None:
        self.local = local

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        assert (rank, dtype, storage_offset) == (0, torch.uint8, 0)
        return self.local.view(sizes)


def _torch_backend(monkeypatch: pytest.MonkeyPatch, rendezvous: Callable[..., Any]) -> backends._TorchBackend:
    stand_in = types.ModuleType("torch.distributed._symmetric_memory")
    vars(stand_in).update(empty=lambda n, dtype, device: torch.full((n,), 7, dtype=dtype), rendezvous=rendezvous)
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(dist, "_symmetric_memory", stand_in, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return backends._TorchBackend(lambda: SINGLE, torch.device("cuda", 0))


def test_memory_of_gpus_comes_from_a_rendezvous(monkeypatch: pytest.MonkeyPatch):
    buffer = _torch_backend(monkeypatch, lambda local, pg: _Handle(local)).allocate(512)
    assert [tensor.tolist() for tensor in buffer.tensors] == [[0] * 512]
    assert buffer.addresses == [buffer.tensors[0].data_ptr()]
    assert buffer.nbytes == 512


def test_gpus_without_a_link_are_told_by_torchs_own_words(monkeypatch: pytest.MonkeyPatch):
    def rendezvous(local: torch.Tensor, pg: Any) -> Any:
        raise RuntimeError("no peer access between devices 0 and 1")

    with pytest.raises(MemoryUnavailable, match="is unavailable: rank 0: no peer access between devices 0 and 1"):
        _torch_backend(monkeypatch, rendezvous).allocate(512)


def _shared_gpu_body(rank: int, world: int) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        pool = make_pool(device="cuda:0", rebase_every=3)
        why = pool.probe()
        run_exchanges(pool.channel("gather", SLOT), 8)
        pool.barrier()
        pool.close()
    return why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's symmetric memory is on GPUs")
def test_processes_that_share_a_gpu(ranks: Any):
    assert ranks(2, _shared_gpu_body) == [None, None]


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_misuse_of_a_channel_says_what_to_do():
    (pool,) = SymmetricMemoryPool.virtual(1, 1 << 16)
    channel = pool.channel("gather", 64)
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
        pool.channel("other", -1)


def test_misuse_of_an_pool_says_what_to_do():
    for wrong, message in (
        (lambda: SymmetricMemoryPool.of(SINGLE, device="cpu"), "a group of one rank has no peer to exchange with"),
        (lambda: SymmetricMemoryPool.virtual(0, 1), "world=0: expected at least 1"),
        (lambda: SymmetricMemoryPool.virtual(2, 1 << 16, "meta"), "device=meta: expected a CPU or a GPU"),
        (
            lambda: SymmetricMemoryPool.virtual(2, 1 << 16, timeout_s=0.0),
            "timeout_s=0.0: expected a number of seconds above 0",
        ),
        (lambda: SymmetricMemoryPool.virtual(2, 100), "the pool may take 100; make it with bytes=34816 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def _misuse_body(rank: int, world: int) -> list[str]:
    pool = make_pool()
    assert "the group's pool is on cpu; close() it first" in said_by(
        lambda: SymmetricMemoryPool.of(everyone(), device="cuda:0"), ValueError
    )
    channel = pool.channel("gather", 64 if rank == 0 else 128)
    said = said_by(lambda: channel.begin((1,), torch.float32))
    pool.channel("gather", 128)
    assert make_pool(timeout_s=2.5) is pool
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
    from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool
    pool = SymmetricMemoryPool.virtual(1, 1 << 16)[0]
    pool.channel("gather", 64).begin((4,), torch.float32)
    pool.channel("gather", 64).end()
    pool.barrier()
    print(pool.probe(), "torch.distributed._symmetric_memory" in sys.modules)
"""


def test_works_without_triton_and_without_torchs_symmetric_memory():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TRITON)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["None", "False"], done.stderr
