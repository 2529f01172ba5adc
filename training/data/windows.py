"""Token sequences for training without a tokenizer: text, with bytes as tokens, or a file of token numbers.

A dataset is cut into windows that do not overlap; the sampler (``parallel/data.py``) chooses the windows of a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from torch.utils.data import Dataset

from .corpus import HELD_OUT_EVERY, MAX_BYTES, VOCAB_SIZE, load_corpus, load_text
from .items import DataError
from .prepare import entropy
from .prepared import PackedWindows

TEXT_BYTES = 1 << 30  # the limit for the user's text; token numbers suit more data, because they stay on disk
_ENTROPY_OF = 1 << 20  # numbers, the first ones
Paths = str | os.PathLike[str] | tuple[str, ...] | None


class Windows(Dataset):
    """A dataset of windows: item ``i`` is ``(tokens, targets)``, [seq] each, int64, with targets one token ahead.

    ``source`` is one-dimensional: a tensor, or an array that may be mapped from a file. Reading a window raises
    DataError for a number outside ``vocab_size``.
    """

    def __init__(self, source: torch.Tensor | np.ndarray, seq: int, vocab_size: int) -> None:
        self._source = source
        self._seq = seq
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return max(0, (len(self._source) - 1) // self._seq)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._seq
        window = torch.from_numpy(np.asarray(self._source[start : start + self._seq + 1]).astype(np.int64))
        low, high = int(window.min()), int(window.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"data.path: token {low if low < 0 else high} near position {start}, and the model's vocabulary has "
                f"{self._vocab_size} (model.vocab_size)"
            )
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Tokens:
    """A run's data: its windows to train on, and those to evaluate.

    ``source`` describes its origin, ``digest`` is its identity, and ``entropy`` that of the targets' own frequencies in
    nats; None for bytes. ``ends`` are the special tokens that end the answers of chats. ``of_bytes`` says whether each
    token is a byte.
    """

    train: Windows | PackedWindows
    held_out: Windows | PackedWindows
    source: str
    digest: str | None = None
    entropy: float | None = None
    ends: tuple[int, ...] = ()
    of_bytes: bool = False


def load_tokens(path: Paths, *, seq: int, vocab_size: int, validation: Paths = None) -> Tokens:
    """The windows of ``path``: text as bytes, or a ``.npy`` file; None is the standard library's sources.

    A part is held out, or all of ``validation`` instead. Raises DataError for unusable data, and for text unless
    ``vocab_size`` is that of bytes.
    """
    path, validation = _one(path, "data.path"), _one(validation, "data.validation")
    if validation is not None:
        train, held_out = (_whole(each, seq, vocab_size) for each in (path, validation))
        return Tokens(train, held_out, str(path), of_bytes=not (_is_numbers(path) or _is_numbers(validation)))
    if _is_numbers(path):
        return _of_numbers(Path(path), seq, vocab_size)
    check_bytes(vocab_size)
    corpus = load_corpus(path, seq=seq, max_bytes=MAX_BYTES if path is None else TEXT_BYTES)
    train, held_out = (Windows(part, seq, vocab_size) for part in (corpus.train, corpus.held_out))
    return Tokens(train, held_out, corpus.source, of_bytes=True)


def _is_numbers(path: str | os.PathLike[str] | None) -> TypeGuard[str | os.PathLike[str]]:
    """Whether ``path`` names a file of token numbers."""
    return path is not None and Path(path).suffix == ".npy"


def _one(given: Paths, setting: str) -> str | os.PathLike[str] | None:
    if not isinstance(given, tuple):
        return given
    if len(given) > 1:
        raise DataError(
            f"{setting}: {len(given)} paths, and without a tokenizer only one is read, as bytes or as numbers; pass "
            "the folder of a tokenizer as data.tokenizer, or one path"
        )
    return given[0]


def check_bytes(vocab_size: int, start: str | None = None) -> None:
    """DataError unless ``vocab_size``, that of the model in the folder ``start`` if there is one, is that of bytes."""
    if vocab_size != VOCAB_SIZE:
        given = (
            f"model.vocab_size = {vocab_size}" if start is None else f"start = {start}: a vocabulary of {vocab_size}"
        )
        why = "no tokenizer is named" if start is None else "that folder has no tokenizer"
        remedy = f" or set model.vocab_size = {VOCAB_SIZE}," if start is None else ""
        raise DataError(
            f"{given}, but where {why} text is read as bytes, a vocabulary of {VOCAB_SIZE}; pass the folder of a "
            f"tokenizer (--set data.tokenizer=FOLDER),{remedy} or give token numbers in a .npy file as data.path"
        )


def _whole(path: str | os.PathLike[str] | None, seq: int, vocab_size: int) -> Windows:
    """All windows of ``path``."""
    if _is_numbers(path):
        return Windows(_numbers(Path(path)), seq, vocab_size)
    check_bytes(vocab_size)
    return Windows(load_text(path, max_bytes=MAX_BYTES if path is None else TEXT_BYTES), seq, vocab_size)


def _numbers(path: Path) -> np.ndarray:
    """The numbers in a ``.npy`` file, mapped."""
    try:
        numbers = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"--data {path}: there is no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"--data {path}: not a NumPy file of numbers ({error})") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise DataError(
            f"--data {path}: {numbers.dtype} of shape {list(numbers.shape)}; expected whole numbers in one dimension"
        )
    return numbers


def _of_numbers(path: Path, seq: int, vocab_size: int) -> Tokens:
    """The file's last part is held out."""
    numbers = _numbers(path)
    held_out = len(numbers) // HELD_OUT_EVERY
    if held_out <= seq:
        raise DataError(
            f"--data {path}: {len(numbers)} tokens, at least {HELD_OUT_EVERY * (seq + 1)} are needed; give more"
        )
    cut = len(numbers) - held_out
    train, last = (Windows(part, seq, vocab_size) for part in (numbers[:cut], numbers[cut:]))
    some = numbers[: min(cut, _ENTROPY_OF)]
    known = entropy(np.bincount(some)) if some.min() >= 0 and some.max() < vocab_size else None
    return Tokens(train, last, str(path), entropy=known)
