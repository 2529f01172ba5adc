"""A model's folder runs no code: not its own Python, and no kernels that it names on a hub."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")

import transformers

import shardfuse
from shardfuse import load_pretrained
from shardfuse.serving.folder import open_folder
from shardfuse.serving.folder_options import FolderOptions
from shardfuse.testing import save_tiny_hf

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "layers", "parallel", "training", "serving", "integrations", "bench", "src", "examples")
LOADS = ("from_pretrained", "from_config")
ONLY_DATA = ("GenerationConfig",)  # reads JSON, and has no such option
CODE = """
open({mark!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class C(LlamaConfig): model_type = "other"
class M(LlamaForCausalLM): config_class = C
class T(PreTrainedTokenizerFast): pass
"""


def _calls() -> list[tuple[str, ast.Call]]:
    """Every call that may load something with transformers, and its place."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADS:
                    on = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                    if on.startswith("Auto"):
                        found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
                    else:
                        assert on in ONLY_DATA or not hasattr(transformers, on), (path, node.lineno)
    return found


def test_every_call_into_transformers_refuses_a_folders_code() -> None:
    calls = _calls()
    assert len(calls) >= 6
    for place, call in calls:
        given = {each.arg: each.value for each in call.keywords}
        trust = given.get("trust_remote_code")
        assert isinstance(trust, ast.Constant), place
        assert trust.value is False, place


@pytest.mark.parametrize("what", ["tokenizer", "config", "model"])
def test_the_code_of_a_folder_does_not_run(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = save_tiny_hf(tmp_path / "tiny"), tmp_path / "ran"
    (folder / "checksums.json").unlink()
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    name, change = {
        "tokenizer": (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "code.T"]}},
        ),
        "config": ("config.json", {"model_type": "other", "auto_map": {"AutoConfig": "code.C"}}),
        "model": ("config.json", {"model_type": "mamba", "auto_map": {"AutoModelForCausalLM": "code.M"}}),
    }[what]
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError) as caught:
        open_folder(FolderOptions(folder, device="cpu"))
    if what != "model":  # transformers has a model of this kind, and takes that one
        assert "asks for Python code of its own (auto_map), which is never run here" in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["someone/kernels", "flash_attention_2", {"": "someone/kernels"}])
def test_kernels_that_a_config_names_are_not_fetched(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("kernels are fetched")

    hub = sys.modules["transformers.integrations.hub_kernels"]
    for each in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(hub, each, fetch)
    folder = save_tiny_hf(tmp_path / "tiny")
    (folder / "checksums.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    model = load_pretrained(folder)
    assert model.config._attn_implementation in ("eager", "sdpa")
    assert shardfuse.load_hf(folder) is not None


def test_the_tests_that_the_promises_name_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).is_file()] == []
