"""Only data-parallel ranks split the data, in torch's order; reading can resume in the middle of an epoch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.data import DataSampler, ResumableLoader, data_loader, data_sampler

SAMPLES = list(range(50))


def _samplers(shares: int, **options: Any) -> list[DataSampler]:
    return [DataSampler(SAMPLES, share, shares, seed=3, **options) for share in range(shares)]


def _read(samplers: list[DataSampler], batches: int, batch_size: int) -> list[list[int]]:
    """The samples that all shares together read, step by step."""
    loaders = [iter(ResumableLoader(SAMPLES, sampler, batch_size=batch_size)) for sampler in samplers]
    return [sorted(int(i) for loader in loaders for i in next(loader)) for _ in range(batches)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shares", [1, 3, 4])
def test_an_epoch_is_torchs(shares: int, drop_last: bool) -> None:
    for epoch in (0, 5):
        for share in range(shares):
            ours = DataSampler(SAMPLES, share, shares, seed=3, drop_last=drop_last)
            theirs = DistributedSampler(SAMPLES, shares, share, seed=3, drop_last=drop_last)  # type: ignore[arg-type]
            for sampler in (ours, theirs):
                sampler.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_a_dataset_smaller_than_the_ranks_is_padded_as_torch_does() -> None:
    ours = [list(DataSampler([7, 8], share, 5, seed=1)) for share in range(5)]
    theirs = [list(DistributedSampler([7, 8], 5, share, seed=1)) for share in range(5)]  # type: ignore[arg-type]
    assert ours == theirs


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_after_a_stop_are_those_of_an_uninterrupted_run(workers: int) -> None:
    """Worker processes read ahead, but the position must not."""

    def loader() -> ResumableLoader:
        return data_loader(torch.arange(50), batch_size=4, seed=3, num_workers=workers)  # type: ignore[arg-type]

    through = loader()
    want = [batch.tolist() for _ in range(2) for batch in through]
    assert sorted(i for batch in want[:13] for i in batch) == SAMPLES
    assert want[:13] != want[13:]  # another order

    first = loader()
    batches = iter(first)
    got = [next(batches).tolist() for _ in range(5)]
    state = copy.deepcopy(first.sampler.state_dict())
    assert state["consumed"] == 20

    second = loader()
    second.sampler.load_state_dict(state)
    assert len(second) == 8
    got += [batch.tolist() for _ in range(2) for batch in second]
    assert got == want


class _Noise(Dataset[torch.Tensor]):
    """Random samples, like an augmentation's."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_workers_draw_other_numbers_on_every_share_and_after_every_start() -> None:
    def first_batch(share: int, consumed: int, epoch: int = 0) -> tuple[float, ...]:
        sampler = DataSampler(SAMPLES[:8], share, 2)
        sampler.load_state_dict(sampler.state_dict() | {"epoch": epoch, "consumed": consumed})
        return tuple(next(iter(ResumableLoader(_Noise(), sampler, batch_size=2, num_workers=1))).tolist())

    drawn = [first_batch(0, 0), first_batch(1, 0), first_batch(0, 4), first_batch(0, 0, epoch=1)]
    assert len(set(drawn)) == 4
    assert first_batch(0, 4) == drawn[2]  # but the same draws at the same position


def test_a_generator_of_the_callers_is_left_to_the_caller() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = data_loader(torch.arange(8), batch_size=4, generator=generator)  # type: ignore[arg-type]
    next(iter(loader))
    drawn_once = torch.Generator().manual_seed(5)
    torch.empty((), dtype=torch.int64).random_(generator=drawn_once)  # torch's seed for the workers
    assert torch.equal(generator.get_state(), drawn_once.get_state())


