"""An engine on an asyncio loop: any number of tasks send requests, and one thread beside the loop runs the steps.

Only that thread, the worker, touches the engine. Tasks send it commands: between two steps the worker executes the
queued commands in order, and answers each through ``loop.call_soon_threadsafe``, which also delivers the events of a
step. The loop never waits for a step, and a step never waits for the loop.

Without live requests the worker waits on a condition; while the engine is paused it waits until the next deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .engine import Engine
from .request import Finish, Request, TokenEvent
from .stats import EngineLoad, EngineStats

_RETRIES = 1  # the engine's contract: after a failed step the next one computes the same tokens one by one
_TURN = 16  # events that a reader takes before other tasks run
_SCORED = 400  # bytes of a prompt's token with log-probabilities, about
_LONGEST_WAIT_S = 3600.0  # conditions accept no timeout as long as a request's may be
# row_invariance and onednn.serving change state of the whole process, so the steps of several engines take turns.
_ONE_STEP = threading.Lock()
_served: weakref.WeakSet[Engine] = weakref.WeakSet()
_served_lock = threading.Lock()


class SlowReader(RuntimeError):
    """The reader of some answers left more events unread than it may."""


class _Stream:
    """The channel of one request from the worker to the task that reads its events."""

    def __init__(self, request: Request, position: int, submitted: Submitted) -> None:
        self.request = request
        self.position = position  # its position among those submitted together
        self.submitted = submitted
        self.number: int | None = None  # the engine's number, once added; only the worker uses it
        self.deadline: float | None = None


class Submitted:
    """Requests that :meth:`AsyncEngine.submit` has queued: iterate over their events, then :meth:`cancel`.

    Each event comes with its request's position among them: ``async for position, event in submitted``. That raises
    SlowReader, and the requests are cancelled, once more than about ``most_unread`` bytes of events are unread.
    """

    def __init__(self, owner: AsyncEngine, requests: Sequence[Request], most_unread: int | None = None) -> None:
        self._owner = owner
        # (request, event, whether it is the request's last); at most max_new_tokens + 1 for each answer.
        self._queue: asyncio.Queue[tuple[_Stream, TokenEvent, bool] | None] = asyncio.Queue()
        self.streams = [_Stream(request, position, self) for position, request in enumerate(requests)]
        self._left = len(self.streams)
        self._most_unread, self._unread = most_unread, 0
        self._taken = 0  # events that were there already

    def __aiter__(self) -> Submitted:
        return self

    async def __anext__(self) -> tuple[int, TokenEvent]:
        if not self._left:
            raise StopAsyncIteration
        if self._queue.qsize():  # then the queue alone would let nothing else run
            self._taken += 1
            if self._taken % _TURN == 0:
                await asyncio.sleep(0)
        entry = await self._queue.get()
        if entry is None:
            self._left = 0
            raise SlowReader(f"more than {self._most_unread} bytes of the answers wait for their reader")
        stream, event, last = entry
        self._unread -= _size(event)
        self._left -= last
        return stream.position, event

    def put(self, stream: _Stream, event: TokenEvent, last: bool) -> None:
        """Queue an event of ``stream``, in the loop."""
        self._unread += _size(event)
        if self._most_unread is not None and self._unread > self._most_unread:
            self.cancel()
            while not self._queue.empty():
                self._queue.get_nowait()
            self._left, self._unread = 1, -sys.maxsize  # the reader gets the error; later events are dropped
            self._queue.put_nowait(None)
        elif self._unread >= 0:
            self._queue.put_nowait((stream, event, last))

    def cancel(self) -> None:
        """Cancel the unfinished requests before the next step; no event follows. A second call does nothing."""
        if self._left:
            self._left = 0
            with contextlib.suppress(RuntimeError):  # a worker that has ended has cancelled the requests
                self._owner._send("cancel", partial(self._owner._leave, self.streams), None)


class AsyncEngine:
    """Serves ``engine`` to the tasks of one event loop.

        async with AsyncEngine(engine) as serve:
            async for event in serve.stream(Request(prompt)):
                print(event.token)

    This object owns the engine until the block ends: nothing else may call it. The end of the block cancels every live
    request, with the event "cancelled". The engine then is open and idle, and later calls of this object raise
    RuntimeError.

    The worker repeats a step that fails as a whole. If the step fails again, all live requests end with its error, and
    the worker serves later ones; if a step fails without any live request, the worker stops, and every call raises that
    error.

    Raises ValueError for the engine of a rank other than 0, which must call ``follow()``. Entering the block raises
    RuntimeError for an engine that is busy or that another AsyncEngine serves.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.model.group.rank:
            raise ValueError(
                f"AsyncEngine: this is rank {engine.model.group.rank}: rank 0 takes the requests; call engine.follow()"
            )
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards the next three attributes
        self._commands: list[tuple[str, Callable[[], Any], asyncio.Future[Any] | None]] = []
        self._closing = False
        self._over: str | None = None  # the reason why no more commands are accepted
        # Only the worker uses these:
        self._live: dict[int, _Stream] = {}
        self._drains: list[asyncio.Future[None]] = []
        self._failures = 0  # steps that failed in a row
        self._cancelled = False  # whether the engine has request ends to report
        # The worker writes these; any thread may read them:
        self._turned: float | None = None  # the time when the last step ended or became due; None if no step is due
        self._load, self._stats = engine.load, copy.copy(engine.stats)

    # --- the loop's side

    async def __aenter__(self) -> AsyncEngine:
        if self._loop is not None:
            raise RuntimeError("AsyncEngine: it was used before: expected one async with block for each; make another")
        with _served_lock:
            if self._engine in _served:
                raise RuntimeError("AsyncEngine: another one serves this engine: let the tasks share that one")
            if self._engine.busy:
                raise RuntimeError("AsyncEngine: the engine is busy: read run() to its end, or cancel its requests")
            _served.add(self._engine)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="shardfuse-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End live requests and the worker after the running step. The end of the ``async with`` block calls it."""
        if self._thread is None:
            return
        self._check_loop("aclose")
        with self._wake:
            self._closing = True
            self._wake.notify()
        interrupted: asyncio.CancelledError | None = None
        while not self._ended.done():  # cancelling the task meanwhile leaves no thread behind either
            try:
                await asyncio.shield(self._ended)
            except asyncio.CancelledError as error:
                interrupted = error
        self._thread.join()
        if interrupted is not None:
            raise interrupted

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The events of ``request``; the last one of each answer has a ``finish``.

        A task that is cancelled, or that leaves the ``async for``, cancels the request before the next step.
        Raises the errors of :meth:`Engine.add` at the first event: ValueError, QueueFull.
        """
        submitted = await self._submit("stream", [request])
        try:
            async for _, event in submitted:
                yield event
        finally:
            submitted.cancel()

    async def submit(self, *requests: Request, most_unread: int | None = None) -> Submitted:
        """Queue ``requests``, all or none. The reader of their events must call ``cancel()`` in the end, also after
        errors.

        Raises the errors of :meth:`Engine.add` for any of them.
        """
        return await self._submit("submit", requests, most_unread)

    async def _submit(self, name: str, requests: Sequence[Request], most_unread: int | None = None) -> Submitted:
        self._check_loop(name)
        submitted = Submitted(self, requests, most_unread)
        try:
            await self._ask(name, partial(self._add, submitted.streams))
        except BaseException:  # such as the cancellation of this task
            submitted.cancel()
            raise
        return submitted

    async def complete(self, request: Request) -> list[TokenEvent]:
        """All events of ``request``. Raises the errors of :meth:`stream`, and RuntimeError if the request fails."""
        events = [event async for event in self.stream(request)]
        error = next((event.error for event in events if event.error is not None), None)
        if error is not None:
            raise RuntimeError(f"complete: the request failed: {error}") from error
        return events

    async def drain(self) -> None:
        """Wait until no request is live. A paused engine needs a :meth:`resume` for that."""
        self._check_loop("drain")
        assert self._loop is not None
        drained: asyncio.Future[None] = self._loop.create_future()
        await self._ask("drain", partial(self._drains.append, drained))
        await drained

    async def pause(self) -> None:
        """:meth:`Engine.pause` between two steps. Requests can still be added, be cancelled and time out."""
        await self._ask("pause", self._engine.pause)

    async def resume(self) -> None:
        """:meth:`Engine.resume`."""
        await self._ask("resume", self._engine.resume)

    async def update_weights(self, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """:meth:`Engine.update_weights` between two steps, in the worker, with the same errors."""
        await self._ask("update_weights", partial(self._engine.update_weights, state))

    async def stats(self) -> EngineStats:
        """A copy of the engine's statistics between two steps."""
        return await self._ask("stats", lambda: copy.copy(self._engine.stats))

    @property
    def load(self) -> EngineLoad:
        """The engine's load after its newest step. This method waits for no step; nor does the next one."""
        return self._load

    @property
    def newest_stats(self) -> EngineStats:
        """A copy of the engine's statistics after its newest step."""
        return self._stats

    @property
    def since_step_s(self) -> float:
        """Seconds since the last step ended or became due; 0 while the engine is idle or paused."""
        turned = self._turned
        return 0.0 if turned is None else time.monotonic() - turned

    @property
    def stopped(self) -> str | None:
        """The reason why no more requests are accepted; None while they are."""
        return self._over

    async def _ask(self, name: str, call: Callable[[], Any]) -> Any:
        """Run ``call`` in the worker between two steps; return its result or raise its error."""
        self._check_loop(name)
        assert self._loop is not None
        result: asyncio.Future[Any] = self._loop.create_future()
        self._send(name, call, result)
        return await result

    def _send(self, name: str, call: Callable[[], Any], result: asyncio.Future[Any] | None) -> None:
        with self._wake:
            if self._over is not None or self._closing:
                raise RuntimeError(f"{name}: {self._over or _CLOSED}")
            self._commands.append((name, call, result))
            self._wake.notify()

    def _check_loop(self, name: str) -> None:
        if self._loop is None:
            raise RuntimeError(f"{name}: the AsyncEngine is not open: use it within its async with block")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{name}: the AsyncEngine belongs to another event loop: expected a call from a task of that loop; "
                "asyncio.run_coroutine_threadsafe sends it one"
            )

    # --- the worker's side

    def _work(self) -> None:
        error: Exception | None = None
        try:
            while self._turn():
                pass
        except Exception as failure:
            error = failure
        except BaseException as failure:  # SystemExit, which would end the thread silently
            error = RuntimeError(f"the worker was ended by {failure!r}")
        self._end(error)

    def _turn(self) -> bool:
        """Wait for work, execute the commands, run a step; return False when the worker must end."""
        with self._wake:
            while not self._commands and not self._closing and (idle := self._idle_s()) != 0:
                self._turned = None
                self._wake.wait(idle)
            if self._turned is None:
                self._turned = time.monotonic()
            commands, self._commands = self._commands, []
            closing = self._closing
        for _, call, result in commands:
            self._carry_out(call, result)
        if closing:
            return False
        if self._idle_s() == 0:
            self._step()
            self._turned = time.monotonic()
        self._load, self._stats = self._engine.load, copy.copy(self._engine.stats)
        if self._drains and not self._live:
            self._settle_drains(None)
        return True

    def _idle_s(self) -> float | None:
        """The seconds until a step is due; None: until a command comes."""
        if not self._engine.busy:
            return None
        if not self._engine.paused or self._cancelled:
            return 0.0
        deadlines = [stream.deadline for stream in self._live.values() if stream.deadline is not None]
        return min(max(0.0, min(deadlines) - time.monotonic()), _LONGEST_WAIT_S) if deadlines else None

    def _carry_out(self, call: Callable[[], Any], result: asyncio.Future[Any] | None) -> None:
        if result is None:
            call()
        elif not result.cancelled():
            try:
                value = call()
            except Exception as error:
                self._post(_settle, result, None, error)
            else:
                self._post(_settle, result, value, None)

    def _add(self, streams: Sequence[_Stream]) -> None:
        for stream, number in zip(streams, self._engine.add_all([stream.request for stream in streams])):
            stream.number = number
            self._live[number] = stream
            if stream.request.timeout_s is not None:  # slightly later than the engine's own deadline
                stream.deadline = time.monotonic() + stream.request.timeout_s

    def _leave(self, streams: Sequence[_Stream]) -> None:
        for stream in streams:
            if stream.number is not None and self._live.pop(stream.number, None) is not None:
                self._cancelled |= self._engine.cancel(stream.number)

    def _step(self) -> None:
        try:
            with _ONE_STEP:
                events = self._engine.step()
        except Exception as error:
            self._failures += 1
            if self._failures > _RETRIES:
                if not self._live:
                    raise
                self._end_all("error", error)
        else:
            self._failures, self._cancelled = 0, False
            self._deliver(events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Make the loop put each event into its stream; a cancelled request has none."""
        last = {event.request: event for event in events if not self._engine.lives(event.request)}
        found = [
            (self._live[event.request], event, last.get(event.request) is event)
            for event in events
            if event.request in self._live
        ]
        for number in last:
            self._live.pop(number, None)
        if found:
            self._post(_put, found)

    def _end_all(self, finish: Finish, error: Exception | None) -> None:
        """End every live request; its task gets the end even if the engine fails to cancel."""
        numbers = list(self._live)
        try:
            for number in numbers:
                self._cancelled |= self._engine.cancel(number)
        finally:
            ends = [(self._live.pop(number), TokenEvent(number, None, finish, error), True) for number in numbers]
            self._post(_put, ends)

    def _end(self, error: Exception | None) -> None:
        """Clean up: end all requests and waiting futures, and release the engine."""
        with self._wake:
            self._over = _CLOSED if error is None else f"the AsyncEngine has stopped: {type(error).__name__}: {error}"
            commands, self._commands = self._commands, []
        with contextlib.suppress(Exception):  # an error of the engine, or of a loop closed before the block's end
            self._end_all("cancelled" if error is None else "error", error)
            if self._engine.busy:
                self._engine.step()  # this step reports the ends and computes nothing
        with contextlib.suppress(RuntimeError):
            for name, _, result in commands:
                if result is not None:
                    self._post(_settle, result, None, RuntimeError(f"{name}: {self._over}"))
            self._settle_drains(None if error is None else RuntimeError(f"drain: {self._over}"))
        with _served_lock:
            _served.discard(self._engine)
        with contextlib.suppress(RuntimeError):
            self._post(_settle, self._ended, None, None)

    def _settle_drains(self, error: Exception | None) -> None:
        for drained in self._drains:
            self._post(_settle, drained, None, error)
        self._drains.clear()

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call, *args)


_CLOSED = "the AsyncEngine is closed: its async with block has ended"


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():  # its task was cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _put(found: list[tuple[_Stream, TokenEvent, bool]]) -> None:
    for stream, event, last in found:
        stream.submitted.put(stream, event, last)


def _size(event: TokenEvent) -> int:
    """About how many bytes an event takes."""
    prompt = event.prompt_logprobs
    return 256 + len(event.text) + 120 * len(event.top_logprobs) + (len(prompt) * _SCORED if prompt else 0)
