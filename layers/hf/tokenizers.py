"""The tokenizer in a folder of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import COMPANIONS, GENERATION
from .pretrained import refusals_of

_SAVE = "tokenizer.save_pretrained(folder) of transformers writes one"


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of ``folder``, without running code from there.

    transformers reads the folder's config.json as well, as long as that says: of a model that is to be loaded, call
    ``check_claims`` first.

    Raises FileNotFoundError for a missing folder, ValueError where it holds no tokenizer that can be loaded,
    ImportError without transformers.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError(
            "a tokenizer needs transformers, which is not installed: pip install 'shardfuse[hf]'"
        ) from None
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: there is no such folder: expected a tokenizer's files")
    try:
        with refusals_of(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({_SAVE}): {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without the files
        raise ValueError(f"{folder}: its tokenizer knows no text, so its files are missing: {_SAVE}")
    return tokenizer


def holds_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has any of a tokenizer's files."""
    return any(next(folder.glob(pattern), None) for pattern in COMPANIONS if pattern != GENERATION)
