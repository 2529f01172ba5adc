"""Pack the states that a run needs besides model and optimizer: of samplers, schedulers and random generators.

In a checkpoint each state is one tensor of bytes: plain data (``plain.py``), which is read back without pickle.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..core import collectives
from ..core.mesh import Group, data_coordinate
from ..core.random import manual_seed
from . import plain

__all__ = ["gather_random", "pack", "restore_random", "unpack"]


def pack(name: str, state: Any) -> torch.Tensor:
    """``state`` as bytes: uint8 [n], on the CPU.

    Raises ValueError if it holds anything but numbers, strings, tensors and containers of them.
    """
    try:
        return torch.frombuffer(bytearray(plain.encode(state)), dtype=torch.uint8)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"states[{name!r}]: its state_dict() holds something that cannot be read back without running code "
            f"({error}); let it return numbers, strings, tensors, and lists and dictionaries of them"
        ) from error


def unpack(name: str, packed: torch.Tensor) -> Any:
    """The inverse of :func:`pack`. Raises ValueError if the bytes are not plain data."""
    try:
        return plain.decode(packed.numpy().tobytes())
    except ValueError as error:
        raise ValueError(f"the state of {name!r} is not plain data: {error}") from error


# Coordinate -> device type -> state of torch's generator.
RandomStates = dict[str, dict[str, torch.Tensor]]


def gather_random(mesh: DeviceMesh | None, ranks: Group) -> RandomStates:
    """The states of torch's generators for every share of ``mesh``'s data. A collective of ``ranks``.

    Random numbers differ between shares of the data; tensor-parallel peers and the stages of a pipeline draw alike
    (``random.py``). Without a mesh every rank has its own share. A GPU that this process does not use is skipped.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return dict(collectives.gather_objects((_place(mesh, ranks), states), ranks, site="checkpoint.random"))


def restore_random(states: RandomStates, mesh: DeviceMesh | None, ranks: Group) -> None:
    """Restore torch's generators from this rank's saved states.

    If the number of shares has changed, the generators are seeded from the saved states, differently for each share.
    Every rank passes the same ``states``. Raises ValueError unless they have the form that :func:`gather_random` gives.
    """
    if not (isinstance(states, dict) and states and all(map(_is_states, states.values()))):
        raise ValueError("they are not the states of torch's generators")
    mine = states.get(_place(mesh, ranks))
    if mine is None:
        first = states[min(states)]["cpu"]
        digest = hashlib.blake2b(first.numpy().tobytes(), digest_size=7).digest()
        manual_seed(int.from_bytes(digest, "little"), mesh)
        return
    try:
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine and torch.cuda.is_available():
            torch.cuda.set_rng_state(mine["cuda"])
    except RuntimeError as error:
        raise ValueError(f"they are not the states of torch's generators: {error}") from error


def _place(mesh: DeviceMesh | None, ranks: Group) -> str:
    index, count = (ranks.rank, ranks.size) if mesh is None else data_coordinate(mesh)
    return f"{index}/{count}"


def _is_states(states: Any) -> bool:
    """Whether ``states`` are those of the CPU's generator and perhaps a GPU's."""
    if not isinstance(states, dict) or not {"cpu"} <= states.keys() <= {"cpu", "cuda"}:
        return False
    return all(
        isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1 for state in states.values()
    )
