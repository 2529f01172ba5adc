"""Errors as OpenAI's API has them: an object with a message, a type, the parameter that is wrong, and a code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ..ranks import RanksLost
from ..request import QueueFull

log = logging.getLogger("shardfuse.server")

INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 404: INVALID, 408: "timeout_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error that the client is told, with an HTTP ``status``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = error_body(status, message, code=code, param=param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The JSON of an :class:`ErrorBody`."""
    kind = _TYPES.get(status, INVALID if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served, now or later."""
    return ApiError(400, message, param=param, code=code)


def wrong_body(error: ValidationError) -> ApiError:
    """400 for a body that did not come by HTTP, as :func:`install` has it for one that did."""
    message, param = _first([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
    return invalid(message, param)


def unavailable(message: str, code: str = "unavailable", retry_after_s: int = 1) -> ApiError:
    """503: the request could be served by another server, or by this one later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def explained(error: Exception) -> ApiError:
    """What the client is told of an ``error`` of the engine or of a request in it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, RanksLost):
        return unavailable(str(error), "ranks_lost", 30)
    if isinstance(error, ValueError):
        return invalid(str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the model failed on this request: {type(error).__name__}: {error}", code="model_error")


def install(app: FastAPI) -> None:
    """Have ``app`` answer every error with an :class:`ErrorBody`."""

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            body = error.body
        elif error.status_code == 404:
            body = error_body(
                404, f"there is no {request.url.path}: /openapi.json lists what there is", code="not_found"
            )
        else:
            body = error_body(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _first(error.errors())
        return JSONResponse(error_body(400, message, param=param), 400)

    @app.exception_handler(Exception)
    async def _defect(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, f"a defect of the server: {type(error).__name__}"), 500)


def _first(errors: Any) -> tuple[str, str | None]:
    """The message and parameter of what pydantic found first; unknown parameters come before the rest."""
    found = min(errors, key=lambda each: each["type"] != "extra_forbidden")
    place = [str(part) for part in found["loc"][1:] if not str(part).startswith(("function-", "list[", "tagged-"))]
    param = ".".join(place) or None
    if found["type"] == "json_invalid":
        return f"the body is no JSON: {found.get('ctx', {}).get('error', found['msg'])}", None
    if found["type"] == "extra_forbidden":
        return f"{param}: there is no such parameter here; /openapi.json lists what there is", param
    given = repr(found.get("input"))
    given = given if len(given) <= 100 else given[:97] + "..."
    return f"{param or 'the body'}: {found['msg'][:1].lower()}{found['msg'][1:]}, and {given} was given", param
