"""Training runs: every layout to the same losses, and stopped, killed and gone on with as if nothing had been."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import load_hf
from shardfuse.training.agreement import Agreement
from shardfuse.training.launch import launch
from shardfuse.training.stopping import StopFile

pytestmark = pytest.mark.nightly  # minutes of processes: make test-all runs them

_HERE = str(Path(__file__).parent)
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"microbatches": 2},
    "dp2-zero1": {"zero": 1, "microbatches": 2},
    "dp2-zero3": {"zero": 3},
    "tp2": {"tp": 2, "microbatches": 2},
    "sp2": {"tp": 2, "sequence_parallel": True, "recompute": True},
    "pp2-1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 2},
    "pp2-zbv": {"pp": 2, "schedule": "zbv", "microbatches": 4},
}


@pytest.fixture(scope="module")
def case() -> Iterator[Any]:
    """tests/train_case.py, importable here and in the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_HERE)
        patch.setenv("PYTHONPATH", _HERE)
        yield importlib.import_module("train_case")


@pytest.fixture(scope="module")
def alone(ranks: Any, case: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The losses of one process, in fp32 and in fp64."""
    folder = tmp_path_factory.mktemp("alone")
    single, exact = (case.settings(folder / name, 1) for name in ("single", "exact"))
    ranks(1, case.run_body, single.to_json())
    ranks(1, case.exact_body, exact.to_json())
    return case.losses(single.out), case.losses(exact.out)


def _interrupted(ranks: Any, case: Any, folder: Path, first: str, second: str) -> None:
    """In ``folder``: "whole", a run as ``first``; "parts", one stopped after 5 steps that went on as ``second``."""
    for out, layout, options in (
        ("whole", first, {}),
        ("parts", first, {"stop_after": 5}),
        ("parts", second, {"resume": True}),
    ):
        world = 1 if layout == "alone" else 2
        settings = case.settings(folder / out, world, parallel=LAYOUTS[layout])
        results = ranks(world, case.run_body, settings.to_json(), **options)
        stopped = out == "parts" and not options.get("resume")
        assert {result.steps for result in results} == {5 if stopped else case.STEPS}
        assert {result.stopped_by for result in results} == {signal.SIGTERM if stopped else 0}
        assert {result.resumed_at for result in results} == {5 if options.get("resume") else 0}
        assert (folder / out / "model").exists() is not stopped


def _nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


_OTHERS = [layout for layout in LAYOUTS if layout not in ("sp2", "pp2-zbv")]


@pytest.mark.parametrize("layout", ["sp2", "pp2-zbv", *map(_nightly, _OTHERS)])
def test_stopped_run_goes_on_as_if_it_had_not_been(ranks: Any, case: Any, alone: Any, tmp_path: Path, layout: str):
    _interrupted(ranks, case, tmp_path, layout, layout)
    whole, parts = (case.lines(tmp_path / out) for out in ("whole", "parts"))
    assert [line[0] for line in whole] == list(range(1, case.STEPS + 1))
    assert parts == whole
    ours, theirs = (load_hf(tmp_path / out / "model").state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    agreement = Agreement(case.losses(tmp_path / "whole"), *alone)
    assert agreement.ok, agreement


_CHANGES = [("dp2-zero3", "pp2-zbv"), ("pp2-1f1b", "sp2"), ("sp2", "alone"), ("alone", "dp2")]


@pytest.mark.parametrize(("first", "second"), [_CHANGES[0], *(_nightly(*change) for change in _CHANGES[1:])])
def test_stopped_run_goes_on_in_another_layout(
    ranks: Any, case: Any, alone: Any, tmp_path: Path, first: str, second: str
):
    _interrupted(ranks, case, tmp_path, first, second)
    agreement = Agreement(case.losses(tmp_path / "parts"), *alone)
    assert agreement.ok, agreement


@pytest.mark.nightly
def test_dropout_repeats_after_a_stop(ranks: Any, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And is the same whether tensors or stages are spread; data-parallel ranks draw masks of their own."""
    monkeypatch.setitem(case.VALUES, "model", {**case.VALUES["model"], "residual_dropout": 0.2})
    _interrupted(ranks, case, tmp_path, "sp2", "pp2-zbv")
    whole, parts = (case.losses(tmp_path / out) for out in ("whole", "parts"))
    assert parts[:5] == whole[:5]
    assert parts == pytest.approx(whole, rel=8 * torch.finfo(torch.float32).eps)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "more"),
    [("alone", {"precision": "bf16"}), ("dp2", {"precision": "fp16"}), ("dp2-zero3", {"offload": True})],
    ids=["bf16", "fp16", "offload"],
)
def test_formats_and_offload_repeat_after_a_stop(
    ranks: Any, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, more: dict[str, Any]
):
    monkeypatch.setitem(LAYOUTS, layout, {**LAYOUTS[layout], **more})
    _interrupted(ranks, case, tmp_path, layout, layout)
    assert case.lines(tmp_path / "parts") == case.lines(tmp_path / "whole")


