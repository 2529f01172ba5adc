"""Records as tokens, and which of them the loss counts."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from chat_case import (
    CHATML,
    DEFAULT_SYSTEM,
    GEMMA,
    LLAMA,
    MARKED,
    MISTRAL,
    REASONING,
    TOOLS,
    answer,
    user,
    wrapped,
)

from shardfuse.testing.tokenizer import tiny_tokenizer
from shardfuse.training.data.items import Item, RecordError, Sample
from shardfuse.training.data.reader import RecordReader

pytest.importorskip("transformers")
BOS, EOS = 256, 257
CHAT = [user("Hi é"), answer("Yo 🙂"), user("more"), answer("bye 🦜")]
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {}}}


def read(tokenizer: Any, *records: Any, train_on: str = "answers") -> list[Sample | RecordError]:
    return RecordReader(tokenizer, train_on=train_on).read([Item("here", record, 1) for record in records])


def sample(tokenizer: Any, record: Any, **options: Any) -> Sample:
    [found] = read(tokenizer, record, **options)
    assert isinstance(found, Sample), found
    assert found.ids.dtype == np.int64
    assert found.counted.dtype == bool
    assert found.ids.shape == found.counted.shape
    return found


def refusal(tokenizer: Any, record: Any, **options: Any) -> str:
    [found] = read(tokenizer, record, **options)
    assert isinstance(found, RecordError), found
    assert "\n" not in str(found)
    str(found).encode()
    return str(found)


def counted(tokenizer: Any, record: Any, **options: Any) -> str:
    found = sample(tokenizer, record, **options)
    return tokenizer.decode(found.ids[found.counted])


def with_post_processor(processor: Any, **named: Any) -> Any:
    inner = tiny_tokenizer()
    inner.post_processor = processor
    return wrapped(inner, **{f"{name}_token": f"<|{name}|>" for name in ("bos", "eos")}, **named)


def beginning(single: str) -> Any:
    """A tokenizer that puts special tokens around a text, such as "<|bos|> $A"."""
    from tokenizers.processors import TemplateProcessing

    return with_post_processor(
        TemplateProcessing(single=single, special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS), ("<|turn|>", 259)])
    )


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        (CHATML, "Yo 🙂<|eos|>\nbye 🦜<|eos|>\n"),
        (DEFAULT_SYSTEM, "Yo 🙂bye 🦜"),
        (LLAMA, "Yo 🙂<|eos|>bye 🦜<|eos|>"),
        (GEMMA, "Yo 🙂<|eos|>\nbye 🦜<|eos|>\n"),
        (MISTRAL, " Yo 🙂<|eos|> bye 🦜<|eos|>"),
    ],
    ids=["chatml", "default-system", "llama", "gemma", "mistral"],
)
def test_the_answers_of_a_chat_count(template, learnt):
    tokenizer = wrapped(template=template)
    found = sample(tokenizer, {"messages": CHAT, "id": 3})
    assert tokenizer.decode(found.ids[found.counted]) == learnt
    assert found.ids.tolist() == tokenizer.apply_chat_template(CHAT)["input_ids"]
    everything = sample(tokenizer, {"messages": CHAT}, train_on="all")
    assert everything.counted.all()
    assert everything.ids.tolist() == found.ids.tolist()


def test_marked_answers_count_as_transformers_and_the_prefixes_say():
    record, marked, plain = {"messages": CHAT}, "{{ bos_token }}" + MARKED, "{{ bos_token }}" + CHATML
    found, unmarked = sample(wrapped(template=marked), record), sample(wrapped(template=plain), record)
    theirs = wrapped(template=marked).apply_chat_template(CHAT, return_assistant_tokens_mask=True)
    assert found.ids.tolist() == unmarked.ids.tolist() == theirs["input_ids"]
    assert found.counted.tolist() == unmarked.counted.tolist() == [bool(each) for each in theirs["assistant_masks"]]


def test_every_token_of_a_marks_last_character_counts():
    tokenizer = wrapped(template=MARKED.replace(" + '<|eos|>\n' }}{% endg", " }}{% endg"))
    assert counted(tokenizer, {"messages": CHAT}) == "Yo 🙂bye 🦜"


def test_answers_begin_and_end_in_spaces_that_offsets_leave_out():
    from tokenizers.processors import ByteLevel

    tokenizer = with_post_processor(ByteLevel(trim_offsets=True))
    for template in (MARKED.replace("<|eos|>\n", ""), CHATML.replace("<|eos|>\n", "")):
        tokenizer.chat_template = template
        chat = [user("a"), answer(" b"), user("c "), answer("d  "), user("e"), answer(" ")]
        assert counted(tokenizer, {"messages": chat}) == " bd   "


def test_a_comment_marks_nothing():
    tokenizer = wrapped(template="{# no {% generation %} here #}" + CHATML)
    assert counted(tokenizer, {"messages": CHAT[:2]}) == "Yo 🙂<|eos|>\n"


def test_named_templates_are_chosen_by_the_tools():
    tokenizer = wrapped(template={"default": CHATML, "tool_use": MARKED.replace("<|turn|>", "<|pad|>")})
    records = [{"messages": CHAT, "tools": tools} for tools in (None, [], [SCHEMA], None)]
    found = [each for each in read(tokenizer, *records) if isinstance(each, Sample)]
    assert [each.ids[0] for each in found] == [259, 259, 258, 259]
    for each in found:
        assert tokenizer.decode(each.ids[each.counted]) == "Yo 🙂<|eos|>\nbye 🦜<|eos|>\n"
    assert "no chat template for the record" in refusal(wrapped(template={"tool_use": CHATML}), {"messages": CHAT})


def test_tools_are_schemas_or_json():
    tokenizer = wrapped(template=TOOLS)
    ids = tokenizer.apply_chat_template(CHAT, tools=[SCHEMA])["input_ids"]
    for tools in ([SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], [{**SCHEMA, "strict": None}]):
        assert sample(tokenizer, {"messages": CHAT, "tools": tools}).ids.tolist() == ids
    prompt = {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": [SCHEMA]}
    assert sample(tokenizer, prompt).ids.tolist() == ids
    for tools in (None, [], "", "[]", "null"):
        assert len(sample(tokenizer, {"messages": CHAT, "tools": tools}).ids) < len(ids)


def test_keys_that_are_none_are_absent():
    lean = [
        user([{"type": "text", "text": "hi"}, {"type": "image", "image": "x"}]),
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [None, 1]}}}]},
        {"role": "tool", "content": "3"},
        answer("done"),
    ]
    full: Any = copy.deepcopy(lean)
    full[0]["content"][0]["image"] = full[0]["tool_calls"] = None
    full[1].update(content=None, name=None)
    full[1]["tool_calls"][0]["function"]["arguments"]["b"] = None
    tokenizer = wrapped(template=TOOLS)
    ids = tokenizer.apply_chat_template(lean)["input_ids"]
    found = sample(tokenizer, {"messages": full, "text": "other"})
    assert found.ids.tolist() == ids
    assert tokenizer.decode(found.ids[found.counted]) == '{"name": "f", "arguments": {"a": [null, 1]}}done'
    assert full[1]["content"] is None, "the record is the caller's"


def test_answers_in_a_row_and_at_the_beginning():
    first = [answer("one"), user("q"), answer("two"), answer("three")]
    learnt = "one<|eos|>\ntwo<|eos|>\nthree<|eos|>\n"
    assert counted(wrapped(template=CHATML), {"messages": first}) == learnt
    assert counted(wrapped(template=MARKED), {"messages": first}) == learnt
    words = refusal(wrapped(template=DEFAULT_SYSTEM), {"messages": first})
    assert words.startswith("message 1 (assistant)")
    assert "begin the chat with" in words
    words = refusal(wrapped(template=CHATML + "{{ messages[0].role[:0] }}"), {"messages": first})
    assert words.startswith("message 1 (assistant)")
    assert "begin the chat with" in words
    assert "no element 0" in words


def test_reasoning_that_a_template_drops_is_refused():
    tokenizer = wrapped(template=REASONING)
    chat = [user("2+2?"), answer("<think>easy</think>4"), user("more"), answer("<think>hm</think>5")]
    words = refusal(tokenizer, {"messages": chat})
    assert words.startswith("message 2 (assistant)")
    assert "later messages" in words
    assert "'<think>easy" in words
    assert "'4<|eos|>" in words
    assert all(way in words for way in ("`prompt`", "{% generation %}", "data.train_on"))
    assert counted(tokenizer, {"messages": chat[:2]}) == "<think>easy</think>4<|eos|>"
    record = {"prompt": chat[:3], "completion": chat[3:]}
    assert counted(tokenizer, record) == "<think>hm</think>5<|eos|>"
    assert sample(tokenizer, record).ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
    assert sample(tokenizer, {"messages": chat}, train_on="all").counted.all()


def test_a_prompt_that_no_answer_begins_with_is_refused():
    tokenizer = wrapped(template=CHATML.replace("<|turn|>assistant\n", "<|turn|>assistant\n<think>"))
    words = refusal(tokenizer, {"messages": CHAT})
    assert words.startswith("message 2 (assistant)")
    assert "'<think>' against 'Yo " in words
    words = refusal(tokenizer, {"prompt": CHAT[:1], "completion": CHAT[1:]})
    assert words.startswith("message 1 of `completion` (assistant)")


def test_only_a_completions_answers_count():
    for template in (CHATML, MARKED):
        tokenizer = wrapped(template=template)
        record = {"prompt": CHAT[:2], "completion": CHAT[2:]}
        assert counted(tokenizer, record) == "bye 🦜<|eos|>\n"
        assert sample(tokenizer, record, train_on="all").counted.all()
        assert counted(tokenizer, {"prompt": [], "completion": CHAT}) == "Yo 🙂<|eos|>\nbye 🦜<|eos|>\n"
        assert "no answer to learn from" in refusal(tokenizer, {"prompt": CHAT[:2], "completion": CHAT[2:3]})
    changing = wrapped(template=MARKED + "{% if loop is not defined %}{{ messages | length }}{% endif %}")
    assert "`prompt`: its text changes" in refusal(changing, {"prompt": CHAT[:2], "completion": CHAT[2:]})


def test_a_chat_takes_few_renderings(monkeypatch):
    tokenizer = wrapped(template=CHATML)
    calls = []
    inner = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer),
        "apply_chat_template",
        lambda self, *args, **more: calls.append(1) or inner(self, *args, **more),
    )
    sample(tokenizer, {"messages": CHAT * 3})
    assert len(calls) == 2 * 6  # the whole chat ends with its last answer


def test_a_batch_takes_one_call_for_each_kind(monkeypatch):
    tokenizer = wrapped(template=CHATML)
    reader = RecordReader(tokenizer)
    calls = []
    inner = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, *args, **more: calls.append(1) or inner(self, *args, **more)
    )
    records: list[Any] = [{"text": f"text {n}"} for n in range(5)]
    records[1:1] = [{"messages": [user("a"), answer(f"b{n}")]} for n in range(5)]
    found = reader.read([Item("here", record, 1) for record in records])
    assert len(calls) == 2
    texts = [tokenizer.decode(each.ids[each.counted]) for each in found if isinstance(each, Sample)]
    assert texts == ["text 0<|eos|>", *(f"b{n}<|eos|>\n" for n in range(5)), *(f"text {n}<|eos|>" for n in range(1, 5))]
    assert reader.read([]) == []


@pytest.mark.parametrize(
    ("around", "begin"),
    [("$A", []), ("<|bos|> $A", [BOS]), ("<|bos|> <|turn|> $A <|eos|>", [BOS, 259]), ("$A <|eos|>", [])],
    ids=["none", "llama", "both", "t5"],
)
def test_a_text_has_its_special_tokens_once(around, begin):
    tokenizer = beginning(around)
    for text in ("ab", "ab<|eos|>"):
        for train_on in ("answers", "all"):
            found = sample(tokenizer, {"text": text}, train_on=train_on)
            assert found.ids.tolist() == [*begin, 97, 98, EOS]
            assert found.counted.all()
    found = sample(tokenizer, {"prompt": "a", "completion": "b"})
    assert found.ids.tolist() == [*begin, 97, 98, EOS]
    assert found.counted.tolist() == [False] * len(begin) + [False, True, True]
    assert sample(tokenizer, {"prompt": "a", "completion": "b"}, train_on="all").counted.all()


def test_pieces_of_a_text_have_the_ends_that_are_theirs():
    reader = RecordReader(beginning("<|bos|> $A"))
    pieces = [
        Item("here", {"text": "ab"}, 2, first=first, last=last) for first in (True, False) for last in (True, False)
    ]
    ids = [found.ids.tolist() for found in reader.read(pieces) if isinstance(found, Sample)]
    assert ids == [[BOS, 97, 98, EOS], [BOS, 97, 98], [97, 98, EOS], [97, 98]]


def test_a_tokenizer_without_an_end_adds_none():
    tokenizer = wrapped(tiny_tokenizer())
    assert sample(tokenizer, {"text": "ab"}).ids.tolist() == [97, 98]
    assert "nothing to learn from" in refusal(tokenizer, {"text": "a"})
    assert "nothing to learn from" in refusal(tokenizer, {"text": ""})


def test_a_vocabulary_without_latin_letters_keeps_its_beginning():
    from tokenizers import Tokenizer, models, processors

    inner = Tokenizer(models.WordLevel({"日": 0, "<b>": 1, "<e>": 2}))
    inner.post_processor = processors.TemplateProcessing(single="<b> $A <e>", special_tokens=[("<b>", 1), ("<e>", 2)])
    tokenizer = wrapped(inner, **{f"{name}_token": f"<{name[0]}>" for name in ("bos", "eos")})
    assert sample(tokenizer, {"text": "日"}).ids.tolist() == [1, 0, 2]


def test_a_token_across_the_border_counts():
    from tokenizer_case import END, byte_level

    tokenizer = wrapped(byte_level(), eos_token=END)
    assert len(tokenizer("cat")["input_ids"]) == 1
    found = sample(tokenizer, {"prompt": "1c", "completion": "at"})
    assert tokenizer.decode(found.ids[found.counted]) == f"cat{END}"


def test_an_empty_answer_takes_no_token_around_it():
    from tokenizer_case import END, byte_level

    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + 'c' }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}at{% endif %}{% endfor %}"
    )
    chat = [user("1"), answer(""), user("2"), answer("+")]
    assert counted(wrapped(byte_level(), template, eos_token=END), {"messages": chat}) == "+"


def test_a_tokenizer_without_offsets_goes_by_its_ids(monkeypatch):
    from tokenizer_case import END, byte_level

    for template in (CHATML, MARKED):
        tokenizer = wrapped(template=template)
        with_offsets = sample(tokenizer, {"messages": CHAT})
        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "is_fast", False)
            found = sample(tokenizer, {"messages": CHAT})
        assert found.ids.tolist() == with_offsets.ids.tolist()
        assert found.counted.tolist() == with_offsets.counted.tolist()
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    words = refusal(wrapped(byte_level(), eos_token=END), {"prompt": "1c", "completion": "at"})
    assert words.startswith("`completion`")
    assert "'1cat'" in words
    assert "tokenizer.json" in words


LONG = "secret " * 40


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([1], ["the record is [1]"]),
        ({}, ["nothing", "`messages`, `prompt` with `completion`, or `text`"]),
        ({"a" * 90: 1, **dict.fromkeys("bcdefghij", 1)}, ["'aaa", "'h' and 2 more", "`text`"]),
        ({"prompt": "a"}, ["'prompt'", "`completion`"]),
        ({"messages": None, "text": None}, ["'messages' (null), 'text' (null):"]),
        ({"conversations": [{"from": "human", "value": "a"}]}, ["`messages`", "`from` to `role`", "`value`"]),
        ({"instruction": "a", "input": "", "output": "b"}, ["`prompt` of `instruction`", "`output` to `completion`"]),
        ({"text": 5}, ["`text` is 5", "string"]),
        ({"text": [LONG]}, ["`text` is ['secret"]),
        ({"text": ""}, ["nothing to learn from"]),
        ({"text": "<|eos|>"}, ["nothing to learn from"]),
        ({"prompt": "a", "completion": ""}, ["no answer to learn from"]),
        ({"prompt": "a", "completion": "<|eos|>"}, ["no answer to learn from"]),
        ({"prompt": LONG, "completion": CHAT[1:2]}, ["`prompt` is 'secret", "`completion` is [", "two strings"]),
        ({"prompt": 1, "completion": "b"}, ["`prompt` is 1"]),
        ({"prompt": CHAT[:1], "completion": [5]}, ["message 1 of `completion` is 5"]),
        ({"prompt": [], "completion": []}, ["empty"]),
        ({"messages": "hi"}, ["`messages` is 'hi'", "a list of messages"]),
        ({"messages": []}, ["empty"]),
        ({"messages": [CHAT[0], LONG]}, ["message 2 of `messages` is 'secret"]),
        ({"messages": [{"content": "a", "x": 1}]}, ["message 1", "no `role`, only 'content', 'x'"]),
        ({"messages": [{"role": 1, "content": "a"}]}, ["message 1", "the role 1"]),
        ({"messages": [{"from": "human", "value": "a"}]}, ["message 1", "`from` to `role`"]),
        ({"messages": [user({"a": 1})]}, ["message 1", "(user)", "{'a': 1}"]),
        ({"messages": [CHAT[0], answer(None, tool_calls=[], name="x")]}, ["message 2", "'assistant'", "is empty"]),
        ({"messages": CHAT[:1]}, ["no answer to learn from", "'user'"]),
        ({"messages": [CHAT[0], answer([{"text": LONG}])]}, ["the chat template cannot render", "concatenate"]),
        ({"messages": CHAT, "tools": "[{" + LONG}, ["`tools` is '[{secret", "not JSON"]),
        ({"messages": CHAT, "tools": {"a": 1}}, ["`tools` is {'a': 1}", "list"]),
        ({"messages": CHAT, "tools": [SCHEMA, 3]}, ["tool 2", "3"]),
        ({"messages": [user("a\ud800b"), answer("c")]}, ["surrogate", "\\ud800"]),
        ({"text": LONG + "\udc00" + LONG}, ["surrogate", "character 280", "\\udc00"]),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_with_the_reason(record, words):
    found = refusal(wrapped(template=CHATML), record)
    assert all(each in found for each in words), found
    assert "secret " * 9 not in found
    assert len(found) < 400


def test_a_templates_own_words_are_the_reason():
    tokenizer = wrapped(template=GEMMA)
    for train_on in ("answers", "all"):
        chat = [{"role": "system", "content": "a"}, *CHAT]
        assert "System role not supported" in refusal(tokenizer, {"messages": chat}, train_on=train_on)
        chat = [*CHAT, answer("again")]
        assert "roles must alternate" in refusal(tokenizer, {"messages": chat}, train_on=train_on)
    tokenizer.chat_template = CHATML + "{{ raise_exception('bad \ud800') }}"
    assert "bad \\ud800" in refusal(tokenizer, {"messages": CHAT})
    tokenizer.chat_template = CHATML + "{% if messages | length == 2 %}{{ none.x.y }}{% endif %}"
    words = refusal(tokenizer, {"messages": CHAT})
    assert words.startswith("message 2 (assistant)")
    assert "up to it alone" in words
    tokenizer.chat_template = MARKED + "{{ raise_exception('') }}"
    assert "TemplateError" in refusal(tokenizer, {"messages": CHAT})


def test_a_tokenizer_without_a_chat_template_refuses_chats():
    for train_on in ("answers", "all"):
        words = refusal(wrapped(), {"messages": CHAT}, train_on=train_on)
        assert "chat template" in words
        assert "data.tokenizer" in words
        assert "`text`" in words


def test_a_bad_record_spoils_no_other():
    tokenizer = wrapped(template=CHATML)
    bad, chat = {"text": "\ud800"}, {"messages": CHAT}
    found = read(tokenizer, {"text": "ab"}, bad, chat, {"messages": [user("\udfff"), answer("b")]}, None, {"text": "c"})
    assert [isinstance(each, Sample) for each in found] == [True, False, True, False, False, True]
    assert found[5].ids.tolist() == [99, EOS]
    assert found[2].ids.tolist() == sample(tokenizer, chat).ids.tolist()
    [unreadable] = RecordReader(tokenizer).read([Item("here", None, 3, problem="not JSON")])
    assert isinstance(unreadable, RecordError)
    assert str(unreadable) == "not JSON"
    for error in (found[1], found[3], found[4], unreadable):
        assert isinstance(error, RecordError)
        assert error.__traceback__ is None, "a traceback would keep the batch in memory"


@pytest.mark.parametrize("kind", [RuntimeError, type("PanicException", (BaseException,), {})], ids=["error", "panic"])
def test_what_a_tokenizer_raises_is_the_reason(kind, monkeypatch):
    tokenizer = wrapped()
    inner = type(tokenizer).__call__

    def strict(self, text, **more):
        if any("bad" in each for each in text):
            raise kind("cannot\nread it")
        return inner(self, text, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", strict)
    good, bad = read(tokenizer, {"text": "ab"}, {"text": "bad"})
    assert isinstance(good, Sample)
    assert isinstance(bad, RecordError)
    assert "'bad': cannot read it" in str(bad)


def test_an_interruption_is_not_a_records_fault(monkeypatch):
    tokenizer = wrapped()
    reader = RecordReader(tokenizer)

    def interrupted(self, *_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer), "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.read([Item("here", {"text": "ab"}, 1)])


def test_all_takes_chats_without_answers():
    assert sample(wrapped(template=CHATML), {"messages": CHAT[:1]}, train_on="all").counted.all()


def test_another_train_on_is_refused():
    with pytest.raises(ValueError, match=r"train_on='answer': did you mean 'answers'\? \(expected one of answers, all"):
        RecordReader(wrapped(), train_on="answer")
