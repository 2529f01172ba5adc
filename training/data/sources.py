"""The records of the files that a user names: which files a path names, and the batches of their records.

``Files`` finds and checks the files; ``Files.batches`` streams their records. Each of several processes cuts the same
stream into the same batches and decodes only its own.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .formats import BATCH_BYTES, BATCH_ITEMS, Raw, Source, check, chunks, raws, reason, shown, text_flaw
from .items import DataError, Item

_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".json": "json", ".npy": "npy"}


class Files:
    """The records of files, which ``paths`` names: files, folders and globs (``**`` too).

    ``files`` are in an order that is the same on every machine, each once. ``holds_records`` is False for text files,
    whose records are ``{"text": ...}``. ``left_out`` counts the files in named folders that are not read: in a folder
    only JSON-lines and Parquet files are, or if it holds none, its text files. ``size`` is in bytes on disk.

    Raises DataError for paths that cannot be used; ``setting`` is the setting's name there.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, setting: str = "data.path") -> None:
        if not paths:
            raise DataError(f"{setting}: names no files; give files, folders or globs")
        read: dict[str, Source] = {}
        left_out: set[str] = set()
        for path in paths:
            sources, others = _find(os.fspath(path), f"{setting} = {shown(path)}")
            left_out.update(os.path.realpath(other) for other in others)
            for source in sources:
                read.setdefault(os.path.realpath(source.path), source)
        self._sources = tuple(read.values())
        self._refuse_mixed()
        self.files = tuple(source.path for source in self._sources)
        self.holds_records = self._sources[0].kind != "text"
        self.left_out = len(left_out - read.keys())
        self.size = sum(source.size for source in self._sources)

    def _refuse_mixed(self) -> None:
        text = next((source for source in self._sources if source.kind == "text"), None)
        records = next((source for source in self._sources if source.kind != "text"), None)
        if text and records:
            raise text.error(f"a text file, but {shown(records.path)} holds records; give files of one kind")

    def digest(self, on_bytes: Callable[[int], None] | None = None) -> str:
        """SHA-256, in hex, of the files' contents and kinds in their order; names and folders do not change it.

        ``on_bytes`` is called with the number of bytes read since its last call.
        """
        whole = hashlib.sha256()
        for source in self._sources:
            one = hashlib.sha256()
            for chunk, _ in chunks(source._replace(packing="")):  # as it is on disk
                one.update(chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
            whole.update(f"{source.kind}{source.packing}:".encode() + one.digest())
        return whole.hexdigest()

    def batches(self, share: int = 0, shares: int = 1) -> Iterator[tuple[list[Item], int]]:
        """Batches ``share``, ``share + shares``, ... of all, each with the bytes of ``size`` read up to its end.

        A batch has up to 256 items of about 1 MiB together. A record that cannot be read is an item with a problem.
        Raises DataError for a file that cannot be read, is cut short, or is text in another encoding than UTF-8.
        """
        if not 0 <= share < shares:
            raise ValueError(f"share = {share} of {shares}: expected 0 <= share < shares")
        for number, (batch, end) in enumerate(self._cut()):
            if number % shares == share:
                yield [raw.decode(raw) for raw in batch], end

    def _cut(self) -> Iterator[tuple[list[Raw], int]]:
        """All batches before decoding; how many processes share them does not change them."""
        batch: list[Raw] = []
        size = end = before = 0
        for source in self._sources:
            for raw in raws(source):
                if batch and (len(batch) == BATCH_ITEMS or size + raw.size > BATCH_BYTES):
                    yield batch, end
                    batch, size = [], 0
                batch.append(raw)
                size += raw.size
                end = before + raw.end
            before += source.size
        if batch:
            yield batch, self.size


def _find(given: str, where: str) -> tuple[list[Source], list[Path]]:
    """The files of one path, and those of folders that are not read."""
    path = Path(given)
    mode = _mode(path, where) if given else None
    if mode is None:
        return _find_glob(given, where)
    if stat.S_ISDIR(mode):
        sources, others = _find_folder(path, where)
        if not sources:
            raise DataError(
                f"{where}: the folder holds no records (.jsonl, .ndjson, .parquet) and no text; check the path, or "
                "name its files"
            )
        return sources, others
    if not stat.S_ISREG(mode):
        raise DataError(f"{where}: neither a file nor a folder (a pipe or device); write its contents to a file")
    return [check(_source(path, where))], []


def _mode(path: Path, where: str) -> int | None:
    """The file's mode; None if it is missing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: cannot be read ({reason(error)}); check the path") from None


def _find_glob(given: str, where: str) -> tuple[list[Source], list[Path]]:
    """The files that match, and those in matching folders."""
    root = Path(given)
    while _mode(root, where) is None and root != root.parent:
        root = root.parent  # the part that exists is taken literally, brackets included
    pattern = str(Path(given).relative_to(root)) if given else ""
    if not glob.has_magic(pattern):
        raise DataError(f"{where}: there is no such file or folder; check the path")
    names = sorted(set(glob.glob(pattern, root_dir=root, recursive=True)))
    # "**" matches folders too, whose files are then matches themselves.
    parents = {parent for name in names for parent in Path(name).parents}
    sources: list[Source] = []
    left_out: list[Path] = []
    for name in names:
        path = root / name
        if path.is_dir() and Path(name) not in parents:
            found, others = _find_folder(path, f"{where}: {shown(path)}")
            sources += found
            left_out += others
        elif path.is_file():
            sources.append(check(_source(path, f"{where}: {shown(path)}")))
    if not sources:
        raise DataError(f"{where}: no file of records or text matches; check the pattern")
    return sources, left_out


def _find_folder(folder: Path, where: str) -> tuple[list[Source], list[Path]]:
    """The folder's record files, or if there are none, its text files; and the others."""
    paths = _walk(folder, where)
    sources = [_source(path, f"{where}: {shown(path)}") for path in paths]
    records = [source for source in sources if source.kind in ("jsonl", "parquet")]
    if records:
        read = [check(source) for source in records]
    else:
        texts = [source._replace(kind="text") for source in sources]
        read = [source for source in texts if not text_flaw(source)]
    kept = {source.path for source in read}
    return read, [path for path in paths if path not in kept]


def _walk(folder: Path, where: str) -> list[Path]:
    """The regular files below the folder, sorted by their relative names, without hidden files and folders."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{where}: {shown(error.filename)} cannot be read ({reason(error)}); check its permissions")

    seen: set[str] = set()
    names = []
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(parent))
        # A link may lead back to a folder above it.
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(os.path.join(parent, name)) not in seen
        )
        for name in files:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                names.append(path.relative_to(folder).as_posix())
    return [folder / name for name in sorted(names)]


def _source(path: Path, where: str) -> Source:
    """The file with the kind that its name gives."""
    suffix, packing = path.suffix.lower(), ""
    if suffix in (".gz", ".zst"):
        suffix, packing = Path(path.stem).suffix.lower(), suffix
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{where}: cannot be read ({reason(error)})") from None
    return Source(path, _KINDS.get(suffix, "text"), packing, size, where)
