"""Bodies of requests: read, weighed before they are parsed, parsed and checked, beside the event loop if they are
large.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from .errors import GONE, ApiError, invalid, shown
from .served import Served
from .weights import check_weight
from .wrong_bodies import wrong_body

M = TypeVar("M", bound=BaseModel)
_LARGE = 16 << 10  # bytes; the event loop parses smaller bodies itself, in a millisecond or two


async def read(request: Request, kind: type[M], served: Served) -> M:
    """The body of ``request`` as a ``kind``. Raises ApiError for any other body."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError(GONE, "the client closed the connection", code="cancelled") from None
    request.state.large = len(raw) > _LARGE
    if raw and not _says_json(request.headers.get("content-type", "")):
        raise invalid("the body is not said to be JSON: send the header 'Content-Type: application/json'")
    if request.state.large:
        return await served.aside(parsed, raw, kind, served.most_memory)
    return parsed(raw, kind, served.most_memory)


def parsed(raw: bytes, kind: type[M], most: int) -> M:
    """``raw``, UTF-8 JSON, as a ``kind``. Raises ApiError for other bytes, and for a weight above ``most``."""
    check_weight(most, raw)
    found = _json(raw)
    if not isinstance(found, dict):
        raise invalid(f"the body is {shown(found or None)}: expected a JSON object")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise wrong_body(kind, error, found) from None


def _json(raw: bytes) -> Any:
    try:
        return from_json(raw)
    except ValueError:
        pass
    try:  # takes lone surrogates, which the fields that hold them refuse, and has other words for what is no JSON
        return json.loads(raw.decode()) if raw else None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}") from None


def _says_json(content_type: str) -> bool:
    kind, _, form = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (form == "json" or form.endswith("+json"))
