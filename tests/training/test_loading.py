"""Which tokenizer reads a run's data, and what is refused before anything is read as something else."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shardfuse.testing.models import save_tiny_hf
from shardfuse.training.data.items import DataError
from shardfuse.training.data.loading import load, needs_preparation, prepare_run, summary
from shardfuse.training.data.prepared import Prepared
from shardfuse.training.layout import resolve
from shardfuse.training.settings import START_LR, RunSettings, parse


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 260 tokens with its tokenizer."""
    return save_tiny_hf(tmp_path_factory.mktemp("start"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(40)))
    return path


def _settings(out: Path, **values: Any) -> RunSettings:
    data = {"seq": 16, "batch": 2, **values.pop("data", {})}
    return resolve(parse({"out": str(out / "run"), "device": "cpu", "data": data, **values}), 1)


def _prepared(settings: RunSettings, console: Console | None = None) -> list[Prepared]:
    return [Prepared.open(each) for each in prepare_run(settings, console)]


def test_the_tokenizer_of_the_start_reads_the_text(start: Path, texts: Path, tmp_path: Path):
    settings = _settings(tmp_path, start=str(start), data={"path": str(texts)})
    assert needs_preparation(settings)
    assert settings.optimizer.lr == START_LR
    (made,) = _prepared(settings)
    assert made.folder.parent == tmp_path / "shardfuse-tokens"
    assert (made.about.documents, made.about.source) == (40, "texts.jsonl")
    assert made.about.tokenizer.endswith(f" of {start}")
    tokens = load(settings, [made.folder])
    assert (len(tokens.train), len(tokens.held_out)) == (len(made.train), 1)
    assert tokens.digest == made.folder.name


def test_text_is_never_bytes_where_the_vocabulary_is_not(start: Path, texts: Path, tmp_path: Path):
    bare = save_tiny_hf(tmp_path / "bare", tokenizer=False)
    says = rf"^start = {bare}: a vocabulary of 260, but where that folder has no tokenizer text is read as bytes"
    with pytest.raises(DataError, match=rf"{says}.*data.tokenizer=FOLDER"):
        needs_preparation(_settings(tmp_path, start=str(bare), data={"path": str(texts)}))
    says = (
        r"^model.vocab_size = 300, but where no tokenizer is named text is read as bytes.* set model.vocab_size = 256"
    )
    with pytest.raises(DataError, match=says):
        needs_preparation(_settings(tmp_path, model={"vocab_size": 300}, data={"path": str(texts)}))
    byte_model = save_tiny_hf(tmp_path / "bytes", tokenizer=False, vocab_size=256)
    settings = _settings(tmp_path, start=str(byte_model), data={"path": str(texts)})
    assert not needs_preparation(settings)
    assert not needs_preparation(_settings(tmp_path))  # the standard library's sources


def test_token_numbers_need_no_tokenizer(start: Path, tmp_path: Path):
    path = tmp_path / "numbers.npy"
    np.save(path, np.arange(2000) % 260)
    bare = save_tiny_hf(tmp_path / "bare", tokenizer=False)
    for folder in (start, bare):
        settings = _settings(tmp_path, start=str(folder), data={"path": str(path)})
        assert not needs_preparation(settings)
        tokens = load(settings, None)
        assert tokens.entropy == pytest.approx(np.log(260), abs=0.1)
    settings = _settings(tmp_path, start=str(bare), data={"path": str(path), "validation": str(path)})
    tokens = load(settings, None)
    assert len(tokens.train) == len(tokens.held_out) == 1999 // 16


def test_another_tokenizer_has_to_fit(start: Path, texts: Path, tmp_path: Path):
    small = save_tiny_hf(tmp_path / "small", tokenizer=False, vocab_size=256)
    for more in ({"start": str(small)}, {}):
        settings = _settings(tmp_path, **more, data={"path": str(texts), "tokenizer": str(start)})
        with pytest.raises(DataError, match=rf"data.tokenizer = {start}: its tokens go up to 259, and .* has 256"):
            prepare_run(settings)
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder"):
        _settings(tmp_path, data={"path": str(texts), "tokenizer": str(tmp_path / "nowhere")})
    fits = _settings(tmp_path, model={"vocab_size": 260}, data={"path": str(texts), "tokenizer": str(start)})
    assert (fits.model.bos_token_id, fits.model.eos_token_id) == (256, 257)
    assert _prepared(fits)[0].about.documents == 40


def test_data_to_tokenise_has_to_be_named(start: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"^data.path: the text to train on is not named.*--data"):
        prepare_run(_settings(tmp_path, start=str(start)))


