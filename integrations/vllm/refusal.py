"""What stands for the backend in a vLLM that it was not written for: imported when somebody chooses it."""

from __future__ import annotations

from . import CONTRACT, HOST

HOST.check(CONTRACT)
