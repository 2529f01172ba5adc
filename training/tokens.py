"""Token sequences for training: text, with bytes as tokens, or a file of token numbers.

A dataset is cut into windows that do not overlap; the sampler (``parallel/data.py``) chooses the windows of a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from .data import HELD_OUT_EVERY, MAX_BYTES, VOCAB_SIZE, DataError, load_corpus

TEXT_BYTES = 1 << 30  # the limit for the user's text; token numbers suit more data, because they stay on disk


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
        window = torch.as_tensor(np.asarray(self._source[start : start + self._seq + 1], dtype=np.int64))
        low, high = int(window.min()), int(window.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"data.path: token {low if low < 0 else high} near position {start}, and the model's vocabulary has "
                f"{self._vocab_size} (model.vocab_size)"
            )
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Tokens:
    """A run's data. ``source`` describes its origin."""

    train: Windows
    held_out: Windows
    source: str


def load_tokens(path: str | os.PathLike[str] | None, *, seq: int, vocab_size: int) -> Tokens:
    """The windows of ``path``: text, or a ``.npy`` file; None is the standard library's sources.

    Raises DataError for unusable data, and for text if ``vocab_size`` is too small for bytes.
    """
    if path is not None and Path(path).suffix == ".npy":
        return _of_numbers(Path(path), seq, vocab_size)
    if vocab_size < VOCAB_SIZE:
        raise DataError(
            f"model.vocab_size = {vocab_size}: text is read as bytes, which need {VOCAB_SIZE}; raise it, or give a "
            ".npy file of token numbers as data.path"
        )
    corpus = load_corpus(path, seq=seq, max_bytes=MAX_BYTES if path is None else TEXT_BYTES)
    return Tokens(Windows(corpus.train, seq, vocab_size), Windows(corpus.held_out, seq, vocab_size), corpus.source)


def _of_numbers(path: Path, seq: int, vocab_size: int) -> Tokens:
    """The file's last part is held out."""
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
    held_out = len(numbers) // HELD_OUT_EVERY
    if held_out <= seq:
        raise DataError(
            f"--data {path}: {len(numbers)} tokens, at least {HELD_OUT_EVERY * (seq + 1)} are needed; give more"
        )
    cut = len(numbers) - held_out
    return Tokens(Windows(numbers[:cut], seq, vocab_size), Windows(numbers[cut:], seq, vocab_size), str(path))
