"""Exchanges of every kind with exactly known results, and a recorder of the ranks' accesses in them.

For test_comm_trace.py. The recorder observes kernels in the loads and stores of Triton's interpreter, and the host in
torch's, so it changes neither; addresses identify the flags and rows.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from comm_model import Exchange, Me, Step
from comm_trace import Event
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from shardfuse.kernels.comm import (
    all_gather_linear,
    all_reduce_rmsnorm,
    all_reduce_shape,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_config,
    reduce_scatter_shape,
)
from shardfuse.kernels.runtime import signals as signals_module
from shardfuse.kernels.runtime.signals import CHUNKS, COUNTERS, DONE, EPOCH, PHASES, STATE, following, rows_of
from shardfuse.parallel.overlap.memory.pool import Channel

WIDTH = 32  # K of products, D of sums
N = 48  # two tiles, so two programs share the data for one peer
PROGRAMS = reduce_config.flagged_programs("interpreter")


# --- the exchanges ----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One exchange. Its data follow from it, its number and the ranks."""

    op: str  # "gather", "scatter", "reduce" (linear_all_reduce), "one-shot", "two-shot" (all_reduce_rmsnorm)
    T: int
    pieces: int = 1  # of a gather

    def slot_shape(self, world: int) -> tuple[int, ...]:
        if self.op == "gather":
            return self.T, WIDTH
        if self.op == "scatter":
            return reduce_scatter_shape(self.T, N, world)
        if self.op == "reduce":
            return all_reduce_shape(self.T, N, world)
        return reduce_config.slot_shape(self.T, WIDTH, world, 1 if self.op == "one-shot" else 2, PROGRAMS)

    def place(self, row: int, world: int) -> tuple[int, int, int]:
        """(phase, source, chunk) of the data in a row of the slot: docs/overlap.md, "What travels"."""
        per = -(-self.T // world)
        if self.op == "gather":
            return 0, row // per, row % per // -(-per // self.pieces)
        if self.op == "scatter":
            return 0, row // per, 0
        if self.op == "one-shot":
            return 0, row // self.T, row % self.T % PROGRAMS
        addends = per if self.op == "reduce" else reduce_config.rows_per_owner(self.T, world, PROGRAMS)
        if row < world * addends:
            return 0, row // addends, 0 if self.op == "reduce" else row % addends % PROGRAMS
        row -= world * addends
        if self.op == "reduce":
            return 1, row // per, row % per % PROGRAMS
        return 1, (row % PROGRAMS + row // PROGRAMS) % world, row % PROGRAMS

    def as_model(self, world: int) -> Exchange:
        """The same for comm_model.py: each rank's rows in chunks, and the number of chunks with a flag."""
        rows = [last - first for first, last in (rows_of(rank, world, self.T) for rank in range(world))]
        if self.op == "gather":
            piece = max(1, -(-rows[0] // self.pieces))
            return Exchange("pushed_gather", tuple(-(-n // piece) for n in rows), self.pieces)
        if self.op == "scatter":
            return Exchange("reduce_scatter", tuple(rows))
        if self.op == "reduce":
            return Exchange("all_reduce", tuple(min(n, PROGRAMS) for n in rows), PROGRAMS)
        if self.op == "one-shot":  # every rank sends to all, one chunk per program
            return Exchange("all_gather", (min(self.T, PROGRAMS),) * world, PROGRAMS)
        return Exchange("two_shot", (self.T,), PROGRAMS)


def two_shot(me: Me, x: Exchange, epoch: int) -> Iterator[Step]:
    """The model's program of all_reduce_rmsnorm in two rounds: its programs one after another, each with its chunk.

    ``x.rows`` is (T,). Program b has the rows b + i * P, and rank (b + i) % R sums them.
    """
    for chunk in range(x.chunks):
        owners = {(chunk + i) % me.world for i, _ in enumerate(range(chunk, x.rows[0], x.chunks))}
        for phase in (0, 1):
            sends = owners if phase == 0 else set(me.ranks()) if me.rank in owners else set()
            gets = set(me.ranks()) if phase == 0 and me.rank in owners else owners if phase == 1 else set()
            for peer in me.ranks():
                if peer in sends:
                    yield Step("write", epoch, phase, peer, chunk)
                yield Step("raise", epoch, phase, peer, chunk, order="release")
            for source in me.ranks():
                yield Step("wait", epoch, phase, source, chunk, order="acquire", timeout=True)
                if source in gets:
                    yield Step("read", epoch, phase, source, chunk)


def _whole(seed: int, *shape: int) -> torch.Tensor:
    """Small whole numbers: sums of their products are exact in fp32, in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _run(call: Call, number: int, peers: list[torch.Tensor], signals: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of exchange ``number`` on this rank, and the expected one."""
    rank, world = signals.rank, len(peers)
    mine = slice(*rows_of(rank, world, call.T))
    options = {"peers": peers, "signals": signals, "impl": "triton"}
    if call.op == "gather":
        x, weight = _whole(number, call.T, WIDTH), _whole(number + 1, N, WIDTH)
        found = all_gather_linear(x[mine], weight, pieces=call.pieces, **options)
        assert isinstance(found, torch.Tensor)
        return found, x @ weight.t()
    xs = _whole(number, world, call.T, WIDTH)
    if call.op in ("one-shot", "two-shot"):
        return all_reduce_rmsnorm(xs[rank], shots=1 if call.op == "one-shot" else 2, **options)[1], xs.sum(0)
    weights = _whole(number + 1, world, N, WIDTH)
    op = linear_all_reduce if call.op == "reduce" else linear_reduce_scatter
    found = op(xs[rank], weights[rank], **options)
    assert isinstance(found, torch.Tensor)
    total = torch.einsum("rtk,rnk->tn", xs, weights)
    return found, total if call.op == "reduce" else total[mine]


# --- recording --------------------------------------------------------------------------------------------------------


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Make ``owner.name(...)`` call ``change(original, ...)``. The last change is the outermost."""
    inner = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(inner, *args, **kwargs))


class Recorder:
    """Records this rank's accesses to a channel's flags and slots while ``patch`` lasts.

    ``events`` holds them in comm_trace.py's form; ``orders``, as (what, semantics, scope), the memory orders of all
    raises and waits and of a kernel's counters. ``late`` delays each flag by a time of its choice.
    """

    def __init__(self, channel: Channel, patch: pytest.MonkeyPatch, late: random.Random | None = None) -> None:
        self.rank, self.size, self.late = channel.rank, channel.size, late
        self.pads = channel._pads
        self.events: list[Event] = []
        self.orders: set[tuple[str, str, str]] = set()
        self.epoch = 0
        self._call: Call | None = None
        self._row_bytes = 0
        self._fenced = False
        self._pad_starts = [pad.data_ptr() for pad in channel._pads]
        self._slot_starts = [slots.data_ptr() for slots in channel._slots]
        self._stride = channel._slots[0].stride(0)
        self._state = channel._state.data_ptr()
        for name, change in (
            ("create_masked_load", self._load),
            ("create_masked_store", self._store),
            ("create_atomic_rmw", self._exchange),
            ("create_atomic_cas", self._compare),
        ):
            around(patch, InterpreterBuilder, name, change)
        around(patch, signals_module, "fence", self._fence)

    @contextlib.contextmanager
    def exchange(self, epoch: int, call: Call) -> Iterator[None]:
        """A context around an exchange that records its begin, its end and the place of its rows."""
        self.epoch, self._call, self._row_bytes = epoch, call, 4 * call.slot_shape(self.size)[-1]
        self.events.append(("begin", epoch))
        with _HostWrites(self):
            yield
        self.events.append(("end", epoch))
        self._forget_repeated()

    def _forget_repeated(self) -> None:
        """Drop repeated reads by tiles: the first and the last one give the order with other events."""
        begun = max(i for i, event in enumerate(self.events) if event[0] == "begin")
        made = self.events[begun:]
        last = {event: i for i, event in enumerate(made)}
        first = {event: i for i, event in reversed(list(enumerate(made)))}
        kept = [event for i, event in enumerate(made) if event[0] == "raise" or i in (first[event], last[event])]
        self.events[begun:] = kept

    # ---- the kernels' accesses

    def _load(self, inner: Any, builder: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        found = inner(builder, ptrs, mask, *rest, **options)
        self._data("read", active(ptrs, mask))
        return found

    def _store(self, inner: Any, builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses = active(ptrs, mask)
        assert all(self.flag(address) is None for address in addresses.tolist()), "a flag stored as if it were data"
        self._data("write", addresses)
        return inner(builder, ptrs, value, mask, *rest)

    def _exchange(
        self, inner: Any, builder: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        for address, epoch in zip(active(ptr, mask).tolist(), active(value, mask).tolist()):
            flag = self.flag(address)
            if flag is not None:
                self._raised(*flag, epoch, sem.name, scope.name)
            elif self._counts(address):
                self.orders.add(("count", sem.name, scope.name))
        return inner(builder, op, ptr, value, mask, sem, scope)

    def _compare(self, inner: Any, builder: Any, ptr: Any, wanted: Any, new: Any, sem: Any, scope: Any) -> Any:
        found = inner(builder, ptr, wanted, new, sem, scope)
        flags = [self.flag(address) for address in ptr.data.ravel().tolist()]
        if None in flags:
            return found
        self.orders.add(("wait", sem.name, scope.name))
        looks = {flag: look for flag, *look in zip(flags, wanted.data.ravel().tolist(), found.data.ravel().tolist())}
        if all(signals_module.reached(seen, epoch) for epoch, seen in looks.values()):  # else it polls again
            for (whose, phase, source, chunk), (epoch, seen) in looks.items():
                assert whose == self.rank, f"rank {self.rank} waits for a flag of rank {whose}'s pad"
                self.events.append(("wait", phase, source, chunk, epoch, seen))
        return found

    # ---- the host's accesses

    def stored_by_host(self, tensor: torch.Tensor) -> None:
        """Record a write to ``tensor``."""
        if self.flag(tensor.data_ptr()) is not None:
            for word, epoch in enumerate(tensor.flatten().tolist()):
                flag = self.flag(tensor.data_ptr() + 4 * word)
                assert flag is not None
                self._raised(*flag, epoch, *(("RELEASE", "SYSTEM") if self._fenced else ("RELAXED", "SYSTEM")))
        elif self._data("write", tensor.data_ptr() + np.arange(tensor.nbytes, dtype=np.uint64)):
            self._fenced = False

    def _fence(self, inner: Any) -> None:
        inner()
        self._fenced = True

    # ---- the meaning of addresses

    def flag(self, address: int) -> tuple[int, int, int, int] | None:
        """(owner of the pad, phase, source, chunk) of an address."""
        for whose, start in enumerate(self._pad_starts):
            word = (address - start) // 4
            if 0 <= word < PHASES * self.size * CHUNKS:
                return whose, word // CHUNKS // self.size, word // CHUNKS % self.size, word % CHUNKS
        return None

    def in_own_slots(self, addresses: np.ndarray) -> bool:
        start = self._slot_starts[self.rank]
        return bool(((addresses >= start) & (addresses < start + 2 * self._stride)).any())

    def _counts(self, address: int) -> bool:
        word = (address - self._state) // 4
        return word == DONE or COUNTERS <= word < STATE

    def _raised(self, whose: int, phase: int, source: int, chunk: int, epoch: int, sem: str, scope: str) -> None:
        assert source == self.rank, f"rank {self.rank} raises a flag of rank {source}"
        if self.late is not None:
            time.sleep(self.late.choice([0, 0, 0.001, 0.004]))
        self.orders.add(("raise", sem, scope))
        self.events.append(("raise", phase, whose, chunk, epoch))

    def _data(self, kind: str, addresses: np.ndarray) -> bool:
        """Record a read or write, chunk by chunk; returns whether any of it was in a slot."""
        known = len(self.events)
        for whose, start in enumerate(self._slot_starts):
            offsets = addresses[(addresses >= start) & (addresses < start + 2 * self._stride)].astype(np.int64) - start
            if not offsets.size:
                continue
            assert self._call is not None, "a slot is used before the first exchange"
            rows = np.stack((offsets // self._stride, offsets % self._stride // self._row_bytes), 1)
            places = [(slot, *self._call.place(row, self.size)) for slot, row in np.unique(rows, axis=0).tolist()]
            for slot, phase, source, chunk in dict.fromkeys(places):
                told = f"rank {self.rank} {kind}s what is rank {source}'s in the slot of rank {whose}"
                assert (source if kind == "write" else whose) == self.rank, told
                # The other slot belongs to the last exchange, and to the next one.
                epoch = self.epoch if slot == self.epoch % 2 else self.epoch - 1
                self.events.append((kind, phase, whose if kind == "write" else source, chunk, epoch))
        return len(self.events) > known


class _HostWrites(TorchDispatchMode):
    """Reports torch's writes to tensors to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # The interpreter copies its arguments onto themselves.
        moved = not (func is torch.ops.aten.copy_.default and args[0].data_ptr() == args[1].data_ptr())
        if moved and func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor):
            self._recorder.stored_by_host(args[0])
        return found


def active(handle: Any, mask: Any) -> np.ndarray:
    """The interpreter's values where the mask, which may hold integers, is true."""
    return handle.data[np.broadcast_to(mask.data, handle.data.shape).astype(bool)]


def made(call: Call, number: int, channel: Channel, recorder: Recorder | None, device_counts: bool = False) -> bool:
    """Make an exchange and record it; returns whether its result is right."""
    shape = call.slot_shape(channel.size)
    if device_counts:
        peers, signals = channel.device_counted(shape, torch.float32)
        epoch = following(int(signals.state[EPOCH]))
    else:
        peers, signals = channel.begin(shape, torch.float32)
        epoch = channel.epoch
    with contextlib.nullcontext() if recorder is None else recorder.exchange(epoch, call):
        found, expected = _run(call, number, peers, signals)
    if not device_counts:
        channel.end()
    return torch.equal(found, expected)
