"""What a launch's threads know of other accesses: barriers, fences, releases and acquires join their clocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine import Launch
from ..memory import Array, Guard
from ..parse import Instruction
from ..program import EXIT, Program
from .clocks import GPU, SYS, WEAK, received
from .world import World

_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile")
_SCOPES = {"cta": GPU, "cluster": GPU, "gpu": GPU, "gl": GPU, "sys": SYS}
_KNOWN: weakref.WeakKeyDictionary[Program, list[tuple[str, int]]] = weakref.WeakKeyDictionary()
_SOME = 64  # accesses whose threads are remembered, before old ones are forgotten


def strengths(program: Program) -> list[tuple[str, int]]:
    """(memory order, scope) of each instruction; ("weak", WEAK) for ordinary accesses."""
    if program not in _KNOWN:
        _KNOWN[program] = [_strength(i) for i in program.kernel.code]
    return _KNOWN[program]


def _strength(i: Instruction) -> tuple[str, int]:
    order = next((part for part in i.parts if part in _ORDERS), "")
    if i.parts[0] in ("atom", "red"):
        scope = next((_SCOPES[part] for part in i.parts if part in _SCOPES), GPU)
        return order or "relaxed", scope
    if i.parts[0] not in ("ld", "st") or not order:
        return "weak", WEAK
    if order == "volatile":
        return order, SYS
    return order, next((_SCOPES[part] for part in i.parts if part in _SCOPES), GPU)


class OrderedLaunch(Launch):
    """A launch of one rank. Its blocks are agents (``clocks.py``), whose time is the number of their barriers."""

    def __init__(self, world: World, rank: int, *given: Any) -> None:
        super().__init__(*given)
        self.world, self.rank = world, rank
        self.code = self.program.kernel.code
        self.strengths = strengths(self.program)
        first = world.host_knows(rank)
        self.agent = world.clocks.agents(rank, self.blocks)
        self.barriers = np.zeros(self.blocks, np.int32)  # that each block has passed
        self.view = np.full(self.n, first)
        self.async_view = self.view.copy()  # what the asynchronous proxy sees
        self.unique = (len(world.clocks.rank) << 20) + self._each  # each thread's number in the world
        self._fenced: dict[int, tuple[int, int]] = {}  # by thread: its view at a fence, and the fence's scope
        self._heard: dict[int, tuple[int, int]] = {}  # views that relaxed loads found, for a fence at GPU and at SYS
        # (threads, granules, times) of the last weak stores and of the last loads
        self._last_stored: list[tuple[Array, Array, Array]] = []
        self._last_loaded: list[tuple[Array, Array, Array]] = []
        self._at_barrier = False

    def end_launch(self) -> None:
        """What follows on the rank's stream knows all that the launch has done."""
        world, clocks = self.world, self.world.clocks
        world.finish(self.rank)
        view = clocks.join(world.host_view[self.rank], clocks.joined(self.view))
        world.host_view[self.rank] = clocks.knowing(view, self.agent, self.barriers + 1)

    def remember(self, loads: bool, threads: Array, at: Array, times: Array) -> None:
        """Which threads have stored or loaded what, for releases of theirs without a barrier before."""
        if loads:
            self._last_loaded = [*self._last_loaded[-_SOME:], (threads, at, times)]
        else:
            self._last_stored = [*self._last_stored[-_SOME:], (threads, at, times)]

    # ---------------------------------------------------------------------------------------- barriers and fences

    def _release(self, at: Array) -> bool:
        there = (self.waiting | (at == EXIT)).reshape(self.blocks, -1).all(1)
        there &= self.waiting.reshape(self.blocks, -1).any(1)
        for block in np.flatnonzero(there):
            self._meet(slice(block * self.threads, (block + 1) * self.threads), block)
        return super()._release(at)

    def _meet(self, rows: slice, block: int) -> None:
        """All threads of a block know what each of them knows, and has done."""
        self.barriers[block] += 1
        agent, clocks = self.agent[block], self.world.clocks
        for views in (self.view, self.async_view):
            views[rows] = clocks.knowing(clocks.joined(views[rows]), agent, self.barriers[block])

    def barrier(self, guard: Guard, where: int) -> None:
        self._at_barrier = True
        super().barrier(guard, where)
        self._at_barrier = False

    def lanes_meet(self, guard: Guard) -> None:
        """bar.warp.sync: the lanes of a warp know what each of them knows, and has done. Also where a barrier begins,
        which then does the same for the block.
        """
        super().lanes_meet(guard)
        if self._at_barrier:
            return
        chosen, clocks = self.threads_of(guard), self.world.clocks
        for warp in np.unique(self.warp[chosen]).tolist():
            threads = chosen[self.warp[chosen] == warp]
            if self.warps == 1 and len(threads) == 32:
                self._meet(slice(warp * 32, warp * 32 + 32), warp)
                continue
            self._apart(threads)
            for views in (self.view, self.async_view):
                if (views[threads] != views[threads[0]]).any():
                    views[threads] = clocks.joined(views[threads])

    def fence_memory(self, guard: Guard, where: int) -> None:
        """fence.acq_rel, fence.sc and membar: what relaxed loads have found is acquired, relaxed stores release."""
        parts = self.code[where].parts
        scope = next((_SCOPES[part] for part in parts if part in _SCOPES), SYS)
        for t in self.threads_of(guard).tolist():
            heard = self._heard.pop(t, (0, 0))
            self.view[t] = self.world.clocks.join(int(self.view[t]), heard[scope - 1])
            self._fenced[t] = self._release_view(t, scope), scope

    def fence_global(self, guard: Guard) -> None:
        """fence.proxy.async of global memory: the asynchronous proxy sees what the thread does."""
        chosen = self.threads_of(guard)
        self.async_view[chosen] = self.view[chosen]

    # ------------------------------------------------------------------------------------------------ release, acquire

    def _release_view(self, t: int, scope: int) -> int:
        """The view that a release by a thread passes on: with it its block's accesses before the last barrier, and its
        own since then. At .sys its stores get to other ranks' memory.
        """
        self._apart(self._each[t : t + 1])
        if scope == SYS:
            self.world.release(self.rank, int(self.view[t]))
        return int(self.view[t])

    def _apart(self, threads: Array) -> None:
        """What these threads of a block have stored, and they alone have loaded, since its last barrier becomes that of
        an agent of its own, so that others can know it without the rest of the block's. These threads do.
        """
        clocks, shadow, block = self.world.clocks, self.world.shadow, int(self.block[threads[0]])
        agent, now = int(self.agent[block]), int(self.barriers[block])
        stored = _since(self._last_stored, lambda found: np.isin(found, threads), now)
        loaded = _since(self._last_loaded, lambda found: np.isin(found, threads), now)
        if not len(stored) and not len(loaded):
            return
        [alone] = clocks.agents(self.rank, root=agent).tolist()
        seen = stored[(shadow.writer[stored] == agent) & (shadow.when[stored] == now)]
        shadow.writer[seen], shadow.when[seen] = alone, 0
        self.world.rename(self.unique[threads], agent, now, alone)
        others = _since(self._last_loaded, lambda found: (self.block[found] == block) & ~np.isin(found, threads), now)
        shadow.read_alone(np.setdiff1d(loaded, others), agent, now, alone)
        for view in np.unique(self.view[threads]).tolist():
            same = threads[self.view[threads] == view]
            self.view[same] = clocks.knowing(view, alone, 1)

    def passed_on(self, t: int, order: str, strength: int) -> tuple[int, int]:
        """(the view that a strong store of this order passes on, at which scope); view 0: none."""
        if order in ("release", "acq_rel"):
            return self._release_view(t, strength), strength
        view, scope = self._fenced.get(t, (0, GPU))
        return view, min(scope, strength)

    def acquires(self, t: int, address: int, order: str, strength: int) -> None:
        message, clocks = self.world.messages.get(address), self.world.clocks
        if message is None:
            return
        found = [received(clocks, message, self.rank, min(scope, strength)) for scope in (GPU, SYS)]
        if order in ("acquire", "acq_rel"):
            self.view[t] = clocks.join(int(self.view[t]), found[1])
        else:
            before = self._heard.get(t, (0, 0))
            self._heard[t] = clocks.join(before[0], found[0]), clocks.join(before[1], found[1])


def _since(made: list[tuple[Array, Array, Array]], whose: Callable[[Array], Array], now: int) -> Array:
    """The granules that some threads have accessed at the time ``now`` of their block."""
    own = [at[whose(threads) & (times == now)].reshape(-1) for threads, at, times in made]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *own]))
