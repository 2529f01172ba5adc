"""torch.distributed over the virtual ranks of one emulation: each rank's thread has a default group of its own.

    with groups(world) as network:  # shardfuse.kernels.dev.ptx.ranks.world
        # in the thread of a rank, between world.start() and its end:
        with network.joined():
            mesh = init_device_mesh("cpu", (world.ranks,), mesh_dim_names=("tp",))

The group is torch's group of threads (torch.testing), which moves the data. Its waits would block the thread that holds
the baton, so here they pass the baton on. A collective orders the ranks' hosts: what comes after a rank's wait comes
after all that came before the others' calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from shardfuse.kernels.dev.ptx.ranks.world import World, current
from shardfuse.parallel.overlap.memory import pool

BACKEND = "virtual"


class Wait(dist.Work):
    """What a call returns: :meth:`wait` passes the baton on until ``call`` is complete."""

    def __init__(self, call: Call, rank: int) -> None:
        super().__init__()
        self.call, self.rank = call, rank

    def wait(self, timeout: object = None) -> bool:
        world, actor = self.call.world, current()
        assert actor is not None
        while not self.call.done:
            actor.pause(lambda: [f"waits in {self.call.name} for {self.call.missing}"])
        for view in self.call.views.values():
            world.host_view[self.rank] = world.clocks.join(world.host_view[self.rank], view)
        return True


class Call:
    """A collective: what the ranks bring, and the view of each when it came. ``join`` is as torch's ``Collective``'s.

    ``work`` moves the data as soon as all of ``ranks`` have come.
    """

    def __init__(self, world: World, work: Any, name: str, ranks: list[int]) -> None:
        self.world, self.work, self.name, self.ranks = world, work, name, ranks
        self.brought: dict[int, Any] = {}
        self.views: dict[int, int] = {}
        self.done = False

    @property
    def missing(self) -> str:
        return ", ".join(f"rank {rank}" for rank in self.ranks if rank not in self.brought)

    def join(self, rank: int, data: Any) -> Wait:
        self.world.progress = True
        self.brought[rank], self.views[rank] = data, self.world.host_knows(rank)
        if not self.missing:
            self.work.work([self.brought[each] for each in self.ranks])
            self.done = True
        return Wait(self, rank)


class Network:
    """The calls of a world's ranks; ``counts`` says how often each rank has made each: "AllGather", "Message"."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts = [Counter[str]() for _ in range(world.ranks)]
        self._made: Counter[Any] = Counter()  # by rank and what the ranks' calls have in common
        self._calls: dict[Any, Call] = {}

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Within the block this thread's default process group is the ranks'."""
        actor = current()
        assert actor is not None
        store = dist.HashStore()  # of this rank alone, so that nothing can wait in it
        dist.init_process_group(BACKEND, rank=actor.rank, world_size=self.world.ranks, store=store)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def started(self, work: Any, pg: ThreadGroup) -> Call:
        """In place of ``ProcessLocalGroup._start_coll``: the call that the ranks' nth one in a group is."""
        return self.call(work, pg._rank, f"in group {pg.pg_name}", list(range(pg.size())))

    def call(self, work: Any, rank: int, where: object, ranks: list[int]) -> Call:
        """The nth of this rank's calls ``where``; raises RuntimeError if another rank's nth one was of another kind."""
        kind = type(work).__name__
        nth = self._made[where, rank]
        self._made[where, rank] += 1
        self.counts[rank][kind] += 1
        call = self._calls.setdefault((where, nth), Call(self.world, work, f"{kind} {nth} {where}", ranks))
        if type(call.work) is not type(work):
            raise RuntimeError(f"rank {rank} calls {kind}, and another rank {call.name}: ranks make the same calls")
        if len(call.brought) == len(ranks) - 1:
            del self._calls[where, nth]
        return call


class Message:
    """A sender's tensor into a receiver's."""

    def work(self, data: list[Any]) -> None:
        sent, into = data
        into.copy_(sent)


class ThreadGroup(threaded.ProcessLocalGroup):
    """torch's group of threads, with messages and with what ``parallel/core`` asks of a group."""

    network: Network  # of the block of :func:`groups`

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ThreadGroup:
        return self

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Wait:
        return self._message(tensors[0].clone(), self._rank, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Wait:
        return self._message(tensors[0], source, self._rank, tag)

    def _message(self, tensor: torch.Tensor, source: int, to: int, tag: int) -> Wait:
        where = f"of tag {tag} from rank {source} to rank {to} in group {self.pg_name}"
        return self.network.call(Message(), self._rank, where, [source, to]).join(self._rank, tensor)


class _Worlds(threaded.ThreadLocalWorld):
    comms = property(lambda self: [])  # torch 2.11's destroy_process_group asks for them


def _create(store: object, rank: int, size: int, timeout: object) -> ThreadGroup:
    return ThreadGroup(rank, size)


# DTensors enter this mode. Without a GPU its first user's thread keeps a guard of CUDA devices for all others (c10's
# ensureCUDADeviceGuardSet), so the first one is a thread that lasts.
with FakeTensorMode():
    pass

dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


@contextlib.contextmanager
def groups(world: World) -> Iterator[Network]:
    """Within the block the threads of ``world``'s ranks may join a network of process groups."""
    network = Network(world)
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (sys, "excepthook", sys.excepthook),  # which each group of torch's wraps
            (c10d, "_world", _Worlds()),
            (threaded.ProcessLocalGroup, "_start_coll", network.started),
            (threaded.ProcessLocalGroup, "_end_coll", lambda call, pg: None),
            (pool, "_exists", lambda pg: True),  # it asks this thread, which knows no other rank's group
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(mock.patch.object(ThreadGroup, "network", network, create=True))
        isolate(True)
        stack.callback(isolate, False)
        yield network
