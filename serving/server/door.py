"""The middleware of every request: its id, its key, the size of its body, and a log line at its end."""

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

from .errors import ApiError, Json, error_body
from .errors import log as defects
from .served import TOLD, ServerOptions

log = logging.getLogger("shardfuse.access")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SWALLOW_BYTES, _SWALLOW_S, _SILENCE_S = 64 << 20, 5.0, 0.5  # bytes read of a refused body
_OPEN = ("/", "/health", "/version", "/metrics", "/stats", "/openapi.json")  # served without a key
_CLOSE = {"Connection": "close"}  # for a body that is not read to its end


class Door:
    """Middleware around ``app``. It puts ``request_id`` and ``tenant`` into the request's state."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._keys = [(key.encode(), hashlib.sha256(key.encode()).hexdigest()[:16]) for key in options.api_keys]

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

        try:
            tenant = self._tenant(scope["path"], headers.get(b"authorization", b""))
            scope["state"]["tenant"] = tenant
            length = headers.get(b"content-length", b"")
            if length.isdigit() and int(length) > self._options.max_body_bytes:
                await _swallow(receive)
                raise self._too_large(int(length))
            await self._app(scope, self._limited(receive), out)
        except ApiError as error:
            if sent:
                raise
            await Json(error.body, error.status_code, headers=dict(error.headers or {}))(scope, receive, out)
        except Exception as error:
            defects.error("a defect of the server", exc_info=error)
            if sent:
                raise
            body = error_body(500, f"a defect of the server: {type(error).__name__}")
            await Json(body, 500)(scope, receive, out)
        finally:
            seconds = time.monotonic() - began
            told: dict[str, Any] = {
                "request_id": name,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                **more,
            }
            quiet = scope["path"] in _OPEN and status == 200
            log.log(
                logging.DEBUG if quiet else logging.INFO, "%s %s %s", *list(told.values())[1:4], extra={"told": told}
            )

    def _tenant(self, path: str, authorization: bytes) -> str:
        """The client's cache salt: the hash of its key."""
        if not self._keys or path in _OPEN:
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

    def _too_large(self, length: int) -> ApiError:
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
                        await _swallow(receive)
                    raise self._too_large(taken)
            return message

        return limited


async def _swallow(receive: Receive) -> None:
    """Read the rest of a body, up to a limit: a client reads no answer while it sends, and may never see one if the
    connection is closed meanwhile.
    """
    taken, deadline = 0, time.monotonic() + _SWALLOW_S
    while taken < _SWALLOW_BYTES and (left := deadline - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(receive(), min(left, _SILENCE_S))
        except asyncio.TimeoutError:
            return
        taken += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
