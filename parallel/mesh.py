"""Which processes work together, and on what: the device mesh and its tensor-parallel groups.

A mesh has the dimensions ``("dp", "pp", "tp")``: data-parallel replicas, pipeline stages, tensor-parallel ranks.
Tensor-parallel ranks are neighbours, because they talk most. A process that is alone needs no mesh and no process
group; everything then takes ``None``.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESH_DIMS = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Group:
    """The ranks that share a tensor: a process group, and where this process stands in it.

    ``pg`` is the ProcessGroup, ``mesh`` the same as a one-dimensional DeviceMesh, for DTensor. Both are None for a
    process alone.
    """

    pg: Any
    rank: int
    size: int
    mesh: DeviceMesh | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # process groups cannot be copied, and a copied module works in the same one

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.size})"


SINGLE = Group(None, 0, 1, None)

MeshLike = DeviceMesh | dist.ProcessGroup | Group | None


def init_mesh(
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int | None = None,
    device_type: str | None = None,
    timeout: timedelta | None = None,
) -> DeviceMesh | None:
    """The mesh ``("dp", "pp", "tp")`` over all processes, or None when this process is alone.

    Reads what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and initialises torch.distributed
    if nobody has: gloo on a CPU, NCCL with ``device_type="cuda"``, which also selects this process's GPU.
    ``tp=None`` takes what ``dp`` and ``pp`` leave of the world. ``device_type=None`` is "cuda" where there is a GPU.
    ``timeout`` bounds every collective; None is torch's default.

    Raises ValueError where ``dp * pp * tp`` is not the world size, or a machine has fewer GPUs than processes;
    RuntimeError where the processes cannot meet.
    """
    world = _world_size()
    shape = _mesh_shape(dp, pp, tp, world)
    if world == 1 and not dist.is_initialized():
        return None
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda":
        _select_gpu()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RuntimeError(
                f"init_mesh: the {world} processes could not meet at {where} (MASTER_ADDR:MASTER_PORT); is the port in "
                "use, or a process gone? torchrun --standalone finds a free port"
            ) from error
        if device_type == "cpu":
            atexit.register(shutdown)  # gloo's threads, still running when the process ends, may abort it
    return init_device_mesh(device_type, shape, mesh_dim_names=MESH_DIMS)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _mesh_shape(dp: int, pp: int, tp: int | None, world: int) -> tuple[int, int, int]:
    for name, degree in (("dp", dp), ("pp", pp), ("tp", tp)):
        if degree is not None and degree < 1:
            raise ValueError(f"init_mesh: {name}={degree}: expected at least 1")
    if tp is None:
        if world % (dp * pp):
            raise ValueError(
                f"init_mesh: dp={dp} * pp={pp} does not divide the {world} processes that were started; "
                f"change the degrees, or start a multiple of {dp * pp} processes"
            )
        tp = world // (dp * pp)
    if dp * pp * tp != world:
        raise ValueError(
            f"init_mesh: dp={dp} * pp={pp} * tp={tp} = {dp * pp * tp}, but {world} "
            f"{'process was' if world == 1 else 'processes were'} started; change the degrees, or start "
            f"{dp * pp * tp} processes (torchrun --nproc-per-node {dp * pp * tp} ...)"
        )
    return dp, pp, tp


def _select_gpu() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"init_mesh: this process has local rank {local_rank}, but the machine has {torch.cuda.device_count()} "
            "GPUs; start at most one process per GPU, or pass device_type='cpu'"
        )
    torch.cuda.set_device(local_rank)


def shutdown() -> None:
    """Leave torch.distributed. Does nothing for a process alone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def tp_group(mesh: MeshLike, dim: str = "tp") -> Group:
    """The group in ``mesh`` that shares tensors: a mesh with a dimension ``dim``, any one-dimensional mesh, a process
    group, a Group, or None for a process alone.

    Raises ValueError for a mesh of several dimensions without ``dim``, TypeError for anything else.
    """
    if mesh is None:
        return SINGLE
    if isinstance(mesh, Group):
        return mesh
    if isinstance(mesh, dist.ProcessGroup):
        device_type = "cuda" if "nccl" in dist.get_backend_config(mesh) else "cpu"
        mesh = DeviceMesh.from_group(mesh, device_type)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, ProcessGroup, Group or None, not {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if dim in names and mesh.ndim > 1:
        mesh = mesh[dim]
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: its dimensions {names or mesh.ndim} hold no {dim!r}, so which ranks share a tensor is open; "
            f"pass a one-dimensional sub-mesh (mesh[{names[-1]!r}])"
            if names
            else f"mesh: it has {mesh.ndim} dimensions without names; pass a one-dimensional mesh, or name one {dim!r}"
        )
    return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh)


def everyone() -> Group:
    """All processes, as a group without a mesh."""
    if not dist.is_initialized():
        return SINGLE
    return Group(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), None)


def data_coordinate(mesh: DeviceMesh | None) -> tuple[int, int]:
    """(which share of the data this process reads, of how many): ranks with the same share see the same batch."""
    if mesh is None:
        return 0, 1
    if "dp" not in (mesh.mesh_dim_names or ()):
        return 0, 1
    return mesh.get_local_rank("dp"), mesh["dp"].size()
