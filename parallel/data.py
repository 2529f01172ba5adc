"""Samplers and loaders that give each data-parallel rank its share of the samples and resume within an epoch.

Data is split over the data-parallel ranks alone: tensor-parallel ranks and the stages of a pipeline see the same batch.
The order is that of torch's DistributedSampler over all shares together, so a position in it does not depend on the
number of shares: a run that stops with four data-parallel ranks can resume with two and reads every sample of the epoch
once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from .core.mesh import data_coordinate

__all__ = ["DataSampler", "ResumableLoader", "data_loader", "data_sampler"]

# Two runs must agree on these for a position in the order to mean the same samples.
_ORDER = ("samples", "shuffle", "seed")


def data_sampler(
    dataset: Sized, mesh: DeviceMesh | None = None, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DataSampler:
    """The sampler of this process's share of ``dataset``; without a mesh that is all of it.

    The options are DistributedSampler's: ``drop_last`` drops the samples that do not divide by the number of shares;
    otherwise samples from the epoch's start fill the gap. Raises ValueError where a share would be empty.
    """
    share, shares = data_coordinate(mesh)
    return DataSampler(dataset, share, shares, shuffle=shuffle, seed=seed, drop_last=drop_last)


def data_loader(
    dataset: Dataset[Any],
    mesh: DeviceMesh | None = None,
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> ResumableLoader:
    """A DataLoader of this process's share, ``batch_size`` samples at a time; ``options`` are DataLoader's.

    Save ``loader.sampler``: it counts the batches that were returned, not those that the loader's workers have read
    ahead. ``drop_last`` also drops a last batch that is not full.
    """
    sampler = data_sampler(dataset, mesh, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
    return ResumableLoader(dataset, sampler, batch_size=batch_size, drop_last=drop_last, **options)


class DataSampler(DistributedSampler[int]):
    """torch's DistributedSampler with a resumable position.

    ``consumed`` counts samples of the epoch over all shares. Iterating yields the rest of the epoch and counts nothing,
    because an iterating worker may read ahead: :meth:`advance` counts (:class:`ResumableLoader` calls it). A consumed
    epoch ends by itself; the next one starts from its beginning, in an order of its own.

    A saved position can be loaded with another number of shares.
    """

    def __init__(
        self, dataset: Sized, share: int, shares: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        samples = len(dataset)
        if samples < (shares if drop_last else 1):
            raise ValueError(
                f"dataset: it has {samples} samples for {shares} data-parallel ranks"
                f"{' and drop_last=True' if drop_last else ''}, which leaves ranks without any; give more data"
            )
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=shares,
            rank=share,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.samples = samples
        self.consumed = 0

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        left = order[self.consumed :]
        wanted = len(self) * self.num_replicas
        left = left[:wanted]
        while len(left) < wanted:
            left += order[: wanted - len(left)]
        return iter(left[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        """The number of this share's samples left in the epoch."""
        left = self.samples - self.consumed
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def _order(self) -> list[int]:
        """The epoch's order over all shares, by torch's own sampler."""
        whole: DistributedSampler[int] = DistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.epoch)
        return list(whole)

    def advance(self, samples: int) -> None:
        """Record that every share has used ``samples`` more; at the end of the epoch the next one begins."""
        self.consumed += samples * self.num_replicas
        if len(self) <= 0:
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of ``epoch``, unless it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank, and the data set and order that it refers to."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position; the number of shares may differ.

        Raises ValueError for a position in another dataset or order.
        """
        ours = self._fingerprint()
        for name in _ORDER:
            if state.get(name) != ours[name]:
                raise ValueError(
                    f"the sampler's position was saved with {name}={state.get(name)}, and here {name}={ours[name]}: "
                    "the same position would be other data; use the same dataset, shuffle and seed, or start afresh"
                )
        self.epoch, self.consumed = state["epoch"], state["consumed"]
        if len(self) <= 0:  # the rest does not give every share a sample
            self.set_epoch(self.epoch + 1)

    def workers_seed(self) -> int:
        """A seed for the workers that read this share from here on; it differs by share, epoch and position."""
        place = (self.seed, self.rank, self.epoch, self.consumed)
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=7).digest(), "little")

    def _fingerprint(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ORDER}


class ResumableLoader(DataLoader[Any]):
    """A DataLoader whose sampler counts the samples that were returned.

    Iterating yields the rest of the epoch. A state saved after a batch's step includes that batch. The loader draws its
    workers' seeds from a generator of its own, so that restarting it within an epoch does not advance torch's. Workers
    draw different numbers on every share of the data and from every starting point, unless ``generator`` is given.
    """

    sampler: DataSampler

    def __init__(self, dataset: Dataset[Any], sampler: DataSampler, *, batch_size: int, **options: Any) -> None:
        if options.get("drop_last") and sampler.num_samples < batch_size:
            raise ValueError(
                f"batch_size={batch_size}: a data-parallel rank has {sampler.num_samples} samples in an epoch, so with "
                "drop_last=True there is no batch; give more data, or use a smaller batch or drop_last=False"
            )
        self._own_generator = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self._own_generator)
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **options)
        self._size = batch_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._skip_scraps()  # after a position that was saved with smaller batches
        if self._own_generator is not None:
            self._own_generator.manual_seed(self.sampler.workers_seed())
        for batch in super().__iter__():
            self.sampler.advance(min(self._size, len(self.sampler)))
            self._skip_scraps()
            yield batch

    def _skip_scraps(self) -> None:
        """End an epoch that has no whole batch left, if the caller wants only whole ones."""
        if self.drop_last and len(self.sampler) < self._size:
            self.sampler.set_epoch(self.sampler.epoch + 1)
