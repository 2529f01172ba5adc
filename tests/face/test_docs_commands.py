"""The command lines, options and settings that README.md and the files below docs/ name exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from torch.distributed.run import get_args_parser

from shardfuse.cli import app
from shardfuse.training.settings import parse_assignment, read_settings

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
DOCUMENTS = {file.relative_to(ROOT).as_posix(): file.read_text() for file in FILES}
NEWER = {"--shutdown-timeout"}  # options that torchrun does not have in torch 2.11
# Of vLLM and SGLang, which are not here to ask.
HOSTS = {
    *("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend", "--page-size"),
    "--cuda-graph-backend-prefill",
}
_TORCHRUNS = set(get_args_parser()._option_string_actions)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _lines() -> list[str]:
    """The command lines of ours, from blocks and from between backquotes."""
    found = []
    for text in DOCUMENTS.values():
        for language, body in BLOCK.findall(text):
            if language in ("console", "bash"):
                found += [line.removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines()]
        found += [" ".join(line.split()) for line in re.findall(r"`(shardfuse [^`]+)`", BLOCK.sub("", text))]
    return sorted({line for line in found if re.search(r"(^|\s)shardfuse [a-z]", line)})


def _parse(line: str) -> None:
    """Have the options of a command line parsed, torchrun's too, and nothing run. Raises for what does not exist."""
    words = shlex.split(line, comments=True)
    if "torchrun" in words:
        if not NEWER.isdisjoint(words) and not _TORCHRUNS >= NEWER:
            pytest.skip(f"this torch's torchrun lacks one of {', '.join(NEWER)}")
        launch = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert launch.module
        words = [launch.training_script, *launch.training_script_args]
    program, *words = words
    assert program == "shardfuse"
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


@pytest.mark.parametrize("line", _lines(), ids=lambda line: line.partition("#")[0].strip())
def test_a_command_line_is_one_that_the_parser_takes(line: str):
    _parse(line)


def test_the_parser_refuses_what_does_not_exist():
    assert len(_lines()) > 10
    for line, message in {
        "shardfuse train run.toml --zeros 1": "No such option",
        "shardfuse train run.toml --zero one": "integer",
        "torchrun --nproc-per-node 2 -m shardfuse train --resumes": "No such option",
    }.items():
        with pytest.raises(Exception, match=message):
            _parse(line)
    with pytest.raises(SystemExit):
        _parse("torchrun --nprocs 2 -m shardfuse train")


def test_every_option_that_is_named_exists():
    root: Any = typer.main.get_command(app)
    groups = [root, *(command for command in root.commands.values() if hasattr(command, "commands"))]
    commands = [command for group in groups for command in group.commands.values()]
    options = {option for command in commands for param in command.params for option in param.opts}
    options |= _TORCHRUNS | NEWER | HOSTS
    everything = "\n".join(DOCUMENTS.values())
    options |= set(re.findall(r"^#SBATCH (--[a-z-]+)", everything, re.MULTILINE))  # SLURM's, which is not here to ask
    named = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"`(--[^`]+)`", BLOCK.sub("", everything)))))
    assert len(named) > 5
    assert named <= options


def test_the_settings_are_all_of_them_and_their_defaults(tmp_path: Path):
    (source,) = (body for language, body in BLOCK.findall(DOCUMENTS["docs/training.md"]) if language == "toml")
    (tmp_path / "run.toml").write_text(source)
    defaults = read_settings(None, {})
    assert read_settings(tmp_path / "run.toml", {}) == defaults
    listed, section = set(), ""
    for line in source.splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = f"{header[1]}."
        elif setting := re.match(r"(?:# )?((\w+) = [^#]*)", line):
            read_settings(None, dict([parse_assignment(f"{section}{setting[1]}")]))  # those behind a # as well
            listed.add(f"{section}{setting[2]}")
    sections = {name: value for name, value in vars(defaults).items() if dataclasses.is_dataclass(value)}
    fields = {f"{name}.{field}" for name, value in sections.items() if name != "model" for field in vars(value)}
    assert listed >= fields | (vars(defaults).keys() - sections.keys())
