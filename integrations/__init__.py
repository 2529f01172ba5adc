"""Floor 4: the paged kernel inside other servers. docs/integrations.md explains how to enable it in each.

One module for each host, which imports the host when it is asked to: ``vllm``, ``transformers``, ``sglang``. Beside
them ``pages.py`` holds the one kernel object that all of them call, ``hosts.py`` the versions that were tested,
``contract.py`` what of a host the plug-in rests on, ``conformance/`` the matrix of equal tokens, and ``hub/`` the build
for Hugging Face's ``kernels``.
"""

from __future__ import annotations

import importlib
from typing import Any

from .hosts import UnsupportedHost
from .pages import reset_stats, stats

_HOSTS = ("sglang", "transformers", "vllm")

__all__ = ["UnsupportedHost", "reset_stats", "stats"]


def __getattr__(name: str) -> Any:
    if name in _HOSTS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOSTS})
