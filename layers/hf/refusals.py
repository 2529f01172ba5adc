"""transformers' refusals of a folder, explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import claims


def in_words(error: Exception) -> str:
    """An error's message in one line, without the stack of C++ that torch appends."""
    return " ".join(str(error).partition("\nException raised from")[0].split())


@contextmanager
def refusals_of(folder: Path, config: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Explain transformers' refusal of a folder: it needs Python code of its own, or has values that no model has."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder} asks for Python code of its own (auto_map), which is never run here: expected a model and a "
                "tokenizer that transformers itself has"
            ) from error
        if isinstance(error, ValueError):
            raise
        cause = f"; its largest fields are {claims.largest(config)}" if config else ""
        raise ValueError(f"no model has these values ({in_words(error)}){cause}") from error
