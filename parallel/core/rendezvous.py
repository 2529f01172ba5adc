"""The rendezvous of processes that torchrun has restarted, safe from the addresses of dead processes.

torchrun's agent keeps a store in which its processes meet, and torch (2.13) gives them the same store after each
restart: it still holds the entries of the previous processes, including their addresses. A restarted process can read
stale addresses and hang. The restart count does not identify a start either, because each machine's agent counts its
own (pytorch issue 135712). So rank 0 gives each start a name.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

LEADER = "shardfuse/leader"
PATIENCE = timedelta(seconds=2)  # how long a rank trusts a name, perhaps of an earlier start, before it reads again
PAUSE_S = 0.05


def agent_store(timeout: timedelta | None) -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) for ``init_process_group`` where torchrun keeps the store, None elsewhere.

    A collective of all processes. Raises dist.DistError where they do not connect within ``timeout``.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = default_pg_timeout if timeout is None else timeout
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(start_name(store, rank, world, timeout), store), rank, world


def start_name(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name that rank 0 has given to exactly these ``world`` processes.

    Rank 0 publishes a new name, the others answer under it, and once all have answered it is valid. A rank recognises
    the name of an earlier rank 0 by its answers: its own is not among them.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        name = f"shardfuse/{mine}"
        store.set(LEADER, name)
        places = [f"{name}/{other}" for other in range(1, world)]
        store.wait(places, timeout)
        answers = [store.get(place).decode() for place in places]
        store.set(f"{name}/answers", " ".join(answers))
        return name
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get(LEADER).decode()
        store.set(f"{name}/{rank}", mine)
        try:
            store.wait([f"{name}/answers"], PATIENCE)
        except dist.DistStoreError:
            continue
        if mine in store.get(f"{name}/answers").decode().split():
            return name
        time.sleep(PAUSE_S)
    raise dist.DistStoreError(f"rank 0 of {world} did not connect within {timeout}")
