"""Short training runs: stopped and resumed, killed, restarted, and refused."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardfuse import ParallelTransformer, TransformerConfig, export_hf, load_hf
from shardfuse.commands.train import TrainOptions, run_train
from shardfuse.layers.hf.tokenizers import holds_tokenizer, load_tokenizer
from shardfuse.parallel.checkpoint.checkpoint import save_checkpoint
from shardfuse.parallel.core.rendezvous import loopback_store
from shardfuse.training.folders import RunFolder
from shardfuse.training.metrics import read_lines
from shardfuse.training.restart import TIME_IS_UP, StopFile

ZBV = {"pp": 2, "schedule": "zbv"}
SHORT: dict[str, Any] = {
    "model": {"num_layers": 1},
    "checkpoint": {"every": 1, "asynchronous": False, "export": False},
    "log": {"eval_batches": 0, "eval_every": False},
}


def test_pipeline_stopped_after_a_step_goes_on_as_if_it_had_not_been(ranks: Any, case: Any, tmp_path: Path):
    for out, options in (("whole", {}), ("parts", {"stop_after": 1}), ("parts", {"resume": True})):
        settings = case.settings(tmp_path / out, 2, steps=3, parallel=ZBV, model={"num_layers": 2})
        results = ranks(2, case.run_body, settings.to_json(), **options)
        stops = "stop_after" in options
        assert {(result.steps, result.stopped_by) for result in results} == {(1, signal.SIGTERM) if stops else (3, 0)}
        assert {result.resumed_at for result in results} == {1 if "resume" in options else 0}
        assert (tmp_path / out / "model").exists() is not stops
    assert len(case.lines(tmp_path / "whole")) == 3
    assert case.lines(tmp_path / "parts") == case.lines(tmp_path / "whole")
    ours, theirs = (load_hf(tmp_path / out / "model").state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_keeps_the_ids_and_the_tokenizer_of_its_start(ranks: Any, case: Any, tmp_path: Path):
    sizes = {name: value for name, value in case.VALUES["model"].items() if name != "num_layers"}
    config = TransformerConfig(num_layers=1, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=4, **sizes)
    export_hf(ParallelTransformer(config), tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    np.save(tmp_path / "numbers.npy", np.arange(2000) % 256)  # which no tokenizer has to read
    data = {"path": str(tmp_path / "numbers.npy")}
    settings = case.settings(tmp_path / "run", 1, steps=1, start=str(tmp_path / "start"), data=data, log=SHORT["log"])
    ranks(1, case.run_body, settings.to_json())
    trained = tmp_path / "run" / "model"
    assert load_hf(trained).config == load_hf(tmp_path / "start").config == config
    assert (trained / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("numbers", [False, True], ids=["text", "numbers"])
def test_a_model_of_bytes_has_a_tokenizer_of_bytes(ranks: Any, case: Any, tmp_path: Path, numbers: bool):
    """Of text that was read as bytes: what the numbers in a file stand for is not known."""
    pytest.importorskip("transformers")
    np.save(tmp_path / "numbers.npy", np.arange(2000) % 256)
    data = {"path": str(tmp_path / "numbers.npy")} if numbers else {}
    model, checkpoint = {"num_layers": 1}, {"every": None}
    settings = case.settings(tmp_path / "run", 1, steps=1, model=model, data=data, checkpoint=checkpoint)
    ranks(1, case.run_body, settings.to_json())
    folder = tmp_path / "run" / "model"
    assert holds_tokenizer(folder) is not numbers
    if not numbers:
        text = "naïve\n\x00"
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


class _ThirdLook:
    """A clock that jumps by an hour at the third reading."""

    def __init__(self) -> None:
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return 3600.0 * (self._looks >= 3)


def _limited_body(rank: int, world: int, text: str, resume: bool) -> Any:
    """A run whose time limit passes after two steps, only by the last rank's clock."""
    from shardfuse.training import restart
    from shardfuse.training.run import train_run
    from shardfuse.training.settings import RunSettings

    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(restart, "time", _ThirdLook())
        return train_run(RunSettings.from_json(text), resume, StopFile(Path("/nowhere")))


