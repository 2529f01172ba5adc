"""The formats of files of records: JSON lines, JSON lists, Parquet and text, compressed or not.

``raws`` cuts a file into records without decoding them, and ``Raw.decode`` decodes one.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from .items import DataError, Item

BATCH_ITEMS = 256
BATCH_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
LONGEST_LINE = 64 << 20  # a longer line would have to be held in memory
COLUMNS = ("messages", "tools", "prompt", "completion", "text")

_CHUNK = 1 << 18
_EXPECTED = 'expected an object such as {"messages": [...]} or {"text": "..."}'
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACE = b"|".join(re.escape(chr(code).encode()) for code in range(0x3001) if chr(code).isspace())
# Where a large text may be cut, best first. GPT-2's pattern splits several spaces in a row differently at a text's end,
# so a newline alone is best. The bytes after it are enough to tell every space, of at most 3 bytes.
_LINE_ENDS = (
    re.compile(rb"(?s)(?<![\t-\r\x1c-\x20])\n(?!%b)(?=.{3})" % _SPACE),
    re.compile(rb"(?s)\n(?!%b)(?=.{3})" % _SPACE),
)
_AFTER_SPACE = re.compile(rb"\r\n|%b" % _SPACE)


class Source(NamedTuple):
    """A file to read. ``packing`` is "", ".gz" or ".zst"; ``where`` begins an error."""

    path: Path
    kind: str
    packing: str
    size: int
    where: str

    def error(self, reason: str) -> DataError:
        return DataError(f"{self.where}: {reason}")


class Raw(NamedTuple):
    """A record before decoding: ``number`` is its line or row from 1, or its first byte in a text file.

    ``size`` is in bytes; ``end`` counts the bytes on disk that are read up to its end.
    """

    decode: Callable[[Raw], Item]
    source: Source
    number: int
    value: Any
    size: int
    end: int
    first: bool = True
    last: bool = True

    def item(self, unit: str, value: dict[str, Any] | None, problem: str = "") -> Item:
        return Item(f"{shown(self.source.path)}, {unit} {self.number}", value, self.size, problem)


def check(source: Source) -> Source:
    """The file, refused if its beginning cannot be read as its kind."""
    if source.kind == "npy":
        raise source.error("a file of token numbers, which is read only as the one file that is named; give it alone")
    if source.kind == "parquet":
        _parquet(source)
        with _reading(source):
            source.path.open("rb").close()
    elif source.kind == "text":
        if flaw := text_flaw(source):
            raise source.error(flaw)
    else:
        next(chunks(source), None)
    return source


def text_flaw(source: Source) -> str:
    """Why the file is no text, and the remedy; "" for text. Raises DataError for text that is not UTF-8.

    Only the beginning is read.
    """
    from .corpus import is_binary  # here, because it imports torch, which a process that reads records does not need

    start = 0
    for chunk, _ in chunks(source):
        head = chunk if start else chunk.removeprefix(codecs.BOM_UTF8)
        if not start and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "text in UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"
        if is_binary(head):
            return "a binary file; give text in UTF-8, or records as .jsonl, .json or .parquet"
        try:
            codecs.getincrementaldecoder("utf-8")().decode(chunk)
        except UnicodeDecodeError as error:
            raise _encoding_error(source, error, start) from None
        if head.strip():
            return ""
        start += len(chunk)
    return "the file is empty; give a file that holds text"


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Names the file in the errors of reading and unpacking it, which have no common class."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise source.error(f"cannot be read ({reason(error)}); check its permissions and the disk") from None
        raise source.error(f"the file is cut short or corrupt ({reason(error)}); copy or make it again") from None


def chunks(source: Source) -> Iterator[tuple[bytes, int]]:
    """The unpacked contents, and after each chunk the number of bytes of the file that are read."""
    with _reading(source), source.path.open("rb") as file:
        if source.packing and source.size == 0:
            raise EOFError("the file is empty")
        for chunk in _UNPACK[source.packing](file, source):
            yield chunk, file.tell()


def _read(file: Any) -> Iterator[bytes]:
    return iter(lambda: file.read(_CHUNK), b"")


def _zstd(file: BinaryIO, source: Source) -> Iterator[bytes]:
    """Unpack with the first of three libraries that is installed; with windows up to 2 GiB (``zstd --long=31``)."""
    if library := _library("compression.zstd"):
        return _read(library.ZstdFile(file, options={library.DecompressionParameter.window_log_max: 31}))
    if library := _library("zstandard"):
        return _zstd_frames(file, library)
    if library := _library("pyarrow"):
        return _read(library.CompressedInputStream(file, "zstd"))
    raise source.error("reading .zst files needs the package zstandard; pip install zstandard")


def _zstd_frames(file: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """Unpack frame by frame: the package's own reader takes a frame that is cut short for a whole one."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    packed = b""
    at_once = 64  # all that it is given is unpacked together, and a byte may stand for ten thousand
    while packed or (packed := file.read(at_once)):
        if frame.eof:
            frame = decompressor.decompressobj()
        if chunk := frame.decompress(packed):
            yield chunk
        at_once = max(64, at_once // 2) if len(chunk) > _CHUNK else min(4096, at_once * 2)
        packed = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the last frame has no end")


def _library(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_UNPACK: dict[str, Callable[[BinaryIO, Source], Iterator[bytes]]] = {
    "": lambda file, source: _read(file),
    ".gz": lambda file, source: _read(gzip.GzipFile(fileobj=file)),
    ".zst": _zstd,
}


# JSON.


def _lines(source: Source) -> Iterator[Raw]:
    """The lines that are not blank. Of a line over ``LONGEST_LINE`` only the beginning is kept."""
    number, offset = 1, 0
    held: list[bytes] = []
    size = 0
    for chunk, disk in chunks(source):
        ends = chunk.split(b"\n")
        for line in ends[:-1]:
            whole = b"".join((*held, line)) if held else line
            size += len(line) + 1
            offset += size
            if raw := _line(source, number, whole, size, disk if source.packing else offset):
                yield raw
            number, size = number + 1, 0
            held.clear()
        if size <= LONGEST_LINE:
            held.append(ends[-1])
        size += len(ends[-1])
    if raw := _line(source, number, b"".join(held), size, source.size):
        yield raw


def _line(source: Source, number: int, line: bytes, size: int, end: int) -> Raw | None:
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    return None if not line or line.isspace() else Raw(_line_item, source, number, line, size, end)


def _line_item(raw: Raw) -> Item:
    if raw.size > LONGEST_LINE:
        problem = f"a line of {raw.size} bytes, at most {LONGEST_LINE} are read; {_EXPECTED}"
        return raw.item("line", None, problem)
    value, problem = _object(raw.value)
    return raw.item("line", value, problem)


def _object(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The line's JSON object, or None and the problem."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        found = f"not UTF-8, column {error.start + 1}"
    except json.JSONDecodeError as error:
        found = f"{error.msg}, column {error.colno}"
    except RecursionError:
        found = "nested too deep"
    except ValueError as error:  # a number of thousands of digits
        found = reason(error)
    else:
        problem = _value_problem(value, bool(_SURROGATE.search(line)))
        return (None, problem) if problem else (value, "")
    return None, f"not JSON ({found}); {_EXPECTED}"


def _value_problem(value: Any, surrogates: bool) -> str:
    """Why the value is no record, or "". ``surrogates``: half characters, which no tokenizer takes, are looked for."""
    if not isinstance(value, dict):
        return f"a JSON {_JSON_NAMES.get(type(value), 'number')}; {_EXPECTED}"
    if surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            return f"{half} is half of a character without the other half; write the whole character"
        except RecursionError:
            return f"not JSON (nested too deep); {_EXPECTED}"
    return ""


_JSON_NAMES = {list: "list", str: "string", bool: "boolean", type(None): "null"}


def _json(source: Source) -> Iterator[Raw]:
    """A list's records, or those of a file of JSON lines with a list's name."""
    first = next(_lines(source), None)
    if first is None:
        raise source.error("the file is empty; expected a list of objects")
    if first.value.lstrip().startswith(b"["):
        return _listed(source)
    if _object(first.value)[0] is None:
        raise source.error("neither a list of objects nor an object per line; write one of these, lines as .jsonl")
    return _lines(source)


def _listed(source: Source) -> Iterator[Raw]:
    text = b"".join(chunk for chunk, _ in chunks(source)).removeprefix(codecs.BOM_UTF8)
    try:
        values = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise _encoding_error(source, error, 0) from None
    except (ValueError, RecursionError) as error:
        found = "nested too deep" if isinstance(error, RecursionError) else reason(error)
        raise source.error(f"not JSON ({found}); expected a list of objects") from None
    surrogates = bool(_SURROGATE.search(text))
    size = len(text) // max(1, len(values))
    for i, value in enumerate(values):
        end = source.size * (i + 1) // len(values)
        yield Raw(_record_item, source, i + 1, (value, surrogates), size, end)


def _record_item(raw: Raw) -> Item:
    value, surrogates = raw.value
    problem = _value_problem(value, surrogates)
    return raw.item("record", None if problem else value, problem)


# Parquet.


def _parquet(source: Source) -> ModuleType:
    """pyarrow.parquet."""
    if source.packing:
        raise source.error(f"a Parquet file inside {source.packing}, which is not read; unpack it")
    library = _library("pyarrow.parquet")
    if library is None:
        raise source.error("reading Parquet files needs the package pyarrow; pip install pyarrow")
    return library


def _rows(source: Source) -> Iterator[Raw]:
    library = _parquet(source)
    with _reading(source), library.ParquetFile(source.path, buffer_size=_CHUNK) as file:
        names = file.schema_arrow.names
        columns = [name for name in COLUMNS if name in names]
        if not columns:
            raise source.error(f"columns {', '.join(names) or 'none'}; expected some of {', '.join(COLUMNS)}")
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        rows = max(1, file.metadata.num_rows)
        row_bytes = max(1, sum(group.total_byte_size for group in groups) // rows)
        at_once = min(BATCH_ITEMS, max(1, BATCH_BYTES // row_bytes))
        number = 0
        # One thread: the processes that share the file are as many as the processors are meant to be.
        for batch in file.iter_batches(batch_size=at_once, columns=columns, use_threads=False):
            size = batch.nbytes // max(1, batch.num_rows)
            for i in range(batch.num_rows):
                number += 1
                yield Raw(_row_item, source, number, (batch, i), size, source.size * number // rows)


def _row_item(raw: Raw) -> Item:
    batch, i = raw.value
    try:
        row = {name: _without_nulls(column[i].as_py()) for name, column in zip(batch.schema.names, batch.columns)}
    except ValueError as error:  # not UTF-8, or a date out of range
        return raw.item("row", None, f"not readable ({reason(error)}); {_EXPECTED}")
    return raw.item("row", {name: value for name, value in row.items() if value is not None})


def _without_nulls(value: Any) -> Any:
    """The value without keys that are null: Parquet gives every object the keys of all. A message keeps "content"."""
    if isinstance(value, list):
        return [_without_nulls(element) for element in value]
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None or key == "content"}
    return value


# Text.


def _texts(source: Source) -> Iterator[Raw]:
    """The text, in pieces if it is large."""
    unpacked = chunks(source)
    buffer = bytearray()
    start = disk = 0
    ended = False
    while not ended or buffer:
        while not ended and len(buffer) < 2 * PIECE_BYTES + 3:
            chunk, disk = next(unpacked, (b"", disk))
            buffer += chunk
            ended = not chunk
        cut = len(buffer) if ended and len(buffer) <= PIECE_BYTES else _cut_at(buffer, ended)
        piece = bytes(buffer[:cut])
        del buffer[:cut]
        end = disk if source.packing else start + cut
        yield Raw(_text_item, source, start, piece, cut, end, start == 0, ended and not buffer)
        start += cut


def _cut_at(buffer: bytearray, ended: bool) -> int:
    """Where a piece of about ``PIECE_BYTES`` ends. The result does not depend on how far the buffer is filled."""
    for pattern in _LINE_ENDS:
        if match := pattern.search(buffer, PIECE_BYTES - 1, 2 * PIECE_BYTES + 3):
            return match.end()
    if ended and len(buffer) <= 2 * PIECE_BYTES:
        return len(buffer)
    if match := _AFTER_SPACE.search(buffer, PIECE_BYTES - 1, 2 * PIECE_BYTES):
        return match.end()
    cut = PIECE_BYTES
    while cut < len(buffer) and buffer[cut] & 0xC0 == 0x80:  # a character's later bytes
        cut += 1
    return cut


def _text_item(raw: Raw) -> Item:
    if (at := raw.value.find(b"\0")) >= 0:
        raise raw.source.error(f"a binary file (byte {raw.number + at} is 0); give text in UTF-8")
    try:
        text = raw.value.decode()
    except UnicodeDecodeError as error:
        raise _encoding_error(raw.source, error, raw.number) from None
    place = shown(raw.source.path)
    if not (raw.first and raw.last):
        place += f", from byte {raw.number}"
    return Item(place, {"text": text.removeprefix("\ufeff") if raw.first else text}, raw.size, "", raw.first, raw.last)


def _encoding_error(source: Source, error: UnicodeDecodeError, start: int) -> DataError:
    byte = error.object[error.start]
    return source.error(f"byte {start + error.start} (0x{byte:02x}) is not UTF-8; convert the file to UTF-8 (iconv)")


_FORMATS: dict[str, Callable[[Source], Iterator[Raw]]] = {
    "jsonl": _lines,
    "json": _json,
    "parquet": _rows,
    "text": _texts,
}


def raws(source: Source) -> Iterator[Raw]:
    """The file's records, as they follow each other."""
    return _FORMATS[source.kind](source)


def shown(path: str | os.PathLike[str]) -> str:
    """The path on one line."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)


def reason(error: Exception) -> str:
    """The error's message on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())
