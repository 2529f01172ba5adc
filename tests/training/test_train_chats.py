"""Training runs on chats, from a folder with its tokenizer: what a step reads, resuming, and what comes out."""

from __future__ import annotations

import json
import random
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardfuse import data_loader, load_hf
from shardfuse.testing.models import save_tiny_hf
from shardfuse.testing.tokenizer import SPECIAL_TOKENS
from shardfuse.training.checks import Agreement
from shardfuse.training.data.prepared import Prepared
from shardfuse.training.data.windows import Tokens
from shardfuse.training.exporting import settle_generation
from shardfuse.training.metrics import read_lines
from shardfuse.training.settings import RunSettings

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"microbatches": 2},
    "dp2-zero1": {"zero": 1, "microbatches": 2},
    "dp2-zero3": {"zero": 3},
    "tp2": {"tp": 2, "microbatches": 2},
    "sp2": {"tp": 2, "sequence_parallel": True, "recompute": True},
    "pp2-1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 2},
    "pp2-zbv": {"pp": 2, "schedule": "zbv", "microbatches": 4},
}
TURN = 259  # the id of the tiny tokenizer's "turn"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model with its tokenizer."""
    return save_tiny_hf(tmp_path_factory.mktemp("start"), num_layers=2)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 chats of several lengths."""
    path, draw = tmp_path_factory.mktemp("data") / "chats.jsonl", random.Random(0)
    with path.open("w") as file:
        for _ in range(50):
            said = [("user", "a" * draw.randint(1, 9)), ("assistant", "b" * draw.randint(1, 9))]
            messages = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def _settings(case: Any, source: Path, chats: Path, out: Path, layout: str, **sections: Any) -> Any:
    data = {"path": str(chats), "seq": 64, "batch": 4, "cache": str(chats.parent / "kept"), **sections.pop("data", {})}
    log = {"eval_batches": 1, "eval_every": 2, **sections.pop("log", {})}
    changed = {"steps": STEPS, "start": str(source), "parallel": LAYOUTS[layout], "data": data, "log": log, **sections}
    return case.settings(out, 1 if layout == "alone" else 2, **changed)


def _interrupted(ranks: Any, case: Any, start: Path, chats: Path, folder: Path, first: str, second: str) -> None:
    """Run in ``folder``: "whole", a run as ``first``; "parts", one stopped after 3 steps and resumed as ``second``."""
    for out, layout, options in (
        ("whole", first, {}),
        ("parts", first, {"stop_after": 3}),
        ("parts", second, {"resume": True}),
    ):
        text = _settings(case, start, chats, folder / out, layout).to_json()
        results = ranks(1 if layout == "alone" else 2, case.run_body, text, **options)
        assert {result.stopped_by for result in results} == {signal.SIGTERM if "stop_after" in options else 0}


@pytest.fixture(scope="module")
def alone(ranks: Any, case: Any, start: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The losses of one process, in fp32 and in fp64."""
    folder = tmp_path_factory.mktemp("alone")
    for name, body in (("single", case.run_body), ("exact", case.exact_body)):
        ranks(1, body, _settings(case, start, chats, folder / name, "alone").to_json())
    return case.losses(folder / "single"), case.losses(folder / "exact")


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(each, marks=pytest.mark.nightly) for each in LAYOUTS if each != "dp2")]
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    ranks: Any, case: Any, start: Path, chats: Path, alone: Any, tmp_path: Path, layout: str
):
    _interrupted(ranks, case, start, chats, tmp_path, layout, layout)
    assert len(case.lines(tmp_path / "whole")) == STEPS
    assert case.lines(tmp_path / "parts") == case.lines(tmp_path / "whole")
    agreement = Agreement(case.losses(tmp_path / "whole"), *alone)
    assert agreement.ok, agreement


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [("dp2-zero3", "pp2-zbv"), ("pp2-1f1b", "sp2"), ("alone", "dp2")])
def test_a_stopped_run_goes_on_in_another_layout(
    ranks: Any, case: Any, start: Path, chats: Path, alone: Any, tmp_path: Path, first: str, second: str
):
    _interrupted(ranks, case, start, chats, tmp_path, first, second)
    agreement = Agreement(case.losses(tmp_path / "parts"), *alone)
    assert agreement.ok, agreement


def test_losses_are_those_of_transformers_on_the_same_batches(
    ranks: Any, case: Any, start: Path, chats: Path, tmp_path: Path
):
    """Of each document by itself, of its answers alone: the first step's, and the held-out one before it."""
    settings = _settings(
        case, start, chats, tmp_path / "run", "dp2", steps=1, optimizer={"lr": 1e-30, "weight_decay": 0.0}
    )
    ranks(2, case.run_body, settings.to_json())
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    (kept,) = [Prepared.open(each) for each in (chats.parent / "kept").iterdir()]
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    batch = next(iter(data_loader(kept.train, batch_size=4, seed=0, drop_last=True)))
    held_out = [torch.stack(parts) for parts in zip(*kept.held_out)]
    for name, (tokens, targets, positions) in (("loss", batch), ("held_out", held_out)):
        total, count = 0.0, 0
        for row, wanted, places in zip(tokens, targets, positions):
            starts = [*(places == 0).nonzero().flatten().tolist(), len(row)]
            for begin, end in pairwise(starts):
                logits = model(input_ids=row[None, begin:end]).logits[0]
                total += F.cross_entropy(logits, wanted[begin:end], ignore_index=-100, reduction="sum").item()
                count += int((wanted[begin:end] != -100).sum())
        assert 0 < count < 0.8 * tokens.numel()
        assert line[name] == pytest.approx(total / count, rel=1e-5)


