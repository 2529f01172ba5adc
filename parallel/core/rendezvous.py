"""Connect the processes: :func:`init_mesh` makes them meet and returns the mesh that all of them request.

The rendezvous is safe from the addresses of dead processes. torchrun's agent keeps a store in which its processes meet,
and torch (2.13) gives them the same store after each restart: it still holds the entries of the previous processes,
including their addresses. A restarted process can read stale addresses and hang. The restart count does not identify a
start either, because each machine's agent counts its own (pytorch issue 135712). So rank 0 gives each start a name.
"""

from __future__ import annotations

import atexit
import errno
import ipaddress
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from ...kernels.runtime.checks import whole_number
from .agreement import agree_on
from .mesh import everyone, share_timeout, shared_options

T = TypeVar("T")

LEADER = "shardfuse/leader"
PATIENCE = timedelta(seconds=2)  # how long a rank trusts a name, which may be an earlier start's, before it reads again
PAUSE_S = 0.05
MARGIN_S = 1.0  # beyond gloo's own timeout, whose error says more
COMPARED_VARIABLES = ("SHARDFUSE_IMPL", "SHARDFUSE_ROW_INVARIANT")  # they select kernels, and so the numbers


def init_mesh(
    *,
    dp_replicate: int = 1,
    dp: int = 1,
    pp: int = 1,
    tp: int | None = None,
    grid: Sequence[int] | None = None,
    depth: int = 1,
    device_type: str | None = None,
    timeout: timedelta | None = None,
    alone: bool = False,
) -> DeviceMesh | None:
    """The mesh ``("dp", "pp", "tp")`` over all processes, with a dimension ``"dp_replicate"`` in front if that is > 1.

    ``grid`` (i, j, k), or (rows, columns) with copies over ``depth``, takes the place of ``tp`` (``parallel/grid/``):
    the mesh then ends in the dimensions ("grid_k", "grid_j", "grid_i"), or ("grid_k", "grid_i") of i rows and k
    columns, with "grid_depth" in front if that is > 1.

    None for a single process. With ``alone`` it gets a mesh of one instead (FSDP2 needs one to offload):
    torch.distributed is initialised, and the mesh uses the current GPU.

    Reads torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and initialises
    torch.distributed unless the program already has: gloo on a CPU, NCCL with ``device_type="cuda"``, which also
    selects this process's GPU. ``tp=None``: the world size divided by the other degrees. ``device_type=None`` is "cuda"
    where there is a GPU. ``timeout`` bounds every collective of the processes and of the mesh's groups, including
    groups made of it later; None is the default process group's timeout, which is torch's default if this call starts
    it.

    Raises ValueError where the product of the degrees is not the world size, ``grid`` has another form, a variable of
    torchrun's is missing, the machine has no such device or fewer GPUs than processes, or the ranks ask for different
    meshes; RuntimeError where the processes cannot connect. An error on one rank is raised on all.
    """
    world = _world_size()
    single = world == 1 and not dist.is_initialized()
    device_type = default_device() if device_type is None else device_type
    if single:
        shape = _mesh_shape(dp_replicate, dp, pp, tp, grid, depth, world)
        _check_device(device_type)
        if not alone:
            return None
        if device_type == "cuda":
            torch.cuda.init()  # without it DeviceMesh would choose another GPU than the current one
    connect(device_type if torch.cuda.is_available() else "cpu", timeout)
    if not single:  # connected first, so that one rank's error reaches the others

        def work() -> dict[str, int]:
            found = _mesh_shape(dp_replicate, dp, pp, tp, grid, depth, world)
            _check_device(device_type)
            if device_type == "cuda":
                _select_gpu()
            return found

        def facts(shape: dict[str, int]) -> dict[str, str]:
            given = {"device_type": device_type, "timeout": str(timeout), **_surroundings()}
            return {name: str(size) for name, size in shape.items()} | given

        shape = agree_on(everyone(), work, facts, what="init_mesh")
    options = shared_options(device_type)
    smaller: Any = {} if options is None else {name: options for name, n in shape.items() if n < world}

    def make() -> DeviceMesh:
        sizes = tuple(shape.values())
        return init_device_mesh(device_type, sizes, mesh_dim_names=tuple(shape), backend_override=smaller)

    try:
        # A new thread would have another current GPU.
        bound = timeout if timeout is not None or options is None else options._timeout
        mesh = make() if device_type == "cuda" or single else _within(bound, make)
    except RuntimeError as error:
        raise RuntimeError(f"init_mesh: its groups could not be made; is a process gone? ({error})") from error
    for pg in mesh.get_all_groups():
        share_timeout(pg)
    return mesh


