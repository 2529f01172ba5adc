"""Training runs: equal losses in every layout, and the same losses after a stop or a kill and a resume.

These tests take minutes: make test-all runs them. make test runs test_train_runs.py.
"""

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
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import load_hf
from shardfuse.training.checks import Agreement
from shardfuse.training.launch import launch

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"microbatches": 2},
    "dp2-zero1": {"zero": 1, "microbatches": 2, "mlp_recompute": 2},
    "dp2-zero3": {"zero": 3},
    "tp2": {"tp": 2, "microbatches": 2, "mlp_recompute": 1},
    "sp2": {"tp": 2, "sequence_parallel": True, "recompute": True},
    "pp2-1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 2},
    "pp2-zbv": {"pp": 2, "schedule": "zbv", "microbatches": 4},
}


@pytest.fixture(scope="module")
def alone(ranks: Any, case: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The losses of one process, in fp32 and in fp64."""
    folder = tmp_path_factory.mktemp("alone")
    single, exact = (case.settings(folder / name, 1) for name in ("single", "exact"))
    ranks(1, case.run_body, single.to_json())
    ranks(1, case.exact_body, exact.to_json())
    return case.losses(single.out), case.losses(exact.out)


def _interrupted(ranks: Any, case: Any, folder: Path, first: str, second: str) -> None:
    """Run in ``folder``: "whole", a run as ``first``; "parts", one stopped after 5 steps and resumed as ``second``."""
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


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_run_goes_on_as_if_it_had_not_been(ranks: Any, case: Any, alone: Any, tmp_path: Path, layout: str):
    _interrupted(ranks, case, tmp_path, layout, layout)
    whole, parts = (case.lines(tmp_path / out) for out in ("whole", "parts"))
    assert [line[0] for line in whole] == list(range(1, case.STEPS + 1))
    assert parts == whole
    ours, theirs = (load_hf(tmp_path / out / "model").state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    agreement = Agreement(case.losses(tmp_path / "whole"), *alone)
    assert agreement.ok, agreement


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "second"), [("dp2-zero3", "pp2-zbv"), ("pp2-1f1b", "sp2"), ("sp2", "alone"), ("alone", "dp2")]
)
def test_stopped_run_goes_on_in_another_layout(
    ranks: Any, case: Any, alone: Any, tmp_path: Path, first: str, second: str
):
    _interrupted(ranks, case, tmp_path, first, second)
    agreement = Agreement(case.losses(tmp_path / "parts"), *alone)
    assert agreement.ok, agreement


@pytest.mark.nightly
def test_dropout_repeats_after_a_stop(ranks: Any, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is also the same under tensor and pipeline parallelism; data-parallel ranks draw different masks."""
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


# --- separate processes -----------------------------------------------------------------------------------------------


def _killed(ranks: Any, case: Any, folder: Path, layout: str, seed: int) -> None:
    settings = [case.settings(folder / out, 2, parallel=LAYOUTS[layout]) for out in ("whole", "killed")]
    ranks(2, case.run_body, settings[0].to_json())
    dice = random.Random(seed)
    victim, step = dice.randrange(2), dice.randrange(case.STEPS)
    results = launch(case.run_and_die, settings[1].to_json(), victim, step, processes=2, max_restarts=1)
    assert [result.steps for result in results] == [case.STEPS] * 2
    # Checkpoints are written while training continues, so the newest may have been incomplete.
    assert results[0].resumed_at in ((0, 4) if step >= 4 else (0,))
    assert case.lines(settings[1].out) == case.lines(settings[0].out)


@pytest.mark.nightly
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
    """One runs under torchrun and completes; the other starts its own processes and would never end."""
    leftovers = importlib.import_module("launched").Leftovers()
    case.write_toml(tmp_path / "run.toml", case.values("torchrun", optimizer={"schedule": "constant"}))
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


@pytest.mark.nightly
def test_two_machines_go_on_after_a_worker_of_either_was_killed(ranks: Any, case: Any, tmp_path: Path):
    """Each agent of torchrun counts the failures of its own workers; the other agent restarts its workers as well."""
    leftovers = importlib.import_module("launched").Leftovers()
    long = {"steps": 60, "optimizer": {"schedule": "constant"}, "log": {"eval_every": False}}
    case.write_toml(tmp_path / "run.toml", case.values("out", **long))
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
    case.write_toml(tmp_path / "run.toml", case.values("out", optimizer={"schedule": "constant"}))
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


@pytest.mark.nightly
def test_run_goes_on_in_another_precision(ranks: Any, case: Any, tmp_path: Path):
    for steps, precision in enumerate(("fp32", "fp16", "fp32"), start=1):
        more = {"steps": steps, "parallel": {"precision": precision}, "checkpoint": {"export": False}}
        (result,) = ranks(1, case.run_body, case.settings(tmp_path / "run", 1, **more).to_json(), resume=True)
        assert (result.resumed_at, result.steps) == (steps - 1, steps)
