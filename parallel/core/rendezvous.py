"""Where processes that torchrun started again find each other, and not those that died.

torchrun's agent keeps a store that its processes meet in, and torch (2.13) hands them the same one each time that they
are started: what the last ones left there, addresses of theirs included, is still in it. A restarted
process can read stale addresses and hang. The count of restarts does not tell one start from the next either: each
machine's agent counts those of its own (pytorch issue 135712). So rank 0 gives each start a name.
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
PATIENCE = timedelta(seconds=2)  # with a name that may be one of an earlier start, before it is asked for again
PAUSE_S = 0.05


def agent_store(timeout: timedelta | None) -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) for ``init_process_group`` where torchrun keeps the store, None elsewhere.

    A collective of all processes. Raises dist.DistError where they do not come within ``timeout``.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = default_pg_timeout if timeout is None else timeout
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(start_name(store, rank, world, timeout), store), rank, world


def start_name(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name that these ``world`` processes have got from their rank 0, and no others before or after them.

    Rank 0 says a new one, the others answer under it, and with everybody's answer it is good. An earlier rank 0's is
    seen by its answers: one's own is not among them.
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
    raise dist.DistStoreError(f"rank 0 of {world} did not come within {timeout}")