def default_device() -> str:
    """The default type of the processes' devices."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def connect(device_type: str, timeout: timedelta | None) -> None:
    """Initialise torch.distributed over the processes that torchrun's variables describe, or this one alone.

    Where the program already has, only the ``timeout`` is set. Raises as :func:`init_mesh` does.
    """
    if dist.is_initialized():
        if timeout is not None:
            set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.15
            set_timeout(timeout)
        return
    world = _world_size()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        if world == 1:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        else:
            _check_variables(world)
            store, rank, _ = agent_store(timeout) or own_store(timeout)

            def initialise() -> None:
                dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)

            _within(timeout, initialise)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RuntimeError(
            f"init_mesh: the {world} processes could not connect at {where} (MASTER_ADDR:MASTER_PORT); is the port "
            f"in use, or a process gone? torchrun --standalone finds a free port ({error})"
        ) from error
    if device_type == "cpu":
        atexit.register(shutdown)  # at exit, because this function made the groups


def _within(timeout: timedelta | None, work: Callable[[], T]) -> T:
    """Run ``work()`` for hardly longer than ``timeout`` (None: torch's default).

    gloo's own timeout does not bound every wait of its connection: a peer killed during the handshake leaves it waiting
    for ever (torch 2.13). Therefore ``work`` runs in a thread, which stays behind after the timeout. Raises
    RuntimeError.
    """
    seconds = (default_pg_timeout if timeout is None else timeout).total_seconds()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="shardfuse-connect", daemon=True)
    thread.start()
    thread.join(seconds + MARGIN_S)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"gloo still waited after {seconds + MARGIN_S:.0f} s")
    return results[0]


def agent_store(timeout: timedelta | None) -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) for ``init_process_group`` where torchrun keeps the store, None elsewhere.

    A collective of all processes. Raises dist.DistError where they do not connect within ``timeout``.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = default_pg_timeout if timeout is None else timeout
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store_client(timeout)
    return dist.PrefixStore(start_name(store, rank, world, timeout), store), rank, world


def own_store(timeout: timedelta | None) -> tuple[dist.Store, int, int]:
    """The result of :func:`agent_store` if rank 0 keeps the store instead.

    Processes that start a second time can reach rank 0's earlier store, which ends once rank 0 has left it too. A rank
    that has lost its store therefore connects again.
    """
    timeout = default_pg_timeout if timeout is None else timeout
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        store = _store_server(timeout)
        return dist.PrefixStore(start_name(store, rank, world, timeout), store), rank, world
    deadline = time.monotonic() + timeout.total_seconds()
    left = timeout
    while True:
        store = _store_client(left)
        try:
            return dist.PrefixStore(start_name(store, rank, world, left), store), rank, world
        except dist.DistNetworkError:
            left = timedelta(seconds=deadline - time.monotonic())
            if left <= timedelta():
                raise


def _store_server(timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT."""
    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    try:
        # A machine's own name may be a loopback address for itself, and another one for other machines.
        if host != "localhost" and os.environ.get("LOCAL_WORLD_SIZE") != str(world):
            ipaddress.ip_address(host)
        found = ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError):  # a name, which torch resolves
        found = None
    if found is None or not found.is_loopback:
        return next(rendezvous("env://", timeout=timeout))[0]
    try:
        return loopback_store(port, world, timeout, host=str(found))
    except OSError as error:
        raise dist.DistNetworkError(f"{host}:{port} cannot be listened on: {error}") from error


def loopback_store(
    port: int = 0, world: int | None = None, timeout: timedelta = default_pg_timeout, host: str = "127.0.0.1"
) -> dist.TCPStore:
    """A store that listens on the loopback interface alone, where torch's own listens on all; 0 is any free port.

    With ``world`` it waits for so many processes. Raises OSError or dist.DistError for a port that cannot be used.
    """
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": world is not None}
    options["multi_tenant"] = True  # a store of this process that listens there already is used again
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return dist.TCPStore(host, port, world, **options)
    with listener:
        fd = os.dup(listener.fileno())
        return dist.TCPStore(host, listener.getsockname()[1], world, master_listen_fd=fd, **options)


def _store_client(timeout: timedelta) -> dist.Store:
    """A connection to the store at MASTER_ADDR and MASTER_PORT.

    torch's client (2.13) pauses longer and longer between attempts, and gives up only after up to 2.5 times its
    timeout. Therefore this function gives it a quarter of ``timeout``, and starts it only when the port accepts
    connections.

    Raises dist.DistNetworkError.
    """
    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), max(PAUSE_S, deadline - time.monotonic())).close()
            store = dist.TCPStore(host, port, world, is_master=False, timeout=timeout / 4)
            store.set_timeout(timeout)
            return store
        except (OSError, dist.DistError) as error:
            if time.monotonic() >= deadline:
                raise dist.DistNetworkError(f"no store answered within {timeout}: {error}") from error
        time.sleep(PAUSE_S)


