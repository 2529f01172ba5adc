"""The data of a run: which tokenizer reads it, its preparation, and its windows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ...layers.config import TransformerConfig
from ...layers.hf.folders import check_claims
from ...layers.hf.tokenizers import holds_tokenizer, load_tokenizer
from ..settings import DataSettings, RunSettings
from .items import DataError
from .prepare import Options, Progress, largest_id, prepare_files
from .prepared import Prepared, is_prepared
from .sources import Files
from .windows import Tokens, check_bytes, load_tokens

LINE_EVERY = 5.0  # seconds between two lines of progress, without a terminal


def tokenizer_folder(settings: RunSettings) -> Path | None:
    """The folder of the tokenizer that reads the run's text; None where its data are bytes or numbers.

    Raises DataError for text that nothing can read: bytes are tokens for a vocabulary of bytes alone.
    """
    data = settings.data
    if data.tokenizer is not None:
        return Path(data.tokenizer)
    if settings.start is not None and holds_tokenizer(Path(settings.start)):
        return Path(settings.start)
    if not _is_numbers(data):
        check_bytes(settings.model.vocab_size, settings.start)
    return None


def with_ends(config: TransformerConfig, folder: Path) -> TransformerConfig:
    """``config`` with the tokenizer's tokens that begin and end a text, where it has none of its own."""
    tokenizer = load_tokenizer(folder)
    given = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    fits = {name: id for name, id in given.items() if id is not None and id < config.vocab_size}
    return dataclasses.replace(config, **{name: id for name, id in fits.items() if getattr(config, name) is None})


def needs_preparation(settings: RunSettings) -> bool:
    """Whether the data of resolved ``settings`` go through a tokenizer first. Raises the errors of
    :func:`tokenizer_folder`."""
    return tokenizer_folder(settings) is not None and not _is_numbers(settings.data)


def prepare_run(
    settings: RunSettings, console: Console | None = None, ended: Callable[[], bool] = lambda: False
) -> list[Path]:
    """The folders of prepared tokens of resolved ``settings``: of data.path, then of data.validation where it is given.

    Shows the progress on ``console``, and then what the data are. Ends with an error when ``ended()``. No collectives.
    Raises DataError, and FileNotFoundError, ValueError or ImportError for a tokenizer that cannot be loaded.
    """
    data, folder = settings.data, tokenizer_folder(settings)
    assert folder is not None
    if data.path is None:
        raise DataError(
            "data.path: the text to train on is not named, and a tokenizer is; pass a file, a folder or a glob (--data "
            "PATH)"
        )
    tokenizer = _tokenizer(folder, settings)
    hold_out = data.validation is None and settings.log.eval_batches != 0
    options = Options(data.seq, packing=data.packing, train_on=data.train_on, hold_out=hold_out)
    display = _Display(console, ended)
    found = [_prepared("data.path", data.path, tokenizer, options, settings, display)]
    if data.validation is not None:
        options = Options(data.seq, packing=data.packing, train_on=data.train_on)
        found.append(_prepared("data.validation", data.validation, tokenizer, options, settings, display))
    if console is not None:
        for name, each in zip(("data", "validation"), found):
            for line in summary(name, each):
                console.print(line, markup=False, soft_wrap=True)
    return [each.folder for each in found]


def load(settings: RunSettings, prepared: list[Path] | None) -> Tokens:
    """The windows of resolved ``settings``, prepared or not."""
    data = settings.data
    if not prepared:
        return load_tokens(data.path, validation=data.validation, seq=data.seq, vocab_size=settings.model.vocab_size)
    opened = [Prepared.open(folder) for folder in prepared]
    train, validation = opened[0], opened[-1]
    held_out = train.held_out if len(opened) == 1 else validation.train
    about = train.about
    return Tokens(train.train, held_out, about.source, train.folder.name, about.entropy, about.answers_end_at())


