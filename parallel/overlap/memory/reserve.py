"""Reserves symmetric memory for a whole model at once, before its first step.

Without it a layer's first exchange requests the memory it needs, and a larger exchange requests more. All ranks then
stop, wait for their devices and reallocate. That is correct, but slow, and impossible once a captured graph holds
addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.mesh import Group
from .. import policy
from .pool import SymmetricMemoryPool
from .sizes import largest, own_slots, table


class Needs(NamedTuple):
    """What the layers of one group need of its pool: the bytes of a slot by channel, the largest of any layer."""

    group: Group
    device: torch.device
    slots: dict[str, int]


def reserve_symmetric_memory(model: nn.Module, tokens: int) -> str:
    """Allocate the memory in which the layers of ``model`` exchange rows, for steps of up to ``tokens``; its budget.

    Call it on all ranks that share the model, before its first step and before any capture of a CUDA graph. Layers with
    ``overlap`` "none" or "chunked" need no such memory. The result is a printable table of bytes, or the reason why
    symmetric memory is unavailable; layers then use other paths.

    Raises ValueError for ``tokens`` below 1 and where the pool's own limit does not suffice, RuntimeError where a
    captured graph holds addresses that would have to change.
    """
    if tokens < 1:
        raise ValueError(f"reserve_symmetric_memory: tokens={tokens}: expected the most tokens of a step, 1 or more")
    told = []
    for group, device, slots in needs(model, tokens):
        unavailable = policy.kernel_unavailable(group, device)
        if unavailable is not None:
            told.append(f"no symmetric memory: {unavailable}")
            continue
        pool = SymmetricMemoryPool.of(group, device=device)
        for name, slot_bytes in slots.items():
            pool.channel(name, slot_bytes)
        pool.settle()
        told.append(pool.budget())
    return "\n".join(told) or "no symmetric memory: no layer of this model exchanges rows in it"


def needs(model: nn.Module, tokens: int) -> Iterator[Needs]:
    """The needs of each group in which layers of ``model`` exchange rows, in the order of the layers."""
    found: dict[int, Needs] = {}
    for module in model.modules():
        ask: Any = getattr(module, "slots", None)
        slots = ask(tokens) if callable(ask) else None
        if not slots:
            continue
        group: Any = module.group
        device = next(module.parameters()).device
        known = found.setdefault(id(group.pg), Needs(group, device, {}))
        found[id(group.pg)] = known._replace(slots=largest(known.slots, slots))
    yield from found.values()


def budgets(model: nn.Module, tokens: int, device: torch.device) -> Iterator[str]:
    """The table of :func:`reserve_symmetric_memory` for ``device``, one for each group. Not collective."""
    for group, _, slots in needs(model, tokens):
        if policy.lacking(device) is not None:
            continue
        pool = SymmetricMemoryPool.existing(group)
        if pool is not None:
            yield pool.budget(slots)
            continue
        every = {**own_slots(group.size), **slots}
        yield table(every, group.size, None, f"symmetric memory, on each of {group.size} ranks")
