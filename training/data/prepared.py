"""Tokens on disk, ready to train on: documents in windows, as ``prepare`` writes them.

A folder whose name is a digest of text, tokenizer and settings::

    DIGEST/
        tokens.bin            every token of every document, uint8, uint16 or uint32
        counted.bin           uint8 beside each: whether the loss counts it as a target
        train_pieces.npy      [P, 2] int64: first token and number of tokens of each piece, in the windows' order
        train_bounds.npy      [W + 1] int64: window w holds the pieces bounds[w] to bounds[w + 1]
        held_out_pieces.npy, held_out_bounds.npy
        data.json             how it was made, and what it holds

All arrays are mapped, not read. The folder gets its name when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ...parallel.cross_entropy import IGNORE_INDEX
from .items import DataError

FORMAT = "shardfuse tokens 1"
ABOUT, TOKENS, COUNTED = "data.json", "tokens.bin", "counted.bin"
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class About:
    """What a folder holds, and how it was made.

    ``options`` are the settings that the digest covers. ``largest`` is the highest token id. ``entropy`` is that of the
    targets' own frequencies, in nats: what a model loses per token that knows only how often each one occurs.
    ``answers`` counts the documents with masked targets, and ``ends`` those of them that each special token ends, by
    its id.
    """

    source: str
    tokenizer: str
    options: dict[str, Any]
    documents: int
    tokens: int
    skipped: int
    first_skipped: str
    dtype: str
    largest: int
    entropy: float
    answers: int
    ends: dict[str, int]
    padding: float  # the share of the training windows that holds no token
    masked: float  # the share of the training windows' tokens whose target does not count
    format: str = FORMAT

    def answers_end_at(self) -> tuple[int, ...]:
        """The special tokens that end a good part of the answers: a tenth or more."""
        return tuple(int(id) for id, count in self.ends.items() if count * 10 >= self.answers)

    def write(self, folder: Path) -> None:
        (folder / ABOUT).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> About:
        """Raises DataError for a folder of another kind."""
        try:
            values = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']!r}, expected {FORMAT!r}")
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{folder}: no prepared tokens ({error}); delete the folder and prepare again") from None


class PackedWindows(Dataset):
    """A dataset of windows: item w is ``(tokens, targets, positions)``, [seq] each, int64.

    A window holds one or more documents. ``positions`` restart at 0 in each, which keeps attention inside it
    (:meth:`~shardfuse.parallel.parallel_model.ParallelModel.step`). ``targets`` are one token ahead; IGNORE_INDEX
    stands at a document's last token, where the loss does not count the next one, and in the padding at the end.
    """

    def __init__(self, tokens: np.ndarray, counted: np.ndarray, pieces: np.ndarray, bounds: np.ndarray, seq: int):
        self._tokens, self._counted, self._pieces, self._bounds = tokens, counted, pieces, bounds
        self.seq = seq

    def __len__(self) -> int:
        return max(0, len(self._bounds) - 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        tokens = torch.zeros(self.seq, dtype=torch.int64)
        targets = torch.full((self.seq,), IGNORE_INDEX, dtype=torch.int64)
        positions = torch.zeros(self.seq, dtype=torch.int64)
        at = 0
        for first, length in self._pieces[self._bounds[index] : self._bounds[index + 1]].tolist():
            ids = torch.from_numpy(self._tokens[first : first + length].astype(np.int64))
            counted = torch.from_numpy(self._counted[first + 1 : first + length] != 0)
            end = at + length - 1
            tokens[at:end] = ids[:-1]
            targets[at:end] = ids[1:].masked_fill(~counted, IGNORE_INDEX)
            positions[at:end] = torch.arange(length - 1)
            at = end
        positions[at:] = torch.arange(self.seq - at)  # the padding is a document of its own
        return tokens, targets, positions


@dataclass(frozen=True)
class Prepared:
    """Prepared data: its folder, what it holds, and its windows to train on and to evaluate."""

    folder: Path
    about: About
    train: PackedWindows
    held_out: PackedWindows

    @classmethod
    def open(cls, folder: Path) -> Prepared:
        """Raises DataError for a folder that ``prepare`` did not complete."""
        about = About.read(folder)
        try:
            tokens = _mapped(folder / TOKENS, about.dtype, about.tokens)
            counted = _mapped(folder / COUNTED, "uint8", about.tokens)
            found = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for split in SPLITS for name in _names(split)}
        except (OSError, ValueError) as error:
            raise DataError(f"{folder}: torn ({error}); delete the folder and prepare again") from None
        seq = int(about.options["seq"])
        train, held_out = (
            PackedWindows(tokens, counted, found[pieces], found[bounds], seq) for pieces, bounds in map(_names, SPLITS)
        )
        return cls(folder, about, train, held_out)


def is_prepared(path: Path) -> bool:
    return (path / ABOUT).is_file()


def write_windows(folder: Path, split: str, pieces: np.ndarray, bounds: np.ndarray) -> None:
    """Write the windows of ``split`` as :func:`best_fit` returns them."""
    for name, array in zip(_names(split), (pieces, bounds)):
        np.save(folder / f"{name}.npy", array)


def _names(split: str) -> tuple[str, str]:
    return f"{split}_pieces", f"{split}_bounds"


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, expected {count:,} of {dtype}")
    return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)
