"""The process of a server: a socket, signals, and uvicorn."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn

from .app import create_app
from .connections import HEADERS_BYTES, Connection, Connections
from .served import Served

log = logging.getLogger("shardfuse.server")
_SWITCH_S = 0.0005  # after which a thread that waits for the interpreter gets it: each token passes between threads
_LAST_S = 5.0  # the time from the signal that ends open requests to the end of the process
_KEPT_S = 30  # without a request on a connection
_ACCEPTED = 8  # connections accepted between other work; all of them have to fit beside the open files
_BACKLOG = 1024  # connections that the kernel holds until they are accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to ``port`` of ``host``; 0 chooses a free port. Raises ValueError if binding fails."""
    if not 0 <= port < 65536:
        raise ValueError(f"port {port}: expected a number from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)  # asyncio sends at once (TCP_NODELAY) where it is named
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ValueError(
            f"port {port} on {host} cannot be used ({error.strerror}): choose another, or 0 for any free one"
        ) from None
    return found


def config(served: Served, connections: Connections) -> uvicorn.Config:
    """uvicorn's settings for the application over ``served``, within the limits of ``connections``."""
    proxies = list(served.options.trusted_proxies)
    return uvicorn.Config(
        create_app(served),
        http=cast(Any, functools.partial(Connection, connections)),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=bool(proxies),  # else uvicorn would believe every client on this machine
        forwarded_allow_ips=proxies,
        backlog=_ACCEPTED,
        timeout_keep_alive=_KEPT_S,
        timeout_graceful_shutdown=int(_LAST_S),  # for connections; all requests have been answered by then
        h11_max_incomplete_event_size=HEADERS_BYTES,
    )


def run(served: Served, listener: socket.socket, *, drain_s: float, started: Callable[[str, str], object]) -> int:
    """Serve until SIGTERM or SIGINT, then finish open requests for at most ``drain_s``; return the exit code.

    While it drains, new requests get 503. A second signal ends at once, with exit code 1, as does the end of
    ``drain_s``. ``started`` is called with the address and the limits on connections once the server accepts requests.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel drops a connection whose client reads nothing for so long
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(served.options.send_timeout_s * 1000))
    connections = Connections(served.options, served.metrics)
    made = config(served, connections)
    server = _Server(made, served, drain_s, lambda address: started(address, connections.words()))
    sys.setswitchinterval(_SWITCH_S)
    asyncio.run(server.serve(sockets=[listener]))
    if not server.began:
        return 1
    return 1 if server.hurried else 0


class _Server(uvicorn.Server):
    """uvicorn, but after the first signal its socket stays open and answers 503 until all requests are done."""

    def __init__(
        self, config: uvicorn.Config, served: Served, drain_s: float, started: Callable[[str], object]
    ) -> None:
        super().__init__(config)
        self.began = self.hurried = False
        self._served, self._drain_s, self._started = served, drain_s, started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drains: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started and sockets:
            self.began = True
            for each in sockets:
                each.listen(_BACKLOG)
            # Objects that exist now stay: a garbage collection over all of them would stall every answer.
            gc.collect()
            gc.freeze()
            host, port = sockets[0].getsockname()[:2]
            self._started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's hook for SIGINT and SIGTERM."""
        if self._loop is None:  # a signal during startup
            self.should_exit = True
        elif self._served.draining:
            self._hurry(f"a second signal, {signal.Signals(sig).name}")
        else:
            self._served.draining = True
            self._loop.call_soon_threadsafe(self._begin_to_drain, signal.Signals(sig).name)

    def _begin_to_drain(self, name: str) -> None:
        count = self._served.open_requests
        log.info("%s: draining, %d requests are open; a second signal ends them", name, count)
        self._drains = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._served.drain(), self._drain_s)
        except asyncio.TimeoutError:
            self._hurry(f"{self._drain_s:g} s are over (--drain-timeout)")
        self.should_exit = True

    def _hurry(self, why: str) -> None:
        log.warning("%s: %d open requests are ended", why, self._served.open_requests)
        if not self.hurried:  # a hanging step would keep the process alive for ever
            timer = threading.Timer(_LAST_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
        self.hurried = self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(asyncio.ensure_future, self._end_streams())

    async def _end_streams(self) -> None:
        await self._served.serve.aclose()  # every open answer ends with an error, so that connections close
