"""Agreement between ranks: an error on one rank is raised on all, and values that must be equal are compared.

Ranks that were started differently would train apart without an error, or wait in collectives that the others never
enter. Every function here is a collective of its group, to be called before anything depends on the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from . import collectives
from .mesh import Group

T = TypeVar("T")

Facts = Mapping[str, str]
SITE = "agree"
START_ALIKE = "start all ranks with the same program, settings and versions"


def agree(group: Group, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and return this rank's result; if any rank raises, all raise the first error.

    Without it, a rank that fails alone leaves the others waiting in the next collective. If an error cannot be sent,
    the other ranks raise a RuntimeError with its name and text.
    """
    result, error = _attempt(work)
    for rank, failure in enumerate(collectives.gather_objects(_sendable(error), group, site=SITE)):
        if failure is not None:
            raise error if error is not None and rank == group.rank else failure
    return result  # type: ignore[return-value]


def together(group: Group, work: Callable[[], T]) -> list[T]:
    """:func:`agree`, returning all ranks' results."""
    return collectives.gather_objects(agree(group, work), group, site=SITE)


def on_first(group: Group, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone; every rank gets its result, or raises its error."""
    return together(group, lambda: work() if group.rank == 0 else None)[0]  # type: ignore[return-value]


def agree_on(group: Group, work: Callable[[], T], facts: Callable[[T], Facts], *, what: str) -> T:
    """Run ``work`` on every rank, compare ``facts`` of its results, and return this rank's result.

    ``facts`` are values as text, by name. Raises ValueError on every rank where they differ; the message begins with
    ``what`` and names the first field that differs, two ranks and both values. If ``work`` raises on any rank, all
    raise; a rank without an error of its own raises the first one, with the number of its rank.
    """
    given: dict[str, str] = {}

    def both() -> T:
        result = work()
        given.update(facts(result))
        return result

    result, error = _attempt(both)
    try:
        answers = collectives.gather_objects((_sendable(error), _digest(given)), group, site=SITE)
    finally:  # also if the other ranks are gone
        if error is not None:
            raise error
    for rank, (failure, _) in enumerate(answers):
        if failure is not None:
            raise _of_rank(global_rank(group, rank), failure)
    if len({each for _, each in answers}) > 1:
        raise ValueError(f"{what}: {_difference(given, group)}; {START_ALIKE}")
    return result  # type: ignore[return-value]


def compare(group: Group, facts: Facts, *, what: str, remedy: str = START_ALIKE) -> None:
    """:func:`agree_on` without ``work``: one small message if all ranks' ``facts`` are equal."""
    if len(set(collectives.gather_number(_digest(facts), group, site=SITE))) > 1:
        raise ValueError(f"{what}: {_difference(facts, group)}; {remedy}")


def checksum(tensor: torch.Tensor) -> int:
    """A hash: equal for tensors that are equal bit for bit, and almost never for other tensors of the same shape."""
    size = tensor.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size, torch.uint8)
    bits = tensor.detach().contiguous().flatten().view(kind)
    total = 0
    for chunk in bits.split(1 << 20):  # 64-bit copies of a part at a time
        weights = torch.arange(1, chunk.numel() + 1, device=chunk.device) * 0x9E3779B1 | 1
        total = (total * 31 + int((chunk.long() * weights).sum())) & ((1 << 63) - 1)
    return total


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _difference(mine: Facts, group: Group) -> str:
    """The message about the first field in which a rank's facts differ from those of the group's first."""
    first, *others = collectives.gather_objects(dict(mine), group, site=SITE)
    rank, theirs = next((rank, facts) for rank, facts in enumerate(others, 1) if facts != first)
    name = next(name for name in [*first, *theirs] if first.get(name) != theirs.get(name))
    ours, other = (facts.get(name, "nothing") for facts in (first, theirs))
    return f"{name} is {ours} on rank {global_rank(group, 0)} and {other} on rank {global_rank(group, rank)}"


def global_rank(group: Group, rank: int) -> int:
    """The global rank of ``group``'s rank ``rank``."""
    return rank if group.pg is None else dist.get_global_rank(group.pg, rank)


def _digest(facts: Facts) -> int:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little", signed=True)


def _of_rank(rank: int, failure: Exception) -> Exception:
    message = f"rank {rank}: {failure}"
    with contextlib.suppress(Exception):
        return type(failure)(message)
    return RuntimeError(message)


def _sendable(error: Exception | None) -> Exception | None:
    """``error`` itself, or a RuntimeError with its text if it does not survive pickling, such as an error of a local
    class or one whose ``args`` are not its constructor's arguments."""
    if error is None:
        return None
    with contextlib.suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):  # noqa: S301 - what this line has pickled
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
