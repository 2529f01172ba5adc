"""Random numbers that tensor-parallel ranks agree on.

Dropout here is a function of an RNG key and of an element's place in the whole tensor (``kernels/dropout``). Ranks that
draw the same RNG keys therefore draw the same mask where a tensor is replicated, and their own parts of one mask where
it is sharded: a run gives the same numbers at every degree of tensor parallelism. (Dropped attention weights are the
exception: torch's own kernels draw them; see :func:`sharded_draws`.) RNG keys come from torch's own generators, which
``torch.utils.checkpoint`` rewinds for a recomputed forward and CUDA graphs advance. So a program only has to seed them:
alike within a tensor-parallel group and over the stages of a pipeline, which draw the RNG keys of all layers, and
differently between data-parallel replicas, whose tokens differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import collectives
from .mesh import GRID_DIMS, Group
from .sharding import named_seed


def manual_seed(
    seed: int, mesh: DeviceMesh | None = None, *, step: int = 0, tp_dim: str = "tp", pp_dim: str = "pp"
) -> int:
    """Seed torch's generators for this rank, and return the seed.

    It depends on ``seed``, ``step`` and the rank's coordinates in every dimension of ``mesh`` (of ``init_mesh``, say)
    except ``tp_dim``, ``pp_dim`` and those of a grid. Call it with the step's number at the start of every step: a run
    resumed from a checkpoint then draws the same numbers as an uninterrupted one. It also seeds the generator that
    draws parameters: build the model before, or seed its weights separately (``init_weights``).
    """
    places = []
    if mesh is not None:
        names, alike = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim))), (tp_dim, pp_dim, *GRID_DIMS)
        places = [
            f"{name}={mesh.get_local_rank(name)}" for name in names if name not in alike and mesh[name].size() > 1
        ]
    found = named_seed(seed, f"random/step={step}/{'/'.join(places)}")
    torch.manual_seed(found)
    return found


@contextlib.contextmanager
def sharded_draws(group: Group, device: torch.device) -> Iterator[None]:
    """Within the block torch's generator of ``device`` gives every rank of ``group`` different numbers.

    Use it for operations that draw by themselves on sharded tensors, such as dropout of each rank's attention weights.
    Afterwards the ranks draw alike again. Raises RuntimeError while a CUDA graph is captured or torch.compile traces
    (never with one rank).
    """
    if group.size == 1:
        yield
        return
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        raise RuntimeError(
            "dropout of attention weights that are sharded over ranks moves torch's generator, which neither "
            "torch.compile nor a CUDA graph can record: leave this layer out, or build it with dropout_p=0"
        )
    generator = _generator(device)
    before = generator.get_state()
    # All ranks draw the same number, which advances the state for the next call; the seed derived from it differs by
    # rank.
    generator.manual_seed(named_seed(_fingerprint(device), f"rank={group.rank}"))
    try:
        yield
    finally:
        generator.set_state(before)
        torch.empty(1, dtype=torch.int64, device=device).random_()


@contextlib.contextmanager
def own_draws(place: str, device: torch.device) -> Iterator[None]:
    """Within the block torch's generator of ``device`` is seeded by its state and ``place``.

    Use it for layers that draw by themselves on pipeline stages, which would otherwise draw alike. Afterwards the
    generator has its former state.
    """
    generator = _generator(device)
    before = generator.get_state()
    generator.manual_seed(named_seed(_fingerprint(device), place))
    try:
        yield
    finally:
        generator.set_state(before)


def check_alike(group: Group, device: torch.device) -> None:
    """RuntimeError unless all ranks of ``group`` would draw the same random numbers on ``device``. Collective."""
    if group.size == 1:
        return
    mine = _fingerprint(device)
    everyone = collectives.all_gather(torch.tensor([mine], device=device), group, site="random.check").tolist()
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise RuntimeError(
            f"tensor-parallel ranks {others} would draw other random numbers than rank 0, so their dropout masks would "
            "not fit together: call shardfuse.manual_seed(seed, mesh) on every rank, and never draw on only some of "
            "them"
        )


def _fingerprint(device: torch.device) -> int:
    """63 bits that identify a generator's next numbers; it neither advances the generator nor waits for a GPU."""
    generator = _generator(device)
    if device.type == "cuda":
        return named_seed(generator.initial_seed(), f"offset={generator.get_offset()}")
    probe = torch.Generator(device)
    probe.set_state(generator.get_state())
    return int(torch.empty(1, dtype=torch.int64).random_(generator=probe))


def _generator(device: torch.device) -> torch.Generator:
    """Torch's own generator for ``device``."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
