"""Prepare data: read records, make tokens of them in parallel, fill windows, and keep the result on disk.

Worker processes of a DataLoader read and tokenise every n-th batch of records each; this process writes their tokens
in the records' order. The result does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...kernels.runtime.names import expected
from ...parallel.checkpoint import storage
from ..launch import available_cores
from .corpus import HELD_OUT_EVERY
from .items import TRAIN_ON, DataError, Item, RecordError, Sample
from .packing import best_fit, cut, one_each
from .prepared import COUNTED, FORMAT, SPLITS, TOKENS, About, Prepared, write_windows
from .reader import RecordReader
from .sources import Files

WORTH_WORKERS = 4 << 20  # bytes of data: less is read sooner than processes start
_RECORDS = 256  # of a batch, of data that is not in files


@dataclass(frozen=True)
class Options:
    """How data becomes windows: what the digest of prepared data covers beside text and tokenizer.

    A window has ``seq`` tokens. ``packing`` fills windows with several documents; otherwise each has one. Targets are
    the ``train_on`` "answers" of chats alone, or "all" tokens. ``hold_out`` keeps one piece in HELD_OUT_EVERY out of
    training.
    """

    seq: int
    packing: bool = True
    train_on: str = "answers"
    hold_out: bool = False

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise ValueError(f"seq={self.seq}: expected at least 1")
        if self.train_on not in TRAIN_ON:
            raise ValueError(f"train_on={self.train_on!r}: {expected(self.train_on, TRAIN_ON)}")


class Progress(NamedTuple):
    """How far a preparation has come: ``done`` of ``total`` bytes, or records, and the tokens made of them."""

    done: int
    total: int
    tokens: int


class Source(Protocol):
    """Data in batches of items; see ``Files.batches``."""

    size: int

    def batches(self, share: int = 0, shares: int = 1) -> Iterator[tuple[list[Item], int]]: ...


class Records:
    """An iterable of dicts, such as a ``datasets.Dataset``, as a source. ``size`` counts records, 0 where unknown."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._records = records
        self.indexed = isinstance(records, Sized) and hasattr(records, "__getitem__")
        self.size = len(records) if isinstance(records, Sized) else 0

    def batches(self, share: int = 0, shares: int = 1) -> Iterator[tuple[list[Item], int]]:
        if self.indexed:
            for first in range(share * _RECORDS, self.size, shares * _RECORDS):
                end = min(first + _RECORDS, self.size)
                yield [_item(self._records[i], i) for i in range(first, end)], end  # type: ignore[index]
            return
        numbered = enumerate(self._records)
        while batch := list(islice(numbered, _RECORDS)):
            yield [_item(record, i) for i, record in batch], batch[-1][0] + 1


def _item(record: Any, index: int) -> Item:
    place = f"record {index + 1}"
    if isinstance(record, Mapping):
        return Item(place, dict(record), 0)
    return Item(place, None, 0, f"a {type(record).__name__}; expected a dict such as {{'messages': [...]}}")


