"""Bodies that are wrong: of all errors that pydantic finds in one, the client is told a single one, in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ...kernels.runtime.names import nearest
from .errors import ApiError, invalid, shown
from .protocol import TEXT_ONLY

_INDEX = re.compile(r"\.(\d+)")  # in a path, where OpenAI writes [0]


def wrong_body(kind: type[BaseModel], error: ValidationError, body: Any) -> ApiError:
    """400 for a ``body`` that is no ``kind``, as pydantic's ``error`` says."""
    return _first(kind, error.errors(include_url=False), body)


def _first(kind: type[BaseModel], errors: Any, body: Any) -> ApiError:
    """The most telling one of ``errors``.

    An image or other media comes first, then the kind of an object, parameters that it does not have, and the rest.
    """

    def weight(error: Any) -> int:
        if error["type"] == TEXT_ONLY:
            return 0
        return 1 if error["loc"][-1:] == ("type",) else 2 if error["type"] == "extra_forbidden" else 3

    found = min(errors, key=weight)
    path, kinds = _path(found, body)
    if found["type"] == TEXT_ONLY:
        place = _INDEX.sub(r"[\1]", path)
        return invalid(f"{place}: {found['msg']}", path)
    if found["type"] == "extra_forbidden":
        *before, name = found["loc"]
        close = nearest(name, _names(kind, before))
        hint = "/openapi.json lists what there is" if close is None else f"did you mean {close!r}?"
        return invalid(f"{path}: there is no such parameter here; {hint}", path)
    told = [found["msg"][:1].lower() + found["msg"][1:]]
    given = "nothing" if found["type"] == "missing" else shown(found.get("input"))
    if kinds is not None:  # the value matches none of several allowed kinds
        told = []
        for each in errors:
            where, of = _path(each, body)
            if of == kinds:
                inner = f"at {where[len(kinds) + 1 :]}, " if where != kinds else ""
                told.append(inner + each["msg"][:1].lower() + each["msg"][1:])
        path, given = kinds, shown(_at(body, kinds))
    return invalid(f"{path or 'the body'}: {', or '.join(dict.fromkeys(told))}", path or None, given=given)


def _path(error: Any, body: Any) -> tuple[str, str | None]:
    """The place of an ``error`` in ``body``, and that of the value with several allowed kinds around it."""
    path: list[str] = []
    kinds, here = None, body
    *before, last = error["loc"] or ("",)
    for part in before:
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = here[part]
            path.append(str(part))
        elif kinds is None:  # the name of a kind
            kinds = ".".join(path)
    named = error["type"] in ("missing", "extra_forbidden") or isinstance(last, int)
    if named or (isinstance(here, dict) and last in here):
        path.append(str(last))
    elif kinds is None:
        kinds = ".".join(path)
    return ".".join(path), kinds or None


def _names(kind: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """The parameters of the object at ``loc``, pydantic's place of an error, in a body of ``kind``.

    Beside parameters, such a place has indices and, in unions, the name of a kind: one with a ``type`` has that name.
    """
    kinds = [kind]
    for part in loc:
        typed = [each for each in kinds if len(kinds) > 1 and part in _types(each)]
        found = [field.annotation for each in kinds for name, field in _fields(each) if name == part]
        kinds = typed or [model for annotation in found for model in _models(annotation)] or kinds
    return [name for each in kinds for name, _ in _fields(each)]


def _fields(kind: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(field.alias or name, field) for name, field in kind.model_fields.items()]


def _types(kind: type[BaseModel]) -> tuple[Any, ...]:
    return get_args(kind.model_fields["type"].annotation) if "type" in kind.model_fields else ()


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models within a type: those of ``list[A] | B | None`` are A and B."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models(each)]


def _at(body: Any, path: str) -> Any:
    for part in path.split("."):
        body = body[int(part)] if isinstance(body, list) else body[part]
    return body
