"""A decode step on a CPU as a recorded list of ops: a replay runs the kernels without the layers' Python.

Like a CUDA graph on a GPU, a recording holds the ops of one number of tokens, with the parameters of that time. Unlike
a graph it calls each op again, so the allocator provides the memory, and it calls attention, whose work depends on
lengths, on the new step's batch.

The runner records a number of tokens after it has occurred a few times, and computes the next such step both ways, by
the replay first, so that the forward's keys and values are the ones that stay. If logits, keys or values differ in any
bit, the model does more than a list of ops can hold, and the runner stops recording it. A model that writes to a tensor
of its own is not recorded, because such a step must not run twice. A change of parameters ends a recording. Hooks run
during recording, not during replay. Models of transformers read values on the host (for packed sequences), so their
steps are not recorded.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..kernels.runtime import library, onednn
from ..layers.attention.paged import PagedBatch
from ..layers.attention.rope import Rope
from ..layers.trial import same_bits

_SEEN = 4  # occurrences of a number of tokens before its step is recorded
_KEPT = 64  # recordings
_RAISED = 3  # replays in a row that raise where the forward does not, before recording ends
# Parts of op names: such ops depend on values or on other ranks.
_VARIES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bernoulli", "rand", "c10d")

Forward = Callable[[torch.Tensor, PagedBatch], torch.Tensor]


class _Slot(int):
    """The number of a tensor that the step creates or receives."""


class _Call:
    """One op: the function, its arguments, the slots of its results, and the tensors that no later call reads."""

    __slots__ = ("args", "attends", "done", "flat", "kwargs", "out", "run", "shares")

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.run, self.args, self.kwargs, self.out = run, args, kwargs, out
        self.attends = run is PagedBatch.attend
        # Whether the op writes to an argument or returns a view of one.
        self.shares = self.attends or any(each.alias_info is not None for each in _operands(run))
        nested = [each for each in args if isinstance(each, (list, tuple))]
        self.flat = not self.attends and type(out) is _Slot and not any(_slots((nested, kwargs)))
        self.done: list[int] = []


class _Recorder(TorchDispatchMode):
    """Runs ops and records them."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.why_not = ""
        self.alive: list[Any] = []  # keeps every tensor alive, so that no id is reused
        self._named: dict[int, Any] = {}
        self._storages: set[int] = set()  # of the tensors that the step makes or is given
        for each in given:
            self._name(each)
            self.made(each)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # see _RecorderBesideCompiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(each in func.name() for each in _VARIES):
            self.why_not = f"{func.name()} is one of its ops"
        given = {_storage(each) for each in _tensors((args, kwargs))}
        self._storages |= {_storage(each) for each in _tensors(out)} - given
        if not {_storage(each) for each in _written(func, args, kwargs or {})} <= self._storages:
            self.why_not = f"{func.name()} writes to a tensor that outlives the step"
        self.note(func, args, kwargs or {}, out)
        return out

    def made(self, out: Any) -> None:
        """Let later ops write to ``out``, which ends with the step."""
        self._storages |= {_storage(each) for each in _tensors(out)}

    def note(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.calls.append(_Call(run, self.named(args), self.named(kwargs), self._name(out)))

    def named(self, value: Any) -> Any:
        """``value`` with slots instead of the step's tensors. Identical tuples stay identical."""
        if isinstance(value, torch.Tensor):
            return self._named.get(id(value), value)
        if isinstance(value, dict):
            return {key: self.named(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.named(each) for each in value]
        if isinstance(value, (tuple, Rope)):
            if id(value) not in self._named:
                self._named[id(value)] = _like(value, [self.named(each) for each in value])
                self.alive.append(value)
            return self._named[id(value)]
        if type(value).__module__ not in ("builtins", "torch"):
            self.why_not = f"an argument is a {type(value).__name__}, which may hold tensors"
        return value

    def _name(self, out: Any) -> Any:
        """Slots for results; the result of an in-place op already has one."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self._named:
                self._named[id(out)] = _Slot(len(self.alive))
                self.alive.append(out)
            return self._named[id(out)]
        return [self._name(each) for each in out] if isinstance(out, (list, tuple)) else None


class _RecorderBesideCompiler(_Recorder):
    """A recorder whose dispatch torch.compile leaves alone. To see to that, torch imports its compiler, which takes a
    second, so a program that has not done so gets the other one.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class _NotedBatch(PagedBatch):
    """A batch that records its attention as one call."""

    recorder: _Recorder

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            out = super().attend(*args, **kwargs)
        self.recorder.made(out)
        self.recorder.note(PagedBatch.attend, args, kwargs, out)
        return out


class _Unrecordable(Exception):
    """A replay could differ from the step: its ops depend on values or on other ranks, write to a tensor that outlives
    the step, or hide their tensors. ``out`` is the step's result.
    """

    def __init__(self, why: str, out: torch.Tensor) -> None:
        super().__init__(why)
        self.out = out


class Recording:
    """The ops of ``forward`` in one step; :meth:`replay` runs them for another step with the same number of tokens.

    ``out`` is this step's result. Raises _Unrecordable if a replay could differ, and the errors of ``forward``.
    """

    def __init__(self, forward: Forward, tokens: torch.Tensor, batch: PagedBatch) -> None:
        noted = _NotedBatch(**{each.name: getattr(batch, each.name) for each in fields(batch) if each.init})
        kind = _RecorderBesideCompiler if "torch._dynamo" in sys.modules else _Recorder
        recorder = kind(_given(tokens, noted))
        object.__setattr__(noted, "recorder", recorder)  # the dataclass is frozen
        with recorder, library.recorded():
            self.out = forward(tokens, noted)
        if recorder.why_not:
            raise _Unrecordable(recorder.why_not, self.out)
        self._result, self._size = recorder.named(self.out), len(recorder.alive)
        self._calls = _fold(recorder.calls, self._result)
        wanted = {self._result}
        for call in reversed(self._calls):
            slots = {*_slots((call.args, call.kwargs, call.out))}
            call.done = list(slots - wanted)
            wanted |= slots

    def replay(self, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The result for other tokens and their batch."""
        values: list[Any] = [None] * self._size
        values[: len(_GIVEN)] = _given(tokens, batch)
        same: dict[int, Any] = {}
        for call in self._calls:
            if call.flat:
                args = [values[each] if type(each) is _Slot else each for each in call.args]
                values[call.out] = call.run(*args, **call.kwargs)
            else:
                if call.attends:
                    out: Any = batch.attend(*_filled(call.args, values, same), **_filled(call.kwargs, values, same))
                else:
                    out = call.run(*_filled(call.args, values, same), **_filled(call.kwargs, values, same))
                _keep(call.out, out, values)
            for slot in call.done:
                values[slot] = None
        return values[self._result]


class Recordings:
    """Computes decode steps, replaying a number of tokens as soon as it is recorded.

    Args:
        forward: computes a step.
        parameters: of the model.
    """

    def __init__(self, forward: Forward, parameters: Iterable[torch.Tensor]) -> None:
        self.replayed = 0  # steps
        self._forward = forward
        self._parameters = list(parameters)
        self._state: Any = None
        self._seen: Counter[int] = Counter()
        self._kept: OrderedDict[int, Recording] = OrderedDict()
        self._checked: set[int] = set()
        self._raised = 0  # see _RAISED
        self._off = False

    def run(self, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The step's result, [S, V]."""
        if self._off:
            return self._forward(tokens, batch)
        state = [onednn.changes(), *[(each._version, each.data_ptr()) for each in self._parameters]]
        if state != self._state:
            self._state = state
            self._seen.clear()
            self._kept.clear()
            self._checked.clear()
        count = len(tokens)
        recording = self._kept.get(count)
        if recording is None:
            self._seen[count] += 1
            return self._record(tokens, batch) if self._seen[count] > _SEEN else self._forward(tokens, batch)
        self._kept.move_to_end(count)
        if count not in self._checked:
            return self._compare(recording, tokens, batch)
        self.replayed += 1
        return recording.replay(tokens, batch)

    def _record(self, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        try:
            recording = Recording(self._forward, tokens, batch)
        except _Unrecordable as step:
            self._off = True
            return step.out
        self._kept[count := len(tokens)] = recording
        self._checked.discard(count)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return recording.out

    def _compare(self, recording: Recording, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Compute the step both ways; if the results are equal replay it from now on, else stop recording.

        A replay that raises is compared anew in the next step: of the step itself the forward raises too, and what
        passes, such as want of memory, says nothing of the recording. One that raises again and again ends it.
        """
        found: list[torch.Tensor] = []
        with contextlib.suppress(Exception):
            found = [recording.replay(tokens, batch), *_stored(batch)]
        out = self._forward(tokens, batch)
        self._raised = 0 if found else self._raised + 1
        if 0 < self._raised < _RAISED:
            return out
        expected = [out, *_stored(batch)]
        if len(found) == len(expected) and all(map(same_bits, found, expected)):
            self._checked.add(len(tokens))
            return out
        self._off = True
        self._kept.clear()
        warnings.warn(
            "a recorded step of this model came to other logits, keys or values than its forward, so the engine goes "
            "on without recordings: some op of it depends on what the host read",
            stacklevel=2,
        )
        return out


_GIVEN = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "positions", "logit_indices", "tokens")


def _stored(batch: PagedBatch) -> list[torch.Tensor]:
    """What the cache holds in the step's slots: of data [S, layers, K, H + Hv], of scales [S, layers, K]."""
    slots, size = batch.slot_mapping[batch.slot_mapping >= 0], batch.cache.block_size
    return [x[:, slots // size, :, slots % size] for x in batch.cache.by_block()]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _storage(x: torch.Tensor) -> int:
    """A number of its memory; tensors of oneDNN's own layouts, which show none, share theirs with no other."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else -id(x)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an op writes to, by its schema."""
    for position, each in enumerate(func._schema.arguments):
        if each.is_write:
            yield from _tensors(args[position] if position < len(args) else kwargs.get(each.name))


def _given(tokens: torch.Tensor, batch: PagedBatch) -> list[torch.Tensor]:
    return [*(getattr(batch, name) for name in _GIVEN[:-1]), tokens]


def _slots(value: Any) -> Iterator[_Slot]:
    """The slots in ``value``."""
    if type(value) is _Slot:
        yield value
    elif isinstance(value, (list, tuple, dict, Rope)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _slots(each)


def _filled(value: Any, values: Any, same: dict[int, Any]) -> Any:
    """``value`` with tensors instead of slots; ``same`` holds the result of each tuple."""
    if type(value) is _Slot:
        return values[value]
    if isinstance(value, dict):
        return {key: _filled(each, values, same) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values, same) for each in value]
    if isinstance(value, (tuple, Rope)):
        if id(value) not in same:
            same[id(value)] = _like(value, [_filled(each, values, same) for each in value])
        return same[id(value)]
    return value


def _like(value: Any, parts: list[Any]) -> Any:
    """``parts`` in the type of ``value``: a tuple, a named tuple or a Rope."""
    return type(value)(*parts) if hasattr(value, "_fields") or isinstance(value, Rope) else tuple(parts)


def _fold(calls: list[_Call], result: Any) -> list[_Call]:
    """Remove the calls whose results are equal in every step, and insert these results where they are used."""
    changed: set[Any] = {result}  # slots of tensors that an op may write to, through any view
    for call in reversed(calls):
        if call.shares and (_writes(call) or changed & {*_slots(call.out)}):
            changed |= {*_slots((call.args, call.kwargs, call.out))}
    known: dict[Any, Any] = _Known()
    same: dict[int, Any] = {}
    left = []
    for call in calls:
        call = _Call(call.run, _filled(call.args, known, same), _filled(call.kwargs, known, same), call.out)
        if call.attends or any(_slots((call.args, call.kwargs))) or changed & {*_slots(call.out)}:
            left.append(call)
        else:
            found: list[Any] = [None] * (1 + max(_slots(call.out), default=0))
            _keep(call.out, call.run(*call.args, **call.kwargs), found)
            known |= {slot: found[slot] for slot in _slots(call.out)}
    return left


def _operands(run: Any) -> list[Any]:
    """The aliasing of an op's arguments and results, from its schema."""
    return [*run._schema.arguments, *run._schema.returns]


def _writes(call: _Call) -> bool:
    return call.attends or any(each.alias_info is not None and each.alias_info.is_write for each in _operands(call.run))


class _Known(dict[Any, Any]):
    """An unknown slot stays a slot."""

    def __missing__(self, slot: Any) -> Any:
        return slot


def _keep(slots: Any, out: Any, values: list[Any]) -> None:
    """Store results in their slots."""
    if type(slots) is _Slot:
        values[slots] = out
    elif slots is not None:
        for slot, each in zip(slots, out):
            _keep(slot, each, values)