def start_name(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """The name that rank 0 has given to exactly these ``world`` processes.

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


def _surroundings() -> dict[str, str]:
    package = sys.modules[__name__.partition(".")[0]]  # also has a version for a source tree that is not installed
    variables = {name: os.environ.get(name, "not set") for name in COMPARED_VARIABLES}
    return {"torch's version": torch.__version__, "shardfuse's version": package.__version__, **variables}


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_variables(world: int) -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"init_mesh: WORLD_SIZE={world} but no {', no '.join(missing)}: start the processes with torchrun, which "
            "sets all of them"
        )


def _mesh_shape(
    dp_replicate: int, dp: int, pp: int, tp: int | None, grid: Sequence[int] | None, depth: int, world: int
) -> dict[str, int]:
    """The mesh's dimensions, in order, each with its size."""
    for name, degree in (("dp_replicate", dp_replicate), ("dp", dp), ("pp", pp), ("tp", tp), ("depth", depth)):
        if degree is not None:
            whole_number(f"init_mesh: {name}", degree)
    hybrid = {"dp_replicate": dp_replicate} if dp_replicate > 1 else {}
    outer = {**hybrid, "dp": dp, "pp": pp}
    others = " * ".join(f"{name}={size}" for name, size in outer.items())
    rest = math.prod(outer.values())
    if grid is not None:
        inner, said = _grid_shape(grid, depth, tp)
        if depth > 1 and dp_replicate * dp > 1:
            raise ValueError(
                f"init_mesh: depth={depth} and dp={dp_replicate * dp}: FSDP2 cannot place parameters over a depth; "
                f"dp={dp_replicate * dp * depth} over the same grid makes as many copies of the weights"
            )
    elif depth != 1:
        raise ValueError(f"init_mesh: depth={depth} without a grid: pass grid=(rows, columns) as well")
    else:
        if tp is None:
            if world % rest:
                raise ValueError(
                    f"init_mesh: {others} does not divide the {world} processes that were started; "
                    f"change the degrees, or start a multiple of {rest} processes"
                )
            tp = world // rest
        inner, said = {"tp": tp}, f"tp={tp}"
    total = rest * math.prod(inner.values())
    if total != world:
        raise ValueError(
            f"init_mesh: {others} * {said} = {total}, but {world} "
            f"{'process was' if world == 1 else 'processes were'} started; change the degrees, or start "
            f"{total} processes (torchrun --nproc-per-node {total} ...)"
        )
    return outer | inner


def _grid_shape(grid: Sequence[int], depth: int, tp: int | None) -> tuple[dict[str, int], str]:
    """The dimensions of a grid in a mesh, and how errors call it."""
    if not isinstance(grid, Sequence):
        raise ValueError(f"init_mesh: grid={grid!r}: expected the sizes of its axes, (i, j, k) or (rows, columns)")
    if tp not in (None, 1):
        raise ValueError(f"init_mesh: tp={tp} and grid={tuple(grid)}: a grid takes the place of tp; pass one of them")
    for size in grid:
        whole_number("init_mesh: each size of the grid", size)
    if len(grid) == 3 and depth == 1:
        i, j, k = grid
        return {"grid_k": k, "grid_j": j, "grid_i": i}, f"grid={tuple(grid)}"
    if len(grid) == 2:
        i, k = grid
        copies = {} if depth == 1 else {"grid_depth": depth}
        return copies | {"grid_k": k, "grid_i": i}, f"grid={tuple(grid)} * depth={depth}"
    raise ValueError(
        f"init_mesh: grid={tuple(grid)} with depth={depth}: expected (i, j, k) without a depth, or (rows, columns)"
    )


def _check_device(device_type: str) -> None:
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"init_mesh: device_type={device_type!r}: expected 'cpu', 'cuda' for GPUs, or None")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "init_mesh: device_type='cuda': this machine has no GPU that torch can use; pass device_type='cpu'"
        )


def _select_gpu() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"init_mesh: this process has local rank {local_rank}, but the machine has {torch.cuda.device_count()} "
            "GPUs; start at most one process per GPU, or pass device_type='cpu'"
        )
    torch.cuda.set_device(local_rank)


def shutdown() -> None:
    """Leave torch.distributed. Does nothing for a single process."""
    if dist.is_initialized():
        dist.destroy_process_group()
