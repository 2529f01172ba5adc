"""Symmetric memory: ranks see each other's writes, agree on exchange numbers, and free memory with its group."""

from __future__ import annotations

import gc
import math
import textwrap
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from symmetric_case import (
    ROWS,
    SLOT,
    TIMEOUT_S,
    WIDTH,
    counting,
    exchange,
    expected_rows,
    make_pool,
    memory_held,
    pull,
    push,
    run_exchanges,
    said_by,
)

from shardfuse.kernels import comm
from shardfuse.kernels.comm.reduce_op import all_reduce_rmsnorm_shape
from shardfuse.kernels.runtime.signals import CHUNKS, COUNTERS, EPOCH, PHASES, STATE
from shardfuse.parallel.core.mesh import Group, everyone
from shardfuse.parallel.overlap.memory.channel import capturing
from shardfuse.parallel.overlap.memory.pool import Channel, SymmetricMemoryPool, model_slots, pool_bytes
from shardfuse.parallel.overlap.memory.sizes import ALIGN, layout, own_slots, pad_bytes, text

# --- memory and exchanges ---------------------------------------------------------------------------------------------


def _views_body(rank: int, world: int) -> None:
    pool = make_pool()
    channel = pool.channel("gather", SLOT)
    assert (pool.rank, pool.size, channel.rank, channel.size) == (rank, world, rank, world)
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
        push(peers, signals, 100.0 * step)
        assert torch.equal(pull(peers, signals), expected_rows(world, 100.0 * step))
        channel.end()
    assert starts[0] != starts[1]
    assert starts == [starts[0], starts[1]] * 2 + [starts[0]]  # slots alternate
    assert pool.channel("gather", SLOT // 2) is channel  # shared by all callers
    assert make_pool() is pool
    pool.check()


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_rank_writes_its_peers_see(ranks: Any, world: int):
    ranks(world, _views_body)


def test_poisoned_slots_never_show_what_was_sent_two_exchanges_ago():
    pools = SymmetricMemoryPool.virtual(2, 1 << 16)
    channels = [pool.channel("gather", SLOT) for pool in pools]
    shape = (2, ROWS, WIDTH)
    for step in range(4):
        begun = [channel.begin(shape, torch.float32) for channel in channels]
        assert all(bool(peers[rank].isnan().all()) for rank, (peers, _) in enumerate(begun)), f"step {step}"
        for peers, signals in begun:
            push(peers, signals, 1.0)
        for channel in channels:
            channel.end()


WRAPS = {
    "through 2^31, rebased": (2**31 - 4, 3, [2**31 - 3, 2**31 - 2, 2**31 - 1, *range(-(2**31), -(2**31) + 7)]),
    "through 2^31": (2**31 - 4, 2**30, [2**31 - 3, 2**31 - 2, 2**31 - 1, *range(-(2**31), -(2**31) + 7)]),
    "through 0": (-4, 4, list(range(-3, 7))),
}


def _wrap_body(rank: int, world: int, first: int, every: int, expected: list[int]) -> None:
    pool = make_pool(first_epoch=first, rebase_every=every)
    channel = pool.channel("gather", SLOT)
    assert run_exchanges(channel, len(expected)) == expected
    pool.barrier()
    own = exchange(channel, 0.0)[0].pads[rank]
    behind = (channel.epoch - own.to(torch.int64)).remainder(2**32)
    # A rebase advances unused flags; without one they keep their values.
    rebases = (len(expected)) // every
    assert int(behind[1].min()) == int(behind[1].max()) == len(expected) + 1 - rebases * every


@pytest.mark.parametrize("name", WRAPS)
def test_epochs_wrap_and_flags_are_rebased(ranks: Any, name: str):
    ranks(2, _wrap_body, *WRAPS[name])


def _groups_body(rank: int, world: int) -> list[str]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = Group(pairs[rank % 2], rank // 2, 2, None)
    whole, part = make_pool(), make_pool(pair, bytes=1 << 16)
    assert whole is not part
    channels = whole.channel("gather", SLOT), part.channel("gather", SLOT), part.channel("reduce", SLOT)
    begun = [channel.begin((channel.size, ROWS, WIDTH), torch.float32) for channel in channels]
    starts = [peer.data_ptr() for peers, _ in begun for peer in peers]
    assert len(set(starts)) == len(starts)
    for index, (peers, signals) in enumerate(begun):  # all three under way at once
        push(peers, signals, 1000.0 * index + 10.0 * (rank % 2 if index else 0))
    for index, (channel, (peers, signals)) in enumerate(zip(channels, begun)):
        value = 1000.0 * index + 10.0 * (rank % 2 if index else 0)
        assert torch.equal(pull(peers, signals), expected_rows(channel.size, value))
        channel.end()
    for channel in channels[:2]:
        run_exchanges(channel, 3)
    assert (channels[0].epoch, channels[1].epoch, channels[2].epoch) == (4, 4, 1)
    return [part.budget().splitlines()[0], said_by(lambda: part.channel("gather", 1 << 20), ValueError)]


def test_two_pools_and_subgroups_side_by_side(ranks: Any):
    for rank, (title, error) in enumerate(ranks(4, _groups_body)):
        members = [rank % 2, rank % 2 + 2]
        assert title == f"symmetric memory of the group of global ranks {members}, on each of 2 ranks"
        assert f"of the group of global ranks {members}: the channels 'barrier'" in error


def _inference_body(rank: int, world: int) -> None:
    channel = make_pool().channel("gather", SLOT)
    with torch.inference_mode():
        run_exchanges(channel, 2)
    peers, signals = channel.begin((world, ROWS, WIDTH), torch.float32)  # views from inference mode
    assert not any(tensor.is_inference() for tensor in (*peers, *signals.pads, signals.table, signals.state))
    weight = torch.ones((), requires_grad=True)
    push(peers, signals, 2.0)
    (weight * pull(peers, signals)).sum().backward()
    channel.end()
    assert weight.grad == expected_rows(world, 2.0).sum()


def test_inference_mode_leaves_nothing_that_training_cannot_use(ranks: Any):
    ranks(2, _inference_body)


# --- growth and budget ------------------------------------------------------------------------------------------------


def _growth_body(rank: int, world: int) -> None:
    pool = make_pool()
    gather, last = pool.channel("gather", SLOT), pool.channel("last", SLOT)
    run_exchanges(gather, 3)
    run_exchanges(last, 2)
    assert pool.channel("gather", 16 * SLOT) is gather  # moves the other one
    assert run_exchanges(gather, 2) == [4, 5]
    assert run_exchanges(last, 2) == [3, 4]
    peers, _ = gather.begin((16 * SLOT // 4,), torch.float32)
    assert peers[rank].nbytes == 16 * SLOT
    assert "cannot move while an exchange is under way: exchange (channel 'gather', torch.float32 [960])" in said_by(
        lambda: pool.channel("gather", 17 * SLOT)
    )


def test_channels_grow_between_exchanges_and_go_on_counting(ranks: Any):
    ranks(2, _growth_body)


def _reserve_body(rank: int, world: int) -> str:
    room = layout({**own_slots(world), "gather": SLOT}, world)[1]
    pool = make_pool(bytes=room)
    gather = pool.channel("gather", SLOT)
    run_exchanges(gather, 1)
    error = said_by(lambda: pool.channel("reduce", SLOT), ValueError)
    needed = int(error.partition("make it with bytes=")[2].split()[0])
    assert make_pool(bytes=needed) is pool
    run_exchanges(pool.channel("reduce", SLOT), 2)
    assert run_exchanges(gather, 1) == [2]
    return error


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_would_do(ranks: Any):
    errors = ranks(2, _reserve_body)
    assert errors[0] == errors[1]
    assert (
        "the channels 'barrier' (2 x 0 B), 'probe' (2 x 16.0 KiB), 'gather' (2 x 240 B), 'reduce' (2 x 240 B) take "
        in errors[0]
    )


def test_budget_is_a_table_of_bytes_by_channel():
    (pool, _) = SymmetricMemoryPool.virtual(2, 64 << 10)
    pool.channel("gather", 1000)
    assert pool.budget() == textwrap.dedent("""\
        symmetric memory, on each of 2 ranks
          channel  slots         bytes
          barrier  2 x 0 B       1.0 KiB
          probe    2 x 16.0 KiB  33.0 KiB
          gather   2 x 1000 B    3.0 KiB
          total                  37.0 KiB of 64.0 KiB""")
    assert text(3 << 30) == "3.0 GiB"


@pytest.mark.parametrize(("ranks_", "tokens"), [(2, 7), (3, 7), (8, 4096)])
def test_a_models_channels_fill_its_pool_to_the_byte(ranks_: int, tokens: int):
    sizes = {"hidden": 24, "tokens": tokens, "dtype": torch.bfloat16, "ranks": ranks_}
    slots, needed = model_slots(**sizes), pool_bytes(**sizes)
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
        pool = SymmetricMemoryPool.virtual(ranks_, room)[0]
        for name in ("gather", "reduce", "decode"):
            pool.channel(name, slots[name])
        if fits:
            pool.channel("decode2", slots["decode2"])
        else:
            with pytest.raises(ValueError, match=f"bytes={needed} or more"):
                pool.channel("decode2", slots["decode2"])


# --- its end ----------------------------------------------------------------------------------------------------------


def _freed_body(rank: int, world: int) -> None:
    gc.collect()  # from earlier tests
    assert memory_held() == (0, 0)
    pool = make_pool()
    channel = pool.channel("gather", SLOT)
    peers = channel.begin((world, ROWS, WIDTH), torch.float32)[0]
    assert memory_held() == (world, world)
    dist.barrier()
    dist.destroy_process_group()
    peers[rank].fill_(1.0)  # a view holds its memory, and no more
    for use in (pool.barrier, lambda: pool.channel("new", 1), pool.probe, pool.check):
        assert "this pool was closed, or its process group destroyed" in said_by(use)
    del peers
    assert memory_held() == (0, 0)


def test_an_pool_goes_with_its_group(ranks: Any):
    ranks(2, _freed_body)


def _kept_body(rank: int, world: int) -> None:
    """An object still holds a destroyed group, as modules do."""
    kept = Group(dist.new_group([0, 1]), rank, world, None)
    old = make_pool(kept)
    old.barrier()
    dist.destroy_process_group(kept.pg)
    again = Group(dist.new_group([0, 1]), rank, world, None)
    new = make_pool(again)
    assert new is not old
    assert "this pool was closed" in said_by(old.barrier)
    new.barrier()
    assert "process group has been destroyed" in said_by(lambda: make_pool(kept), ValueError)
    new.close()
    new.close()
    assert make_pool(again) is not new
    assert "closed" in said_by(new.barrier)
    make_pool(again).barrier()


def test_a_new_group_never_meets_an_old_pool(ranks: Any):
    ranks(2, _kept_body)


def _cycles_body(rank: int, world: int, cycles: int) -> None:
    group = everyone()
    gc.collect()  # from earlier tests: these cycles need no collection
    counts = []
    for _ in range(cycles):
        pool = make_pool(group, bytes=64 << 10)
        pool.channel("gather", SLOT)
        pool.barrier()
        pool.close()
        counts.append(memory_held())
    assert counts == [(0, 0)] * cycles


def test_fifty_pools_leak_neither_files_nor_mappings(ranks: Any):
    ranks(2, _cycles_body, 50)


# --- virtual ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_epoch", [0, 2**31 - 3])
def test_virtual_ranks_take_turns_in_one_thread(first_epoch: int):
    """Rank 0 sends before rank 1 even requests the channel."""
    world = 3
    with counting(first_epoch):
        pools = SymmetricMemoryPool.virtual(world, 1 << 16)
    channels: list[Channel] = []
    for step in range(5):
        begun = []
        for rank, pool in enumerate(pools):
            channel = pool.channel("gather", SLOT)
            peers, signals = channel.begin((world, ROWS, WIDTH), torch.float32)
            push(peers, signals, float(step))
            begun.append((channel, peers, signals))
            channels[rank:] = [channel]
        for channel, peers, signals in begun:
            assert torch.equal(pull(peers, signals), expected_rows(world, float(step)))
            channel.end()
    assert len({channel.epoch for channel in channels}) == 1
    assert [pool.probe() for pool in pools] == [None] * world


def test_virtual_ranks_with_a_thread_each_meet_and_rebase():
    world, failures = 3, []
    with counting(2**31 - 4, rebase_every=2):
        pools = SymmetricMemoryPool.virtual(world, 1 << 16, timeout_s=TIMEOUT_S)

    def run(pool: SymmetricMemoryPool) -> None:
        try:
            run_exchanges(pool.channel("gather", SLOT), 7)
            pool.barrier()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert {pool._channels["gather"].epoch for pool in pools} == {-(2**31) + 3}


def test_channels_of_virtual_ranks_stay_where_they_are():
    pools = SymmetricMemoryPool.virtual(2, 1 << 16)
    for pool in pools:
        channel = pool.channel("gather", SLOT)
        channel.begin((1,), torch.float32)
        channel.end()
    pools[0].channel("behind", SLOT)  # moves nothing
    with pytest.raises(
        RuntimeError, match="channel 'gather' is in use, and the other virtual ranks have its addresses"
    ):
        pools[0].channel("gather", 2 * SLOT)


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_device_counted_exchanges_see_both_slots():
    with counting(6):
        pools = SymmetricMemoryPool.virtual(2, 1 << 16)
    channel, host = pools[1].channel("decode", SLOT), pools[1].channel("host", SLOT)
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
        pools[1].channel("decode", 2 * SLOT)


def test_graph_capture(monkeypatch: pytest.MonkeyPatch):
    """A capture supports neither the host's count nor memory allocation; everything else works."""
    (pool,) = SymmetricMemoryPool.virtual(1, 1 << 16)
    channel, decode = pool.channel("gather", SLOT), pool.channel("decode", SLOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capturing()
    with pytest.raises(RuntimeError, match=r"channel 'gather': begin\(\) inside graph capture: .*device_counted"):
        channel.begin((1,), torch.float32)
    with pytest.raises(RuntimeError, match=r"first use, which cannot be inside graph capture: probe\(\) the pool"):
        decode.device_counted((1,), torch.float32)
    monkeypatch.undo()
    pool.settle()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    decode.device_counted((1,), torch.float32)
