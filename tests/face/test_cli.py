"""The command line: parsing, exit codes, and one line per explained failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from shardfuse import cli
from shardfuse.commands import env
from shardfuse.kernels.runtime import device, dispatch, fences


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """command("env", "--json") -> (exit code, standard output, standard error), in this process."""
    monkeypatch.delenv("SHARDFUSE_DEBUG", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardfuse", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    yield run
    os.environ.pop("SHARDFUSE_DEBUG", None)  # --debug sets it for the process


def test_help_names_every_command(command):
    code, out, _ = command("--help")
    assert code == 0
    assert all(name in out for name in ("demo", "env", "inspect", "bench"))
    code, out, _ = command("bench", "--help")
    assert code == 0
    assert all(name in out for name in ("list", "run", "stale"))


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "shardfuse", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("shardfuse 0.")


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("env", "--nonsense"), ("bench", "run"), ("demo", "--tp", "two")],
    ids=lambda arguments: " ".join(arguments),
)
def test_usage_errors_exit_with_2(command, arguments):
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert "Usage:" in err


@pytest.mark.parametrize(
    "error", [ValueError("no such thing"), RuntimeError("no such thing"), OSError("no such thing")]
)
def test_an_explained_failure_is_one_line(command, monkeypatch, error):
    monkeypatch.setattr(env, "show", _raiser(error))
    assert command("env") == (1, "", "error: no such thing\n")


def test_the_rest_of_a_long_message_is_not_lost(command, monkeypatch):
    monkeypatch.setattr(env, "show", _raiser(RuntimeError("no such thing\nException raised from ...")))
    code, _, err = command("env")
    assert code == 1
    assert err == "error: no such thing (--debug shows the rest)\n"


@pytest.mark.parametrize("arguments", [("env", "--debug"), ("--debug", "env")], ids=" ".join)
def test_debug_shows_the_traceback(command, monkeypatch, arguments):
    monkeypatch.setattr(env, "show", _raiser(ValueError("no such thing")))
    code, _, err = command(*arguments)
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("error: no such thing\n")


def test_debug_by_variable(command, monkeypatch):
    monkeypatch.setenv("SHARDFUSE_DEBUG", "1")
    monkeypatch.setattr(env, "show", _raiser(ValueError("no such thing")))
    _, _, err = command("env")
    assert err.startswith("Traceback (most recent call last):")


def test_a_defect_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(env, "show", _raiser(TypeError("a defect")))
    monkeypatch.setattr(sys, "argv", ["shardfuse", "env"])
    with pytest.raises(TypeError):
        cli.main()


def test_interrupt_exits_quietly_with_130(command, monkeypatch):
    monkeypatch.setattr(env, "show", _raiser(KeyboardInterrupt()))
    assert command("env") == (130, "", "")


def test_env_reports_versions_and_choices(command):
    code, out, _ = command("env", "--json")
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert report["packages"]["torch"] != "not installed"
    (choices,) = [content for section, content in report.items() if section.startswith("ops on ")]
    assert {"linear_act", "paged_attention"} <= set(choices)
    code, out, _ = command("env")
    assert code == 0
    assert all(section in out for section in report)


def test_env_says_a_shared_reason_once_and_fits_the_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    report = json.loads(command("env", "--json")[1])
    (choices,) = [content for section, content in report.items() if section.startswith("ops on ")]
    _, out, _ = command("env")
    for choice in set(choices.values()):
        assert " ".join(out.split()).count(choice) == 1
    assert max(map(len, out.splitlines())) <= 60
    lines = out[out.index("ops on ") :].splitlines()
    assert all(any(op in line for line in lines) for op in choices)


def test_env_shows_what_changes_a_run_and_hides_the_rest(command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/someone/cache")
    monkeypatch.setenv("MY_TOKEN", "secret")
    _, out, _ = command("env", "--json")
    assert json.loads(out)["environment"]["TRITON_CACHE_DIR"] == "~/cache"
    assert "secret" not in out
    assert "someone" not in out


@pytest.mark.parametrize(
    ("arch", "fenced", "said"), [("sm_90", False, True), ("sm_90", True, False), ("sm_89", False, False)]
)
def test_env_says_what_the_installed_triton_leaves_out(monkeypatch, arch, fenced, said):
    monkeypatch.setattr(device, "architecture", lambda on: arch)
    monkeypatch.setattr(dispatch, "triton_version", lambda: "3.6.0")
    with fences.assumed(fenced):
        assert ("Triton 3.6.0 leaves out fences" in env._small_tiles(0)) is said


def test_env_survives_a_broken_torch(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = command("env", "--json")
    assert code == 0
    assert "torch" in json.loads(out)["broken"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect",), "name one op"),
        (("inspect", "nonsense"), "no op called 'nonsense'"),
        (("inspect", "linear_act", "--target", "sm_1"), "no target called 'sm_1'"),
        (("bench", "run", "nonsense"), "no benchmark called 'nonsense'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_questions_that_name_nothing(command, arguments, says):
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert says in " ".join(err.split())
    assert "Traceback" not in err


def test_bench_list_and_stale(command):
    code, out, _ = command("bench", "list")
    assert code == 0
    assert all(name in out for name in ("linear_act", "mlp", "tp_dtensor"))
    code, out, _ = command("bench", "stale", "--json")
    assert code == 0
    assert isinstance(json.loads(out.splitlines()[-1]), list)


def _raiser(error: BaseException):
    def show(**options: object) -> None:
        raise error

    return show
