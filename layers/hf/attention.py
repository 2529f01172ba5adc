"""Look up the attention function of transformers' modeling files, without importing transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def eager_attention(kind: type) -> Callable[..., Any] | None:
    """The function ``eager_attention_forward`` of the modeling file that a class of layers comes from, or None."""
    for base in kind.__mro__:
        if found := getattr(sys.modules.get(base.__module__), "eager_attention_forward", None):
            return found
    return None
