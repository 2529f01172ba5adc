"""Training text: reading, the held-out part, refusals, and the scores of byte frequencies."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shardfuse.training.data import corpus as data
from shardfuse.training.data.corpus import Corpus, load_corpus
from shardfuse.training.data.items import DataError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(seq=32, max_bytes=1 << 19)


def test_default_corpus_is_python_source_and_always_the_same(corpus: Corpus):
    again = load_corpus(seq=32, max_bytes=1 << 19)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)
    assert b"def __init__(self" in bytes(corpus.train.numpy())
    assert 1 << 18 < len(corpus.train) + len(corpus.held_out) <= (1 << 19) + corpus.files
    assert len(corpus.held_out) / len(corpus.train) == pytest.approx(1 / 15, rel=0.1)


def test_held_out_text_is_not_trained_on(tmp_path: Path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("".join(f"<{i}{line:04}>\n" for line in range(2000)))
    corpus = load_corpus(tmp_path, seq=32)
    assert corpus.files == 4
    train, held_out = (set(re.findall(rb"<\d+>", bytes(part.numpy()))) for part in (corpus.train, corpus.held_out))
    assert train & held_out == set()
    blocks = math.ceil(4 * 2000 * 8 / data.BLOCK_BYTES) * 2
    assert 8000 - blocks <= len(train) + len(held_out) <= 8000  # lines cut by a block's end are in neither
    assert len(held_out) == pytest.approx(8000 / 16, rel=0.3)


def test_single_short_file_has_held_out_blocks_too(tmp_path: Path):
    text = "".join(f"line {i}\n" for i in range(600))
    (tmp_path / "text").write_text(text)
    corpus = load_corpus(tmp_path / "text", seq=32)
    assert len(corpus.train) + len(corpus.held_out) == len(text)
    assert len(corpus.held_out) == pytest.approx(len(text) / 16, rel=0.05)


def test_folder_leaves_out_hidden_binary_and_special_files(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 2000)
    (tmp_path / ".hidden").write_text("secret " * 2000)
    (tmp_path / "image").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.txt").write_text("history " * 2000)
    os.mkfifo(tmp_path / "pipe")
    corpus = load_corpus(tmp_path, seq=32)
    assert set(bytes(corpus.train.numpy())) == set(b"text ")


def test_size_is_capped(tmp_path: Path):
    (tmp_path / "big").write_text("some text\n" * 10_000)
    corpus = load_corpus(tmp_path / "big", seq=32, max_bytes=20_000)
    assert len(corpus.train) + len(corpus.held_out) == 20_000


def _bad_paths(folder: Path) -> dict[str, Path]:
    """One path for each kind of invalid --data."""
    paths = {
        name: folder / name for name in ("missing", "empty", "blank", "binary", "short", "pipe", "no-text", "loop")
    }
    paths["empty"].touch()
    paths["blank"].write_text("\n \n" * 5000)
    paths["binary"].write_bytes(np.random.default_rng(0).bytes(50_000))
    paths["short"].write_text("too short")
    os.mkfifo(paths["pipe"])
    paths["no-text"].mkdir()
    (paths["no-text"] / "image").write_bytes(bytes(10_000))
    paths["loop"].symlink_to(paths["loop"])
    paths["device"] = Path("/dev/zero")
    paths["unreadable"] = Path("/proc/self/mem")  # exists, but not even the superuser can read it
    return paths


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "there is no such file or folder"),
        ("empty", "the file is empty"),
        ("blank", "the file is empty"),
        ("binary", "a binary file; text is needed"),
        ("short", "9 bytes of text, at least"),
        ("pipe", "neither a regular file nor a folder"),
        ("no-text", "no text files in this folder"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("device", "neither a regular file nor a folder"),
        ("unreadable", "cannot be read (Input/output error)"),
    ],
)
def test_bad_data_is_one_clear_line(tmp_path: Path, name: str, says: str):
    path = _bad_paths(tmp_path)[name]
    with pytest.raises(DataError) as caught:
        load_corpus(path)
    assert str(caught.value).startswith(f"--data {path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_permissions_are_respected(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("the superuser may read every file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text " * 5000)
    for name in ("file", "folder"):
        (tmp_path / name).chmod(0)
        with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
            load_corpus(tmp_path / name)


def test_stripped_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no Python sources in .*; pass text with --data PATH"):
        load_corpus()


def test_entropies_of_known_text():
    rng = np.random.default_rng(0)
    uniform = torch.from_numpy(rng.integers(0, 256, 200_000, dtype=np.uint8))
    assert data.unigram_nats(Corpus(uniform, uniform, "", 1)) == pytest.approx(math.log(256), abs=0.01)
    cycle = torch.arange(4, dtype=torch.uint8).repeat(20_000)
    corpus = Corpus(cycle, cycle, "", 1)
    assert data.unigram_nats(corpus) == pytest.approx(math.log(4), abs=0.01)
    assert data.bigram_nats(corpus) == pytest.approx(0.0, abs=0.001)


def test_entropies_of_python_source():
    corpus = load_corpus()
    assert data.unigram_nats(corpus) == pytest.approx(3.1, abs=0.15)
    assert data.bigram_nats(corpus) == pytest.approx(2.4, abs=0.15)
