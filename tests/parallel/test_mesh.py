"""The device mesh and its groups: degrees, coordinates, and errors for those that do not fit."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardfuse
from shardfuse.parallel.core import rendezvous
from shardfuse.parallel.core.mesh import (
    SINGLE,
    Group,
    data_coordinate,
    data_group,
    degree,
    everyone,
    tp_group,
    whole_group,
)
from shardfuse.parallel.core.rendezvous import init_mesh, shutdown


def test_a_process_alone_needs_nothing() -> None:
    assert init_mesh() is None
    assert init_mesh(dp=1, pp=1, tp=1) is None
    assert not dist.is_initialized()
    assert tp_group(None) is SINGLE
    assert tp_group(SINGLE) is SINGLE
    assert everyone() is SINGLE
    assert data_coordinate(None) == (0, 1)
    assert data_group(None) is whole_group(None) is SINGLE
    assert degree(None, "dp") == 1
    shutdown()


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 2}, r"dp=1 \* pp=1 \* tp=2 = 2, but 1 process was started; change the degrees, or start 2 processes"),
        ({"dp": 2}, r"dp=2 \* pp=1 does not divide the 1 processes that were started"),
        ({"pp": 0}, r"pp=0: expected at least 1"),
        ({"dp_replicate": 0}, r"dp_replicate=0: expected at least 1"),
        ({"tp": "2"}, r"init_mesh: tp='2': expected a whole number of at least 1"),
        ({"dp": 1.0}, r"init_mesh: dp=1.0: expected a whole number"),
        ({"pp": True}, r"init_mesh: pp=True: expected a whole number"),
        ({"device_type": "gpu"}, r"init_mesh: device_type='gpu': expected 'cpu', 'cuda' for GPUs, or None"),
        pytest.param(
            {"device_type": "cuda"},
            r"init_mesh: device_type='cuda': this machine has no GPU that torch can use; pass device_type='cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"dp_replicate": 2, "tp": 1}, r"dp_replicate=2 \* dp=1 \* pp=1 \* tp=1 = 2, but 1 process was started"),
    ],
)
def test_degrees_that_do_not_fit_one_process(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_mesh(**degrees)


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ({}, (1, 1, 1, 8)),
        ({"dp": 2}, (1, 2, 1, 4)),
        ({"dp": 2, "pp": 2}, (1, 2, 2, 2)),
        ({"dp": 8, "tp": 1}, (1, 8, 1, 1)),
        ({"dp_replicate": 2, "dp": 2}, (2, 2, 1, 2)),
        ({"dp_replicate": 3}, None),
        ({"dp": 3}, None),
        ({"tp": 3}, None),
        ({"dp": 2, "tp": 2}, None),
    ],
)
def test_what_is_left_of_the_world_is_tensor_parallel(degrees: dict[str, int], shape: tuple[int, ...] | None) -> None:
    arguments = {"dp_replicate": 1, "dp": 1, "pp": 1, "tp": None, "grid": None, "depth": 1, **degrees}
    if shape is None:
        with pytest.raises(ValueError, match="8 processes"):
            rendezvous._mesh_shape(**arguments, world=8)
    else:
        found = {"dp_replicate": 1, **rendezvous._mesh_shape(**arguments, world=8)}
        assert found == dict(zip(("dp_replicate", "dp", "pp", "tp"), shape))


def _coordinates(rank: int, world: int) -> tuple[Any, ...]:
    mesh = init_mesh(dp=2, tp=2)
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp", "pp", "tp")
    group = tp_group(mesh)
    assert group.mesh is not None
    assert everyone() == Group(dist.group.WORLD, rank, world, None)
    return group.rank, group.size, dist.get_process_group_ranks(group.pg), group.mesh.ndim, data_coordinate(mesh)


@pytest.mark.ranks
def test_tensor_parallel_ranks_are_neighbours_and_see_the_same_batch(ranks: Any) -> None:
    assert ranks(4, _coordinates) == [
        (0, 2, [0, 1], 1, (0, 2)),
        (1, 2, [0, 1], 1, (0, 2)),
        (0, 2, [2, 3], 1, (1, 2)),
        (1, 2, [2, 3], 1, (1, 2)),
    ]


def _hybrid(rank: int, world: int) -> tuple[Any, ...]:
    mesh = init_mesh(dp_replicate=2, dp=2, tp=1)
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp_replicate", "dp", "pp", "tp")
    assert [degree(mesh, dim) for dim in ("dp_replicate", "dp", "pp", "tp", "cp")] == [2, 2, 1, 1, 1]
    data, whole = data_group(mesh), whole_group(mesh)
    assert (data.rank, data.size) == data_coordinate(mesh)
    assert whole == everyone()
    assert whole_group(data) is data
    plain = init_mesh(dp=2, tp=2)
    assert plain is not None
    groups = tp_group(mesh), data, whole_group(mesh["dp", "tp"]), data_group(plain)
    return data_coordinate(mesh), *(dist.get_process_group_ranks(group.pg) for group in groups)


@pytest.mark.ranks
def test_hybrid_meshes_read_different_data_along_two_dimensions(ranks: Any) -> None:
    for rank, found in enumerate(ranks(4, _hybrid)):
        node = rank // 2 * 2
        assert found == ((rank, 4), [rank], [0, 1, 2, 3], [node, node + 1], [rank % 2, rank % 2 + 2])


def _timeouts(rank: int, world: int) -> list[float]:
    """The timeouts of every group, in an already initialised world."""
    mesh = init_mesh(dp_replicate=2, dp=2, tp=1, timeout=timedelta(seconds=77))
    assert mesh is not None
    later = init_mesh(pp=2)  # without a timeout: the same as the others
    assert later is not None
    groups = everyone(), data_group(mesh), whole_group(mesh["dp", "tp"])
    pgs = [group.pg for group in groups] + mesh.get_all_groups() + later.get_all_groups()
    return [pg._get_backend(torch.device("cpu")).options._timeout.total_seconds() for pg in pgs]


@pytest.mark.ranks
def test_a_timeout_bounds_every_group(ranks: Any) -> None:
    assert ranks(4, _timeouts) == [[77.0] * (3 + 4 + 3)] * 4


def _process_groups(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = tp_group(pairs[rank // 2])
    assert (group.rank, group.size) == (rank % 2, 2)
    assert group.pg is pairs[rank // 2]
    assert group.mesh is not None
    assert group.mesh.mesh.tolist() == [[0, 1], [2, 3]][rank // 2]
    assert tp_group(group) is group


def _meshes(rank: int, world: int) -> list[str]:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "tp"))
    line = init_device_mesh("cpu", (4,))
    for mesh, want in (
        (named, (rank % 2, 2)),
        (named["rows"], (rank // 2, 2)),
        (named["tp"], (rank % 2, 2)),
        (line, (rank, 4)),
    ):
        group = tp_group(mesh)
        assert (group.rank, group.size) == want
    assert tp_group(named, "rows").rank == rank // 2
    messages = []
    for wrong in (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), init_device_mesh("cpu", (2, 2)), 7):
        try:
            tp_group(wrong)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_a_group_from_any_mesh(ranks: Any) -> None:
    assert ranks(4, _meshes)[0] == [
        "mesh: its dimensions ('a', 'b') hold no 'tp', so the ranks that share a tensor are unknown; "
        "pass a one-dimensional sub-mesh (mesh['b'])",
        "mesh: it has 2 dimensions without names; pass a one-dimensional mesh, or name one 'tp'",
        "mesh: expected a DeviceMesh, ProcessGroup, Group or None, not int",
    ]


@pytest.mark.ranks
def test_a_group_from_a_process_group(ranks: Any) -> None:
    ranks(4, _process_groups)


def _copied(rank: int, world: int) -> bool:
    group = tp_group(init_mesh())
    return copy.deepcopy({"group": group})["group"] is group


@pytest.mark.ranks
def test_a_copied_module_stays_in_its_group(ranks: Any) -> None:
    assert ranks(2, _copied) == [True, True]


def _from_environment(rank: int, world: int, port: int) -> tuple[Any, ...]:
    """Leave the pool's process group and start with torchrun's environment variables."""
    shutdown()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        group = tp_group(init_mesh(tp=world, timeout=timedelta(seconds=60)))
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return group.rank, group.size, dist.get_backend()


@pytest.mark.ranks
def test_torch_distributed_starts_from_torchruns_environment(ranks: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ranks(2, _from_environment, port) == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        program = "from shardfuse.parallel.core.rendezvous import init_mesh; init_mesh(device_type='cpu')"
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert result.returncode == 1
    assert f"RuntimeError: init_mesh: the 2 processes could not connect at 127.0.0.1:{port}" in result.stderr


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.delitem(vars(shardfuse), "__version__", raising=False)
    assert rendezvous._surroundings()["shardfuse's version"] == "0.0.0+not.installed"
    vars(shardfuse).pop("__version__")


def _unmade_body(rank: int, world: int) -> tuple[bool, float]:
    """Whether making the mesh fails, and after how many seconds, where the last rank ends before its groups exist."""

    def gone(*args: Any, **options: Any) -> Any:
        raise RuntimeError("this rank makes no groups")

    before = rendezvous.init_device_mesh
    if rank == world - 1:
        rendezvous.init_device_mesh = gone
    begun = time.monotonic()
    try:
        init_mesh(dp=2, tp=2, device_type="cpu", timeout=timedelta(seconds=4))
    except RuntimeError:
        return True, time.monotonic() - begun
    finally:
        rendezvous.init_device_mesh = before
    return False, 0.0


@pytest.mark.ranks
def test_the_timeout_bounds_the_making_of_groups(ranks: Any):
    for failed, seconds in ranks(4, _unmade_body):
        assert failed
        assert seconds < 30  # all groups together wait for 4 s; torch's default is 1800 s for each


def _stuck_body(rank: int, world: int) -> tuple[str, float]:
    """What init_mesh says where gloo waits for ever while it makes the groups."""
    before, rendezvous.init_device_mesh = rendezvous.init_device_mesh, lambda *args, **options: time.sleep(3600)
    begun = time.monotonic()
    try:
        init_mesh(tp=world, device_type="cpu", timeout=timedelta(seconds=1))
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    finally:
        rendezvous.init_device_mesh = before
    return "", 0.0


@pytest.mark.ranks
def test_a_wait_that_gloo_does_not_bound_ends(ranks: Any):
    for message, seconds in ranks(2, _stuck_body):
        assert "groups could not be made; is a process gone? (gloo still waited after 2 s)" in message
        assert seconds < 30
