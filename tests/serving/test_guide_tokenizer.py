"""Guides whose text contains the text of an added token: they are spelled, and name such tokens by themselves."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install .[hf])")
pytest.importorskip("llguidance", reason="llguidance is not installed (pip install .[guided])")

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from shardfuse.serving import Guide
from shardfuse.serving.guide_tokenizer import by_number, spelling
from shardfuse.serving.guiding import Guides, fill
from shardfuse.testing import tiny_tokenizer

NAMES = {"<tool_call>": False, "[ARGS]": False, "<s p>": True, "[SP]": True, "<|turn|>": True}  # whether special


def _tokenizer() -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    for name, special in NAMES.items():
        tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)])
    return tokenizer


def _likeliest(guides: Guides, guide: Guide, likes: list[int]) -> list[int]:
    """The answer of a model that always likes ``likes`` best, in their order, and then the lowest token."""
    state = guides.start(guide, ())
    state.compiled.matcher.result(timeout=60)
    assert state.begin() is None
    made: list[int] = []
    while not state.done and len(made) < 100:
        allowed = np.unpackbits(fill([state]).numpy().view(np.uint8)[0], bitorder="little")
        made.append(next((each for each in likes if allowed[each]), int(allowed.argmax())))
        state.advance(made[-1])
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("liked", [True, False], ids=["liked", "not"])
def test_a_guide_of_any_kind_may_contain_an_added_tokens_text(name: str, liked: bool) -> None:
    tokenizer = _tokenizer()
    text = f"a{name} b"
    likes = [tokenizer.token_to_id(name)] if liked else []
    guides = Guides(tokenizer, tokenizer.get_vocab_size())
    try:
        for guide, wanted in (
            (Guide.choice([text]), text),
            (Guide.choice([text, f"a{name}"]), text),
            (Guide.regex(re.escape(text)), text),
            (Guide.grammar(f"start: {json.dumps(text)}"), text),
            (Guide.json_schema({"const": text}), f'"{text}"'),
            (Guide.json_schema({"enum": [text]}), f'"{text}"'),
            (Guide.json_schema({"type": "string", "pattern": f"^{re.escape(text)}$"}), f'"{text}"'),
        ):
            made = _likeliest(guides, guide, [*likes, ord(" ")])
            assert tokenizer.decode(made, skip_special_tokens=True) == wanted, guide
    finally:
        guides.close()


def test_a_grammar_names_tokens_as_before() -> None:
    tokenizer = _tokenizer()
    guides = Guides(tokenizer, tokenizer.get_vocab_size())
    turn, call = map(tokenizer.token_to_id, ("<|turn|>", "<tool_call>"))
    lark = f'start: <|turn|> "<tool_call>" /[<]x>/ <tool_call> <[{call}]> // not <tool_call>'
    try:
        assert _likeliest(guides, Guide.grammar(lark), []) == [turn, *b"<tool_call><x>", call, call]
    finally:
        guides.close()


def test_names_in_texts_patterns_and_comments_stay() -> None:
    lark = 'start: <a> "<a> \\" <a>" /<a>\\/<a>/ <b> // "<a>\nx: <a> <[3]>'
    assert by_number(lark, {"<a>": 7}) == 'start: <[7]> "<a> \\" <a>" /<a>\\/<a>/ <b> // "<a>\nx: <[7]> <[3]>'


_UNKNOWN = "<u>"


def test_names_in_patterns_over_lines_stay_and_broken_grammars_cost_little() -> None:
    assert by_number('start: /a\n<a>/ <a> "x', {"<a>": 7}) == 'start: /a\n<a>/ <[7]> "x'
    for broken in ('"', '\\"', "/\\", '"\\', "<", "<a", "//"):  # a quadratic reading would take hours
        assert by_number(f'start: "a"\n"{broken * 300_000}', {"<a>": 7}).startswith("start")


def test_what_merges_need_keeps_its_name() -> None:
    model = models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4, "zz": 5}, merges=[("a", "b"), ("ab", "c")])
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["ab", "a", "zz"])
    assert spelling(tokenizer.to_str())[1] == {"zz": 5}  # and "a" alone may be needed to spell


MODELS = [
    models.BPE(vocab={"<u>": 0, "a": 1, "<": 2, "t>": 3, "<t>": 4, "<v>": 5}, merges=[("<", "t>")], unk_token=_UNKNOWN),
    models.WordLevel({"<u>": 0, "a": 1, "<v>": 2, "<t>": 3}, unk_token=_UNKNOWN),
    models.WordPiece({"<u>": 0, "a": 1, "<v>": 2, "<t>": 3}, unk_token=_UNKNOWN),
    models.Unigram([("<u>", 0.0), ("a", -1.0), ("<v>", -2.0), ("<t>", -2.0)], unk_id=0, byte_fallback=False),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda each: type(each).__name__)
def test_numbers_stay(model: Any) -> None:
    """Those of the tokens in the vocabulary, before, among and after which added ones stand."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<u>", "<v>"])
    tokenizer.add_tokens([AddedToken("<t>", normalized=False), AddedToken("<w>", normalized=False), "plain", "<0x0A>"])
    text, numbers = spelling(tokenizer.to_str())
    renamed = ["<u>", "<v>", "<w>"] if isinstance(model, models.BPE) else ["<u>", "<v>", "<t>", "<w>"]  # it makes <t>
    assert numbers == {name: tokenizer.token_to_id(name) for name in renamed}
    copied = Tokenizer.from_str(text)
    assert copied.get_vocab_size() == tokenizer.get_vocab_size()
    for number in range(tokenizer.get_vocab_size()):
        name = tokenizer.id_to_token(number)
        assert copied.id_to_token(number) == ("\U0010ffff" + name if name in numbers else name)
    assert numbers["<w>"] not in copied.encode("a <w>").ids


def test_a_tokenizer_without_such_tokens_is_unchanged() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.add_tokens(["word", "<0x0A>"])
    assert spelling(tokenizer.to_str()) == (tokenizer.to_str(), {})
