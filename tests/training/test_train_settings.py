"""A training run's settings: TOML, flags that override it, and one clear line for each invalid value."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.training.layout import resolve
from shardfuse.training.optimizer import make_scheduler
from shardfuse.training.rates import SHAPES, rate
from shardfuse.training.settings import ParallelSettings, RunSettings, parse_assignment, read_settings

TOML = """
steps = 40
out = "runs/a"

[model]
style = "gated"
hidden_size = 32
num_heads = 4
num_kv_heads = 2
rope_scaling = { rope_type = "linear", factor = 2.0 }

[parallel]
dp = 2
zero = 3

[optimizer]
lr = 1
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_file_gives_settings_and_the_rest_are_defaults(run_toml: Path):
    settings = read_settings(run_toml, {})
    assert (settings.steps, settings.out, settings.seed) == (40, "runs/a", 0)
    assert settings.model.gated
    assert settings.model.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert settings.parallel == ParallelSettings(dp=2, zero=3)
    assert settings.optimizer.lr == 1.0
    assert type(settings.optimizer.lr) is float


def test_changes_win_over_the_file(run_toml: Path):
    settings = read_settings(run_toml, {"steps": 7, "parallel.zero": 1, "data.seq": 64, "optimizer.clip": None})
    assert (settings.steps, settings.parallel.zero, settings.parallel.dp) == (7, 1, 2)
    assert (settings.data.seq, settings.optimizer.clip) == (64, None)


def test_false_is_none_where_a_setting_can_do_without(run_toml: Path):
    run_toml.write_text("[checkpoint]\nevery = false\n[parallel]\nrecompute = false\n")
    settings = read_settings(run_toml, dict([parse_assignment("optimizer.clip=false")]))
    assert (settings.checkpoint.every, settings.optimizer.clip, settings.parallel.recompute) == (None, None, False)


def test_without_a_file_there_are_defaults():
    assert read_settings(None, {}) == RunSettings()


def test_settings_survive_json(run_toml: Path):
    settings = read_settings(run_toml, {"device": "cpu", "model.eos_token_id": [3, 4], "model.pad_token_id": 5})
    assert settings.model.eos_token_id == (3, 4)
    assert RunSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=1e-3", 1e-3), ("a.b = 3", 3), ("a.b=true", True), ("a.b=zbv", "zbv"), ('a.b="x=y"', "x=y"), ("a.b=", "")],
)
def test_assignments_are_toml_or_strings(text: str, value: Any):
    assert parse_assignment(text) == ("a.b", value)
    assert type(parse_assignment(text)[1]) is type(value)


@pytest.mark.parametrize("text", ["lr", "=3"])
def test_assignments_need_a_name_and_a_value(text: str):
    with pytest.raises(ValueError, match=r"^--set .*: expected SETTING=VALUE"):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": 3}, r"^step: there is no such setting; did you mean 'steps'\?$"),
        ({"pace": 3}, r"^pace: there is no such setting; at the top there are checkpoint, data"),
        ({"optimizer.rate": 3}, r"^optimizer.rate: there is no such setting; at \[optimizer\] there are beta1"),
        ({"steps": "many"}, "^steps = 'many': expected a whole number$"),
        ({"steps": 2.5}, "^steps = 2.5: expected a whole number$"),
        ({"steps": True}, "^steps = True: expected a whole number$"),
        ({"steps": False}, "^steps = False: expected a whole number$"),
        ({"checkpoint.every": True}, "^checkpoint.every = True: expected a whole number or false for none$"),
        ({"steps": 0}, "^steps = 0: expected at least 1$"),
        ({"seed": -1}, "^seed = -1: expected 0 to "),
        ({"device": "tpu"}, "^device = 'tpu': expected 'cpu' or 'cuda'$"),
        ({"timeout": 0}, "^timeout = 0.0: expected seconds above 0$"),
        ({"time_limit": -1.0}, "^time_limit = -1.0: expected seconds above 0$"),
        ({"model": 3}, r"^model = 3: expected a section, \[model\]$"),
        ({"model.hidden_size": 30}, "30"),
        ({"model.style": "silu"}, "^style='silu': expected one of gelu, gated$"),
        ({"data.seq": 4096}, "^data.seq = 4096: the model was made for at most 2048 positions"),
        ({"data.batch": 0}, "^data.batch = 0: expected at least 1$"),
        ({"parallel.zero": 4}, "^parallel.zero = 4: expected one of 0, 1, 2, 3$"),
        ({"parallel.tp": 0}, "^parallel.tp = 0: expected at least 1$"),
        ({"parallel.precision": "fp8"}, "^parallel.precision = 'fp8': expected one of fp32, bf16, fp16$"),
        ({"parallel.pp": 2}, "^parallel.pp = 2: a pipeline also needs a schedule"),
        ({"optimizer.lr": 0}, "^optimizer.lr = 0.0: expected a number above 0$"),
        ({"optimizer.lr": float("nan")}, "^optimizer.lr = nan: expected a number above 0$"),
        (
            {"optimizer.schedule": "cosin"},
            r"^optimizer.schedule = 'cosin': did you mean 'cosine'\? \(expected one of constant, linear, cosine\)$",
        ),
        ({"optimizer.schedule": "step"}, "^optimizer.schedule = 'step': expected one of constant, linear, cosine$"),
        ({"optimizer.beta2": 1}, "^optimizer.beta2 = 1.0: expected at least 0 and less than 1$"),
        ({"optimizer.min_lr": 1}, "^optimizer.min_lr = 1.0: expected at most lr = 0.001$"),
        ({"checkpoint.keep": 0}, "^checkpoint.keep = 0: expected at least 1$"),
        ({"log.eval_batches": -1}, "^log.eval_batches = -1: expected at least 0$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_one_clear_line(changes: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says) as caught:
        read_settings(None, changes)
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"missing.toml: there is no such file; give a TOML file"):
        read_settings(tmp_path / "missing.toml", {})
    with pytest.raises(ValueError, match=f"^{tmp_path}: it is a folder; give a TOML file of settings$"):
        read_settings(tmp_path, {})
    path = tmp_path / "bad.toml"
    path.write_text("steps 3")
    with pytest.raises(ValueError, match=r"below: it cannot be read \(Not a directory\); give a TOML file"):
        read_settings(path / "below", {})
    with pytest.raises(ValueError, match=r"bad.toml: not TOML \(Expected '='.*line 1"):
        read_settings(path, {})
    path.write_text("[optimizer]\nlr = -1")
    with pytest.raises(ValueError, match=r"bad.toml: optimizer.lr = -1.0: expected a number above 0"):
        read_settings(path, {})
    path.write_text("optimizer = 3")
    with pytest.raises(ValueError, match=r"optimizer is a section, \[optimizer\], not a value"):
        read_settings(path, {"optimizer.lr": 1.0})


