"""Errors in the format of OpenAI's API: an object with a message, a type, the wrong parameter, and a code."""

from __future__ import annotations

import itertools
import json
import logging
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Scope

from ...kernels.runtime.names import nearest
from ..aio import SlowReader
from ..guide import GuideBusy, GuideRefused
from ..ranks import RanksLost
from ..request import QueueFull
from ..sampling import LogitsNotFinite
from ..sampling_params import NoTokenLeft

log = logging.getLogger("shardfuse.server")

GONE = 499  # nginx's status for a client that closed its connection
INVALID = "invalid_request_error"
_MESSAGE, _PARAM = 3072, 512  # the most bytes of their JSON: with the rest, an error has at most 4 kB
_TYPES = {401: "authentication_error", 404: INVALID, 408: "timeout_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The body of every unsuccessful answer."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error to report to the client, with an HTTP ``status``. ``given``: what the client sent there, in words, which
    the client is told and the log is not: it may be a prompt.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        given: str = "",
    ) -> None:
        self.logged = message
        message += f"; {given} was given" if given else ""
        super().__init__(status, message, headers)
        self.body = error_body(status, message, code=code, param=param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The JSON of an :class:`ErrorBody`; a long message, which may quote the client, is cut."""
    kind = _TYPES.get(status, INVALID if status < 500 else "server_error")
    param = None if param is None else _cut(param, _PARAM)
    return {"error": {"message": _cut(message, _MESSAGE), "type": kind, "param": param, "code": code}}


def _cut(text: str, most: int) -> str:
    """``text``, or its beginning if its JSON takes more than ``most`` bytes."""
    kept = text[:most]
    while len(json.dumps(kept)) > most:
        kept = kept[: len(kept) * 3 // 4]
    return text if kept == text else f"{kept}..."


def invalid(message: str, param: str | None = None, code: str | None = None, *, given: str = "") -> ApiError:
    """400: the request cannot be served, now or later."""
    return ApiError(400, message, param=param, code=code, given=given)


def unavailable(message: str, code: str = "unavailable", retry_after_s: int = 1) -> ApiError:
    """503: the request could be served by another server, or by this one later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def explained(error: Exception) -> ApiError:
    """The client's error for an ``error`` of the engine or of a request in it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (QueueFull, GuideBusy)):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, SlowReader):
        return ApiError(408, f"the client reads too slowly: {error} (--max-answer-bytes)", code="timeout")
    if isinstance(error, RanksLost):
        return unavailable(str(error), "ranks_lost", 30)
    if isinstance(error, (GuideRefused, NoTokenLeft)):
        return invalid(str(error))
    if isinstance(error, LogitsNotFinite):
        log.error("a request failed: %s", error)
        return ApiError(500, str(error), code="logits_not_finite")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the model failed on this request: {type(error).__name__}: {error}", code="model_error")


def refusal(scope: Scope, error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to the request of ``scope``, whose log line gets the error's message."""
    scope["state"]["error"] = error.logged
    return Json(error.body, error.status_code, headers={**(error.headers or {}), **(headers or {})})


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error with an :class:`ErrorBody`."""

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        path = request.scope["path"]
        if isinstance(error, ApiError):
            told = error
        elif error.status_code == 404:
            told = ApiError(404, _no_path(app, path), code="not_found", headers=error.headers)
        else:
            told = ApiError(error.status_code, f"{request.method} {path}: {error.detail}", headers=error.headers)
        return refusal(request.scope, told)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = error.errors()[0]  # of the path or the query: bodies have their own (bodies.py)
        name = str(wrong["loc"][-1])
        return refusal(request.scope, invalid(f"{name}: {wrong['msg']}", name, given=shown(wrong.get("input"))))


def _no_path(app: FastAPI, path: str) -> str:
    close = nearest(path, [route.path for route in app.routes if isinstance(route, Route)])
    hint = "/openapi.json lists what there is" if close is None else f"did you mean {close}?"
    return f"there is no {path}: {hint}"


class Json(JSONResponse):
    """The answer is ASCII, so that it can quote a client's lone surrogates, which UTF-8 lacks."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def shown(value: Any) -> str:
    """A JSON ``value`` in an error: at most some hundred characters of it."""
    return "nothing" if value is None else _SHORT.repr(value)


class _Short(reprlib.Repr):
    """``repr`` of a few parts of a value, in its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 100
        self.maxlevel = 3

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        most = self.maxdict if level else 0
        parts = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in itertools.islice(x.items(), most)
        ]
        return "{" + ", ".join([*parts, "..."] if len(x) > most else parts) + "}"


_SHORT = _Short()
