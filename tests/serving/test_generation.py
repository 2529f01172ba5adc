"""A model's settings for generation: where answers end, and the defaults of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardfuse import Engine, Request, load_hf, load_pretrained
from shardfuse.serving.folder import Opened, open_folder
from shardfuse.serving.folder_options import FolderOptions
from shardfuse.serving.generation import GenerationDefaults
from shardfuse.testing import save_tiny_hf, solo_tokens, tiny_engine, tiny_model, tiny_tokenizer

END = 257  # of the tiny tokenizer
PROMPT = [72, 101, 108]


def _free(count: int = 24) -> list[int]:
    """The tiny model's answer, which nothing ends."""
    return solo_tokens(tiny_model(dtype=torch.float32), Request(PROMPT, count, ignore_eos=True))


def _cut(answer: list[int], ends: set[int]) -> list[int]:
    """``answer`` up to the first token of ``ends``."""
    return answer[: next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))]


def _folder(tmp_path: Path, generation: Any = None, **config: Any) -> Path:
    """The tiny model with this ``generation_config.json``, and ``config`` in ``config.json``."""
    folder = save_tiny_hf(tmp_path / "tiny", dtype=torch.float32)
    (folder / "checksums.json").unlink()
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _open(folder: Path, **options: Any) -> Opened:
    sizes = {"cache_gib": 0.0005, "block_size": 16, "max_num_seqs": 2}
    return open_folder(FolderOptions(folder, dtype="fp32", device="cpu", **{**sizes, **options}))


# --- the end of an answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_hf, load_pretrained])
@pytest.mark.parametrize(
    ("generation", "config", "named"),
    [
        pytest.param([3, 9], None, [3, 9], id="all of generation_config's"),
        pytest.param([5], [7], [5], id="generation_config's before config's"),
        pytest.param(..., [4, 8], [4, 8], id="config's where generation_config names none"),
        pytest.param(None, 6, [6], id="config's without a generation_config"),
        pytest.param(-1, 6, [], id="-1 means none"),
    ],
)
def test_an_answer_ends_where_the_model_says(
    load: Any, generation: Any, config: Any, named: list[int], tmp_path: Path
) -> None:
    """``named`` are positions of the answer, whose tokens end it, each in the file that holds it."""
    free = _free()

    def ids(given: Any) -> Any:
        several = [free[each] for each in given] if isinstance(given, list) else None
        return several or (given if given in (None, -1) else free[given])

    raw = {} if generation is ... else None if generation is None else {"eos_token_id": ids(generation)}
    folder = _folder(tmp_path, raw, eos_token_id=ids(config))
    ends = {free[each] for each in named}
    engine = Engine(load(folder), num_blocks=8)
    engine.add(Request(PROMPT, len(free)))
    events = list(engine.run())
    assert [event.token for event in events] == _cut(free, ends)
    assert events[-1].finish == ("stop" if ends else "length")
    assert events[-1].stop_reason == (events[-1].token if ends else None)
    assert {event.stop_reason for event in events[:-1]} == {None}
    assert engine.generate([Request(PROMPT, len(free), ignore_eos=True)]) == [free]


