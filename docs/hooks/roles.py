"""Docstrings name other objects in Sphinx's roles; the site shows these as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`~?([^`]+)`")


class Roles(Extension):
    """Turns ``:class:`Engine``` into `` `Engine` `` in every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        docstring: Docstring | None = obj.docstring
        if docstring is not None:
            docstring.value = _ROLE.sub(r"`\1`", docstring.value)