def test_validation_is_of_its_own_and_then_nothing_is_held_out(start: Path, texts: Path, tmp_path: Path):
    held = tmp_path / "held.jsonl"
    held.write_text('{"text": "held"}\n')
    settings = _settings(tmp_path, start=str(start), data={"path": str(texts), "validation": [str(held)]})
    train, validation = _prepared(settings)
    assert (len(train.held_out), validation.about.source) == (0, "held.jsonl")
    tokens = load(settings, [train.folder, validation.folder])
    assert [window[0][:4].tolist() for window in tokens.held_out] == [list(b"held")]
    nothing = _settings(tmp_path, start=str(start), data={"path": str(texts)}, log={"eval_batches": 0})
    assert _prepared(nothing)[0].folder == train.folder


def test_prepared_data_are_a_path_too(start: Path, texts: Path, tmp_path: Path):
    (made,) = _prepared(_settings(tmp_path, start=str(start), data={"path": str(texts)}))
    again = _settings(tmp_path, start=str(start), data={"path": str(made.folder), "cache": str(tmp_path / "other")})
    assert prepare_run(again) == [made.folder]
    longer = _settings(tmp_path, start=str(start), data={"path": str(made.folder), "seq": 32})
    with pytest.raises(DataError, match=r"prepared for windows of 16 tokens, and data.seq = 32"):
        prepare_run(longer)
    small = dataclasses.replace(again, model=dataclasses.replace(again.model, vocab_size=256))
    with pytest.raises(DataError, match=r"the tokens go up to 257, and the model's vocabulary has 256"):
        prepare_run(small)


def test_what_was_read_is_said(start: Path, texts: Path, tmp_path: Path):
    with texts.open("a") as file:
        file.write("{\n")
    console = Console(file=io.StringIO(), width=100)
    settings = _settings(tmp_path, start=str(start), data={"path": str(texts), "skip_bad": 1})
    (made,) = _prepared(settings, console)
    printed = console.file.getvalue()
    assert printed.splitlines() == summary("data", made)
    assert re.search(
        r"^data: 40 documents of texts.jsonl, [\d,]+ tokens .*% padding, 0.0% of the targets masked", printed
    )
    assert re.search(
        r"^warning: data: 1 bad records? left out; the first: \S+, line 41: not JSON", printed, re.MULTILINE
    )


def _preparing_body(rank: int, world: int, text: str, outcome: str) -> str:
    """How ``_prepare`` of the run ends where the first rank prepares until the third sign of life."""
    from shardfuse.parallel.core import collectives
    from shardfuse.parallel.core.mesh import everyone
    from shardfuse.training import run
    from shardfuse.training.restart import Stop, StopFile

    file, signs, go_on, all_reduce = StopFile(Path(text) / "stop"), 0, threading.Event(), collectives.all_reduce

    def counted(*args: Any, site: str, **options: Any) -> Any:
        nonlocal signs
        signs += site == "train.prepare"
        if signs == 3:
            go_on.set()
            if outcome == "stop":
                file.write(signal.SIGTERM)
        return all_reduce(*args, site=site, **options)

    def work(settings: RunSettings, console: Any, ended: Any) -> list[Path]:
        assert go_on.wait(60)
        while outcome == "stop" and not ended():
            pass
        if outcome != "made":
            raise DataError(outcome)
        return [Path("made")]

    with pytest.MonkeyPatch.context() as patch, Stop(everyone(), file) as stop:
        patch.setattr(collectives, "all_reduce", counted)
        patch.setattr(run, "prepare_run", work)
        patch.setattr(run, "BEAT", 0.01)
        try:
            return str(run._prepare(RunSettings(), stop)[0])
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("outcome", ["made", "bad data", "stop"])
def test_ranks_wait_for_the_first_to_prepare(ranks: Any, tmp_path: Path, outcome: str):
    said = {"stop": "stopped by SIGTERM while data were prepared; start again"}.get(outcome, outcome)
    assert ranks(2, _preparing_body, str(tmp_path), outcome) == [said, said]


def test_both_lengths_of_a_run_are_one_too_many():
    from shardfuse.training.settings import read_settings

    with pytest.raises(ValueError, match=r"^steps = 3 and epochs = 2: either decides"):
        read_settings(None, {"steps": 3, "epochs": 2})
    assert read_settings(None, {"steps": 3, "epochs": False}).epochs is None
    assert read_settings(None, {"epochs": 2}).epochs == 2
    with pytest.raises(ValueError, match=r"^data.path = \[\]: expected a path, or a list"):
        read_settings(None, {"data.path": []})
