"""``Engine.from_pretrained`` and ``Engine.chat``: the engine of a folder, and chats with it in the same program."""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[serve])")
pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")  # the support has a server too

from scripted import Scripted, tokenizer_of
from server_case import END
from tokenizers import AddedToken, processors

from shardfuse import Engine, Request, SamplingParams, init_mesh
from shardfuse.layers.hf.chat_template import ChatTemplate
from shardfuse.layers.hf.tokenizers import load_tokenizer
from shardfuse.testing import save_tiny_hf, solo_tokens, tiny_model

ASK = [{"role": "user", "content": "Once"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp64, whose answers do not depend on rounding."""
    return save_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", max_positions=512)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(folder, cache_gib=0.01) as made:
        yield made


class Told:
    """An engine whose model says what it is told."""

    def __init__(self, name: str = "hermes", tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or tokenizer_of(name)
        self.model = Scripted(max(260, len(self.tokenizer)))
        self.engine = Engine(
            self.model, num_blocks=1200, block_size=8, tokenizer=copy.deepcopy(self.tokenizer), enforce_eager=True
        )
        self.engine.eos_token_ids = frozenset([END])

    def ask(self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> Any:
        """The answer to ``messages`` where the model says ``text``."""
        answer = self.engine.chat(messages, tools, sampling=SamplingParams(), **options)
        self.model.start = answer.prompt_tokens
        self.model.script = [*self.tokenizer.encode(text, add_special_tokens=False), END]
        return answer


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    with made.engine:
        yield made


def _tokens(folder: Path, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = load_tokenizer(folder)
    text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_an_answer_streams_and_becomes_a_message(folder: Path, loaded: Engine):
    tokenizer, model = load_tokenizer(folder), tiny_model(max_positions=512)
    messages: list[dict[str, Any]] = [*ASK]
    for _ in range(2):
        prompt = _tokens(folder, messages)
        tokens = solo_tokens(model, Request(prompt, max_new_tokens=24))
        answer = loaded.chat(messages, max_new_tokens=24)
        assert answer.finish is None
        pieces = list(answer)
        assert (answer.tokens, answer.prompt_tokens, answer.finish) == (tokens, len(prompt), "length")
        assert "".join(pieces) == answer.text == tokenizer.decode(tokens)
        assert len(pieces) > 5
        assert "" not in pieces
        assert answer.message == {"role": "assistant", "content": answer.text}
        messages += [answer.message, {"role": "user", "content": "and then?"}]
    assert not loaded.busy


def test_the_folder_says_how_an_answer_is_made(folder: Path, tmp_path: Path):
    prompt = _tokens(folder, ASK)
    first = solo_tokens(tiny_model(max_positions=512), Request(prompt, max_new_tokens=6))
    given = tmp_path / "generation_config.json"
    given.write_text(json.dumps({"eos_token_id": first[3], "max_new_tokens": 6}))
    with Engine.from_pretrained(folder, generation_config=str(given)) as engine:
        answer = engine.chat(ASK)
        assert answer.text == load_tokenizer(folder).decode(first[:4])
        assert (answer.tokens, answer.finish, answer.stop_reason) == (first[:4], "stop", first[3])
        sampled = [engine.chat(ASK, sampling=SamplingParams(temperature=2.0, seed=seed)).text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    given.write_text(json.dumps({"stop_strings": "never there", "max_new_tokens": 5}))
    with Engine.from_pretrained(folder, generation_config=str(given)) as engine:
        assert engine.chat(ASK, max_new_tokens=2).tokens == []  # computed as it is read
        answer = engine.chat(ASK)
        assert len(answer.message["content"]) > 0
        assert len(answer.tokens) == 5


def test_from_pretrained_fills_the_memory(folder: Path):
    block = 2 * 2 * 2 * 8 * 16 * 8  # bytes: layers, keys and values, heads of 8 numbers, slots, of fp64
    with Engine.from_pretrained(
        folder, cache_gib=5 * block / 2**30, block_size=16, max_num_seqs=3, max_num_batched_tokens=64
    ) as engine:
        config = engine.model.config
        assert block == config.num_layers * 2 * config.num_kv_heads * config.head_dim * 16 * 8
        assert (engine.load.num_blocks, engine.max_model_len) == (5, 81)
        assert next(iter(engine.model.parameters())).dtype == torch.float64
    with Engine.from_pretrained(str(folder), dtype=torch.float32, max_model_len=100) as engine:
        assert next(iter(engine.model.parameters())).dtype == torch.float32
        assert engine.max_model_len == 100


def _chat_over_ranks(rank: int, world: int, folder: Path) -> str:
    with Engine.from_pretrained(folder, init_mesh(device_type="cpu"), cache_gib=0.01) as engine:
        if rank:
            with pytest.raises(RuntimeError, match="rank 0 takes the requests"):
                engine.chat(ASK)
            engine.follow()
            return ""
        return engine.chat(ASK, max_new_tokens=12).text


@pytest.mark.ranks
def test_a_folder_over_ranks(ranks: Any, folder: Path, loaded: Engine):
    assert ranks(2, _chat_over_ranks, folder) == [loaded.chat(ASK, max_new_tokens=12).text, ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 3}, r"from_pretrained\(\) got an unexpected keyword argument 'max_len'; "),
        ({"max_model_length": 3}, "'max_model_length'; did you mean 'max_model_len'"),
        ({"num_blocks": 3}, r"num_blocks follows from the folder and the memory \(cache_gib\): .*Engine\(model, "),
    ],
)
def test_options_that_from_pretrained_does_not_have(folder: Path, options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        Engine.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, ValueError, "device='gpu': expected cpu or cuda"),
        ({"cache_gib": "1"}, ValueError, "a cache of '1' GiB: expected a positive number"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs=0: expected at least 1"),
        ({"chat_template": "{{ messages }}"}, FileNotFoundError, "chat_template='{{ messages }}': expected a file"),
    ],
)
def test_options_out_of_range(folder: Path, options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        Engine.from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", ["fp32", "float32", torch.float32])
def test_dtypes(folder: Path, dtype: Any):
    with Engine.from_pretrained(folder, dtype=dtype, cache_gib=0.01, device=torch.device("cpu")) as engine:
        assert next(iter(engine.model.parameters())).dtype == torch.float32


def test_dtypes_of_another_name(folder: Path):
    with Engine.from_pretrained(folder, dtype="auto", cache_gib=0.01) as engine:
        assert next(iter(engine.model.parameters())).dtype == torch.float64
    with pytest.raises(ValueError, match=r"dtype torch.float64: expected one of fp32, bf16, fp16"):
        Engine.from_pretrained(folder, dtype=torch.float64)


def test_calls_of_tools(told: Told):
    answer = told.ask('Look: <tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>', ASK, [TOOL])
    assert list(answer) == ["L", "o", "o", "k", ":"]
    message = answer.message
    [call] = message["tool_calls"]
    assert message | {"tool_calls": 0} == {"role": "assistant", "content": "Look:", "tool_calls": 0}
    assert call == {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    assert answer.finish == "tool_calls"
    result = {"role": "tool", "content": "2", "tool_call_id": call["id"], "name": None}
    again = told.ask("It is 2.", [*ASK, message, result], [TOOL])
    rendered = ChatTemplate(told.tokenizer).render(
        [
            *ASK,
            {**message, "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": [1]}}}]},
            {"role": "tool", "content": "2", "tool_call_id": call["id"]},
        ],
        [TOOL],
        add_generation_prompt=True,
    )
    assert again.prompt_tokens == len(told.tokenizer.encode(rendered, add_special_tokens=False))
    assert (again.text, again.finish) == ("It is 2.", "stop")


def test_without_tools_a_call_is_text(told: Told):
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = told.ask(text, ASK)
    assert answer.message == {"role": "assistant", "content": text}
    assert answer.finish == "stop"


def test_a_text_in_parts(told: Told):
    parts = [{"type": "text", "text": "On"}, {"type": "text", "text": "ce"}]
    answer = told.ask("yes", [{"role": "user", "content": parts, "name": None}])
    assert answer.prompt_tokens == 2 + len("user: Onceassistant: ")
    assert answer.text == "yes"


def test_variables_of_the_template(told: Told):
    told.engine._tokenizer.chat_template = "{{ messages[0]['content'] }}{{ more }}"
    assert told.ask("yes", ASK).prompt_tokens == len("Once")
    assert told.ask("yes", ASK, chat_template_kwargs={"more": "and more"}).prompt_tokens == len("Onceand more")
    for name in ("tokenize", "add_generation_prompt", "messages"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs: {name} is no variable of a template"):
            told.engine.chat(ASK, chat_template_kwargs={name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        told.engine.chat(ASK, temperature=1.0)


def test_the_template_sees_no_fields_without_a_value(told: Told):
    told.engine._tokenizer.chat_template = "{{ messages[0] | list | join(',') }}"
    answer = told.ask("yes", [{"role": "user", "content": "x", "name": None, "tool_calls": None}])
    assert answer.prompt_tokens == len("role,content")


def test_a_rendered_chat_gets_no_further_special_tokens(told: Told):
    tokenizer = told.engine._tokenizer
    plain = told.engine.chat(ASK).prompt_tokens
    special = {"special_tokens": [("<|bos|>", 256)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", **special)
    assert len(tokenizer.encode("")) == 1
    assert told.engine.chat(ASK).prompt_tokens == plain


def test_marks_that_are_special_tokens_are_read_and_not_shown():
    told = Told("mistral")
    told.tokenizer.add_tokens([AddedToken(each, special=True) for each in ("<think>", "</think>")])
    told = Told("mistral", told.tokenizer)
    answer = told.ask('<think>f?</think>Yes [TOOL_CALLS]f[ARGS]{"a": 1}', ASK, [TOOL])
    assert answer.message["content"] == "f?Yes"
    assert [call["function"] for call in answer.message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    told.engine._tokenizer.chat_template += "<think>"  # a call in a thought is considered, not made
    considered = told.ask('[TOOL_CALLS]f[ARGS]{"a": 1}</think>No', ASK, [TOOL])
    assert considered.message == {"role": "assistant", "content": '[TOOL_CALLS]f[ARGS]{"a": 1}No'}
    told.engine.close()


def test_an_answer_that_is_stopped_keeps_what_was_said(told: Told):
    answer = told.ask("one two three", ASK)
    for text in answer:
        if text == " ":
            break
    assert told.engine.busy
    with pytest.raises(RuntimeError, match="an answer of an earlier chat that was not read to its end"):
        told.engine.chat(ASK)
    answer.stop()
    assert not told.engine.busy
    assert (answer.finish, answer.message["content"]) == ("cancelled", "one ")
    answer.stop()
    assert list(answer) == []
    unread = told.ask("one two", ASK)
    unread.stop()
    assert (unread.finish, unread.text) == ("cancelled", "")
    resumed = told.ask("one two", ASK)
    assert next(iter(resumed)) == "o"
    assert resumed.text == "one two"


def test_steps_come_back_without_text(told: Told):
    answer = told.ask("ä", ASK)
    pieces = list(answer.steps())
    assert [piece for piece in pieces if piece] == ["ä"]
    assert len(pieces) > 1  # the first byte makes no text


def test_a_beginning_of_a_stop_string_is_not_lost(folder: Path, tmp_path: Path):
    prompt = _tokens(folder, ASK)
    said = load_tokenizer(folder).decode(solo_tokens(tiny_model(max_positions=512), Request(prompt, max_new_tokens=40)))
    at = next(at for at, letter in enumerate(said) if letter != "\ufffd" and at > 4)
    given = tmp_path / "generation_config.json"
    given.write_text(json.dumps({"stop_strings": said[at] + "\x00never"}))
    with Engine.from_pretrained(folder, generation_config=str(given)) as engine:
        answer = engine.chat(ASK)
        pieces = []
        for piece in answer.steps():
            pieces.append(piece)
            if len(answer.tokens) and load_tokenizer(folder).decode(answer.tokens)[at:] == said[at]:
                answer.stop()
        assert len(pieces) > 1
        assert "".join(pieces[:-1]) == said[:at]  # the last one comes after the stop
        assert "".join(pieces) == answer.text == said[: at + 1]


def test_an_answer_that_is_dropped_ends(told: Told):
    told.engine.chat(ASK)
    for text in told.ask("one two", ASK):
        assert text == "o"
        break
    gc.collect()
    assert not told.engine.busy
    assert told.ask("three", ASK).text == "three"


def test_an_engine_that_closes_or_pauses(told: Told):
    answer = told.ask("one", ASK)
    assert next(iter(answer)) == "o"
    told.engine.close()
    assert (answer.text, answer.finish) == ("o", "cancelled")
    with pytest.raises(RuntimeError, match="chat: the engine is closed"):
        told.engine.chat(ASK)
    told.engine.open()
    answer = told.ask("one", ASK)
    pieces = iter(answer)
    assert next(pieces) == "o"
    told.engine.pause()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the engine is paused: call resume\(\)"):
            next(iter(answer))
    told.engine.resume()
    assert answer.text == "one"
    answer = told.ask("one", ASK)
    next(iter(answer))
    told.engine.cancel(answer._number)
    assert (answer.text, answer.finish) == ("o", "cancelled")


def test_a_model_that_fails(told: Told):
    answer = told.ask("one", ASK)
    pieces = iter(answer)
    assert next(pieces) == "o"
    with torch.no_grad():
        told.model.w.fill_(float("nan"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="chat: LogitsNotFinite: "):
            list(answer)
    with pytest.raises(RuntimeError, match="chat: LogitsNotFinite: "):
        answer.message  # noqa: B018 - no half of an answer passes for a whole one
    assert answer.finish == "error"
    assert not told.engine.busy


def test_a_step_that_fails_can_be_taken_again(told: Told, monkeypatch: pytest.MonkeyPatch):
    answer, step = told.ask("one two", ASK), told.engine.step
    pieces = iter(answer)
    assert next(pieces) == "o"

    def fail() -> Any:
        monkeypatch.setattr(told.engine, "step", step)
        raise MemoryError

    monkeypatch.setattr(told.engine, "step", fail)
    with pytest.raises(MemoryError):
        next(pieces)
    assert answer.finish is None
    assert answer.text == "one two"
    assert answer.finish == "stop"


def test_others_keep_their_events(told: Told):
    answer = told.ask("one", ASK)
    next(iter(answer))
    number = told.engine.add(Request([5, 6], max_new_tokens=3, ignore_eos=True))
    assert answer.text == "one"
    events = list(told.engine.run())
    assert [event.request for event in events] == [number] * 3
    answer = told.ask("one", ASK)
    next(iter(answer))
    assert list(told.engine.run())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"were read by another step\(\) or run\(\) of the engine"):
            answer.text  # noqa: B018
    assert answer.finish == "error"


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], None, r"messages=\[\]: expected "),
        (None, None, "messages=None: expected "),
        ({"role": "user", "content": "x"}, None, "messages=.*: expected "),
        ([{"role": "user", "content": 5}], None, r"messages\[0\].content=5: expected a text"),
        ([{"role": "assistant", "tool_calls": "abc"}], None, r"messages\[0\].tool_calls\[0\] is 'abc': expected "),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], None, r"tool_calls\[0\] is \{'name': 'f'\}: expected"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], None, r"content\[0\] is 'image_url': "),
        ([{"role": "user", "content": "\ud800"}], None, "the messages are no text in Unicode"),
        (ASK, [{"function": {"name": "f", "parameters": "x"}}], r"tools\[0\]: expected "),
        ([{"content": "x"}], None, r"messages\[0\] is \{'content': 'x'\}: expected \{\"role\": "),
        (["x"], None, r"messages\[0\] is 'x': expected "),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            None,
            r"messages\[0\].content\[0\] is 'image_url': expected ",
        ),
        (ASK, [{"name": "f"}], r"tools\[0\]: expected .*get_json_schema"),
        ([{"role": "user", "content": "x" * 9000}], None, r"have 9,\d+ tokens, and a chat and its answer .* 8,192: "),
    ],
)
def test_chats_that_are_refused(told: Told, messages: Any, tools: Any, message: str):
    with pytest.raises(ValueError, match=message):
        told.engine.chat(messages, tools)
    assert not told.engine.busy


def test_templates_that_refuse(told: Told):
    tokenizer = told.engine._tokenizer
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ValueError, match="the model's chat template refuses these messages: no system"):
        told.engine.chat(ASK)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="tools: the model's chat template does not mention tools"):
        told.engine.chat(ASK, [TOOL])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template: load an instruct model, or give .* chat_template=FILE"):
        told.engine.chat(ASK)
    bare = Engine(told.model, num_blocks=4)
    with pytest.raises(ValueError, match=r"needs a tokenizer of transformers: Engine\(model, tokenizer=...\)"):
        bare.chat(ASK)