@pytest.mark.nightly
def test_run_starts_from_a_folder_of_transformers(ranks: Any, case: Any, tmp_path: Path):
    first = case.settings(tmp_path / "first", 1)
    (trained,) = ranks(1, case.run_body, first.to_json())
    still = {"lr": 1e-30, "weight_decay": 0.0}
    second = case.settings(tmp_path / "second", 2, start=str(tmp_path / "first" / "model"), optimizer=still)
    assert second.model == first.model
    again, _ = ranks(2, case.run_body, second.to_json())
    assert again.held_out == pytest.approx(trained.held_out, rel=8 * torch.finfo(torch.float32).eps)


# --- processes of its own ---------------------------------------------------------------------------------------------


def _killed(ranks: Any, case: Any, folder: Path, layout: str, seed: int) -> None:
    settings = [case.settings(folder / out, 2, parallel=LAYOUTS[layout]) for out in ("whole", "killed")]
    ranks(2, case.run_body, settings[0].to_json())
    dice = random.Random(seed)
    victim, step = dice.randrange(2), dice.randrange(case.STEPS)
    results = launch(case.run_and_die, settings[1].to_json(), victim, step, processes=2, max_restarts=1)
    assert [result.steps for result in results] == [case.STEPS] * 2
    # Checkpoints are written while training goes on, so the newest may not have been complete.
    assert results[0].resumed_at in ((0, 4) if step >= 4 else (0,))
    assert case.lines(settings[1].out) == case.lines(settings[0].out)


def test_killed_worker_is_replaced_and_the_run_ends_the_same(ranks: Any, case: Any, alone: Any, tmp_path: Path):
    _killed(ranks, case, tmp_path, "dp2-zero1", seed=0)
    agreement = Agreement(case.losses(tmp_path / "killed"), *alone)
    assert agreement.ok, agreement


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("layout", ["dp2-zero3", "sp2", "pp2-zbv"])
def test_killed_workers_at_random_steps(ranks: Any, case: Any, tmp_path: Path, layout: str, seed: int):
    _killed(ranks, case, tmp_path, layout, seed)


def _start(command: list[str], folder: Path, leftovers: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=leftovers.environment() | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _write_toml(path: Path, values: dict[str, Any]) -> None:
    top = {name: value for name, value in values.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in top.items())
    for section, content in sections.items():
        text += f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in content.items())
    path.write_text(text)