def test_time_limit_ends_a_run_on_all_ranks_and_resume_goes_on(ranks: Any, case: Any, tmp_path: Path):
    sections = {**SHORT, "checkpoint": {"every": False}, "log": {"eval_batches": 1, "eval_every": False}}
    run = case.settings(tmp_path / "parts", 2, steps=5, time_limit=60.0, parallel={"tp": 2}, **sections)
    for resume, (begun, ended, by) in ((False, (0, 2, TIME_IS_UP)), (True, (2, 4, TIME_IS_UP)), (True, (4, 5, 0))):
        results = ranks(2, _limited_body, run.to_json(), resume)
        assert {(result.resumed_at, result.steps, result.stopped_by) for result in results} == {(begun, ended, by)}
        assert results[0].held_out is not None
        assert (tmp_path / "parts" / "model").exists()
    whole = case.settings(tmp_path / "whole", 2, steps=5, parallel={"tp": 2}, **sections)
    ranks(2, case.run_body, whole.to_json())
    losses = [[line[:4] for line in case.lines(tmp_path / name)] for name in ("parts", "whole")]
    assert losses[0] == losses[1]


@pytest.mark.nightly  # the demo's tests kill its workers, and test_launch a launch's
def test_killed_worker_of_the_command_is_replaced(
    ranks: Any, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    sections = {**SHORT, "steps": 2, "parallel": {"dp": 2, "zero": 1}}
    ranks(2, case.run_body, case.settings(tmp_path / "whole", 2, **sections).to_json())
    case.write_toml(tmp_path / "run.toml", case.values(tmp_path / "killed", **sections))
    monkeypatch.setattr("shardfuse.commands.train.train_run", case.die_once)
    assert run_train(TrainOptions(tmp_path / "run.toml")) == 0
    out, _ = capfd.readouterr()
    assert "restarted (1): resuming from step 1 of 2" in out
    assert case.lines(tmp_path / "killed") == case.lines(tmp_path / "whole")


# --- under torchrun ---------------------------------------------------------------------------------------------------


def _under_torchrun_body(
    rank: int, world: int, text: str, port: int | None, job: str, restarts: list[int], resume: bool = False
) -> Any:
    """Run settings ``text`` with each rank on its own machine, whose agent counts restarts; returns any refusal.

    ``port`` is the port of the agents' store, None if they keep none.
    """
    from shardfuse.training.run import train_run
    from shardfuse.training.settings import RunSettings

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", job)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts[rank]))
        if port is not None:
            patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            patch.setenv("MASTER_PORT", str(port))
        try:
            return train_run(RunSettings.from_json(text), resume).resumed_at
        except ValueError as error:
            return str(error)


def _server() -> dist.TCPStore:
    return loopback_store()


def test_restart_goes_on_only_where_the_start_was_let_in(ranks: Any, case: Any, tmp_path: Path):
    agent, other = _server(), _server()
    texts = [case.settings(tmp_path / "run", 2, steps=steps, **SHORT).to_json() for steps in (1, 2)]

    def start(steps: int, agent: dist.TCPStore, restarts: list[int], **options: Any) -> Any:
        (said,) = set(ranks(2, _under_torchrun_body, texts[steps - 1], agent.port, "none", restarts, **options))
        return said

    assert start(1, agent, [0, 0]) == 0
    for restarts in ([0, 0], [1, 0], [2, 1]):  # another torchrun's first attempt, and its restarts
        assert "holds an earlier run" in start(2, other, restarts)
    assert start(2, agent, [0, 1]) == 1  # only one machine's agent counted the restart, or none did
    assert start(2, other, [0, 0], resume=True) == 2
    assert start(2, other, [1, 0]) == 2  # complete, but a process died at its exit


def test_unfinished_run_of_a_named_job_is_gone_on_with(ranks: Any, case: Any, tmp_path: Path):
    """Both without a store that outlives the processes, and in a new launch of the same job."""
    out = tmp_path / "run"
    texts = [case.settings(out, 2, steps=steps, **SHORT).to_json() for steps in (1, 2)]
    ranks(2, case.run_body, texts[0])
    with RunFolder(out, resume=True, job="job"):
        pass
    assert ranks(2, _under_torchrun_body, texts[1], None, "job", [0, 0]) == [1, 1]
    for said in ranks(2, _under_torchrun_body, texts[1], None, "job", [0, 0]):
        assert "holds an earlier run" in said


def test_half_set_environment_is_no_run_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = TrainOptions(flags={"out": str(tmp_path / "run"), "steps": 1, "device": "cpu"})
    with pytest.raises(
        ValueError,
        match=r"^WORLD_SIZE = 2: .* MASTER_ADDR and MASTER_PORT are not set; start the processes with torchrun",
    ):
        run_train(options)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match=r" and MASTER_PORT is not set;"):
        run_train(options)
    assert not (tmp_path / "run").exists()


