"""The stand-in for the backend in an unsupported vLLM; importing it, when the backend is selected, raises the error."""

from __future__ import annotations

from . import CONTRACT, HOST

HOST.check(CONTRACT)
