"""``shardfuse.testing``: what it makes is repeatable, varied and right, and its fixtures turn a leak red."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import Request, SamplingParams, load_hf
from shardfuse.testing import (
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    assert_idle,
    save_tiny_hf,
    solo_tokens,
    tiny_engine,
    tiny_model,
    tiny_tokenizer,
)

REQUESTS = [
    Request([1, 2, 3], max_new_tokens=24),
    Request(list(b"hello"), max_new_tokens=24),
    Request(list(b"hello"), max_new_tokens=24, sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=5)),
    Request([7], max_new_tokens=24, sampling=SamplingParams(repetition_penalty=1.2, logit_bias={9: 3.0})),
]


# --- models and engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["gated", "gelu"])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_vary(style: str, seed: int) -> None:
    """Within an answer and between prompts: a server that mixes answers up does not give the right ones by chance."""
    model = tiny_model(style, seed)
    answers = [solo_tokens(model, Request(prompt, max_new_tokens=24)) for prompt in ([1], [2, 3], list(b"hello"))]
    assert min(len(set(answer)) for answer in answers) >= 5
    assert len({token for answer in answers for token in answer}) >= 15
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_seed_names_a_model_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (tiny_model(seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert tiny_model(vocab_size=32, num_layers=1).config.vocab_size == 32
    assert tiny_model().config.eos_token_id == 257
    with pytest.raises(ValueError, match="style='llama'"):
        tiny_model("llama")


@pytest.mark.parametrize("style", ["gated", "gelu"])
def test_engines_give_the_solo_tokens(style: str) -> None:
    model = tiny_model(style)
    engine = tiny_engine(model, max_num_seqs=3, num_blocks=10)
    assert engine.generate(REQUESTS) == [solo_tokens(model, request) for request in REQUESTS]
    assert engine.stats.preemptions > 0
    assert_idle(engine)


def test_solo_tokens_end_at_stop_tokens_and_refuse_what_engines_refuse() -> None:
    model = tiny_model()
    whole = solo_tokens(model, REQUESTS[0])
    stopped = solo_tokens(model, Request([1, 2, 3], max_new_tokens=24, stop=whole[4:6]))
    assert stopped == whole[: 1 + min(whole.index(token) for token in whole[4:6])]
    with pytest.raises(ValueError, match=r"prompt\[0\] is 260"):
        solo_tokens(model, Request([VOCAB_SIZE]))


def test_what_lives_or_leaks_is_said() -> None:
    engine = tiny_engine()
    number = engine.add(Request([1], max_new_tokens=4))
    engine.step()
    with pytest.raises(AssertionError, match=r"1 requests live in the engine, such as number 0: read run\(\)"):
        assert_idle(engine)
    engine.cancel(number)
    assert_idle(engine)
    engine._allocator.grow(99, 9)
    with pytest.raises(AssertionError, match="2 of 64 blocks are leaked"):
        assert_idle(engine)


# --- tokenizer and folder ---------------------------------------------------------------------------------------------


def test_the_tokenizer_writes_bytes() -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install .[hf])")
    tokenizer = tiny_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    every = "".join(map(chr, range(0x250))) + " two  spaces\r\n\t\N{GRINNING FACE} \N{CJK UNIFIED IDEOGRAPH-4E2D}'s"
    assert tokenizer.encode(every).ids == list(every.encode())
    assert tokenizer.decode(list(every.encode())) == every
    assert tokenizer.encode("".join(SPECIAL_TOKENS.values()) + "a").ids == [256, 257, 258, 259, ord("a")]
    assert tokenizer.decode([257, ord("a")]) == "a"


def test_without_tokenizers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizers is not installed: pip install 'shardfuse\[hf\]'"):
        tiny_tokenizer()
    with pytest.raises(ImportError, match="tokenizers"):
        save_tiny_hf(tmp_path / "one")
    save_tiny_hf(tmp_path / "two", tokenizer=False)
    assert not (tmp_path / "two" / "tokenizer.json").exists()


@pytest.mark.parametrize("style", ["gated", "gelu"])
def test_folders_hold_the_model_and_its_tokenizer(style: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    folder = save_tiny_hf(tmp_path / "tiny", style, 3)
    model = load_hf(folder)
    assert [solo_tokens(model, each) for each in REQUESTS] == [
        solo_tokens(tiny_model(style, 3), each) for each in REQUESTS
    ]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hello").input_ids == list(b"hello")
    assert tokenizer.eos_token_id == model.config.eos_token_id == 257
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|turn|>user: hi<|turn|>"


def test_the_chat_template_shows_tools_calls_and_results(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(save_tiny_hf(tmp_path / "tiny"))
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {"x": 'a"b'}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    chat = tokenizer.apply_chat_template(
        messages, tools=[{"type": "function", "function": {"name": "f"}}], tokenize=False
    )
    assert chat == (
        '<|turn|>tools:\n{"type": "function", "function": {"name": "f"}}<|turn|>user: hi<|turn|>assistant: \n'
        '<tool_call>\n{"name": "f", "arguments": {"x": "a\\"b"}}\n</tool_call><|turn|>tool: 3<|turn|>'
    )


# --- fixtures ---------------------------------------------------------------------------------------------------------

_TESTS = """
import pytest
from shardfuse import Request

REQUEST = Request([1, 2, 3], max_new_tokens=4)

def test_good(shardfuse_engine, shardfuse_model):
    assert shardfuse_engine.model is shardfuse_model
    assert shardfuse_engine.max_model_len == 256
    assert len(shardfuse_engine.generate([REQUEST])[0]) == 4

def test_fresh(shardfuse_engine):
    assert shardfuse_engine.add(REQUEST) == 0
    shardfuse_engine.cancel(0)

def test_left_waiting(shardfuse_engine):
    shardfuse_engine.add(REQUEST)

def test_left_running(shardfuse_engine):
    shardfuse_engine.add(REQUEST)
    shardfuse_engine.step()

def test_leaked(shardfuse_engine):
    shardfuse_engine._allocator.grow(99, 1)

class TestOptions:
    @pytest.fixture
    def shardfuse_engine_options(self):
        return {"max_model_len": 7}

    def test_small(self, shardfuse_engine):
        assert shardfuse_engine.max_model_len == 7
"""


def test_the_fixtures_turn_a_leak_red(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["shardfuse.testing.fixtures"]\n')
    (tmp_path / "test_server.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' plugins take a while
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    red = dict(re.findall(r"^ERROR test_server\.py::(\w+) - (.*)$", done.stdout, re.MULTILINE))
    assert red.keys() == {"test_left_waiting", "test_left_running", "test_leaked"}
    assert "6 passed, 3 errors" in done.stdout  # each of the three passed, and its teardown did not
    assert done.stdout.count("1 requests live in the engine") >= 2
    assert "1 of 64 blocks are leaked" in done.stdout


def test_nothing_but_the_fixtures_needs_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import shardfuse.testing as t; t.tiny_engine()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