def prepare_data(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    seq: int,
    packing: bool = True,
    train_on: str = "answers",
    hold_out: bool = False,
    skip_bad: int = 0,
    folder: str | os.PathLike[str] = "shardfuse-tokens",
    on_progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Make training windows of texts or chats; ``data_loader(prepared.train, mesh, ...)`` reads them.

    Args:
        data: paths of files, folders or globs (JSONL, Parquet, JSON lists, text; ``.gz``, ``.zst``), or an iterable of
            dicts such as a ``datasets.Dataset``. A record has ``messages`` (and ``tools``), ``prompt`` and
            ``completion``, or ``text``.
        tokenizer: of transformers. Chats go through its template.
        seq: tokens of a window.
        packing: whether a window may hold several documents; they do not see each other.
        train_on: "answers", so that the loss counts the assistant's answers and completions alone, or "all".
        hold_out: whether to keep one document in sixteen for ``prepared.held_out``.
        skip_bad: how many records that cannot be trained on may be left out.
        folder: where the result is kept, under a digest of text, tokenizer and settings, by which it is found again.
        on_progress: called now and then.

    Returns the windows as datasets of ``(tokens, targets, positions)``, [seq] int64 each, the arguments of
    :meth:`~shardfuse.parallel.parallel_model.ParallelModel.step`.

    Raises DataError, a ValueError, for data that cannot be trained on; the message names file and line. Call it in one
    process, and ``Prepared.open(prepared.folder)`` in the others.
    """
    options = Options(seq, packing=packing, train_on=train_on, hold_out=hold_out)
    made_by = f"{type(tokenizer).__name__} {tokenizer.name_or_path}".rstrip()
    shared: dict[str, Any] = {"skip_bad": skip_bad, "on_progress": on_progress}
    if isinstance(data, (str, os.PathLike)) or (isinstance(data, Sequence) and _is_path(next(iter(data), None))):
        paths = [data] if isinstance(data, (str, os.PathLike)) else data
        return prepare_files(Files(paths, setting="data"), tokenizer, options, Path(folder), made_by, **shared)
    records = Records(data)  # type: ignore[arg-type]
    cores = available_cores() if records.indexed and records.size >= WORTH_WORKERS // 1024 else 1
    names = type(data).__name__, made_by
    return prepare(records, tokenizer, options, Path(folder), names=names, workers=cores if cores > 1 else 0, **shared)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def prepare_files(
    files: Files, tokenizer: Any, options: Options, cache: Path, made_by: str, **options_of_prepare: Any
) -> Prepared:
    """:func:`prepare` for ``files``, over all cores where they are large. ``made_by`` describes the tokenizer."""
    cores = available_cores()
    named = files.files[0].name if len(files.files) == 1 else f"{len(files.files):,} files"
    return prepare(
        files,
        tokenizer,
        options,
        cache,
        names=(named, made_by),
        key=digest(files.digest(), tokenizer, options),
        workers=cores if cores > 1 and files.size >= WORTH_WORKERS else 0,
        **options_of_prepare,
    )


def prepare(
    source: Source,
    tokenizer: Any,
    options: Options,
    cache: Path,
    *,
    names: tuple[str, str],
    key: str | None = None,
    skip_bad: int = 0,
    workers: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """The tokens of ``source`` in windows, in a folder of ``cache``: an earlier one of the same ``key``, or a new one.

    ``key`` is a digest of text, tokenizer and ``options``; None: the folder's name is a digest of the result. ``names``
    describe source and tokenizer. Up to ``skip_bad`` records may be bad; they are left out and counted.

    Raises DataError, which names the place, for a bad record beyond these, for data without any tokens to learn from,
    and where the folder cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        storage.remove_dead(cache, "*")
        if key is not None and (cache / key).exists():
            found = Prepared.open(cache / key)
            if found.about.skipped <= skip_bad:
                return found
        with _folder(cache, key) as (folder, publish):
            made = _Making(folder, tokenizer, options, skip_bad)
            with contextlib.closing(_chunks(source, tokenizer, options, workers)) as chunks:
                for chunk in chunks:
                    made.add(chunk)
                    if on_progress is not None:
                        on_progress(Progress(chunk.at, source.size, made.tokens))
            name = made.finish(names)
            return Prepared.open(publish(key or name))
    except OSError as error:
        raise DataError(
            f"{cache}: prepared tokens cannot be kept there ({error.strerror or error}); make room, or choose another "
            "folder (data.cache)"
        ) from None


@contextlib.contextmanager
def _folder(cache: Path, key: str | None) -> Iterator[tuple[Path, Callable[[str], Path]]]:
    """A new folder in ``cache``, and the function that gives it its name; it is removed where the block fails.

    A killed process leaves it under its temporary name, and the next preparation removes it.
    """
    folder, lock = storage.beside(cache / (key or "tokens"))

    def publish(name: str) -> Path:
        storage.publish(folder, cache / name)
        return cache / name

    try:
        yield folder, publish
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


# --- in the workers ---------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """The tokens of a batch of items: ``lengths`` [n] and ``edges`` [n, 2] (first, last) of each that is good.

    ``errors`` are the places of the others, and the reasons.
    """

    ids: np.ndarray
    counted: np.ndarray
    lengths: np.ndarray
    edges: np.ndarray
    errors: list[tuple[str, str]]
    at: int  # bytes of the source read so far


class _Chunks(IterableDataset[Chunk | DataError]):
    """The chunks of ``source``; each worker yields every n-th. An error of the source is yielded, because one that is
    raised in a worker arrives with the worker's traceback for its message."""

    def __init__(self, source: Source, reader: RecordReader, dtype: np.dtype, seq: int) -> None:
        self._source, self._reader, self._dtype, self._seq = source, reader, dtype, seq

    def __iter__(self) -> Iterator[Chunk | DataError]:
        worker = get_worker_info()
        share, shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        try:
            for items, at in self._source.batches(share, shares):
                yield self._chunk(items, at)
        except DataError as error:
            yield error

    def _chunk(self, items: list[Item], at: int) -> Chunk:
        samples: list[Sample] = []
        edges, errors = [], []
        for item, found in zip(items, self._reader.read(items)):
            reason = str(found) if isinstance(found, RecordError) else self._too_long(found)
            if reason:
                errors.append((item.place, reason))
            else:
                assert isinstance(found, Sample)
                samples.append(found)
                edges.append((item.first, item.last))
        return Chunk(
            _joined([each.ids for each in samples], self._dtype),
            _joined([each.counted for each in samples], np.dtype(bool)),
            np.array([len(each.ids) for each in samples], dtype=np.int64),
            np.array(edges, dtype=bool).reshape(-1, 2),
            errors,
            at,
        )

    def _too_long(self, sample: Sample) -> str:
        """Why a document is refused that would have to be cut; "" for the others. The parts of one whose targets all
        count are documents of their own; an answer without its question is none."""
        if len(sample.ids) <= self._seq + 1 or sample.counted.all():
            return ""
        return (
            f"{len(sample.ids):,} tokens, and a window takes {self._seq + 1:,}: what a chat or a prompt with its "
            "completion says is not cut; use longer windows (data.seq), or leave such records out (data.skip_bad)"
        )


def _joined(arrays: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def _chunks(source: Source, tokenizer: Any, options: Options, workers: int) -> Generator[Chunk]:
    reader = RecordReader(tokenizer, train_on=options.train_on)
    dataset = _Chunks(source, reader, token_dtype(tokenizer), options.seq)
    more: dict[str, Any] = {"num_workers": workers, "worker_init_fn": _alone} if workers else {}
    if workers and sys.platform == "linux":  # from Python 3.14 on, others would import the caller's program again
        more["multiprocessing_context"] = "fork"
    loader = DataLoader(dataset, batch_size=None, collate_fn=_as_is, **more)
    for chunk in loader:
        if isinstance(chunk, DataError):
            raise chunk
        yield chunk


def _as_is(chunk: Any) -> Any:
    return chunk


def _alone(worker: int) -> None:
    """One thread for a worker's tokenizer, because there is a worker for each core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


# --- in this process --------------------------------------------------------------------------------------------------


class _Making:
    """Prepared data in the making, in ``folder``."""

    def __init__(self, folder: Path, tokenizer: Any, options: Options, skip_bad: int) -> None:
        self._folder, self._options, self._skip_bad = folder, options, skip_bad
        self._dtype = token_dtype(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        self._digest = hashlib.sha256(json.dumps(dataclasses.asdict(options)).encode())
        self._lengths, self._targets, self._whole = array("q"), array("q"), array("b")  # of each document
        self._ends: Counter[str] = Counter()
        self._skipped, self._first_skipped = 0, ""
        self._frequencies = np.zeros(largest_id(tokenizer) + 1, dtype=np.int64)  # of targets
        self._open = False  # whether the last document goes on
        self._largest = 0
        self.tokens = 0

    def add(self, chunk: Chunk) -> None:
        """Append a chunk. Raises DataError for a bad record too many."""
        for place, reason in chunk.errors:
            self._first_skipped = self._first_skipped or f"{place}: {reason}"
            if self._skipped == self._skip_bad:
                before = f" ({self._skipped} before it were left out, as data.skip_bad allows)" if self._skipped else ""
                raise DataError(f"{place}: {reason}{before}")
            self._skipped += 1
        target = chunk.counted.copy()
        end = 0
        for length, (first, last) in zip(chunk.lengths.tolist(), chunk.edges.tolist()):
            begin, end = end, end + length
            if first or not self._open:
                target[begin] = False  # nothing comes before it
                self._lengths.append(0)
                self._targets.append(0)
                self._whole.append(not chunk.counted[begin:end].all())
            self._open = not last
            self._lengths[-1] += length
            self._targets[-1] += int(np.count_nonzero(target[begin:end]))
            if self._whole[-1]:
                self._count_end(chunk.ids[max(begin, end - 3) : end].tolist())
        self._frequencies += np.bincount(chunk.ids[target], minlength=len(self._frequencies))
        self._largest = max(self._largest, int(chunk.ids.max(initial=0)))
        self._digest.update(chunk.ids.tobytes() + chunk.counted.tobytes() + chunk.lengths.tobytes())
        self._append(TOKENS, chunk.ids)
        self._append(COUNTED, chunk.counted)
        self.tokens += len(chunk.ids)

    def finish(self, names: tuple[str, str]) -> str:
        """Write the windows, and what the folder holds; return a digest of it."""
        for name in (TOKENS, COUNTED):
            self._append(name, np.empty(0))
        options, lengths = self._options, np.asarray(self._lengths)
        whole = np.asarray(self._whole, dtype=bool)
        pieces = cut(np.concatenate(([0], np.cumsum(lengths))), whole, options.seq)
        held = np.zeros(len(pieces), dtype=bool)
        if options.hold_out:
            held[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY] = True
        if held.all():
            raise DataError(f"{names[0]}: nothing to train on; give more data")
        fill = best_fit if options.packing else one_each
        bounds = {}
        for split, chosen in zip(SPLITS, (pieces[~held], pieces[held])):
            filled, bounds[split] = fill(chosen, options.seq)
            write_windows(self._folder, split, filled, bounds[split])
        inputs = int((pieces[~held, 1] - 1).sum())
        About(
            *names,
            options=dataclasses.asdict(options),
            documents=len(lengths),
            tokens=self.tokens,
            skipped=self._skipped,
            first_skipped=self._first_skipped,
            dtype=self._dtype.name,
            largest=self._largest,
            entropy=entropy(self._frequencies),
            answers=int(whole.sum()),
            ends=dict(self._ends),
            padding=1.0 - inputs / (options.seq * (len(bounds["train"]) - 1)),
            masked=1.0 - int(np.asarray(self._targets).sum()) / int((pieces[:, 1] - 1).sum()),
        ).write(self._folder)
        return self._digest.hexdigest()[:32]

    def _count_end(self, tail: list[int]) -> None:
        """Count the special token that ends a document; a template may put a newline behind it."""
        found = [id for id in tail if id in self._special]
        if found:
            self._ends[str(found[-1])] += 1

    def _append(self, name: str, values: np.ndarray) -> None:
        with open(self._folder / name, "ab") as file:
            file.write(values.tobytes())


def entropy(frequencies: np.ndarray) -> float:
    """The entropy of ``frequencies`` [V] in nats, corrected for a small sample (Miller, 1955): + (K - 1) / (2 N)."""
    seen = frequencies[frequencies > 0].astype(np.float64)
    if not len(seen):
        return 0.0
    shares = seen / seen.sum()
    return float(-(shares * np.log(shares)).sum() + (len(seen) - 1) / (2 * seen.sum()))


# --- names and sizes --------------------------------------------------------------------------------------------------


def token_dtype(tokenizer: Any) -> np.dtype:
    """The smallest integer type that holds every id of ``tokenizer``."""
    return np.min_scalar_type(largest_id(tokenizer))


def largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values())


def digest(text: str, tokenizer: Any, options: Options) -> str:
    """The name of the folder for the text of digest ``text``."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        sums = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    made_of = [FORMAT, text, sums, dataclasses.asdict(options)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
