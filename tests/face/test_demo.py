"""The demo as a user meets it: the whole of it once, what it says to bad input, and how it ends when it is stopped."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sockets
import torch
from launched import Leftovers
from typer.testing import CliRunner

from shardfuse import TransformerConfig, load_hf
from shardfuse.cli import app
from shardfuse.commands.demo import COMPARED_STEPS, DemoOptions, _at_degree, run_demo
from shardfuse.commands.demo_serving import MAX_NUM_SEQS, REQUESTS, agrees, could_pick, make_requests, printable
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.serving.engine import Engine
from shardfuse.serving.request import Request
from shardfuse.serving.sampling_params import SamplingParams
from shardfuse.training.data.corpus import load_corpus
from shardfuse.training.folders import output_folder
from shardfuse.training.settings import RunSettings

pytestmark = pytest.mark.demo

_COMMAND = [sys.executable, "-m", "shardfuse", "demo"]
# The demo with a model that trains in a moment, and badly.
_QUICK = """
import sys
from pathlib import Path
from shardfuse import TransformerConfig
from shardfuse.commands.demo import DemoOptions, run_demo
model = TransformerConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
sys.exit(run_demo(DemoOptions(out=Path(sys.argv[1]), device="cpu", steps=int(sys.argv[2]), model=model)))
"""
_QUICK_COMMAND = [sys.executable, "-c", _QUICK]
_TINY = TransformerConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture
def leftovers() -> Leftovers:
    return Leftovers()


def _start(command: Sequence[str | Path], leftovers: Any, folder: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(part) for part in command],
        env=leftovers.environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


# --- the whole of it --------------------------------------------------------------------------------------------------


def test_demo_from_training_to_serving(leftovers: Any, tmp_path: Path):
    demo = _start([*_COMMAND, "--device", "cpu", "--seconds", "1000"], leftovers, tmp_path)
    with sockets.watched(demo.pid) as seen:
        output, errors = demo.communicate(timeout=1200)
    assert demo.returncode == 0, output + errors
    assert seen
    assert all(address.local for address in seen), seen
    leftovers.assert_none()
    assert os.listdir(tmp_path) == ["shardfuse-demo"]
    out = tmp_path / "shardfuse-demo"
    assert sorted(os.listdir(out)) == [
        "checkpoints",
        "metrics.jsonl",
        "model",
        "report.html",
        "report.json",
        "settings.json",
    ]

    report = json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    assert all(check["ok"] for check in report["checks"])
    first, second = report["ranks"]
    assert first["held_out"] < 2.35
    assert first["steps"] == second["steps"] == 240
    assert 0 < first["loss"] < 2.5
    assert second["loss"] is None  # the first rank reports
    agreement = report["agreement"]
    assert len(agreement["sharded"]) == COMPARED_STEPS
    assert 0 < agreement["budget"] < 1e-4
    assert agreement["difference"] <= agreement["budget"]
    assert report["serving"]["peak_seqs"] == MAX_NUM_SEQS < REQUESTS
    assert 0 < report["serving"]["kv_waste"] < 0.5

    for number in range(1, 6):
        assert re.search(rf"^{number}/5  ", output, re.MULTILINE)
    assert re.search(r"^  (onednn|reference|triton)  ", output, re.MULTILINE)
    found = output[: output.index("2/5  ")]
    assert all(op in found for op in ("linear_act", "paged_attention"))
    assert " ".join(found.split()).count("a kernel runs only where") <= 1  # a shared reason is said once
    for said in ("step 1", "s left", "tokens/s", "peak memory", "held no token", "shardfuse-demo/checkpoints"):
        assert said in output
    model = load_hf(out / "model")
    assert 1e6 < sum(param.numel() for param in model.parameters()) < 2e6
    assert "shardfuse serve shardfuse-demo/model" in output
    pytest.importorskip("transformers")
    answer = CliRunner().invoke(app, ["generate", str(out / "model"), "--prompt", "import ", "--max-tokens", "8"])
    assert answer.exit_code == 0, answer.output
    assert answer.output


def test_serving_covers_both_ways_of_choosing_tokens():
    requests = make_requests(load_corpus(), seed=0)
    assert {request.sampling.temperature > 0 for request in requests} == {False, True}
    assert len({request.arrival for request in requests}) > 2
    assert len({len(request.prompt) for request in requests}) == REQUESTS


def test_an_answer_agrees_up_to_what_rounding_decides():
    logits = torch.tensor([1.0, 3.0, 3.0 - 1e-6, 2.0], dtype=torch.float64)
    for error, picks in ((0.0, [1]), (1e-6, [1, 2]), (float("nan"), [])):
        assert [token for token in range(4) if could_pick(logits, token, error, 0.0, 0.0)] == picks

    # At temperature 1 the drawn number lies just above the end of the first token's share, by less than an error moves.
    drawn = 0.3
    share = drawn - 1e-7
    logits = torch.tensor([math.log(share), math.log(1 - share)], dtype=torch.float64)
    for error, picks in ((0.0, [1]), (1e-6, [0, 1])):
        assert [token for token in range(2) if could_pick(logits, token, error, 1.0, drawn)] == picks


def test_a_wrong_token_is_told_from_the_models():
    torch.manual_seed(0)
    model = ParallelTransformer(_TINY).eval()
    exact = copy.deepcopy(model).double()
    for temperature in (0.0, 0.7):
        request = Request(prompt=[5, 6, 7], max_new_tokens=8, sampling=SamplingParams(temperature=temperature, seed=3))
        engine = Engine(model, num_blocks=4, block_size=4, max_num_seqs=1, max_model_len=11)
        (answer,) = engine.generate([request])
        assert agrees(model, exact, request, answer)
        for at, token in enumerate(answer):
            assert not agrees(model, exact, request, [*answer[:at], token ^ 1, *answer[at + 1 :]])


def test_model_output_cannot_disturb_a_terminal():
    assert printable(list(b"if x:\n\t\x1b[2J\xff~")) == "if x:\\n..[2J.~"


# --- what can be known early ------------------------------------------------------------------------------------------


def _refused(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """The one line that the demo says before it starts anything."""
    assert run_demo(DemoOptions(device="cpu", **options)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "there is no such file"), (b"", "empty"), (bytes(50_000), "binary"), (b"short", "5 bytes of text")],
    ids=["missing", "empty", "binary", "short"],
)
def test_bad_data(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, says: str):
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    line = _refused(capsys, data=path, out=tmp_path / "out")
    assert f"--data {path}: " in line
    assert says in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tp", "says"),
    [
        (0, "--tp 0: expected at least 1"),
        (3, "vocab_size=256 does not divide by the 3 tensor-parallel ranks"),
        (8, "num_kv_heads=4 does not divide by the 8 tensor-parallel ranks"),
    ],
)
def test_impossible_degree(capsys: pytest.CaptureFixture[str], tmp_path: Path, tp: int, says: str):
    assert _refused(capsys, tp=tp, out=tmp_path / "out").startswith(f"error: {says}")


def test_a_second_degree_needs_no_second_gpu():
    one, two = (_at_degree(RunSettings(device="cuda"), tp) for tp in (1, 2))
    assert (one.device, one.parallel.tp) == ("cuda", 1)
    assert (two.device, two.parallel.tp) == ("cpu", 2)


def test_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 cannot be used" in _refused(capsys, port=port, out=tmp_path / "out")


def test_folder_of_somebody_else(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not an earlier output of shardfuse demo" in _refused(capsys, out=tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_unwritable_place(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert f"--out {out}: cannot be written to (File exists)" in _refused(capsys, out=out)


def test_full_disk_is_seen_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 << 20))
    assert "3 MiB are free on that disk and 128 MiB are needed" in _refused(capsys, out=tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_command_line_reports_in_one_line(leftovers: Any, tmp_path: Path):
    demo = _start([*_COMMAND, "--data", "nothing-here"], leftovers, tmp_path)
    output, errors = demo.communicate(timeout=60)
    assert (demo.returncode, output) == (1, "")
    assert errors == "error: --data nothing-here: there is no such file or folder\n"


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def test_failed_check_fails_the_command(leftovers: Any, tmp_path: Path):
    demo = _start([*_QUICK_COMMAND, "out", "9"], leftovers, tmp_path)
    output, errors = demo.communicate(timeout=120)
    assert (demo.returncode, errors) == (1, "")
    assert re.search(r"^  FAILED  held-out loss \d\.\d+ nats per byte, to be below 2.35", output, re.MULTILINE)
    assert re.search(r"^FAILED  5 of 6 checks", output, re.MULTILINE)
    checks = json.loads((tmp_path / "out" / "report.json").read_text())["checks"]
    assert [check["ok"] for check in checks] == [False, True, True, True, True, True][: len(checks)]
    leftovers.assert_none()


def test_disk_that_fills_up_while_saving(leftovers: Any, tmp_path: Path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    demo = _start([*_QUICK_COMMAND, "out", "1"], leftovers, tmp_path, preexec_fn=small_files)
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert re.fullmatch(
        r"error: rank \d: \w+: .*/checkpoints/step-00000001: no space left on rank 0 while writing.*\n", errors
    ), errors
    assert os.listdir(tmp_path) == []
    leftovers.assert_none()


# --- stopped ----------------------------------------------------------------------------------------------------------

# When: the line of output that is waited for. The quick demo gets past training in a moment, the real one does not.
_MOMENTS = [
    pytest.param(_COMMAND, ["--device", "cpu", "--out", "out"], "1/5", signal.SIGTERM, id="SIGTERM-starting"),
    pytest.param(_COMMAND, ["--device", "cpu", "--out", "out"], "2/5", signal.SIGINT, id="SIGINT-workers-starting"),
    pytest.param(_COMMAND, ["--device", "cpu", "--out", "out"], "  step", signal.SIGINT, id="SIGINT-training"),
    pytest.param(
        _COMMAND,
        ["--device", "cpu", "--out", "out"],
        "  step",
        signal.SIGKILL,
        id="SIGKILL-training",
        marks=pytest.mark.nightly,
    ),
    pytest.param(_QUICK_COMMAND, ["out", "9"], "3/5", signal.SIGHUP, id="SIGHUP-comparing", marks=pytest.mark.nightly),
    pytest.param(_QUICK_COMMAND, ["out", "9"], "4/5", signal.SIGKILL, id="SIGKILL-loading", marks=pytest.mark.nightly),
    pytest.param(
        _QUICK_COMMAND,
        ["out", "9"],
        "  step   1: request",
        signal.SIGINT,
        id="SIGINT-serving",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("command", "arguments", "moment", "signum"), _MOMENTS)
def test_stopped_at_any_moment(
    leftovers: Any,
    tmp_path: Path,
    command: list[str],
    arguments: list[str],
    moment: str,
    signum: signal.Signals,
):
    earlier = tmp_path / "out"
    earlier.mkdir()
    (earlier / "report.json").write_text('{"made_by": "shardfuse demo"}')

    demo = _start([*command, *arguments], leftovers, tmp_path)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(moment):
            break
    else:
        pytest.fail(f"{moment!r} never came: {demo.stderr.read() if demo.stderr else ''}")
    os.killpg(demo.pid, signum)
    _, errors = demo.communicate(timeout=60)
    leftovers.assert_none()

    # The earlier output is untouched, and nothing half-written carries its name.
    assert os.listdir(earlier) == ["report.json"]
    hidden = [name for name in os.listdir(tmp_path) if name != "out"]
    if signum != signal.SIGKILL:
        assert demo.returncode == 128 + signum
        assert errors == f"stopped by {signum.name}; nothing was left running or half-written\n"
        assert hidden == []
        return
    assert demo.returncode == -signal.SIGKILL
    assert len(hidden) == 1
    assert hidden[0].startswith(".out.writing-")
    with output_folder(earlier, maker="shardfuse demo", names=(), need_bytes=0):  # the next run begins
        assert not (tmp_path / hidden[0]).exists()
