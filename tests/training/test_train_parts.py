"""The parts of a training run: tokens, metrics, throughput, folder, stop requests."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.kernels.runtime.chips import CHIPS
from shardfuse.parallel.core.mesh import SINGLE, everyone
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.pipeline.timeline import Costs
from shardfuse.training import metrics, restart, stages
from shardfuse.training.data.items import DataError
from shardfuse.training.data.windows import Windows, load_tokens
from shardfuse.training.folders import RunFolder, RunFolderError
from shardfuse.training.layout import resolve
from shardfuse.training.metrics import MetricsFile, Recorder, read_lines
from shardfuse.training.restart import TIME_IS_UP, Stop, StopFile
from shardfuse.training.settings import ParallelSettings, RunSettings
from shardfuse.training.trainer import build_model

# --- tokens -----------------------------------------------------------------------------------------------------------


def test_windows_cover_the_source_once():
    windows = Windows(torch.arange(34, dtype=torch.uint8), 8, 256)
    assert len(windows) == 4
    pairs = [windows[i] for i in range(4)]
    assert torch.cat([tokens for tokens, _ in pairs]).tolist() == list(range(32))
    assert torch.cat([targets for _, targets in pairs]).tolist() == list(range(1, 33))
    assert {part.dtype for pair in pairs for part in pair} == {torch.int64}


def test_numbers_stay_in_their_file(tmp_path: Path):
    np.save(tmp_path / "tokens.npy", np.arange(1600, dtype=np.uint16))
    tokens = load_tokens(tmp_path / "tokens.npy", seq=8, vocab_size=1600)
    assert (len(tokens.train), len(tokens.held_out)) == (187, 12)
    assert isinstance(tokens.train._source, np.memmap)
    assert tokens.held_out[0][0].tolist() == list(range(1500, 1508))
    assert tokens.train[186][1].tolist() == list(range(1489, 1497))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((2, 3), dtype=np.int64), r"int64 of shape \[2, 3\]; expected whole numbers in one dimension"),
        (np.zeros(3), r"float64 of shape \[3\]; expected whole numbers"),
        (np.zeros(100, dtype=np.int64), r"100 tokens, at least 144 are needed; give more"),
        (np.array([{}], dtype=object), r"not a NumPy file of numbers"),
    ],
    ids=["2d", "floats", "short", "objects"],
)
def test_numbers_that_cannot_be_used(tmp_path: Path, array: np.ndarray, says: str):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(DataError, match=says):
        load_tokens(tmp_path / "tokens.npy", seq=8, vocab_size=256)


def test_files_that_are_no_numbers(tmp_path: Path):
    with pytest.raises(DataError, match=r"missing.npy: there is no such file"):
        load_tokens(tmp_path / "missing.npy", seq=8, vocab_size=256)
    (tmp_path / "text.npy").write_text("text")
    with pytest.raises(DataError, match=r"text.npy: not a NumPy file"):
        load_tokens(tmp_path / "text.npy", seq=8, vocab_size=256)


@pytest.mark.parametrize("wrong", [300, -1])
def test_token_outside_the_vocabulary_is_named(wrong: int):
    source = np.arange(64)
    source[20] = wrong
    windows = Windows(source, 8, 256)
    assert windows[0][0].tolist() == list(range(8))
    with pytest.raises(DataError, match=rf"token {wrong} near position 16, and the model's vocabulary has 256"):
        windows[2]


@pytest.mark.parametrize("size", [100, 257, 49152])
def test_text_is_bytes_for_a_vocabulary_of_bytes_alone(size: int):
    with pytest.raises(
        DataError, match=rf"^model.vocab_size = {size}, .*text is read as bytes, .*data.tokenizer=FOLDER"
    ):
        load_tokens(None, seq=8, vocab_size=size)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_a_line_each(tmp_path: Path):
    file = MetricsFile(tmp_path)
    file.write(1, loss=2.5, lr=1e-3)
    file.write(2, loss=math.nan)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "lr": 1e-3}, {"step": 2, "loss": None}]


def test_steps_that_come_again_are_written_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(tmp_path)
    for step in range(1, 6):
        first.write(step, loss=float(step))
    path.write_text(path.read_text()[:-4])  # killed in the middle of a line
    second = MetricsFile(tmp_path, done=3)
    for step in range(4, 7):
        second.write(step, loss=-float(step))
    assert [(line["step"], line["loss"]) for line in read_lines(path)] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0), (5, -5.0), (6, -6.0)
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


class _Writer:
    """Records the calls of TensorBoard's SummaryWriter."""

    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.calls: list[tuple[Any, ...]] = [(Path(folder).name, purge_step)]
        _Writer.last = self

    def add_scalar(self, *call: Any) -> None:
        self.calls.append(call)

    def close(self) -> None:
        self.calls.append(("closed",))


