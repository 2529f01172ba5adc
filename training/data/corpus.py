"""Real text without a download: bytes for a byte-level model.

The default corpus is the source of Python's standard library, found through ``sysconfig``; ``--data PATH`` takes a text
file or a folder of text files. A token is a byte, so the vocabulary is 256 and no tokenizer ships.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .items import DataError

VOCAB_SIZE = 256
MAX_BYTES = 4 << 20  # more than a short run reads, and quick to load
BLOCK_BYTES = 8 << 10
HELD_OUT_EVERY = 16  # one block in this many is kept out of training
# In the standard library: tests, installed packages and character tables.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"})
# Bytes that text never holds: control characters except tab, newline, vertical tab, form feed, return and escape.
_CONTROL = bytes(b for b in (*range(32), 127) if b not in b"\t\n\v\f\r\x1b")


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text as bytes.

    ``train`` and ``held_out`` are uint8 [bytes]; ``source`` describes their origin; ``files`` counts the source files.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    source: str
    files: int


def load_corpus(path: str | os.PathLike[str] | None = None, *, seq: int = 128, max_bytes: int = MAX_BYTES) -> Corpus:
    """Read the text at ``path``, or the standard library's sources, cut to ``max_bytes``, and split it by blocks.

    Raises DataError for a path that is missing, empty, binary, unreadable, or shorter than a few windows of ``seq``.
    """
    documents, source = _read(path, max_bytes)
    text = b"\n".join(documents)
    need = 4 * HELD_OUT_EVERY * (seq + 1)
    if len(text) < need:
        raise DataError(f"--data {source}: {len(text)} bytes of text, at least {need} are needed; give more text")
    held_out, train = _split(text)
    return Corpus(_tensor(train), _tensor(held_out), source, len(documents))


def load_text(path: str | os.PathLike[str] | None = None, *, max_bytes: int = MAX_BYTES) -> torch.Tensor:
    """All of the text at ``path``, uint8 [bytes], read as :func:`load_corpus` does."""
    documents, _ = _read(path, max_bytes)
    return _tensor(b"\n".join(documents))


def unigram_nats(corpus: Corpus) -> float:
    """Held-out nats per byte of the training text's byte frequencies (add-one smoothed)."""
    counts = np.bincount(corpus.train.numpy(), minlength=VOCAB_SIZE) + 1.0
    log_p = np.log(counts / counts.sum())
    return float(-log_p[corpus.held_out.numpy()].mean())


def bigram_nats(corpus: Corpus) -> float:
    """Held-out nats per byte of byte-pair frequencies, backed off to the byte frequencies with one pseudo-count."""
    train = corpus.train.numpy().astype(np.int64)
    held_out = corpus.held_out.numpy().astype(np.int64)
    unigram = np.bincount(train, minlength=VOCAB_SIZE) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1] * VOCAB_SIZE + train[1:], minlength=VOCAB_SIZE**2).reshape(VOCAB_SIZE, VOCAB_SIZE)
    table = (pairs + unigram) / (pairs.sum(1, keepdims=True) + 1.0)
    return float(-np.log(table[held_out[:-1], held_out[1:]]).mean())


def _read(path: str | os.PathLike[str] | None, max_bytes: int) -> tuple[list[bytes], str]:
    """The documents at ``path``, or of the standard library, and their origin in words."""
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        documents = _read_folder(folder, max_bytes, suffix=".py", skipped=SKIPPED_FOLDERS)
        if not documents:
            raise DataError(f"no Python sources in {folder} (a stripped installation); pass text with --data PATH")
        return documents, f"the Python standard library's sources ({folder})"
    return _read_path(Path(path), max_bytes), str(path)


def _read_path(path: Path, max_bytes: int) -> list[bytes]:
    """The documents at the user's path."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"--data {path}: there is no such file or folder") from None
    except OSError as error:
        raise DataError(f"--data {path}: cannot be read ({error.strerror or error})") from None
    if stat.S_ISDIR(mode):
        documents = _read_folder(path, max_bytes)
        if not documents:
            raise DataError(f"--data {path}: no text files in this folder")
        return documents
    if not stat.S_ISREG(mode):  # a pipe would block, a device may never end
        raise DataError(f"--data {path}: neither a regular file nor a folder")
    text = _read_file(path, max_bytes)
    if not text.strip():
        raise DataError(f"--data {path}: the file is empty")
    if is_binary(text):
        raise DataError(f"--data {path}: a binary file; text is needed")
    return [text]


def _read_folder(
    folder: Path, max_bytes: int, *, suffix: str = "", skipped: frozenset[str] = frozenset()
) -> list[bytes]:
    """Read text files below ``folder`` up to ``max_bytes``, except hidden and binary ones and folders in ``skipped``.

    A hash of the relative names gives the order: the same on every machine and rank, and a capped selection is not all
    "a" to "c".
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"--data {error.filename}: cannot be read ({error.strerror})") from None

    names = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and name.endswith(suffix):
                names.append((Path(parent) / name).relative_to(folder).as_posix())
    names.sort(key=lambda name: hashlib.sha256(os.fsencode(name)).digest())

    documents: list[bytes] = []
    room = max_bytes
    for name in names:
        if room <= 0:
            break
        if not (folder / name).is_file():  # dangling links, sockets, pipes
            continue
        text = _read_file(folder / name, room)
        if text.strip() and not is_binary(text):
            documents.append(text)
            room -= len(text)
    return documents


def _read_file(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise DataError(f"--data {path}: cannot be read ({error.strerror or error})") from None


def is_binary(text: bytes) -> bool:
    """Whether the text holds a NUL, or more than 5 % control characters."""
    head = text[: 1 << 16]
    return b"\0" in head or len(head) - len(head.translate(None, _CONTROL)) > 0.05 * len(head)


def _split(text: bytes) -> tuple[bytes, bytes]:
    """``(held out, training)`` text: one block in HELD_OUT_EVERY is held out.

    Blocks rather than whole files: a few random files (generated tables, prose) do not represent the rest.
    """
    size = min(BLOCK_BYTES, math.ceil(len(text) / (2 * HELD_OUT_EVERY)))
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    held_out = blocks[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    train = [block for i, block in enumerate(blocks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    return b"".join(held_out), b"".join(train)


def _tensor(text: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
