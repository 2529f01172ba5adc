"""The files that a user names, and their records."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import tracemalloc
from pathlib import Path

import pytest
from data_case import MIB, check_shares, items_of, lines, refusal, values_of

from shardfuse.training.data import formats
from shardfuse.training.data.items import DataError, Item
from shardfuse.training.data.sources import Files

# Which files.


def test_folder_with_records_leaves_out_the_rest(tmp_path: Path):
    for name in ("b.jsonl", "a/z.ndjson", "a.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = lines({"text": name})
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for name in ("README.md", "info.json", ".hidden.jsonl"):
        (tmp_path / name).write_text('{"text": "no"}\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.jsonl").write_text('{"text": "no"}\n')
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    files = Files([tmp_path])
    assert files.files == tuple(tmp_path / name for name in ("a.jsonl.gz", "a/z.ndjson", "b.jsonl"))
    assert files.holds_records
    assert files.left_out == 2
    assert files.size == sum(file.stat().st_size for file in files.files)
    assert values_of(tmp_path) == [{"text": name} for name in ("a.jsonl.gz", "a/z.ndjson", "b.jsonl")]


def test_folder_of_text_leaves_out_binary_and_empty_files(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")  # without records, text like any other
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b" \n" * 200_000)
    (tmp_path / "image").write_bytes(bytes(range(256)))
    (tmp_path / "tokens.npy").write_bytes(b"\x93NUMPY\x01\x00")
    files = Files([tmp_path])
    assert not files.holds_records
    assert files.left_out == 4
    assert values_of(tmp_path) == [{"text": "[1]"}, {"text": "second\r\n"}]


def test_each_file_is_read_once_and_in_the_order_of_the_paths(tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(lines({"text": name}))
    (tmp_path / "link.jsonl").symlink_to("b.jsonl")
    (tmp_path / "note.md").write_text("note")
    files = Files([tmp_path / "c.jsonl", str(tmp_path / "*.jsonl"), tmp_path, tmp_path])
    assert [file.name for file in files.files] == ["c.jsonl", "a.jsonl", "b.jsonl"]
    assert files.left_out == 1
    (tmp_path / "note.md").rename(tmp_path / "note.json")
    assert Files([tmp_path]).left_out == 1
    (tmp_path / "note.json").write_bytes(b"[]")
    assert Files([tmp_path, tmp_path / "note.json"]).left_out == 0


def test_globs(tmp_path: Path):
    for name in ("a/x.jsonl", "a/b/y.jsonl", "a/b/.z.jsonl", "x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(lines({"text": name}))
    (tmp_path / "a" / "empty").mkdir()
    both = [{"text": "a/b/y.jsonl"}, {"text": "a/x.jsonl"}]
    for pattern in ("a/**", "a/**/*", "**/*.jsonl", "[a]", "a*"):
        assert values_of(tmp_path / pattern) == both, pattern
    assert values_of(tmp_path / "a/?.jsonl") == both[1:]
    (tmp_path / "c" / "d").mkdir(parents=True)
    (tmp_path / "c" / "d" / "x.json").write_bytes(b"[{}]")  # named by the pattern, so not text as in a folder
    assert values_of(tmp_path / "c" / "**") == [{}]


def test_existing_path_is_taken_literally(tmp_path: Path):
    for folder in ("data[1]", "data1", "*"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x[0].jsonl").write_bytes(lines({"text": folder}))
    assert values_of(tmp_path / "data[1]" / "x[0].jsonl") == [{"text": "data[1]"}]
    assert values_of(tmp_path / "data[1]" / "*.jsonl") == [{"text": "data[1]"}]
    assert values_of(tmp_path / "*") == [{"text": "*"}]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.jsonl", None, "there is no such file"),
        ("none/*.jsonl", None, "matches; check the pattern"),
        ("a\0b", None, "cannot be read"),
        ("x" * 300, None, "cannot be read"),
        ("new\nline", None, "there is no such file"),
        ("empty.txt", b"\xef\xbb\xbf \n", "is empty"),
        ("nul.txt", b"a\0b", "binary"),
        ("late.txt", b"text\n" * MIB + b"\0\n", "byte 5242880 is 0"),
        ("image", bytes(range(1, 32)) * 9, "binary"),
        ("utf16.txt", "text".encode("utf-16"), "UTF-16"),
        ("latin.txt", "abc é".encode("latin-1") + b" abc", r"byte 4 \(0xe9\) is not UTF-8"),
        ("late_latin.txt", b"text\n" * MIB + b"\xe9\n", r"byte 5242880 \(0xe9\) is not UTF-8"),
        ("spaces.txt", b" " * 300_000 + b"\xe9", r"byte 300000 \(0xe9\) is not UTF-8"),
        ("cut.txt", "é".encode()[:1], r"byte 0 \(0xc3\) is not UTF-8"),
        ("tokens.npy", b"\x93NUMPY", "give it alone"),
        ("cut.jsonl.gz", gzip.compress(lines({"text": "a"}) * 99)[:-9], "cut short or corrupt"),
        ("cut2.jsonl.gz", gzip.compress(b"{}\n") + gzip.compress(b"{}\n")[:-1], "cut short or corrupt"),
        ("empty.jsonl.gz", b"", "cut short or corrupt"),
        ("plain.txt.gz", b"text", "cut short or corrupt"),
        ("crc.txt.gz", gzip.compress(b"text")[:-8] + b"\0" * 8, "cut short or corrupt"),
        ("inner.parquet.gz", gzip.compress(b"PAR1"), "unpack it"),
        ("dict.json", b'{\n"a": [1]}', "neither a list of objects"),
        ("broken.json", b'[{"a": 1},\n{"a": 2},', "not JSON"),
        ("two.json", b"[1]\n[2]", "not JSON"),
        ("blank.json", b"\n", "is empty"),
        ("deep.json", b"[" * 200_000, "nested too deep"),
        ("latin.json", b'["\xe9"]', "byte 2"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, content: bytes | None, reason: str):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    message = refusal(path)
    assert re.search(reason, message), message
    assert name.isprintable() == (name in message)


def test_refused_kinds_of_paths(tmp_path: Path):
    assert "holds no records" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe or device" in refusal(tmp_path / "pipe.jsonl")
    assert "pipe or device" in refusal("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read" in refusal(tmp_path / "loop")
    assert "there is no such file" in refusal("")
    with pytest.raises(DataError, match=r"^extra\.path: names no files"):
        Files([], setting="extra.path")
    with pytest.raises(DataError, match=r"^extra\.path = nowhere: there is no"):
        Files(["nowhere"], setting="extra.path")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for path in (tmp_path, tmp_path / "x.jsonl", tmp_path / "*.jsonl"):
        assert re.search(r"x\.jsonl: cannot be read \(Permission denied\)", refusal(path))


def test_text_beside_records_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "chats.json").write_text("[{}]")
    for paths in ([tmp_path / "notes.txt", tmp_path / "chats.json"], [tmp_path / "*"]):
        message = refusal(*paths)
        assert "notes.txt" in message
        assert "chats.json" in message


def test_digest_depends_on_contents_order_and_kind_alone(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jsonl").write_bytes(b"{}\n" * 200_000)
    (tmp_path / "one" / "b.jsonl").write_bytes(b'{"a": 1}\n')
    read: list[int] = []
    files = Files([tmp_path / "one"])
    digest = files.digest(read.append)
    assert sum(read) == files.size
    assert re.fullmatch("[0-9a-f]{64}", digest)
    (tmp_path / "one").rename(tmp_path / "two")
    a, b = tmp_path / "two" / "a.jsonl", tmp_path / "two" / "b.jsonl"
    assert Files([tmp_path / "two"]).digest() == digest
    assert Files([b, a]).digest() != digest
    b.rename(b.with_suffix(".txt"))
    a.rename(a.with_suffix(".txt"))
    assert Files([tmp_path / "two"]).digest() != digest
    # A byte that moves from one file to the next changes the digest too.
    (tmp_path / "two" / "a.txt").write_bytes(b"ab")
    (tmp_path / "two" / "b.txt").write_bytes(b"c")
    before = Files([tmp_path / "two"]).digest()
    (tmp_path / "two" / "a.txt").write_bytes(b"a")
    (tmp_path / "two" / "b.txt").write_bytes(b"bc")
    assert Files([tmp_path / "two"]).digest() != before


# JSON.


def test_json_lines(tmp_path: Path):
    path = tmp_path / "x.JSONL"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "first"}\r\n'
        b"\n \t\r\n" + '{"text": "a\u2028b\x85c\u2029"}\n'.encode() + b'{"text": "\\ud83d\\ude00"}\n{"text": "last"}'
    )
    items = items_of(path)
    assert [item.value for item in items] == [{"text": t} for t in ("first", "a\u2028b\x85c\u2029", "😀", "last")]
    assert [item.place for item in items] == [f"{path}, line {n}" for n in (1, 4, 5, 6)]
    assert all(item.first and item.last and not item.problem for item in items)
    assert items[0].size == len(b'\xef\xbb\xbf{"text": "first"}\r\n')


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": }', r"not JSON \(Expecting value, column 7\); expected an object such as \{"),
        (b"[1]", "a JSON list; expected an object"),
        (b"null", "a JSON null"),
        (b"true", "a JSON boolean"),
        (b"1", "a JSON number"),
        (b'{"a": "\xe9"}', r"not JSON \(not UTF-8, column 8\)"),
        (b"[" * 100_000, r"not JSON \(nested too deep\)"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"a": "\\ud83d"}', r"\\ud83d is half of a character"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"{}{}", "Extra data, column 3"),
    ],
)
def test_bad_line_is_an_item_with_its_problem(tmp_path: Path, line: bytes, problem: str):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    first, bad, last = items_of(path)
    assert first.value == last.value == {}
    assert bad.value is None
    assert re.search(problem, bad.problem), bad.problem
    assert "\n" not in bad.problem
    assert bad.place == f"{path}, line 2"
    assert bad.size == len(line) + 1


def test_overlong_line_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "LONGEST_LINE", MIB)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n" + b"[" * (20 * MIB) + b"\n{}\n")
    tracemalloc.start()
    try:
        _, bad, last = items_of(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bad.size == 20 * MIB + 1
    assert "at most" in bad.problem
    assert last == Item(f"{path}, line 3", {}, 3)
    assert peak < 8 * MIB


def test_json_list_and_json_lines_with_its_name(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_bytes(b'\xef\xbb\xbf \n[{"text": "a"}, 1, {"text": "\\udc00"}]')
    items = items_of(path)
    assert [item.value for item in items] == [{"text": "a"}, None, None]
    assert [item.place for item in items] == [f"{path}, record {n}" for n in (1, 2, 3)]
    assert "a JSON number" in items[1].problem
    assert "half of a character" in items[2].problem
    path.write_bytes(b"[]")
    assert items_of(path) == []
    path.write_bytes(b'\n{"text": "a"}\n{"text"\n')
    items = items_of(path)
    assert [item.place for item in items] == [f"{path}, line {n}" for n in (2, 3)]
    assert [item.value for item in items] == [{"text": "a"}, None]


# Batches.


def test_shares_interleave_to_all_batches(tmp_path: Path):
    rng = random.Random(0)
    records = [{"text": "x" * int(rng.expovariate(1 / 3000)), "n": n} for n in range(2000)]
    (tmp_path / "a.jsonl").write_bytes(lines(*records[:900]) + b"\n" * 99)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(*records[900:1500]), 1))
    (tmp_path / "c.json").write_text(json.dumps(records[1500:]))
    (tmp_path / "d.jsonl").write_bytes(b"\n" * 99)
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.jsonl")]
    assert values_of(*paths) == records
    check_shares(Files(paths))


def test_small_files_share_a_batch_and_ends_are_exact(tmp_path: Path):
    for n in range(300):
        (tmp_path / f"{n:03}.txt").write_text(f"text {n:03}")
    (first, middle), (rest, end) = Files([tmp_path]).batches()
    assert [len(first), len(rest)] == [256, 44]
    assert (middle, end) == (256 * 8, 300 * 8)
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" * 600)
    assert [end for _, end in Files([tmp_path / "x.jsonl"]).batches()] == [256 * 3, 512 * 3, 600 * 3]


def test_share_outside_the_shares_is_refused(tmp_path: Path):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ValueError, match="share = 2 of 2"):
        next(Files([tmp_path]).batches(2, 2))


def test_other_shares_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.jsonl").write_bytes(lines({"text": "a"}) * 256 * 4)
    decoded = []
    loads = json.loads
    monkeypatch.setattr(formats.json, "loads", lambda text: decoded.append(1) or loads(text))
    assert len(list(Files([tmp_path]).batches(1, 4))) == 1
    assert len(decoded) == 256


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.txt", "x.jsonl.zst"])
def test_memory_stays_bounded(tmp_path: Path, name: str):
    content = lines({"text": "some words " * 20}) * (24 * MIB // 232)
    if name.endswith(".zst"):
        content = pytest.importorskip("zstandard", reason="zstandard is not installed").compress(content)
    elif name.endswith(".gz"):
        content = gzip.compress(content, 1)
    (tmp_path / name).write_bytes(content)
    del content
    tracemalloc.start()
    try:
        for _ in Files([tmp_path / name]).batches(0, 4):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * MIB