# --- the mesh and the machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "processes", "dp"), [({}, 4, 4), ({"tp": 2}, 4, 2), ({"dp_replicate": 2, "dp": 2}, 4, 2)]
)
def test_data_parallel_degree_is_what_is_left(degrees: dict[str, int], processes: int, dp: int):
    assert ParallelSettings(**degrees).over(processes).dp == dp


@pytest.mark.parametrize(
    ("degrees", "processes", "says"),
    [
        (
            {"tp": 2},
            3,
            "dp_replicate=1 * pp=1 * tp=2 does not make up the 3 processes of this run; .* start a multiple of 2",
        ),
        ({"tp": 4}, 2, "does not make up the 2 processes"),
        ({"dp": 2, "tp": 2}, 1, "dp=2 * dp_replicate=1 .* does not make up the 1 process of this run; .*, or start 4$"),
    ],
)
def test_degrees_that_do_not_fit_the_processes(degrees: dict[str, int], processes: int, says: str):
    with pytest.raises(ValueError, match=says.replace("*", r"\*").replace(r".\*", ".*")):
        ParallelSettings(**degrees).over(processes)


def test_batch_divides_over_the_data_parallel_ranks():
    assert resolve(read_settings(None, {"device": "cpu"}), 4).share(4) == 2
    with pytest.raises(
        ValueError, match=r"data.batch = 8: it does not divide over dp_replicate \* dp = 3 data-parallel ranks"
    ):
        resolve(read_settings(None, {"device": "cpu"}), 3)


def test_folder_to_start_from_gives_the_model(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file; a model folder holds"):
        resolve(RunSettings(start=str(tmp_path)), 1)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"config.json: model_type='bert': expected one of"):
        resolve(RunSettings(start=str(tmp_path)), 1)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,'
        ' "num_attention_heads": 4, "initializer_range": 0.02, "max_position_embeddings": 64}'
    )
    with pytest.raises(ValueError, match=r"^data.seq = 128: the model was made for at most 64 positions"):
        resolve(RunSettings(start=str(tmp_path)), 1)
    settings = RunSettings(start=str(tmp_path), data=dataclasses.replace(RunSettings().data, seq=32))
    assert resolve(settings, 1).model.gated


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there():
    with pytest.raises(ValueError, match=r"^device = 'cuda': this machine has no GPU"):
        resolve(RunSettings(device="cuda"), 1)


# --- learning rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_rate_rises_then_follows_its_shape(shape: str):
    rates = [rate(step, steps=30, shape=shape, warmup=10, floor=0.1) for step in range(31)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    middle = {"constant": 1.0, "linear": 0.55, "cosine": 0.55}[shape]
    assert (rates[19] + rates[20]) / 2 == pytest.approx(middle, abs=1e-3)
    assert rates[30] == pytest.approx(1.0 if shape == "constant" else 0.1)
    assert all(after <= before for before, after in itertools.pairwise(rates[9:]))


def test_rate_without_warm_up_begins_at_the_peak():
    assert rate(0, steps=1, shape="cosine") == 1.0
    assert rate(3, steps=4, shape="linear") == pytest.approx(0.25)
    assert rate(5, steps=4, shape="linear", warmup=10) == pytest.approx(0.6)  # shorter than its warm-up


def test_scheduler_goes_on_where_another_stopped():
    def rates(done: int, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        optimizer.param_groups[0]["initial_lr"] = 2.0
        scheduler = make_scheduler(optimizer, steps=9, shape="cosine", warmup=3, floor=0.1, done=done)
        seen = []
        for _ in range(steps):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return seen

    whole = rates(0, 9)
    assert whole == [2 * rate(step, steps=9, shape="cosine", warmup=3, floor=0.1) for step in range(9)]
    assert rates(4, 5) == whole[4:]