def test_stop_adds_to_the_models_tokens_and_ignore_eos_leaves_stop() -> None:
    free = _free()
    first, eos, later = list(dict.fromkeys(free))[1:6:2]
    engine = tiny_engine(tiny_model(dtype=torch.float32, eos_token_id=eos), tokenizer=tiny_tokenizer())
    for options, ends in (
        ({}, {eos}),
        ({"n": 2}, {eos}),
        ({"stop": [first]}, {eos, first}),
        ({"stop": [later]}, {eos, later}),
        ({"stop": [later], "ignore_eos": True}, {later}),
    ):
        for answer in engine.generate([Request(PROMPT, len(free), **options)]):  # type: ignore[arg-type]
            assert answer == _cut(free, ends)
    with pytest.raises(ValueError, match="ignore_eos=1: expected True or False"):
        engine.add(Request(PROMPT, ignore_eos=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("included", [False, True])
def test_the_stop_string_is_the_reason(included: bool) -> None:
    engine = tiny_engine(tiny_model(dtype=torch.float32), tokenizer=tiny_tokenizer())
    engine.add(Request(PROMPT, 40, ignore_eos=True))
    text = "".join(event.text for event in engine.run())
    stop = text[4:6]
    engine.add(Request(PROMPT, 40, stop_strings=["never there", stop], include_stop_str_in_output=included))
    events = list(engine.run())
    assert (events[-1].finish, events[-1].stop_reason) == ("stop", stop)
    assert "".join(event.text for event in events) == text[: text.index(stop) + len(stop) * included]


def test_settings_given_to_the_engine_replace_the_models() -> None:
    free = _free()
    defaults = GenerationDefaults(frozenset([free[2]]), do_sample=True, sampling={"temperature": 5.0})
    engine = tiny_engine(tiny_model(dtype=torch.float32), generation=defaults)
    assert engine.generate([Request(PROMPT, 24)]) == [_cut(free, {free[2]})]  # greedy: the rest is a server's to apply


# --- reading the settings ---------------------------------------------------------------------------------------------

BEAMS = {"num_beams": 4, "length_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
NEUTRAL = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "renormalize_logits": False,
    "bad_words_ids": None,
}


def test_what_applies_and_what_is_named() -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1, "do_sample": True}
    found = GenerationDefaults.parse({**given, **BEAMS, "eos_token_id": [1, 2], "stop_strings": "\n", "max_length": 9})
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}
    assert (found.eos_token_ids, found.stop_strings) == ({1, 2}, ("\n",))
    assert set(found.ignored) == {"num_beams", "no_repeat_ngram_size", "min_new_tokens"}
    assert [found.length(16, prompt) for prompt in (2, 8, 20)] == [7, 1, 16]
    ids = {
        "bos_token_id": 1,
        "pad_token_id": 0,
        "transformers_version": "5.0.0",
        "output_scores": True,
        "use_cache": True,
    }
    assert GenerationDefaults.parse({**NEUTRAL, **ids}, eos=7) == GenerationDefaults(frozenset([7]))
    assert GenerationDefaults.parse({"do_sample": False, "temperature": 0.7}).sampling == {"temperature": 0.0}
    assert GenerationDefaults.parse({"max_new_tokens": 5, "max_length": 9}).length(16, 3) == 5


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        ({"temperature": "warm"}, "generation_config.json: temperature='warm': expected a number"),
        ({"top_p": 0}, "top_p=0: expected a number above 0"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id=.*: expected token ids"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': expected token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a number of tokens, at least 1"),
        ({"do_sample": "yes"}, "do_sample='yes': expected true or false"),
        ({"stop_strings": [""]}, r"stop_strings=\[''\]: expected texts"),
    ],
)
def test_settings_that_cannot_be(raw: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        GenerationDefaults.parse(raw)


@pytest.mark.parametrize("load", [load_hf, load_pretrained])
@pytest.mark.parametrize(("text", "wrong"), [("{", "cut short or corrupt"), ("[]", "expected a JSON object")])
def test_a_file_that_is_no_settings(load: Any, text: str, wrong: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"generation_config.json: {wrong}"):
        load(folder)


def test_every_default_of_transformers_is_known() -> None:
    """What transformers itself would write is named only where it changes answers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert GenerationDefaults.parse({**defaults, "max_length": None}).ignored == {}


@pytest.mark.parametrize("load", [load_hf, load_pretrained])
def test_an_older_folder_has_them_in_its_config(load: Any, tmp_path: Path) -> None:
    own = {"do_sample": True, "top_k": 1, "temperature": 0.25, "num_beams": 4}
    model = load(_folder(tmp_path, **own, max_length=20, repetition_penalty=1.0, eos_token_id=[4, 9]))
    found = GenerationDefaults.of_model(model)
    assert (found.do_sample, dict(found.sampling)) == (True, {"top_k": 1, "temperature": 0.25})
    assert (found.ignored, found.max_length, found.eos_token_ids) == ({"num_beams": 4}, None, {4, 9})


@pytest.mark.parametrize("ids", [torch.tensor([5, 6]), np.array([5, 6]), [np.int64(5), 6], {5, 6}], ids=str)
def test_ids_of_any_integer_type(ids: Any) -> None:
    assert GenerationDefaults.parse({"eos_token_id": ids}).eos_token_ids == {5, 6}


def test_whole_floats_and_flags_of_other_programs() -> None:
    found = GenerationDefaults.parse({"top_k": 50.0, "max_new_tokens": 8.0, "do_sample": 1})
    assert (dict(found.sampling), found.max_new_tokens, found.do_sample) == ({"top_k": 50}, 8, True)


def test_defaults_that_cannot_be_stop_only_those_who_apply_them(tmp_path: Path) -> None:
    """An engine alone takes the ends of answers from them, and so does a folder with --generation-config vllm."""
    folder = _folder(tmp_path, {"top_p": 0, "eos_token_id": 9})
    engine = Engine(load_hf(folder), num_blocks=2)
    assert engine.eos_token_ids == {9}
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=0"):
        _ = engine.generation
    opened = _open(folder, generation_config="vllm")
    opened.engine.close()
    assert opened.defaults == GenerationDefaults(frozenset([9]))
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=0"):
        _open(folder)


# --- a folder's defaults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, 50256])
def test_where_no_file_names_an_end_in_the_vocabulary_the_tokenizer_does(named: int | None, tmp_path: Path) -> None:
    opened = _open(_folder(tmp_path, {}, eos_token_id=named))
    with opened.engine:
        assert opened.stop_ids == {END}
        assert f"answers end at {opened.tokenizer.eos_token} ({END})" in opened.how


@pytest.mark.parametrize("choice", ["auto", "vllm", "FOLDER", "FILE", "FOLDER without an end"])
def test_the_choice_of_defaults(choice: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"do_sample": True, "temperature": 0.3, "eos_token_id": [5, 6], "num_beams": 4})
    other = tmp_path / "other"
    other.mkdir()
    end = {} if choice == "FOLDER without an end" else {"eos_token_id": 9}
    file = other / "generation_config.json"
    file.write_text(json.dumps({"top_k": 3, "max_new_tokens": 4, **end}))
    given = choice if choice in ("auto", "vllm") else str(file if choice == "FILE" else other)
    opened = _open(folder, generation_config=given)
    opened.engine.close()
    found = opened.defaults
    wanted = {
        "auto": ({5, 6}, {"temperature": 0.3}, None, ["num_beams"]),
        "vllm": ({5, 6}, {}, None, []),
        "FOLDER": ({9}, {"top_k": 3}, 4, []),
        "FILE": ({9}, {"top_k": 3}, 4, []),
        "FOLDER without an end": ({5, 6}, {"top_k": 3}, 4, []),
    }
    assert (found.eos_token_ids, dict(found.sampling), found.max_new_tokens, list(found.ignored)) == wanted[choice]
    told = {"auto": "do_sample=True, temperature=0.3", "vllm": "answers end at"}
    assert told.get(choice, "top_k=3, max_new_tokens=4") in opened.how
    assert f"and not at the tokenizer's <|eos|> ({END})" in opened.how
    assert ("warning: generation_config.json has num_beams=4" in opened.how) == (choice == "auto")


def test_a_choice_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no generation_config.json: expected auto .* vllm"):
        _open(_folder(tmp_path), generation_config="nowhere")


# --- the longest answer -----------------------------------------------------------------------------------------------


def test_the_cache_bounds_the_context(tmp_path: Path) -> None:
    """A folder's context may be longer than the cache holds: the limit is the cache's, and both are told."""
    opened = _open(_folder(tmp_path, max_position_embeddings=131072))
    engine = opened.engine
    with engine:
        limit = engine.max_model_len
        assert limit == engine.load.num_blocks * 16 + 1 < 131072
        assert f"{limit:,} tokens together" in opened.how
        assert "the model itself takes 131,072 tokens" in opened.how
        assert "--cache-gib" in opened.how
        longest = [5] * (limit - 4)
        assert len(engine.generate([Request(longest, 4, ignore_eos=True)])[0]) == 4
        with pytest.raises(ValueError, match=f"expected at most max_model_len={limit}; shorten either, or make"):
            engine.add(Request(longest, 5))
    with pytest.raises(ValueError, match=r"max_model_len=100,000 needs a cache of .* GiB, and 0.0005 GiB hold"):
        _open(_folder(tmp_path, max_position_embeddings=131072), max_model_len=100_000)
