"""The middleware of every request: its id, its Host and key, the size of its body, and a log line at its end."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..printable import printable
from .errors import ApiError, refusal
from .errors import log as defects
from .hosts import Hosts, address_of, client_of
from .served import TOLD, Served

log = logging.getLogger("shardfuse.access")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SWALLOW_S, _SILENCE_S = 5.0, 0.5  # in which a refused body is read
_LOGGED = 200  # characters of a path, and of an error
_OPEN = ("/", "/health", "/version", "/metrics", "/stats", "/openapi.json")  # served without a key
_CLOSE = {"Connection": "close"}  # for a body that is not read to its end


class Door:
    """Middleware around ``app``.

    It puts into the request's state ``request_id``, ``tenant`` (the cache salt of its key, "" without keys), and
    ``client``, a name for whoever sends it: its key if there are keys, else its address; "" if that is unknown.
    """

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app = app
        self._metrics = served.metrics
        self._options = options = served.options
        self._keys = [(key.encode(), hashlib.sha256(key.encode()).hexdigest()[:16]) for key in options.api_keys]
        self._open = ("/health",) if options.protect_metrics else _OPEN
        # A web page may send requests to whatever its own name means, but none with a key that it does not know.
        self._hosts = None if self._keys or options.allowed_hosts is None else Hosts(options.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        more: dict[str, Any] = {}
        TOLD.set(more)
        began, status, sent = time.monotonic(), 0, False

        async def out(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, sent = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        length = headers.get(b"content-length", b"")
        too_long = length.isdigit() and (len(length) > 18 or int(length) > self._options.max_body_bytes)
        try:
            self._check_host(headers.get(b"host"), scope.get("server"))
            tenant = self._tenant(scope["path"], headers.get(b"authorization", b""))
            scope["state"].update(tenant=tenant, client=self._client(tenant, scope.get("client")))
            if too_long:
                raise self._too_large(length.decode()[:18])
            await self._app(scope, self._limited(receive), out)
        except ApiError as error:
            if sent:
                raise
            if too_long and b"expect" not in headers:  # such a client waits for the answer
                await _swallow(receive, self._options.max_body_bytes)
            await refusal(scope, error, _CLOSE if too_long else None)(scope, receive, out)
        except Exception as error:
            defects.error("a defect of the server", exc_info=error)
            if sent:
                raise
            await refusal(scope, ApiError(500, f"a defect of the server: {type(error).__name__}"))(scope, receive, out)
        finally:
            self._metrics.answered(status)
            seconds = time.monotonic() - began
            told: dict[str, Any] = {
                "request_id": name,
                "method": scope["method"][:20],
                "path": printable(scope["path"], _LOGGED),
                "status": status,
                "seconds": round(seconds, 4),
                **more,
            }
            if wrong := scope["state"].get("error"):
                told["error"] = printable(wrong, _LOGGED)
            quiet = scope["path"] in _OPEN and status == 200
            log.log(
                logging.DEBUG if quiet else logging.INFO, "%s %s %s", *list(told.values())[1:4], extra={"told": told}
            )

    def _check_host(self, host: bytes | None, server: tuple[str, int | None] | None) -> None:
        """Raise ApiError for a Host of another server. A request of HTTP/1.0 may have none, and no browser sends it."""
        if self._hosts is None or host is None:
            return
        text = host.decode("latin-1")
        here = address_of(server[0]) if server else None
        if self._hosts.allow(text) or (here is not None and Hosts([str(here)]).allow(text)):
            return
        raise ApiError(
            403,
            f"the Host {printable(text, 100)!r} is none of this server's: call it by its address, or start it with "
            "--allowed-hosts NAME, or with a key",
            code="host_not_allowed",
        )

    def _client(self, tenant: str, address: tuple[str, int] | None) -> str:
        if self._keys:
            return f"key:{tenant}" if tenant else ""
        return f"address:{client_of(address[0])}" if address and address[0] else ""

    def _tenant(self, path: str, authorization: bytes) -> str:
        """The client's cache salt: the hash of its key."""
        if not self._keys or path in self._open:
            return ""
        scheme, _, key = authorization.partition(b" ")
        tenant = None
        for known, name in self._keys:  # compares all keys, to take the same time for each
            if hmac.compare_digest(key.strip(), known) and scheme.lower() == b"bearer":
                tenant = name
        if tenant is None:
            raise ApiError(
                401,
                "this server asks for a key: send the header 'Authorization: Bearer KEY'"
                + (", and the one that was sent is not right" if authorization else ""),
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return tenant

    def _too_large(self, length: int | str) -> ApiError:
        return ApiError(
            413,
            f"the body has {length} bytes or more: this server takes {self._options.max_body_bytes} (--max-body-bytes)",
            code="request_too_large",
            headers=_CLOSE,
        )

    def _limited(self, receive: Receive) -> Receive:
        """A ``receive`` that refuses a body that is too long or arrives too slowly."""
        deadline = time.monotonic() + self._options.send_timeout_s
        taken, complete = 0, False

        async def limited() -> Message:
            nonlocal taken, complete
            if complete:  # later messages report the client's disconnect, at any time
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                limit = self._options.send_timeout_s
                raise ApiError(
                    408, f"the body took longer than {limit:g} s to come", code="timeout", headers=_CLOSE
                ) from None
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if taken > self._options.max_body_bytes:
                    if not complete:
                        await _swallow(receive, self._options.max_body_bytes)
                    raise self._too_large(taken)
            return message

        return limited


async def _swallow(receive: Receive, most: int) -> None:
    """Read the rest of a body, at most ``most`` bytes: a client reads no answer while it sends, and may never see one
    if the connection is closed meanwhile. ``Connection`` drops the rest and sends empty pieces.
    """
    taken, deadline = 0, time.monotonic() + _SWALLOW_S
    while taken < most and (left := deadline - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(receive(), min(left, _SILENCE_S))
        except asyncio.TimeoutError:
            return
        taken += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
