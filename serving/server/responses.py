"""Send answers, as one JSON or as events of a stream; in both forms a client's disconnect ends its request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import GONE, ApiError, log
from .growing import Piece
from .served import within

T = TypeVar("T")
Chunks = AsyncGenerator[dict[str, Any] | list[Piece] | None, None]
DONE = b"data: [DONE]\n\n"
_STALLED = "a client took nothing for %g s: its request is cancelled"
_SENT = 1 << 18  # bytes of an answer sent at once


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result; a client's disconnect cancels it and raises ApiError GONE."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE, "the client closed the connection", code="cancelled")
        return task.result()
    finally:
        await _ended(task, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Whole(Response):
    """The JSON in ``pieces``, sent piece by piece, so that a client that reads slowly holds only its own answer."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[Piece], send_timeout_s: float) -> None:
        self._pieces = pieces
        self._send_timeout_s = send_timeout_s
        self.status_code = 200
        self.background = None
        self.init_headers({"Content-Length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            for part in _parts(self._pieces):
                async with within(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.TimeoutError:
            log.warning(_STALLED, self._send_timeout_s)


def _parts(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """``pieces`` in parts of at most ``_SENT`` bytes: one if they are short, else copied one at a time."""
    if sum(map(len, pieces)) <= _SENT:
        yield b"".join(pieces)
        return
    for piece in pieces:
        for start in range(0, len(piece), _SENT):
            yield bytes(piece[start : start + _SENT])


class EventStream(Response):
    """``chunks`` as server-sent events, after their first element, None, has been taken, and then ``last``.

    A chunk of pieces is an event already. A later error becomes an event, because the status has been sent by then. The
    request ends if the client disconnects, or reads nothing for ``send_timeout_s``.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: Chunks, send_timeout_s: float, last: bytes = DONE) -> None:
        self._chunks, self._last = chunks, last
        self._send_timeout_s = send_timeout_s
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sends = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait([sends, gone], return_when=asyncio.FIRST_COMPLETED)
            if sends.done():
                sends.result()
        finally:
            await _ended(sends, gone)

    async def _send(self, send: Send) -> None:
        async def out(body: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": body, "more_body": more}
            async with within(self._send_timeout_s):
                await send(message)

        try:
            async with contextlib.aclosing(self._chunks):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in self._events():
                    for part in _parts(event):
                        await out(part)
            await out(self._last, more=False)
        except asyncio.TimeoutError:
            log.warning(_STALLED, self._send_timeout_s)

    async def _events(self) -> AsyncGenerator[Sequence[Piece], None]:
        try:
            async for chunk in self._chunks:
                if chunk is not None:
                    yield chunk if isinstance(chunk, list) else [_event(chunk)]
        except Exception as error:
            yield [_event(error_of(error).body)]


def error_of(error: Exception) -> ApiError:
    """The client's error for an ``error`` within a stream; a defect of the server is logged."""
    if isinstance(error, ApiError):
        return error
    log.error("a stream failed", exc_info=error)
    return ApiError(500, f"a defect of the server: {type(error).__name__}")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def streamed(request: Request, chunks: Chunks, send_timeout_s: float, last: bytes = DONE) -> EventStream:
    """A stream whose request is queued. Raises ApiError if it is refused."""
    try:
        await unless_gone(request, chunks.__anext__())
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(chunks, send_timeout_s, last)