def _wait_for_lines(process: subprocess.Popen[str], out: Path, count: int) -> None:
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        if process.poll() is not None:
            pytest.fail(f"it ended early: {process.communicate()}")
        time.sleep(0.01)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_two_trainings_side_by_side_one_of_them_interrupted(ranks: Any, case: Any, tmp_path: Path, processes: int):
    """One under torchrun, which completes, and one that starts its own processes and would never end."""
    leftovers = importlib.import_module("launched").Leftovers()
    _write_toml(tmp_path / "run.toml", case.values("torchrun", optimizer={"schedule": "constant"}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = ["shardfuse", "train", "run.toml", "--zero", "1"]
    complete = _start([*torchrun, *arguments], tmp_path, leftovers)
    endless = _start(
        [
            sys.executable,
            "-m",
            *arguments,
            "--processes",
            str(processes),
            "--out",
            "own",
            "--steps",
            "1000000",
            "--json",
        ],
        tmp_path,
        leftovers,
    )
    try:
        _wait_for_lines(endless, tmp_path / "own", case.STEPS)
        os.killpg(endless.pid, signal.SIGINT)  # as Ctrl-C does: the whole group
        out, errors = endless.communicate(timeout=120)
        assert complete.wait(timeout=120) == 0, complete.communicate()
    finally:
        for process in (complete, endless):
            if process.poll() is None:
                process.terminate()
    assert (endless.returncode, errors) == (130, "")
    result = json.loads(out.splitlines()[-1])
    assert result["stopped_by"] == signal.SIGINT
    lines = case.lines(tmp_path / "own")
    assert lines[-1][0] == result["steps"]
    assert (tmp_path / "own" / "checkpoints" / f"step-{result['steps']:08d}").exists()
    assert not (tmp_path / "own" / "model").exists()
    leftovers.assert_none()

    settings = case.settings(tmp_path / "pool", 2, parallel={"zero": 1}, optimizer={"schedule": "constant"})
    ranks(2, case.run_body, settings.to_json())
    assert case.lines(tmp_path / "torchrun") == case.lines(tmp_path / "pool")
    first = case.losses(tmp_path / "own")[: case.STEPS]
    assert first == pytest.approx(case.losses(tmp_path / "pool"), rel=8 * torch.finfo(torch.float32).eps)


def test_two_machines_go_on_after_a_worker_of_either_was_killed(ranks: Any, case: Any, tmp_path: Path):
    """Each agent of torchrun counts the failures of its own workers, and the other one's are started again as well."""
    leftovers = importlib.import_module("launched").Leftovers()
    long = {"steps": 60, "optimizer": {"schedule": "constant"}, "log": {"eval_every": False}}
    _write_toml(tmp_path / "run.toml", case.values("out", **long))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    command = [*torchrun, "--rdzv-id", "job", "-m", "shardfuse", "train", "run.toml", "--zero", "1", "--resume"]
    machines = [_start(command, tmp_path, leftovers) for _ in range(2)]
    try:
        for count, machine in ((10, machines[1]), (30, machines[0])):
            _wait_for_lines(machine, tmp_path / "out", count)
            workers = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
            os.kill(int(workers[0]), signal.SIGKILL)
        for machine in machines:
            _, errors = machine.communicate(timeout=300)
            assert machine.returncode == 0, errors
    finally:
        for machine in machines:
            if machine.poll() is None:
                machine.terminate()
    leftovers.assert_none()
    settings = case.settings(tmp_path / "pool", 2, parallel={"zero": 1}, **long)
    ranks(2, case.run_body, settings.to_json())
    assert case.lines(tmp_path / "out") == case.lines(tmp_path / "pool")


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_the_signal_on(ranks: Any, case: Any, tmp_path: Path, signum: signal.Signals):
    leftovers = importlib.import_module("launched").Leftovers()
    _write_toml(tmp_path / "run.toml", case.values("out", optimizer={"schedule": "constant"}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    run = _start([*torchrun, "shardfuse", "train", "run.toml", "--steps", "1000000"], tmp_path, leftovers)
    try:
        _wait_for_lines(run, tmp_path / "out", 2)
        run.send_signal(signum)
        run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.terminate()
    leftovers.assert_none()
    steps = case.lines(tmp_path / "out")[-1][0]
    assert (tmp_path / "out" / "checkpoints" / f"step-{steps:08d}").exists()
    settings = case.settings(tmp_path / "out", 2, steps=steps + 2, optimizer={"schedule": "constant"})
    assert {result.resumed_at for result in ranks(2, case.run_body, settings.to_json(), resume=True)} == {steps}


def _under_torchrun_body(rank: int, world: int, text: str, job: str, restarts: list[int]) -> Any:
    """The run of settings ``text`` without --resume, each rank of a machine of its own whose agent counts restarts."""
    from shardfuse.training.run import train_run
    from shardfuse.training.settings import RunSettings

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", job)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts[rank]))
        return train_run(RunSettings.from_json(text), False)


def test_restarted_job_goes_on_whoever_counted_it(ranks: Any, case: Any, tmp_path: Path):
    """Where one machine's agent alone counted the restart, and where machines came or went and none did."""
    out, mark = tmp_path / "run", tmp_path / "run" / ".job"
    texts = [case.settings(out, 2, steps=steps, checkpoint={"export": False}).to_json() for steps in (1, 2, 3)]
    ranks(2, case.run_body, texts[0])
    assert {result.resumed_at for result in ranks(2, _under_torchrun_body, texts[1], "none", [0, 1])} == {1}
    mark.write_text("job")
    assert {result.resumed_at for result in ranks(2, _under_torchrun_body, texts[2], "job", [0, 0])} == {2}
    assert not mark.exists()


def test_run_goes_on_in_another_precision(ranks: Any, case: Any, tmp_path: Path):
    for steps, precision in enumerate(("fp32", "fp16", "fp32"), start=1):
        more = {"steps": steps, "parallel": {"precision": precision}, "checkpoint": {"export": False}}
        (result,) = ranks(1, case.run_body, case.settings(tmp_path / "run", 1, **more).to_json(), resume=True)
        assert (result.resumed_at, result.steps) == (steps - 1, steps)


# --- bad input --------------------------------------------------------------------------------------------------------


def _refusals_body(rank: int, world: int, texts: list[str]) -> list[str]:
    """What this rank says of each of the settings; all ranks come that far."""
    import torch.distributed as dist

    from shardfuse.training.run import train_run
    from shardfuse.training.settings import RunSettings

    said = []
    for text in texts:
        with pytest.raises(ValueError) as caught:
            train_run(RunSettings.from_json(text), False, StopFile(Path("/nonexistent")))
        said.append(str(caught.value))
        dist.barrier()
    return said


def test_bad_input_is_one_clear_error_on_every_rank(ranks: Any, case: Any, tmp_path: Path):
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"parallel": {"tp": 2}, "model": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8}}, ("heads", "3")),
        ({"parallel": {"pp": 2, "schedule": "zbv"}, "model": {"num_layers": 1}}, ("3 parts", "4 pipeline stages")),
        ({"parallel": {"pp": 2, "schedule": "zigzag"}}, ("zigzag", "1f1b")),
        ({"parallel": {"pp": 2, "schedule": "1f1b", "microbatches": 1}}, ("microbatches",)),
        ({"data": {"batch": 1 << 30}}, ("data.batch = 1073741824", "sequences of 16 tokens")),
    ]
    texts = [case.settings(tmp_path / "run", 2, **sections).to_json() for sections, _ in cases]
    first, second = ranks(2, _refusals_body, texts)
    assert first == second
    for said, (_, words) in zip(first, cases):
        assert all(word in said for word in words), said
        assert "\n" not in said
