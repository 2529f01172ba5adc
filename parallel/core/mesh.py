"""The device mesh and its groups: which processes work together.

A mesh has the dimensions ``("dp", "pp", "tp")``: data-parallel ranks, pipeline stages, tensor-parallel ranks. Hybrid
sharding adds ``"dp_replicate"`` in front: parameters are then split over dp, and dp_replicate counts the replicas of
these shards, one per node, say. Tensor-parallel ranks are neighbours, because they communicate most. A single process
needs no mesh and no process group: ``None`` takes their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MESH_DIMS = ("dp", "pp", "tp")
HYBRID_DIMS = ("dp_replicate", *MESH_DIMS)
DATA_DIMS = ("dp_replicate", "dp")  # the dimensions over which batches differ
# Those of a grid, in their order in a mesh; "grid_ji" is the last two, flattened.
GRID_DIMS = ("grid_depth", "grid_k", "grid_j", "grid_i", "grid_ji")


@dataclass(frozen=True)
class Group:
    """The ranks that share a tensor: a process group, and this process's rank in it.

    ``pg`` is the ProcessGroup, ``mesh`` the same as a one-dimensional DeviceMesh, for DTensor. Both are None for a
    single process.
    """

    pg: Any
    rank: int
    size: int
    mesh: DeviceMesh | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # process groups cannot be copied, and a copied module uses the same one

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.size})"


SINGLE = Group(None, 0, 1, None)

MeshLike = DeviceMesh | dist.ProcessGroup | Group | None


def share_timeout(pg: dist.ProcessGroup) -> None:
    """Give collectives in ``pg`` the default group's timeout, where new groups get torch's default."""
    world = dist.group.WORLD
    assert world is not None
    for device in set(pg._device_types) & set(world._device_types):
        options = getattr(_backend(world, device), "options", None)  # a fake backend has none and never waits
        if options is not None:
            _backend(pg, device)._set_default_timeout(options._timeout)


def limit_timeout(pg: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give up collectives in ``pg`` after ``timeout`` on this rank, from the next one on."""
    for device in pg._device_types:
        backend = _backend(pg, device)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)


def timeout_of(pg: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The present timeout of collectives in ``pg`` on ``device``; None for a backend that never waits."""
    options = getattr(_backend(pg, device), "options", None)
    return None if options is None else options._timeout


def shared_options(device_type: str) -> Any:
    """Options of a new group with the default group's timeout, which also bounds its creation; None: torch's own."""
    world = dist.group.WORLD
    assert world is not None
    options: Any = getattr(_backend(world, torch.device(device_type)), "options", None)
    if type(options) not in _OPTIONS:
        return None
    new = type(options)()
    new._timeout = options._timeout
    return new


_BACKENDS = [getattr(dist, name) for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(dist, name)]
_OPTIONS = [getattr(each, "_Options", each.Options) for each in _BACKENDS]


def _backend(pg: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of ``pg`` on ``device``, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = pg._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def tp_group(mesh: MeshLike, dim: str = "tp") -> Group:
    """The tensor-parallel group of ``mesh``: a mesh with a dimension ``dim``, any one-dimensional mesh, a process
    group, a Group, or None for a single process.

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
    if mesh.ndim != 1 and "grid_i" in names:
        raise ValueError(
            f"mesh: its dimensions {names} hold a grid and no {dim!r}: only GridTransformer and its layers are split "
            "over one; build those, or make a mesh with tp in the place of the grid"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: its dimensions {names or mesh.ndim} hold no {dim!r}, so the ranks that share a tensor are unknown; "
            f"pass a one-dimensional sub-mesh (mesh[{names[-1]!r}])"
            if names
            else f"mesh: it has {mesh.ndim} dimensions without names; pass a one-dimensional mesh, or name one {dim!r}"
        )
    return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh)


def ranks_of(group: Group) -> list[int]:
    """The global ranks of ``group``, in its order; [this rank] for a single process."""
    if group.pg is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group.pg)