def test_tensorboard_gets_the_same_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = _Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    recorder = Recorder(tmp_path, done=4)
    recorder.write(5, loss=1.5, lr=0.1)
    recorder.close()
    assert _Writer.last.calls == [("tensorboard", 5), ("loss", 1.5, 5), ("lr", 0.1, 5), ("closed",)]


def test_without_tensorboard_there_are_lines_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    recorder = Recorder(tmp_path)
    recorder.write(1, loss=1.5)
    recorder.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.5}]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_spans_are_nvtx_ranges_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with metrics.span("data", torch.device("cpu")):
        pass
    assert seen == []
    with (
        pytest.raises(KeyError),
        metrics.span("save", torch.device("cuda")),
        metrics.span("copy", torch.device("cuda")),
    ):
        raise KeyError
    assert seen == ["save", "copy", "pop", "pop"]


# --- throughput -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_flops_are_those_of_the_matrices(style: str):
    config = TransformerConfig(
        style=style, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2
    )
    from shardfuse import ParallelTransformer

    with torch.device("meta"):
        model = ParallelTransformer(config)
    matrices = sum(
        param.numel() for name, param in model.named_parameters() if param.dim() == 2 and "embed" not in name
    )
    scores = 3 * 2 * 2 * 16 / 2 * 32  # layers, two products, a multiply-add, half of 16 tokens, width of all heads
    assert metrics.flops_per_token(config, 16) == 3 * (2 * matrices + scores)


def test_windows_bound_what_attention_looks_at():
    config = TransformerConfig(attention_window=4)
    short, long = (metrics.flops_per_token(config, seq) for seq in (16, 1024))
    assert short == long < metrics.flops_per_token(TransformerConfig(), 16)


def test_peaks_are_those_of_the_data_sheet():
    chip = CHIPS["sm_90"]
    assert metrics.peak_flops(chip, "bf16") == 989e12
    assert metrics.peak_flops(chip, "fp32") == 67e12
    assert metrics.chip_of(torch.device("cpu")) is None


# --- the folder -------------------------------------------------------------------------------------------------------


def test_folder_belongs_to_one_run_at_a_time(tmp_path: Path):
    out = tmp_path / "deep" / "run"
    with (
        RunFolder(out, resume=False),
        pytest.raises(RunFolderError, match="another run is writing there now"),
        RunFolder(out, resume=True),
    ):
        pytest.fail("two runs in one folder")
    with RunFolder(out, resume=False):
        pass


@pytest.mark.parametrize("trace", ["settings.json", "metrics.jsonl", "checkpoints", "model"])
def test_earlier_run_is_gone_on_with_or_left_alone(tmp_path: Path, trace: str):
    (tmp_path / trace).mkdir()
    (tmp_path / "run.toml").touch()
    with pytest.raises(RunFolderError, match=rf"holds an earlier run \({trace}\); pass --resume"):
        RunFolder(tmp_path, resume=False).__enter__()
    with RunFolder(tmp_path, resume=True):
        pass


def test_run_of_the_same_job_is_gone_on_with_until_it_is_complete(tmp_path: Path):
    with RunFolder(tmp_path, resume=False, job="a") as folder:
        (tmp_path / "settings.json").touch()
        assert not folder.resume
    for job in ("b", None):
        with pytest.raises(RunFolderError, match="holds an earlier run"), RunFolder(tmp_path, resume=False, job=job):
            pytest.fail("another job's run")
    with RunFolder(tmp_path, resume=False, job="a") as folder:
        assert folder.resume
        folder.complete()
    with pytest.raises(RunFolderError, match="holds an earlier run"), RunFolder(tmp_path, resume=False, job="a"):
        pytest.fail("a complete run")


