"""The connections of a server: how many there may be, how long each may wait, and how much of one is read at once.

uvicorn's protocol reads requests with h11. It has no limit on the time that a request's headers take, accepts
connections until the process can open no more files, and parses all that a read returned before anything else runs.
The rest of a body that is too long is dropped as it comes, for a client that still sends reads no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter, deque
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .errors import error_body
from .hosts import address_of, client_of, network_of
from .metrics import Metrics
from .options import ServerOptions

log = logging.getLogger("shardfuse.server")
access = logging.getLogger("shardfuse.access")
HEADERS_BYTES = 16 * 1024  # of a request's line and headers; h11's own limit
_SLICE_BYTES = 2048  # parsed at once: 2.5 ms of chunks of one byte each
_WHOLE_BYTES = 1 << 16  # of a body whose length was sent, which is one event
_TURN_S = 0.002  # after which other work gets the loop
_RESERVED_FILES = 64  # for pipes of guides' compilers, files that are read, and connections that are being refused
_MOST_FILES = 65_536
_READ_BYTES = 1 << 16  # a client that takes fewer in twice the send timeout is gone
_FRAMES_BYTES = 1 << 16
_DROPPED_BYTES, _DROPPED_S = 64 << 20, 5.0  # of a body that is refused, after which the client may not see why
_LAST_CHUNK = b"0\r\n\r\n"


class Connections:
    """The limits on the connections of one server, and who has them. Its methods run in the server's loop."""

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.options, self.metrics = options, metrics
        self.total, self._files = _within_files(options.max_connections)
        each = options.max_connections_per_address
        self.each = min(self.total, max(1, self.total * 3 // 4) if each is None else each)
        self._proxies = [network_of(proxy) for proxy in options.trusted_proxies]
        self._open: set[Connection] = set()
        self._of: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # for a request's headers, the one that waits longest first
        self._fed: deque[Connection] = deque()  # with bytes to parse
        self._turns = False

    def words(self) -> str:
        """The limits in one line, with the reason where they are lower than the options."""
        said = f"at most {self.total:,} connections, {self.each:,} from one address"
        if self.total < self.options.max_connections:
            said += (
                f"; --max-connections {self.options.max_connections:,} needs more than the {self._files:,} files "
                "that this process may open (ulimit -n)"
            )
        return said

    def take(self, connection: Connection) -> bool:
        """Count ``connection``, in the place of one that waits for a request if there is no other; False if none is."""
        client = connection.owner = self._owner(connection)
        if client is not None and self._of[client] >= self.each and not self._make_room(client):
            return False
        if len(self._open) >= self.total and not self._make_room(None):
            return False
        self._open.add(connection)
        if client is not None:
            self._of[client] += 1
        self._waiting[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Forget ``connection``."""
        self._waiting.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            client = connection.owner
            if client is not None:
                self._of[client] -= 1
                if not self._of[client]:
                    del self._of[client]

    def waits(self, connection: Connection, waits: bool) -> None:
        """Note whether ``connection`` waits for the headers of a request."""
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def feed(self, connection: Connection) -> None:
        """Have ``connection`` parse what it has read, in turn with all others, so that other work runs between."""
        if not connection.queued:
            connection.queued = True
            self._fed.append(connection)
        if not self._turns:
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        until = time.monotonic() + _TURN_S
        while self._fed:
            connection = self._fed.popleft()
            connection.queued = False
            if connection.parse():
                connection.queued = True
                self._fed.append(connection)
            if time.monotonic() >= until:
                break
        self._turns = bool(self._fed)
        if self._turns:
            asyncio.get_running_loop().call_soon(self._turn)

    def _make_room(self, client: str | None) -> bool:
        """End the connection, of ``client`` or of any, that has waited longest for a request; False if none waits."""
        for each in self._waiting:
            if client in (None, each.owner):
                each.end_for_room()
                return True
        return False

    def _owner(self, connection: Connection) -> str | None:
        """The client with ``connection``; None for a trusted proxy, which brings many clients' requests."""
        host = connection.client[0] if connection.client else ""
        address = address_of(host)
        if address is None or any(address in each for each in self._proxies):
            return None
        return client_of(host)


class Connection(H11Protocol):
    """One connection: uvicorn's protocol, within the limits of ``connections``."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.queued = False
        self.owner: str | None = None
        self._all = connections
        self._read = bytearray()  # and not yet parsed
        self._body = 0  # bytes of the request's body until now
        self._dropped: int | None = None  # bytes of a body that is too long; once they are dropped, all later ones are
        self._to_drop: int | None = None  # how many there are, if their number was sent
        self._tail = b""  # of what was dropped
        self._beside = 0  # bytes since the last request's headers that were not its body, or came after its answer
        self._awaited: Any = None  # what the timer below waits for
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        # The protocol hears of every byte that the kernel did not take, to measure how long it is not taken.
        transport.set_write_buffer_limits(high=0)
        if self._all.take(self):
            self._watch()
        else:
            self.end_for_room()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._dropped is not None:
            self._drop(data)
            return
        self._unset_keepalive_if_required()
        self._read += data
        if len(self._read) > _SLICE_BYTES:
            self.transport.pause_reading()
        self._all.feed(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        self._read.clear()
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._judge_reader(sys.maxsize)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _judge_reader(self, before: int) -> None:
        """End the connection unless the client takes some of what is to be sent, again and again."""
        left = self.transport.get_write_buffer_size()
        if left > before - _READ_BYTES:
            self.transport.abort()
            return
        self._unread = self.loop.call_later(2 * self._all.options.send_timeout_s, self._judge_reader, left)

    # --- requests

    def parse(self) -> bool:
        """Parse a piece of what was read; return whether to go on at once."""
        if self.transport.is_closing():
            self._read.clear()
        if not self._read or self.flow.read_paused:
            return False
        size = max(_SLICE_BYTES, min(_WHOLE_BYTES, self._left_of_body()))
        piece = bytes(self._read[:size])
        del self._read[:size]
        cycle = self.cycle
        body = 0 if cycle is None else len(cycle.body)
        try:
            self.conn.receive_data(piece)
            self.handle_events()
        except Exception as error:
            log.error("a defect of the server", exc_info=error)
            self.transport.abort()
            return False
        if self.cycle is cycle and cycle is not None:
            taken = len(cycle.body) - body
            self._body += len(piece) if cycle.response_complete else taken  # an answered request takes none
            self._beside += len(piece) - taken
        else:
            self._body, self._beside = 0 if self.cycle is None else len(self.cycle.body), 0
        if self.conn.their_state is h11.SEND_BODY and self._is_too_long():
            self._dropped = 0
            if self._late is not None:
                self._late.cancel()
            self._late = self.loop.call_later(_DROPPED_S, self._end_dropped)
            self._drop(bytes(self._read))
            self._read.clear()
            self.transport.resume_reading()
            return False
        self._watch()
        if self.transport.is_closing() or self.flow.read_paused:
            return False
        if not self._read:
            self.transport.resume_reading()
        return bool(self._read)

    def _left_of_body(self) -> int:
        """Bytes still to come of a body whose length was sent, or of its chunk; 0 if h11 does not tell."""
        if self.conn.their_state is not h11.SEND_BODY or self.conn.trailing_data[0]:
            return 0
        reader = self.conn._reader
        return int(getattr(reader, "_remaining", getattr(reader, "_bytes_in_chunk", 0)))

    def _is_too_long(self) -> bool:
        """Whether the body is one that the Door refuses, by the length that was sent or the bytes of its chunks."""
        self._to_drop = getattr(self.conn._reader, "_remaining", None)
        return self._body + (self._to_drop or 0) > self._all.options.max_body_bytes

    def _drop(self, data: bytes) -> None:
        """Drop ``data`` of a body that is too long. Its reader gets empty pieces, and the end of the body."""
        cycle = self.cycle
        assert self._dropped is not None
        self._dropped += len(data)
        self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        ended = self._tail == _LAST_CHUNK if self._to_drop is None else self._dropped >= self._to_drop
        if ended or self._dropped > _DROPPED_BYTES:
            self._end_dropped()
        cycle.message_event.set()

    def _end_dropped(self) -> None:
        """Nothing more of a body that is too long is waited for."""
        self.cycle.more_body = False
        self.cycle.message_event.set()
        if self.cycle.response_complete:
            self.transport.close()

    def read_on(self) -> None:
        """Parse and read again, after uvicorn has paused both."""
        if self._read:
            self._all.feed(self)
        else:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        before = self.cycle
        super().on_response_complete()
        if not self.transport.is_closing():
            if self.cycle is not before:  # the next request, which had come already
                self._body = len(self.cycle.body)
            self._beside = 0
            self._watch()

    def _watch(self) -> None:
        """Limit the time of what the client has to send next, and the bytes that it may send beside."""
        if self.transport.is_closing():
            return
        idle = self.conn.their_state is h11.IDLE
        answered = self.cycle is None or self.cycle.response_complete
        late = not idle and answered and self.conn.their_state is h11.SEND_BODY  # a body that nothing reads
        if self._beside > self._most_beside(answered):
            self._end(413, "the body comes in chunks that are too small", "request_too_large", "too_large")
            return
        self._all.waits(self, answered and (idle or late))
        partial = idle and (self.cycle is None or bool(self.conn.trailing_data[0]))
        awaited = (self.conn.their_state, self.cycle) if partial or late else None
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if awaited is not None:
            self._unset_keepalive_if_required()
            self._late = self.loop.call_later(self._all.options.header_timeout_s, self._too_late)

    def _most_beside(self, answered: bool) -> int:
        """Bytes of chunks' sizes and extensions; after an answer the rest of the body, so that the client reads it."""
        most = self._all.options.max_body_bytes
        return most + _FRAMES_BYTES if answered else most // 2 + _FRAMES_BYTES

    def _too_late(self) -> None:
        limit = self._all.options.header_timeout_s
        self._end(408, f"the headers took longer than {limit:g} s to come", "timeout", "header_timeout")

    # --- ends

    def end_for_room(self) -> None:
        """End the connection in favour of others, at once, whether or not the client reads the reason."""
        self._all.leave(self)
        what = "the server has no room for more connections: try again later"
        self._end(503, what, "too_many_connections", "connections", always=self.cycle is None)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that h11 does not accept."""
        what = f"this is no request of HTTP/1.1, or its headers have more than {HEADERS_BYTES:,} bytes"
        self._end(400, what, "invalid_http", "invalid", always=True)

    def _unsupported_upgrade_warning(self) -> None:
        """Such a request is answered as any other; uvicorn would advise an installation."""

    def _end(self, status: int, message: str, code: str, reason: str, *, always: bool = False) -> None:
        """Close the connection, before that with an error if a request has begun, or ``always``, and none is answered.

        The refusal is counted if it is sent.
        """
        if self.transport.is_closing():
            return
        cycle = self.cycle
        open_ = cycle is not None and not cycle.response_complete
        begun = open_ or (self.conn.their_state is h11.IDLE and (self._read or self.conn.trailing_data[0]))
        rest = cycle is not None and not open_ and self.conn.their_state is h11.SEND_BODY  # of an answered request
        if (begun or always) and not rest and not (open_ and cycle.response_started):
            self._all.metrics.refused[reason].inc()
            if status < 500:  # a server that is full would fill its log, too
                access.info("%s without a whole request", status, extra={"told": {"status": status, "error": message}})
            self.transport.write(_answer(status, message, code))
        if cycle is not None and open_:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def _within_files(wanted: int) -> tuple[int, int]:
    """How many of ``wanted`` connections this process may have open, and how many files.

    Raises the limit on open files as far as the system lets it.
    """
    try:
        import resource

        opened = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # no such limit is known
        return wanted, _MOST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = min(wanted + opened + _RESERVED_FILES, _MOST_FILES, _MOST_FILES if hard == unlimited else hard)
    if soft != unlimited and soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            soft = needed
    files = _MOST_FILES if soft == unlimited else soft
    return max(1, min(wanted, files - opened - _RESERVED_FILES)), files


class _Flow(FlowControl):
    """uvicorn's control of reading and writing, where reading goes on only after what was read is parsed."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._connection.read_on()


def _answer(status: int, message: str, code: str) -> bytes:
    """A whole answer of HTTP/1.1, after which the connection is closed."""
    body = json.dumps(error_body(status, message, code=code)).encode()
    more = "Retry-After: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + body
