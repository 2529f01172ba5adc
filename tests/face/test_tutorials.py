"""The tutorials below docs/: their code runs in order, prints what the pages show, and trains alike in every layout."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tutorials

pytest.importorskip("transformers")
NEEDS = {"serve.md": ("fastapi", "openai"), "kernel.md": ("triton",)}
REMEDY = "run PYTHONPATH=src python tests/support/tutorials.py --write, and read what has changed"


def test_every_page_is_run():
    assert {file.name for file in tutorials.FOLDER.glob("*.md")} == set(tutorials.PAGES)


@pytest.mark.parametrize("page", tutorials.PAGES)
def test_a_page_shows_what_its_code_prints(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    if page == "kernel.md" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernel needs a GPU or TRITON_INTERPRET=1")
    monkeypatch.chdir(tmp_path)
    outputs = list(tutorials.run(page))
    assert len(outputs) >= 2
    for shown, _, printed in outputs:
        assert tutorials.same(shown, printed), f"{page} shows\n{shown}\nand its code prints\n{printed}\n{REMEDY}"


@pytest.mark.parametrize(
    ("shown", "printed", "alike"),
    [
        ("loss 1.2340", "loss 1.2341", True),
        ("loss 1.2340", "loss 1.24", False),
        ("a  b", "a\n b", True),
        ("a b", "a c", False),
        ("error 8.58e-08 ok", "error 1.21e-07 ok", True),
        ("error 8.58e-08 ok", "error 1.21 ok", False),
        ("a\n...\nd", "a b c d", True),
        ("a\n...\nc\n...\nd", "a b d", False),
        ("a\n...\nd", "b c d", False),
        ("a ━━━", "a ━━━━━", True),
    ],
)
def test_outputs_are_compared_word_by_word(shown: str, printed: str, alike: bool):
    assert tutorials.same(shown, printed) is alike


# --- the program of train.md over processes ---------------------------------------------------------------------------


def _train_body(rank: int, world: int, source: str, degrees: str, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    sys.argv, arguments = ["train.py", *degrees.split()], sys.argv
    try:
        exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = arguments
        os.chdir(before)


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, "--tp 2"),
        (2, "--pp 2"),
        pytest.param(2, "--dp 2", marks=pytest.mark.nightly),
        pytest.param(8, "--dp 2 --pp 2 --tp 2", marks=pytest.mark.nightly),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_every_layout_trains_alike(
    ranks: Any, world: int, degrees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """What evaluate.py says of the checkpoint, in one process, is what the page shows of the one that it wrote."""
    train, evaluate = re.findall(r"^```python title[^\n]*\n(.*?)^```$", _page("train.md"), re.DOTALL | re.MULTILINE)
    ranks(world, _train_body, train, degrees, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("evaluate.py").write_text(evaluate)
    runpy.run_path("evaluate.py", run_name="__main__")
    *_, shown = re.findall(r"^```text\n(.*?)^```$", _page("train.md"), re.DOTALL | re.MULTILINE)
    assert tutorials.same(shown, capsys.readouterr().out)


def _page(name: str) -> str:
    return (tutorials.FOLDER / name).read_text()
