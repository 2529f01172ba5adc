"""Kernels in PTX on virtual ranks, by hand: two words of symmetric memory, one of data and one that is a flag."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ptx_text import addresses, kernel

from shardfuse.kernels.dev.ptx.memory import Allocation
from shardfuse.kernels.dev.ptx.parse import parse
from shardfuse.kernels.dev.ptx.program import Program
from shardfuse.kernels.dev.ptx.ranks.clocks import Region
from shardfuse.kernels.dev.ptx.ranks.launch import execute
from shardfuse.kernels.dev.ptx.ranks.schedules import Schedule
from shardfuse.kernels.dev.ptx.ranks.world import World
from shardfuse.kernels.dev.ptx.settings import Settings

FIRST = "mov.u32 %r0, %tid.x; mov.b32 %r9, 7; mov.b32 %r8, 1;"
ALONE = "setp.ne.s32 %p1, %r0, 0; @%p1 bra $END;"  # but for thread 0
LAST = "$END:"


class Words:
    """Each rank's data word and flag, with addresses in this order: [%rd0] data and [%rd1] flag of rank 0, ..."""

    def __init__(self, ranks: int) -> None:
        self.data = np.zeros((ranks, 4), "u4")
        self.flags = np.zeros((ranks, 2 * ranks * 64), "i4")

    def addresses(self) -> list[int]:
        return [int(each[rank].ctypes.data) for rank in range(len(self.data)) for each in (self.data, self.flags)]

    def regions(self) -> list[Region]:
        found = []
        for rank in range(len(self.data)):
            found.append(Region(self.data[rank].ctypes.data, self.data[rank].nbytes, rank, "slots"))
            found.append(Region(self.flags[rank].ctypes.data, self.flags[rank].nbytes, rank, "flags"))
        return found


def together(
    bodies: Sequence[str], schedule: Schedule, *, threads: int = 0, blocks: int = 1, times: int = 1
) -> tuple[list[str], Words]:
    """Launch each rank's body ``times``, in thread 0 or in ``threads``; returns the reports, and what memory holds."""
    words, world = Words(len(bodies)), World(len(bodies), schedule, limit_s=60.0)
    world.watch(words.regions())
    places = words.addresses()
    memory = [Allocation(each.start, each.size, f"the {each.kind} of rank {each.rank}") for each in words.regions()]

    def launch(body: str) -> None:
        whole = addresses(len(places)) + FIRST + (body if threads else ALONE + body) + LAST
        text = kernel(whole, ["ptr"] * len(places), threads=threads or 32)
        for _ in range(times):
            execute(Program(parse(text)), (blocks, 1, 1), places, memory, 0, Settings())

    for rank, body in enumerate(bodies):
        world.start(f"rank {rank}", rank, lambda body=body: launch(body))
    world.run()
    return [line for _, result in world.launches for line in result.reports], words