def everyone() -> Group:
    """All processes, as a group without a mesh."""
    if not dist.is_initialized():
        return SINGLE
    return Group(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), None)


def degree(mesh: DeviceMesh | None, dim: str) -> int:
    """The number of ranks of ``mesh`` along ``dim``; 1 if the mesh lacks this dimension."""
    if mesh is None or dim not in (mesh.mesh_dim_names or ()):
        return 1
    return mesh[dim].size()


def check_dims(mesh: DeviceMesh | None) -> None:
    """ValueError for a mesh with dimensions that this library does not use: their ranks would diverge."""
    if mesh is None:
        return
    names = mesh.mesh_dim_names
    if names is None and mesh.size() > 1:
        raise ValueError(
            f"the mesh's dimensions {list(mesh.shape)} have no names, so their meaning is unknown: make it by "
            "init_mesh(), or name them (mesh_dim_names) 'dp_replicate', 'dp', 'pp' and 'tp'"
        )
    if degree(mesh, "dp_replicate") > 1 and "dp" not in (names or ()):
        raise ValueError(
            "the mesh has a dimension 'dp_replicate', which repeats the shards of 'dp', and no 'dp': name it 'dp'"
        )
    for name, size in zip(names or (), mesh.shape):
        if size > 1 and name not in (*HYBRID_DIMS, *GRID_DIMS):
            raise ValueError(
                f"the mesh has a dimension {name!r} of {size} ranks, over which nothing would be spread: expected "
                f"{', '.join(map(repr, HYBRID_DIMS))}; rename it, or pass the sub-mesh without it if its ranks are "
                "yours to keep alike"
            )


def along(mesh: DeviceMesh | None, dim: str) -> Group:
    """The group of ``mesh``'s ranks that differ along ``dim`` alone."""
    return SINGLE if mesh is None or degree(mesh, dim) == 1 else tp_group(mesh, dim)


def data_coordinate(mesh: DeviceMesh | None) -> tuple[int, int]:
    """(this process's share of the data, the number of shares): ranks with the same share see the same batch."""
    share, shares = 0, 1
    for dim in DATA_DIMS:
        if mesh is not None and degree(mesh, dim) > 1:
            share = share * degree(mesh, dim) + mesh.get_local_rank(dim)
            shares *= degree(mesh, dim)
    return share, shares


def data_group(mesh: DeviceMesh | None) -> Group:
    """The ranks that differ from this one only in their share of the data, in order of their shares.

    The first call creates a process group where ``mesh`` has both data dimensions, so every rank must call it.
    """
    dims = tuple(dim for dim in DATA_DIMS if degree(mesh, dim) > 1)
    if mesh is None or not dims:
        return SINGLE
    return _flattened(mesh[dims]) if len(dims) > 1 else tp_group(mesh[dims[0]])


def whole_group(mesh: MeshLike) -> Group:
    """All ranks of ``mesh``.

    The first call creates a process group where ``mesh`` has several dimensions and does not hold every process; each
    of its ranks must then call it.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim == 1:
        return tp_group(mesh)
    if math.prod(mesh.shape) == dist.get_world_size():
        return everyone()
    return _flattened(mesh)


def _flattened(mesh: DeviceMesh, name: str | None = None) -> Group:
    options = shared_options(mesh.device_type) if mesh.size() < dist.get_world_size() else None
    group = tp_group(mesh._flatten(name, backend_override=options))
    share_timeout(group.pg)
    return group


def grid_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The sub-mesh of ``mesh`` over which a grid's parameters are placed.

    FSDP2 (torch 2.13) takes parameters that two dimensions of a mesh split, and no more: i and j become one. The first
    call creates a process group, so every rank calls it.
    """
    names = [name for name in GRID_DIMS if name in (mesh.mesh_dim_names or ())]
    if "grid_j" in names:
        within = _flattened(mesh["grid_j", "grid_i"], "grid_ji").mesh
        assert within is not None
        return DeviceMesh._concatenate([mesh["grid_k"], within])
    return mesh if len(names) == mesh.ndim else mesh[tuple(names)]
