"""One key in Triton's cache for one kernel, whatever the process launched before.

A kernel's key covers the global constants of the functions that it calls. Triton (3.6 and 3.7) collects those of a
function that it has not met before it looks into that function, and finds none: the key depends on the order in which a
process meets its kernels, and the cache holds a kernel several times.
"""

from __future__ import annotations

import threading
from typing import Any

_lock = threading.Lock()


def settle(fn: Any) -> None:
    """Compute the key of a kernel that is not interpreted, those of the functions that it calls before its own."""
    from triton.runtime.jit import DependenciesFinder

    plain = getattr(DependenciesFinder, "_update_hash", None)
    if plain is None:  # another Triton: then the key is what it makes of it
        return

    def after_the_callee(self: Any, callee: Any) -> None:
        callee.cache_key  # noqa: B018 - computed once, and kept
        plain(self, callee)

    with _lock:
        DependenciesFinder._update_hash = after_the_callee
        try:
            fn.cache_key  # noqa: B018
        finally:
            DependenciesFinder._update_hash = plain
