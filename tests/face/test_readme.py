"""What the documents say is so: their Python runs, their commands, targets, files and variables exist."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import shardfuse
from shardfuse.bench.page import front
from shardfuse.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FLOORS = ("kernels", "parallel", "layers", "training", "serving", "integrations", "bench", "shardfuse")


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(source, tmp_path, monkeypatch, capsys):
    if "transformers" in source:
        pytest.importorskip("transformers")
    (tmp_path / "example.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py", run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.ranks
def test_the_drop_in_example_gives_the_same_loss_over_two_processes(tmp_path):
    (tmp_path / "example.py").write_text(next(source for source in EXAMPLES if "ParallelMLP" in source))
    (alone,) = _losses([sys.executable, "example.py"], tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = _losses([*torchrun, "example.py"], tmp_path)
    assert together == pytest.approx([alone, alone], abs=1.5e-4)  # the last digit that it prints, give or take one


LIMIT_S = 240.0  # for a process to import torch and train five steps, on a machine that is busy with other things
STUCK_S = 180.0  # a process that has not ended by then writes down where it stands
GRACE_S = 40.0  # for torchrun to end its workers: it gives them 30
# Python runs this in every process before anything else: torchrun's own and its workers' too.
WATCH = """
import faulthandler, os, sys
_file = open(os.path.join({folder!r}, f"standing-{{os.getpid()}}"), "w")
print("----", *sys.orig_argv, file=_file, flush=True)
faulthandler.dump_traceback_later({seconds}, file=_file)
"""


def _losses(command: list[str], folder: Path) -> list[float]:
    """What each process printed last as its loss. Fails with each one's stack where they do not come to an end."""
    (folder / "sitecustomize.py").write_text(WATCH.format(folder=str(folder), seconds=STUCK_S))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            errors = _ended(process)
            pytest.fail(f"{command} did not end within {LIMIT_S:.0f} s\n{_standing(folder)}\nits errors:\n{errors}")
        except BaseException:
            process.terminate()
            raise
    assert process.returncode == 0, errors
    # torchrun's workers do not buffer: a text and its newline are two writes, and another's text may come between.
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d{4})", out)]


def _ended(process: subprocess.Popen[str]) -> str:
    """End ``process`` and what it started; what it wrote to its standard error."""
    process.terminate()  # not kill: torchrun ends its workers when it is asked to stop
    try:
        return process.communicate(timeout=GRACE_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return "(it did not stop when it was asked to, or somebody else holds its pipes)"


def _standing(folder: Path) -> str:
    """The stacks that ``WATCH`` had processes write. One of which only the command is there was not stuck in Python."""
    return "\n".join(file.read_text() for file in sorted(folder.glob("standing-*")))


def test_the_results_are_those_of_the_committed_files():
    assert front.renewed(README, front.results(front.read_all([]))) == README, "run make front"


def test_a_result_that_no_file_holds_is_refused():
    with pytest.raises(LookupError, match="no result that may be shown"):
        front.table([])


def test_a_document_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="expected one"):
        front.renewed("# shardfuse\n", ["| a |"])


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "overview.py"))["picture"]()
    assert drawn == (ROOT / "docs" / "overview.svg").read_text(encoding="utf-8"), "run make front"
    assert not re.search(r"(href|src)=|url\((?!#)", drawn)  # it loads nothing


def test_the_drop_in_example_is_short():
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 20


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"test-LANE"}
    mentioned = set(re.findall(r"`make ([a-zA-Z-]+)", README)) | set(
        re.findall(r"^\$ make ([a-z-]+)", README, re.MULTILINE)
    )
    assert {"demo", "test"} <= mentioned <= targets


def test_every_command_is_in_the_table():
    import typer.main

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    groups = [name for name, command in commands.items() if hasattr(command, "commands")]
    expected = commands.keys() - set(groups)
    expected |= {f"{group} {name}" for group in groups for name in commands[group].commands}
    mentioned = set(re.findall(rf"^\| `shardfuse ((?:(?:{'|'.join(groups)}) )?[a-z]+)", REFERENCE, re.MULTILINE))
    assert mentioned == expected


def test_every_public_name_is_mentioned():
    names = set(shardfuse.__all__) - {"__version__"}
    assert not {name for name in names if f"`{name}`" not in REFERENCE}


def test_every_variable_is_in_the_table():
    sources = [file.read_text() for floor in (*FLOORS, "src") for file in (ROOT / floor).rglob("*.py")]
    sources.append((ROOT / "Makefile").read_text())
    used = set(re.findall(r"SHARDFUSE_[A-Z_]*[A-Z]", "\n".join(sources)))
    rows = re.findall(r"^\| (`SHARDFUSE_.*?) \|", REFERENCE, re.MULTILINE)
    listed = set(re.findall(r"`(SHARDFUSE_[A-Z_]+)`", "\n".join(rows)))
    assert used == listed


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_that_is_named_exists(document):
    text = (ROOT / document).read_text()
    named = set(re.findall(rf"`((?:{'|'.join((*FLOORS, 'tests'))})/[\w./]*)[ `]", text))
    named |= set(re.findall(r"\]\(([\w./]+)\)", text))
    assert named
    missing = {name for name in named if not (ROOT / name).exists()}
    assert missing <= {"bench/results/"}  # comes with the first run on a GPU
