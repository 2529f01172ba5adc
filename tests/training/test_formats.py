"""Large texts in pieces, and the formats that need packages: zstd and Parquet."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from data_case import MIB, check_shares, items_of, lines, refusal, texts, values_of

from shardfuse.training.data.items import Item
from shardfuse.training.data.sources import Files

# Text.


def pieces_of(path: Path, content: bytes) -> list[Item]:
    """The pieces of a large text, which together are the text."""
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    items = items_of(path)
    assert "".join(item.value["text"] for item in items if item.value) == content.decode("utf-8-sig")
    assert sum(item.size for item in items) == len(content)
    assert [item.first for item in items] == [True] + [False] * (len(items) - 1)
    assert [item.last for item in items] == [False] * (len(items) - 1) + [True]
    check_shares(Files([path]))
    return items


def test_text_of_up_to_a_mebibyte_is_one_item(tmp_path: Path):
    for content in (b"a\r\nb\n" * 5, b"\xef\xbb\xbf" + b"line\n" * (MIB // 5 - 1), b"x" * MIB):
        (item,) = pieces_of(tmp_path / "x.txt", content)
        assert item.place == str(tmp_path / "x.txt")


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
def test_large_text_is_cut_before_a_line_that_begins_with_a_word(tmp_path: Path, name: str):
    rng = random.Random(1)
    ends = ["\n", "\n\n", "\n    ", "\r\n", "\n\u3000", "\n\x85", " \n", ". "]
    content = "".join(f"wörd {rng.random()}" + rng.choice(ends) for _ in range(200_000)).encode()
    pieces = texts(pieces_of(tmp_path / name, b"\xef\xbb\xbf" + content))
    assert len(pieces) == len(content) // MIB + 1
    for piece, following in itertools.pairwise(pieces):
        assert re.search(r"\S\n\Z", piece)
        assert not following[0].isspace()
        assert MIB <= len(piece.encode()) + 3 < MIB + 2000


def test_large_text_with_blank_lines_only_is_cut_after_them(tmp_path: Path):
    pieces = texts(pieces_of(tmp_path / "x.txt", b"A paragraph.\r\n\r\n" * 200_000))
    assert len(pieces) == 4
    assert all(piece.endswith("\r\n\r\n") and piece.startswith("A") for piece in pieces)


def test_large_text_without_lines_is_cut_after_a_space_or_between_characters(tmp_path: Path):
    path = tmp_path / "x.txt"
    pieces = texts(pieces_of(path, "wörd ".encode() * 600_000))
    assert len(pieces) == 3
    assert all(piece.endswith(" ") for piece in pieces)
    assert all(MIB <= len(piece.encode()) < MIB + 9 for piece in pieces[:-1])
    pieces = texts(pieces_of(path, "x€".encode() * 800_000))
    assert [len(piece.encode()) for piece in pieces] == [MIB, MIB, 800_000 * 4 - 2 * MIB]
    pieces = texts(pieces_of(path, b"x" + "😀".encode() * 800_000))
    assert [len(piece.encode()) for piece in pieces] == [MIB + 1, MIB, 800_000 * 4 - 2 * MIB]


def test_large_text_keeps_line_ends_whole(tmp_path: Path):
    path = tmp_path / "x.txt"
    assert texts(pieces_of(path, b"x" * (MIB - 1) + b"\r\n " + b"x" * 2 * MIB))[0].endswith("x\r\n")
    # The byte after the last newline within reach is not known.
    assert len(texts(pieces_of(path, b"x" * (2 * MIB + 2) + b"\n " + b"x" * MIB))[0]) == MIB


def test_large_text_waits_another_mebibyte_for_a_line(tmp_path: Path):
    path = tmp_path / "x.txt"
    content = b"x " * (3 * MIB // 4) + b"\n" + b"x " * MIB
    assert texts(pieces_of(path, content))[0] == "x " * (3 * MIB // 4) + "\n"
    (item,) = pieces_of(path, b"x " * (3 * MIB // 4))
    assert item.last


# Packages.


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("compression.zstd", "zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, package in (("x.parquet", "pyarrow"), ("x.jsonl.zst", "zstandard"), ("x.txt.zst", "zstandard")):
        (tmp_path / name).write_bytes(b"PAR1")
        assert f"pip install {package}" in refusal(tmp_path / name)


def test_zstd_of_the_standard_library_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python 3.14's module, with gzip in its place."""
    module = types.ModuleType("compression.zstd")
    given: list[dict[object, int]] = []

    def open_file(file: Any, *, options: dict[object, int]) -> gzip.GzipFile:
        given.append(options)
        return gzip.GzipFile(fileobj=file)

    module.ZstdFile = open_file  # type: ignore[attr-defined]
    module.DecompressionParameter = types.SimpleNamespace(window_log_max="window")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "x.jsonl.zst").write_bytes(gzip.compress(lines({"text": "a"})))
    assert values_of(tmp_path / "x.jsonl.zst") == [{"text": "a"}]
    assert given[0] == {"window": 31}


@pytest.mark.parametrize("library", ["zstandard", "pyarrow"])
def test_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    if library == "pyarrow":
        monkeypatch.setitem(sys.modules, "zstandard", None)
    records = [{"text": f"record {n} " * (n % 99)} for n in range(3000)]
    frames = [zstandard.compress(lines(*part)) for part in (records[:1000], records[1000:1001], records[1001:])]
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(frames[0] + skippable + frames[1] + frames[2])
    assert values_of(path) == records
    check_shares(Files([path]))
    for content in (frames[0] + frames[2][:-5], frames[0][:9], b"", b"{}\n", frames[0] + b"garbage"):
        path.write_bytes(content)
        assert "cut short or corrupt" in refusal(path)


def test_text_is_cut_alike_whichever_library_unpacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    content = b"word " * 300_000 + b" \n" + b"A line.\n\n" * 300_000 + b"word\nword\n" + b"x" * 3_000_000
    (tmp_path / "x.txt.zst").write_bytes(zstandard.compress(content))
    pieces = texts(items_of(tmp_path / "x.txt.zst"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert texts(items_of(tmp_path / "x.txt.zst")) == pieces
    (tmp_path / "x.txt").write_bytes(content)
    assert texts(items_of(tmp_path / "x.txt")) == pieces


def test_parquet(tmp_path: Path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "x.parquet"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi"}, call], "id": 1},
        {"text": "a", "id": 2},
        *({"text": "x" * 3000, "id": n} for n in range(2000)),
    ]
    schema = pa.schema([*pa.Table.from_pylist(rows[:1]).schema, pa.field("text", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=700)
    files = Files([tmp_path])
    assert files.files == (path,)
    items = items_of(path)
    assert [item.value for item in items] == [{k: v for k, v in row.items() if k != "id"} for row in rows]
    assert [items[i].place for i in (0, 6)] == [f"{path}, row 1", f"{path}, row 7"]
    check_shares(files)


def test_parquet_that_cannot_be_read(tmp_path: Path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": [1], "url": ["a"]}), path)
    assert "columns id, url; expected some of messages" in refusal(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cut short or corrupt" in refusal(path)
    path.write_bytes(b"")
    assert "cut short or corrupt" in refusal(path)
    latin = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xe9b"))
    pq.write_table(pa.table({"text": latin}), path)
    bad, good = items_of(path)
    assert "not readable" in bad.problem
    assert good.value == {"text": "b"}