def summary(name: str, prepared: Prepared) -> list[str]:
    """What was prepared, in words."""
    about = prepared.about
    held = f", {len(prepared.held_out):,} more held out" if about.options["hold_out"] else ""
    lines = [
        f"{name}: {about.documents:,} document{'s' * (about.documents != 1)} of {about.source}, {about.tokens:,} "
        f"tokens ({about.tokenizer}), in {len(prepared.train):,} windows of {about.options['seq']:,}{held}: "
        f"{about.padding:.1%} padding, {about.masked:.1%} of the targets masked; kept in {prepared.folder}"
    ]
    if about.skipped:
        lines.append(f"warning: {name}: {about.skipped:,} bad records left out; the first: {about.first_skipped}")
    return lines


def cache_folder(settings: RunSettings) -> Path:
    """The folder of prepared tokens, which runs side by side share."""
    cache = settings.data.cache
    return Path(settings.out).absolute().parent / "shardfuse-tokens" if cache is None else Path(cache)


def paths_of(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


def _is_numbers(data: DataSettings) -> bool:
    """Whether the data are token numbers already."""
    paths = paths_of(data.path)
    return len(paths) == 1 and paths[0].endswith(".npy")


def _tokenizer(folder: Path, settings: RunSettings) -> Any:
    """Raises DataError where the tokenizer has tokens that the model has not."""
    if settings.start is not None and folder == Path(settings.start):
        check_claims(folder)  # transformers' tokenizers read the config as well
        return load_tokenizer(folder)
    tokenizer, size = load_tokenizer(folder), settings.model.vocab_size
    if largest_id(tokenizer) >= size:
        where = "model.vocab_size" if settings.start is None else settings.start
        raise DataError(
            f"data.tokenizer = {folder}: its tokens go up to {largest_id(tokenizer):,}, and the model's vocabulary has "
            f"{size:,} ({where}); pass the model's own tokenizer, or a model with a vocabulary of at least "
            f"{largest_id(tokenizer) + 1:,}"
        )
    return tokenizer


def _prepared(
    setting: str,
    given: str | tuple[str, ...],
    tokenizer: Any,
    options: Options,
    settings: RunSettings,
    display: _Display,
) -> Prepared:
    paths = paths_of(given)
    if len(paths) == 1 and is_prepared(Path(paths[0])):
        prepared = Prepared.open(Path(paths[0]))
        if prepared.about.options["seq"] != options.seq:
            raise DataError(
                f"{setting} = {paths[0]}: prepared for windows of {prepared.about.options['seq']:,} tokens, and "
                f"data.seq = {options.seq:,}; set data.seq, or prepare again"
            )
    else:
        made_by = f"{type(tokenizer).__name__} of {tokenizer.name_or_path}"
        more = {"skip_bad": settings.data.skip_bad, "on_progress": display}
        with display:
            files = Files(paths, setting=setting)
            prepared = prepare_files(files, tokenizer, options, cache_folder(settings), made_by, **more)
    if prepared.about.largest >= settings.model.vocab_size:
        raise DataError(
            f"{setting}: the tokens go up to {prepared.about.largest:,}, and the model's vocabulary has "
            f"{settings.model.vocab_size:,}; pass the model's own tokenizer as data.tokenizer"
        )
    return prepared


class _Display:
    """Shows a preparation on ``console``: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console | None, ended: Callable[[], bool]) -> None:
        self._console, self._ended = console, ended
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._next_line = time.monotonic() + LINE_EVERY

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, at: Progress) -> None:
        if self._ended():
            raise DataError("stopped while data were prepared")
        if self._console is None:
            return
        if self._console.is_terminal:
            if self._bar is None:  # after the workers have started: a fork would copy the bar's thread's locks
                self._bar = Bar(
                    TextColumn("reading data"),
                    BarColumn(),
                    DownloadColumn(),
                    TextColumn("{task.fields[tokens]:,} tokens"),
                    TimeRemainingColumn(),
                    console=self._console,
                    transient=True,
                )
                self._task = self._bar.add_task("", total=at.total, tokens=0)
                self._bar.start()
            self._bar.update(self._task, completed=at.done, tokens=at.tokens)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY
            share = f"{at.done / at.total:.0%}" if at.total else f"{at.done:,} records"
            self._console.print(f"  reading data: {share}, {at.tokens:,} tokens", highlight=False)