@pytest.mark.parametrize("shares", [1, 2, 3, 4])
def test_another_number_of_shares_reads_the_rest(shares: int) -> None:
    """With the same global batch size, the batches are the same for any division over ranks."""
    before = _samplers(4)
    read = _read(before, 2, batch_size=3)
    after = _samplers(shares)
    for sampler in after:
        sampler.load_state_dict(before[1].state_dict())
    if 12 % shares == 0:
        uninterrupted = _samplers(1)
        assert read + _read(after, 2, batch_size=12 // shares) == _read(uninterrupted, 4, batch_size=12)
    else:
        left = [i for sampler in after for i in sampler]
        assert sorted([*left, *(i for batch in read for i in batch)]) == SAMPLES


def test_what_is_left_over_is_padded_or_dropped_and_the_epoch_ends() -> None:
    for drop_last, last in ((False, 17), (True, 16)):
        samplers = _samplers(3, drop_last=drop_last)
        assert [len(list(sampler)) for sampler in samplers] == [last] * 3
        for sampler in samplers:
            sampler.advance(last)
            assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_a_last_batch_that_is_not_full() -> None:
    kept, dropped = (
        data_loader(torch.arange(50), batch_size=8, drop_last=drop_last)  # type: ignore[arg-type]
        for drop_last in (False, True)
    )
    assert [len(batch) for batch in kept] == [8] * 6 + [2]
    assert [len(batch) for batch in dropped] == [8] * 6
    assert kept.sampler.epoch == dropped.sampler.epoch == 1
    assert kept.sampler.consumed == dropped.sampler.consumed == 0


@pytest.mark.parametrize("batch_size", [8, 4])
def test_a_position_in_an_end_that_is_dropped_goes_on_with_the_next_epoch(batch_size: int) -> None:
    """Also if it was saved with smaller batches, of which the epoch had one more."""
    options: dict[str, Any] = {"seed": 3, "drop_last": True}
    before = data_loader(torch.arange(50), batch_size=batch_size, **options)  # type: ignore[arg-type]
    batches = iter(before)
    for _ in range(48 // batch_size - (batch_size == 4)):
        next(batches)
    after, fresh = (data_loader(torch.arange(50), batch_size=8, **options) for _ in range(2))  # type: ignore[arg-type]
    after.sampler.load_state_dict(before.sampler.state_dict())
    fresh.sampler.set_epoch(1)
    assert [batch.tolist() for batch in after] == [batch.tolist() for batch in fresh]


def test_a_rest_too_small_for_the_new_shares_ends_the_epoch() -> None:
    state = DataSampler(SAMPLES, 0, 1, seed=3, drop_last=True).state_dict() | {"consumed": 48}
    sampler = DataSampler(SAMPLES, 0, 4, seed=3, drop_last=True)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_setting_the_epoch_that_is_under_way_keeps_the_position() -> None:
    sampler = _samplers(1)[0]
    sampler.advance(5)
    sampler.set_epoch(0)
    assert sampler.consumed == 5
    sampler.set_epoch(1)
    assert sampler.consumed == 0


def test_loading_again_does_not_move_torchs_generator() -> None:
    before = torch.get_rng_state()
    for _ in data_loader(torch.arange(8), batch_size=4):  # type: ignore[arg-type]
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "name"), [({"samples": 51}, "samples"), ({"seed": 4}, "seed"), ({"shuffle": False}, "shuffle")]
)
def test_a_position_in_another_order_is_refused(change: dict[str, Any], name: str) -> None:
    sampler = _samplers(1)[0]
    with pytest.raises(ValueError, match=f"was saved with {name}="):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_too_little_data_is_refused() -> None:
    with pytest.raises(ValueError, match="0 samples for 1 data-parallel ranks"):
        data_sampler([])
    with pytest.raises(ValueError, match="2 samples for 3 data-parallel ranks and drop_last=True"):
        DataSampler([1, 2], 0, 3, drop_last=True)
    with pytest.raises(ValueError, match="batch_size=9: a data-parallel rank has 8 samples"):
        data_loader(torch.arange(8), batch_size=9, drop_last=True)  # type: ignore[arg-type]


def _shares(rank: int, world: int) -> list[int]:
    return list(data_sampler(SAMPLES, init_mesh(dp=2, tp=2, device_type="cpu"), seed=3))


@pytest.mark.ranks
def test_tensor_parallel_peers_read_the_same(ranks: Any) -> None:
    read = ranks(4, _shares)
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert sorted(read[0] + read[2]) == SAMPLES