# --- resume validation ------------------------------------------------------------------------------------------------


def _refusal_body(rank: int, world: int, text: str) -> tuple[str, bool]:
    """This rank's refusal of the settings, and whether it left the process group."""
    from shardfuse.training.run import train_run
    from shardfuse.training.settings import RunSettings

    with pytest.raises(ValueError) as caught:
        train_run(RunSettings.from_json(text), True, StopFile(Path("/nonexistent")))
    return str(caught.value), not dist.is_initialized()


def _refused(ranks: Any, settings: Any) -> str:
    """The one-line error of both ranks."""
    first, second = ranks(2, _refusal_body, settings.to_json())
    assert first == second
    said, left = first
    assert left
    assert "\n" not in said
    return str(said)


def test_more_sequences_than_there_are_is_one_clear_error_on_every_rank(ranks: Any, case: Any, tmp_path: Path):
    said = _refused(ranks, case.settings(tmp_path / "run", 2, data={"batch": 1 << 30}))
    assert said.startswith("data.batch = 1073741824: ")
    assert "sequences of 16 tokens; use a smaller batch" in said


def test_tokens_are_counted_over_batches_of_several_sizes(ranks: Any, case: Any, tmp_path: Path):
    out = tmp_path / "run"
    for steps, batch in ((2, 4), (3, 2), (4, 2)):
        sections = {**SHORT, "steps": steps, "data": {"batch": batch}}
        ranks(1, case.run_body, case.settings(out, 1, **sections).to_json(), resume=True)
    assert [line["tokens"] for line in read_lines(out / "metrics.jsonl")] == [64, 128, 160, 192]


def test_checkpoints_that_resume_cannot_go_on_from(ranks: Any, case: Any, tmp_path: Path):
    out, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    ranks(2, case.run_body, case.settings(out, 2, steps=2, **SHORT).to_json())
    said = _refused(ranks, case.settings(out, 2, steps=1, **SHORT))
    assert said.startswith(f"steps = 1: the run in {out} is past that, at step 2; pass a larger --steps")

    longer, newest = case.settings(out, 2, steps=3, **SHORT), checkpoints / "step-00000002"
    (tensors, *_) = sorted(newest.glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-8])
    said = _refused(ranks, longer)
    assert said.startswith(f"{tensors}: cut short")
    assert said.endswith(f"; --resume takes step-00000001 once {newest} (mv {newest} {newest}.torn) is out of the way")
    (newest / "checkpoint.json").write_text("{")
    assert f"(mv {newest} {newest}.torn)" in _refused(ranks, longer)
    newest.rename(f"{newest}.torn")
    assert {result.resumed_at for result in ranks(2, case.run_body, longer.to_json(), resume=True)} == {1}

    for path in checkpoints.iterdir():
        (path / "checkpoint.json").write_text("{")
    assert "there is no other checkpoint: choose another --out" in _refused(ranks, longer)
    shutil.rmtree(checkpoints)
    torch.manual_seed(0)
    foreign = ParallelTransformer(TransformerConfig(num_layers=1, hidden_size=8, num_heads=1, intermediate_size=8))
    save_checkpoint(checkpoints / "step-00000001", foreign, extra={"settings": "mine"})
    said = _refused(ranks, longer)
    assert said.startswith(f"{checkpoints / 'step-00000001'}: shardfuse train did not write this checkpoint")