def test_run_of_the_same_launch_is_gone_on_with_even_when_it_is_complete(tmp_path: Path):
    with RunFolder(tmp_path, resume=False, launch="1", job="a") as folder:
        (tmp_path / "settings.json").touch()
    for launch, job in (("1", "a"), ("2", "a"), ("2", None)):
        with RunFolder(tmp_path, resume=False, launch=launch, job=job) as folder:
            assert folder.resume
    with RunFolder(tmp_path, resume=False, launch="2", job="a") as folder:
        folder.complete()
    with RunFolder(tmp_path, resume=False, launch="2", job="a") as folder:
        assert folder.resume
        folder.complete()
    for _ in range(2):  # a refused run leaves no mark
        with pytest.raises(RunFolderError, match="earlier run"), RunFolder(tmp_path, resume=False, launch="3", job="a"):
            pytest.fail("another launch, of a complete run")


def test_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot be written to \(.*\); choose another folder"):
        RunFolder(tmp_path / "file" / "run", resume=False).__enter__()


# --- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_noted_and_end_nothing(signum: signal.Signals):
    before = signal.getsignal(signum)
    seen: list[int] = []
    signal.signal(signum, lambda number, frame: seen.append(number))
    try:
        with Stop(SINGLE) as stop:
            assert stop.agreed() == 0
            signal.raise_signal(signum)
            assert stop.agreed() == signum
            for other in (signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(other)
            assert stop.agreed() == signum
        assert seen == []
        signal.raise_signal(signum)
        assert seen == [signum]
    finally:
        signal.signal(signum, before)


def test_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Stop(SINGLE) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.agreed() == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_file_asks_as_well(tmp_path: Path):
    file = StopFile(tmp_path / "stop")
    with Stop(SINGLE, file) as stop:
        assert stop.agreed() == 0
        file.path.touch()  # being written
        assert stop.agreed() == 0
        file.write(signal.SIGTERM)
        assert stop.agreed() == signal.SIGTERM


def test_a_time_limit_counts_from_the_first_step(monkeypatch: pytest.MonkeyPatch):
    looks = {0.0: False, 3600.0: False, 3601.0: True, 3660.0: True, 3661.0: True}
    clock = iter(looks)
    monkeypatch.setattr(restart, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with Stop(SINGLE, time_limit=60.0) as stop:
        assert [stop.agreed(training=training) for training in looks.values()] == [0, 0, 0, 0, TIME_IS_UP]


def _stop_body(rank: int, world: int, folder: str) -> list[int]:
    """Rank 1 gets the stop request after its second step."""
    file = StopFile(Path(folder) / str(rank))
    seen = []
    with Stop(everyone(), file) as stop:
        for step in itertools.count(1):
            if (rank, step) == (1, 2):
                file.write(signal.SIGINT)
            seen.append(stop.agreed())
            if seen[-1]:
                return seen
    raise AssertionError


def test_ranks_stop_after_the_same_step(ranks: Any, tmp_path: Path):
    assert ranks(2, _stop_body, str(tmp_path)) == [[0, signal.SIGINT]] * 2


def _partition_body(rank: int, world: int, partition: str) -> list[int]:
    """This stage's parts when the first block's measured cost equals that of all others together."""
    small = TransformerConfig(num_layers=6, hidden_size=32, intermediate_size=64)
    parallel = ParallelSettings(pp=world, schedule="1f1b", partition=partition)
    settings = resolve(RunSettings(model=small, parallel=parallel, device="cpu"), world)
    times = [Costs().scaled(each) for each in (0.1, 5, 1, 1, 1, 1, 1, 0.1)]
    with mock.patch.object(stages, "measured_costs", return_value=times) as measure:
        model = build_model(settings, init_mesh(pp=world))
    assert measure.call_count == (partition == "measured")
    return sorted(cast(ParallelTransformer, model.module).kept)


def test_stages_are_cut_by_what_was_measured(ranks: Any):
    assert ranks(2, _partition_body, "measured") == [[0, 1], [2, 3, 4, 5, 6, 7]]
    assert [len(parts) for parts in ranks(2, _partition_body, "modelled")] == [4, 4]


def test_lines_are_json(tmp_path: Path):
    MetricsFile(tmp_path).write(1, loss=float("inf"))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None}