def test_what_comes_out_serves_as_it_was_trained(ranks: Any, case: Any, start: Path, chats: Path, tmp_path: Path):
    """The tokenizer, its template, the settings for generation, and the end of the answers."""
    source = tmp_path / "start"
    source.mkdir()
    for path in start.iterdir():
        (source / path.name).symlink_to(path)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, "temperature": 0.5}))
    run = _settings(case, source, chats, tmp_path / "run", "alone", steps=1)
    ranks(1, case.run_body, run.to_json())
    folder = tmp_path / "run" / "model"
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [TURN, 257], "temperature": 0.5}
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, start))
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [TURN, 257]
    assert load_hf(folder).config == load_hf(start).config


def test_the_end_of_the_answers_joins_those_that_the_model_has(tmp_path: Path):
    """Also where a special token has the id 0, and the folder no settings for generation."""
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}))
    empty: Any = ()
    for ends in ((), (0,), (7, 0), (7,)):
        settle_generation(RunSettings(), Tokens(empty, empty, "", ends=ends), tmp_path)
        assert (tmp_path / "generation_config.json").exists() is (7 in ends)
    given = json.loads((tmp_path / "generation_config.json").read_text())
    assert given == {"bos_token_id": 0, "eos_token_id": [7, 0]}


def test_another_tokenizer_is_what_comes_out(ranks: Any, case: Any, start: Path, chats: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = tokenizer.chat_template.replace(": ", "> ")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = {"tokenizer": str(tmp_path / "tokenizer")}
    run = _settings(case, start, chats, tmp_path / "run", "alone", steps=1, data=data)
    ranks(1, case.run_body, run.to_json())
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == tokenizer.chat_template


def test_epochs_decide_the_steps(ranks: Any, case: Any, start: Path, chats: Path, tmp_path: Path):
    run = _settings(case, start, chats, tmp_path / "run", "dp2", steps=200, epochs=2, log={"eval_batches": 0})
    results = ranks(2, case.run_body, run.to_json())
    data = json.loads((tmp_path / "run" / "settings.json").read_text())
    windows = {len(Prepared.open(each).train) for each in (chats.parent / "kept").iterdir()}
    assert {(result.steps, result.planned, data["steps"]) for result in results} == {
        (2 * (count // 4),) * 3 for count in windows if 2 * (count // 4) == results[0].steps
    }


def test_other_data_cannot_resume(ranks: Any, case: Any, start: Path, chats: Path, tmp_path: Path):
    ranks(1, case.run_body, _settings(case, start, chats, tmp_path / "run", "alone", steps=1).to_json())
    other = tmp_path / "other.jsonl"
    other.write_text(chats.read_text().replace("aa", "ab"))
    for data in ({"path": str(other)}, {"packing": False}, {"train_on": "all"}):
        text = _settings(case, start, chats, tmp_path / "run", "alone", steps=2, data=data).to_json()
        with pytest.raises(Exception, match=r"saved with other data: .*choose another --out"):
            ranks(1, case.run_body, text, resume=True)
    text = _settings(case, start, chats, tmp_path / "run", "alone", steps=2).to_json()
    assert ranks(1, case.run_body, text, resume=True)[0].resumed_at == 1


def _remarks_body(rank: int, world: int, text: str) -> list[str]:
    from shardfuse.parallel.core.mesh import everyone
    from shardfuse.training.restart import Stop
    from shardfuse.training.settings import RunSettings
    from shardfuse.training.trainer import Trainer, train

    remarks: list[str] = []
    trainer = Trainer(RunSettings.from_json(text), None)
    with Stop(everyone()) as stop:
        train(trainer, stop, on_remark=remarks.append)
    return remarks


def test_a_first_loss_above_the_tokens_entropy_is_told_once(
    ranks: Any, case: Any, start: Path, chats: Path, tmp_path: Path
):
    """The weights are random and large, and the answers are of few tokens. A fresh model is not told."""
    run = _settings(case, start, chats, tmp_path / "run", "alone", steps=2)
    ((said,),) = ranks(1, _remarks_body, run.to_json())
    assert said.startswith("the first loss is 7.")
    assert f"the model in {start} may not have been trained with this tokenizer" in said
    sections: dict[str, Any] = {"model": {"vocab_size": 260, "max_positions": 64}, "start": None}
    sections["data"] = {"tokenizer": str(start)}
    fresh = _settings(case, start, chats, tmp_path / "fresh", "alone", **sections, steps=2)
    assert fresh.model.eos_token_id == tuple(SPECIAL_TOKENS).index("eos") + 256
    assert ranks(1, _remarks_body, fresh.to_json()) == [[]]
