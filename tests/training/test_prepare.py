"""Data made into windows, and kept on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from shardfuse import prepare_data
from shardfuse.testing.tokenizer import save_tokenizer
from shardfuse.training.data import prepare as preparing
from shardfuse.training.data.items import DataError
from shardfuse.training.data.prepare import Options, entropy, prepare, prepare_files
from shardfuse.training.data.prepared import Prepared
from shardfuse.training.data.sources import Files

EOS, TURN = 257, 259  # of the tiny tokenizer, whose ids of text are bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def _write(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _completions(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{i}? ", "completion": "y" * (1 + i % 5)} for i in range(count)]


def _same(one: Prepared, other: Prepared) -> bool:
    pairs = [(one.train, other.train), (one.held_out, other.held_out)]
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for i in range(len(a)) for x, y in zip(a[i], b[i])) for a, b in pairs
    )


def test_a_window_holds_documents_with_their_own_positions_and_targets(tokenizer: Any, tmp_path: Path):
    records = [{"prompt": "ab", "completion": "c"}, {"text": "de"}]
    made = prepare_data(records, tokenizer, seq=8, folder=tmp_path)
    assert len(made.train) == 1
    assert len(made.held_out) == 0
    tokens, targets, positions = (part.tolist() for part in made.train[0])
    assert tokens == [97, 98, 99, 100, 101, 0, 0, 0]
    assert targets == [-100, 99, EOS, 101, EOS, -100, -100, -100]
    assert positions == [0, 1, 2, 0, 1, 0, 1, 2]
    with pytest.raises(IndexError):
        made.train[1]


def test_padding_in_the_place_of_packing(tokenizer: Any, tmp_path: Path):
    records = [{"prompt": "ab", "completion": "c"}, {"text": "de"}]
    made = prepare_data(records, tokenizer, seq=4, packing=False, folder=tmp_path)
    assert [window[0].tolist() for window in made.train] == [[97, 98, 99, 0], [100, 101, 0, 0]]
    assert [window[2].tolist() for window in made.train] == [[0, 1, 2, 0], [0, 1, 0, 1]]


def test_shares_of_padding_and_of_masked_targets(tokenizer: Any, tmp_path: Path):
    made = prepare_data([{"prompt": "ab", "completion": "c"}, {"text": "de"}], tokenizer, seq=8, folder=tmp_path)
    assert made.about.padding == pytest.approx(3 / 8)
    assert made.about.masked == pytest.approx(1 / 5)
    assert (made.about.documents, made.about.tokens) == (2, 7)
    assert (made.about.dtype, made.about.largest) == ("uint16", EOS)


def test_a_long_text_is_cut_and_a_long_answer_refused(tokenizer: Any, tmp_path: Path):
    made = prepare_data([{"text": "abcdefgh"}], tokenizer, seq=3, folder=tmp_path)
    assert [window[0].tolist() for window in made.train] == [[97, 98, 99], [100, 101, 102], [103, 104, 0]]
    assert [window[1].tolist() for window in made.train] == [[98, 99, 100], [101, 102, 103], [104, EOS, -100]]
    records = [{"text": "a"}, {"prompt": "abc", "completion": "defg"}]
    with pytest.raises(DataError, match=r"^record 2: 8 tokens, and a window takes 4: .*data.seq.*data.skip_bad"):
        prepare_data(records, tokenizer, seq=3, folder=tmp_path)
    whole = prepare_data(records, tokenizer, seq=3, train_on="all", folder=tmp_path)
    assert whole.about.masked == 0
    assert len(whole.train) == 3


def test_one_piece_in_sixteen_is_held_out(tokenizer: Any, tmp_path: Path):
    records = [{"text": chr(97 + i) * 3} for i in range(26)]
    made = prepare_data(records, tokenizer, seq=8, hold_out=True, folder=tmp_path)
    held = sorted(set(made.held_out[0][0].tolist()) - {0})
    assert held == [97 + 8, 97 + 24]
    trained = {token for window in made.train for token in window[0].tolist()}
    assert trained == {0, *range(97, 97 + 26)} - set(held)


def test_bad_records_are_refused_with_their_place_unless_some_are_allowed(tokenizer: Any, tmp_path: Path):
    path = _write(tmp_path / "data.jsonl", [{"text": "good"}, {"txt": "?"}, [], {"text": "good, too"}, {"text": 3}])
    how = {"seq": 16, "folder": tmp_path / "kept"}
    with pytest.raises(DataError, match=r"data.jsonl, line 2: .*txt"):
        prepare_data(path, tokenizer, **how)
    with pytest.raises(DataError, match=r"data.jsonl, line 5: .*\(2 before it were left out"):
        prepare_data(path, tokenizer, skip_bad=2, **how)
    assert list((tmp_path / "kept").iterdir()) == []
    made = prepare_data(path, tokenizer, skip_bad=3, **how)
    assert (made.about.documents, made.about.skipped) == (2, 3)
    assert "line 2: " in made.about.first_skipped
    with pytest.raises(DataError, match=r"line 2: "):  # although it is there, made with more allowance
        prepare_data(path, tokenizer, **how)


def test_what_was_prepared_is_found_again(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _write(tmp_path / "data.jsonl", _completions(20))
    how = {"seq": 32, "folder": tmp_path / "kept"}
    first = prepare_data(path, tokenizer, **how)
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "RecordReader", None)  # nothing reads
        assert prepare_data(str(path), tokenizer, **how).folder == first.folder
        moved = path.rename(tmp_path / "moved.jsonl")
        assert prepare_data([moved], tokenizer, **how).folder == first.folder
    folders = {first.folder}
    folders.add(prepare_data(moved, tokenizer, **{**how, "seq": 33}).folder)
    folders.add(prepare_data(moved, tokenizer, packing=False, **how).folder)
    folders.add(prepare_data(moved, tokenizer, train_on="all", **how).folder)
    folders.add(prepare_data(_write(moved, _completions(21)), tokenizer, **how).folder)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template + " "
        folders.add(prepare_data(moved, tokenizer, **how).folder)
    finally:
        tokenizer.chat_template = template
    assert len(folders) == 6


def test_any_iterable_of_dicts_gives_the_same_windows(tokenizer: Any, tmp_path: Path):
    records = _completions(300)
    path = _write(tmp_path / "data.jsonl", records)
    of_file = prepare_data(path, tokenizer, seq=32, folder=tmp_path / "kept")
    of_list = prepare_data(records, tokenizer, seq=32, folder=tmp_path / "kept")
    of_generator = prepare_data((record for record in records), tokenizer, seq=32, folder=tmp_path / "kept")
    assert of_list.folder == of_generator.folder != of_file.folder
    assert _same(of_list, of_file)
    with pytest.raises(DataError, match=r"^record 1: a str; expected a dict"):
        prepare_data(iter(["text"]), tokenizer, seq=32, folder=tmp_path / "kept")


def test_processes_change_nothing(tokenizer: Any, tmp_path: Path):
    path = _write(tmp_path / "data.jsonl", [*_completions(700), {"txt": "?"}, *_completions(300)])
    options, names = Options(32, hold_out=True), ("", "")
    alone, shared = (
        prepare(
            Files([path]), tokenizer, options, tmp_path / f"kept-{workers}", names=names, skip_bad=1, workers=workers
        )
        for workers in (0, 2)
    )
    assert _same(alone, shared)
    assert alone.about == shared.about
    with pytest.raises(DataError, match=r"^\S*data.jsonl, line 701: [^\n]*$"):
        prepare(Files([path]), tokenizer, options, tmp_path / "kept", names=names, workers=2)


def test_a_torn_file_is_one_line_from_a_process_too(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    for workers in (0, 2):
        with pytest.raises(DataError, match=r"^[^\n]*data.jsonl.gz[^\n]*$"):
            prepare(Files([path]), tokenizer, Options(8), tmp_path / "kept", names=("", ""), workers=workers)


def test_a_killed_process_leaves_nothing_half_made(tokenizer: Any, tmp_path: Path):
    kept, path = tmp_path / "kept", _write(tmp_path / "data.jsonl", _completions(600))

    def die() -> None:
        prepare_data(path, tokenizer, seq=32, folder=kept, on_progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = kept.iterdir()
    assert left.name.startswith(".")
    assert (left / "tokens.bin").stat().st_size > 0
    made = prepare_data(path, tokenizer, seq=32, folder=kept)
    assert list(kept.iterdir()) == [made.folder]


def test_an_error_leaves_nothing(tokenizer: Any, tmp_path: Path):
    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(_completions(9), tokenizer, seq=32, folder=tmp_path / "kept", on_progress=stop)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_torn_folder_is_named(tokenizer: Any, tmp_path: Path):
    made = prepare_data(_completions(9), tokenizer, seq=32, folder=tmp_path)
    tokens = made.folder / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"torn \(tokens.bin has .* bytes, expected .*delete the folder"):
        Prepared.open(made.folder)
    (made.folder / "data.json").write_text("{}")
    with pytest.raises(DataError, match=r"no prepared tokens .*delete the folder"):
        Prepared.open(made.folder)


def test_a_text_in_pieces_is_one_document(tokenizer: Any, tmp_path: Path):
    text = "".join(f"line {i}\n" for i in range(200_000))  # 2 MB
    path = tmp_path / "text.txt"
    path.write_text(text)
    made = prepare_files(Files([path]), tokenizer, Options(1 << 20), tmp_path / "kept", "")
    assert made.about.documents == 1
    ids = np.fromfile(made.folder / "tokens.bin", made.about.dtype)
    assert ids.tolist() == [*text.encode(), EOS]


def test_an_unwritable_place_and_wrong_options_are_explained(tokenizer: Any, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/kept: prepared tokens cannot be kept there .*data.cache"):
        prepare_data(_completions(2), tokenizer, seq=8, folder=tmp_path / "file" / "kept")
    with pytest.raises(ValueError, match=r"^seq=0: expected at least 1"):
        prepare_data([], tokenizer, seq=0)
    with pytest.raises(
        ValueError, match=r"^train_on='answer': did you mean 'answers'\? \(expected one of answers, all"
    ):
        prepare_data([], tokenizer, seq=8, train_on="answer")
    with pytest.raises(DataError, match=r"nothing to train on"):
        prepare_data([], tokenizer, seq=8, folder=tmp_path / "kept")


def test_entropy_of_frequencies():
    assert entropy(np.array([0, 0])) == 0.0
    assert entropy(np.array([0, 7])) == 0.0
    many = np.array([1, 3]) * 1_000_000
    assert entropy(many) == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), abs=1e-6)
    assert entropy(np.ones(10, dtype=int)) == pytest.approx(np.log(10) + 9 / 20)


def test_the_token_that_ends_answers_is_found(tokenizer: Any, tmp_path: Path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = prepare_data([{"messages": chat}] * 3, tokenizer, seq=64, folder=tmp_path)
    assert made.about.answers_end_at() == (TURN,)
