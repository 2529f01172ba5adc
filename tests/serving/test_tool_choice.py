"""Which format a model's calls have: from its chat template, by name, or another package's."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
pytest.importorskip("starlette", reason="starlette is not installed (pip install .[serve])")

from scripted import template
from server_case import tokenizer
from tool_case import FORMATS

from shardfuse.layers.hf.chat_template import ChatTemplate
from shardfuse.serving.tools import format_of, tool_format


def _template(source: str | None) -> ChatTemplate:
    made = copy.deepcopy(tokenizer())
    made.chat_template = source
    return ChatTemplate(made)


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_shows_its_format(name: str) -> None:
    assert format_of(_template(template(name))) == name


REFUSES = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ tools }}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (REFUSES + "[TOOL_CALLS]", "mistral"),
        (REFUSES + "<tool_call>", "hermes"),
        (REFUSES + "<tool_call><function=", "qwen3-coder"),
        (REFUSES + '{"name": .., "parameters": ..}', "llama3"),
        (REFUSES, None),
        ("{{ messages[0].content }} <tool_call>", None),  # shows no tools
        (None, None),
    ],
)
def test_a_template_that_writes_no_call_may_mention_one(source: str | None, name: str | None) -> None:
    assert format_of(_template(source)) == name


def test_a_template_may_want_no_content_beside_a_call() -> None:
    refuses = "{% if messages[-1].content == '' %}{{ raise_exception('empty') }}{% endif %}"
    assert format_of(_template(refuses + template("pythonic"))) == "pythonic"


def test_templates_without_one_for_tools_show_none() -> None:
    made = copy.deepcopy(tokenizer())
    made.chat_template = {"rag": "a"}
    assert format_of(ChatTemplate(made)) is None


def test_the_template_for_tools_counts() -> None:
    made = copy.deepcopy(tokenizer())
    made.chat_template = {"default": "{{ messages[0].content }}", "tool_use": template("mistral")}
    assert format_of(ChatTemplate(made)) == "mistral"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hermes", "Hermes"),
        ("qwen", "Hermes"),
        ("llama3_json", "Llama3"),
        ("LLAMA3", "Llama3"),
        ("llama4_pythonic", "Pythonic"),
        ("qwen3_xml", "QwenCoder"),
    ],
)
def test_other_servers_names_are_taken(name: str, kind: str) -> None:
    assert type(tool_format(name)).__name__ == kind


def test_the_spelling_is_the_templates() -> None:
    assert "[ARGS]" in tool_format("mistral", _template(template("mistral"))).sample
    assert len(tool_format("mistral").call_id()) == 9


def test_another_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'hermess': did you mean 'hermes'\? \(expected auto, or one of mistral, hermes"
    ):
        tool_format("hermess")


SOURCE = """
from shardfuse.serving.tools import ToolFormat

class Mine(ToolFormat):
    marks = ("<mine>",)
    def parser(self, tools, thought=""):
        raise NotImplementedError

class NoFormat:
    pass
"""
ENTRIES = (
    "[shardfuse.tool_parsers]\nmine = mine_format:Mine\nnone = mine_format:NoFormat\nmissing = mine_format:Missing\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed package with entry points."""
    (tmp_path / "mine_format.py").write_text(SOURCE)
    about = tmp_path / "mine_format-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-format\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine_format", None)


@pytest.mark.usefixtures("package")
def test_a_format_of_another_package_is_found() -> None:
    assert type(tool_format("mine")).__module__ == "mine_format"
    with pytest.raises(ValueError, match="'none': mine_format:NoFormat is no class derived from ToolFormat"):
        tool_format("none")
    with pytest.raises(ValueError, match="'missing': its entry point mine_format:Missing fails: AttributeError"):
        tool_format("missing")
    with pytest.raises(ValueError, match="llama3, mine, missing, none"):
        tool_format("other")
