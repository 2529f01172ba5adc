"""``shardfuse plan`` and ``sf.plan``: what they print, write, draw and refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_page
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import shardfuse as sf
from shardfuse import TransformerConfig, planning
from shardfuse.cli import app
from shardfuse.layers.hf.folders import config_to_hf
from shardfuse.parallel.plan import check, shapes
from shardfuse.parallel.plan.hardware import GPUS
from shardfuse.parallel.plan.search import Space
from shardfuse.training.layout import resolve
from shardfuse.training.settings import read_settings

BASE = ["plan", "--model", "llama3-8b", "--gpus", "16", "--batch", "64", "--tp", "1,2,4", "--schedule", "1f1b"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def plan() -> sf.Plan:
    return sf.plan("llama3-8b", gpus=16, batch=64, tp=(1, 2, 4), schedule="1f1b")


def test_it_prints_layouts_reasons_memory_step_and_traffic() -> None:
    result = run(*BASE)
    assert result.exit_code == 0, result.output
    for text in ("16 x h100", "1 beats 2: ", "Memory of the best layout", "Step of the best layout", "all_gather"):
        assert text in result.output
    assert max(map(len, result.output.splitlines())) <= 120


def test_the_memory_of_a_small_model_is_in_mib() -> None:
    sizes = ("--gpus", "16", "--batch", "16", "--seq", "128")
    result = run("plan", "--model", "mpt-125m", *sizes, "--zero", "3", "--tp", "1", "--pp", "1")
    held = {line.split()[0]: line.split()[1] for line in result.output.splitlines() if len(line.split()) == 2}
    assert held["MiB"] == "fullest"
    assert float(held["weights"]) == pytest.approx(4 * shapes.find("mpt-125m").parameters / 16 / 2**20, abs=0.01)


def test_json_holds_the_same(plan: sf.Plan) -> None:
    result = run(*BASE, "--json")
    record = json.loads(result.stdout)
    assert record["layouts"][0]["step"]["total"] == plan.best.time.total
    assert [each["layout"]["tp"] for each in record["layouts"]] == [each.layout.tp for each in plan.found]
    assert len(record["reasons"]) == len(record["layouts"]) - 1


def test_figures_follow_from_the_step(plan: sf.Plan) -> None:
    seconds = plan.best.time.total
    assert plan.tokens_per_second(plan.best) == 64 * 2048 / seconds
    flops = shapes.find("llama3-8b").flops(64 * 2048, 2048)
    assert plan.utilization(plan.best) == pytest.approx(flops / (seconds * 16 * 989e12))
    assert 0.2 < plan.utilization(plan.best) < 0.9


@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "2", "--pp", "1"),
        ("--pp", "2", "--zero", "1"),
        ("--zero", "3", "--recompute", "full"),
        ("--tp", "4", "--mlp-recompute", "2"),
    ],
)
def test_train_takes_the_file(options: tuple[str, ...], tmp_path: Path) -> None:
    """Of a known model, with the model's sizes in it."""
    file = tmp_path / "new" / "run.toml"
    result = run("plan", "--model", "llama3-8b", "--gpus", "16", "--batch", "64", *options, "--out", str(file))
    assert result.exit_code == 0, result.output
    assert "# of llama3-8b only the sizes; rope_theta and other options are as by default" in file.read_text()
    settings = read_settings(file, {"device": "cpu"})
    parallel = settings.parallel
    assert parallel.dp_replicate * (parallel.dp or 0) * parallel.pp * parallel.tp == 16
    assert settings.model.hidden_size == 4096
    assert resolve(settings, 16).parallel == parallel


def test_the_file_keeps_what_a_file_said(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text(
        "steps = 7\n[model]\nstyle = 'gated'\nhidden_size = 128\nnum_heads = 4\n[data]\nseq = 64\nbatch = 16\n"
        "[optimizer]\nlr = 3e-4\nclip = false\n[parallel]\ntp = 4\noverlap = 'none'\n"
    )
    made = sf.plan(given, gpus=2, gpu="cpu")
    planned = tmp_path / "planned.toml"
    planned.write_text(made.toml())
    settings, before = read_settings(planned, {}), read_settings(given, {})
    assert made.best.layout.batch == 16
    assert settings.parallel.overlap == "none"
    assert replace(settings, parallel=before.parallel) == before
    assert (
        settings.parallel.dp_replicate * (settings.parallel.dp or 0) * settings.parallel.pp * settings.parallel.tp == 2
    )


def test_the_file_holds_what_follows_from_other_sizes(tmp_path: Path) -> None:
    """Each equals what the smallest model would have, but not what this one would."""
    model = TransformerConfig(
        style="gated", hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=32, bias=True,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(sf.plan(model, gpus=2, tp=2).toml())
    assert read_settings(file, {}).model == model


@pytest.mark.parametrize("name", shapes.known())
def test_the_file_of_a_known_model_has_its_parameters(name: str) -> None:
    """Rotary positions have none."""
    shape = replace(shapes.find(name), layers=2)
    config = planning._config(shape, 128)
    model = sf.ParallelTransformer(config, device="meta")
    assert sum(each.numel() for each in model.parameters()) == shape.parameters - shape.positions * shape.hidden


@pytest.mark.parametrize("style", ["gated", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_models_parameters_are_counted(style: str, bias: bool) -> None:
    config = TransformerConfig(style=style, bias=bias, head_dim=48, num_kv_heads=4)
    model = sf.ParallelTransformer(config, device="meta")
    assert sum(each.numel() for each in model.parameters()) == planning._shape(config, "model").parameters


def test_a_folder_with_a_known_models_name_is_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt-1.7b").mkdir()
    (tmp_path / "gpt-1.7b" / "config.json").write_text(json.dumps(config_to_hf(TransformerConfig(style="gated"))))
    monkeypatch.chdir(tmp_path)
    made = sf.plan("gpt-1.7b", gpus=2, count=1, tp=1, pp=1)
    assert (made.shape.hidden, made.settings) == (2304, None)
    assert sf.plan("./gpt-1.7b", gpus=2, count=1, tp=1, pp=1).shape.hidden == 256


def test_a_folder_of_transformers_keeps_its_options(tmp_path: Path) -> None:
    model = TransformerConfig(style="gated", rope_theta=5e5, norm_eps=1e-6, max_positions=512, tie_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(model)))
    made = sf.plan(tmp_path, gpus=2)
    assert made.best.layout.length == 512
    file = tmp_path / "run.toml"
    file.write_text(made.toml())
    assert read_settings(file, {}).model == model
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    made = sf.plan(tmp_path, gpus=2)
    assert (made.best.layout.length, made.shape.parameters) == (1024, 124_439_808)  # transformers' count


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize("gpus", [3, 7, 12, 100, 1000])
def test_the_default_batch_is_one_that_the_gpus_divide(gpus: int) -> None:
    made = sf.plan("llama3-8b", gpus=gpus, count=1, zero=3, tp=1, pp=1, recompute="full")
    assert made.best.layout.dp * made.best.layout.replicas == gpus
    assert 1 << 21 <= made.best.layout.batch * 2048 <= 1 << 22


@pytest.mark.parametrize("name", ["plan.png", "plan.html"])
def test_it_draws(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    result = run(*BASE, "--pp", "4", "--draw", str(file))
    assert result.exit_code == 0, result.output
    content = file.read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
        return
    page = content.decode()
    assert page.count("<table") == 4
    assert "data:image/svg+xml;base64," in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_what_does_not_fit_names_the_smallest_that_does() -> None:
    with pytest.raises(sf.DoesNotFit, match="no layout fits on 8 h100; the smallest number that holds it is") as raised:
        sf.plan("llama3-70b", gpus=8, batch=64, offload=False)
    found = raised.value.smallest
    assert found is not None
    assert f"holds it is {found.layout.gpus}: " in str(raised.value)
    assert sf.plan("llama3-70b", gpus=found.layout.gpus, batch=64, offload=False).best.time.total <= found.time.total


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"model": "gpt-9"}, "expected a folder with config.json, a TOML file"),
        ({"gpus": 0}, "gpus"),
        ({"model": "lama3-8b"}, "did you mean 'llama3-8b'[?] expected a folder"),
        ({"gpu": "v100"}, "expected cpu for this machine, or one of a100-40"),
        ({"gpu": "h100-69"}, "gpu='h100-69': did you mean 'h100-96'[?]$"),
        ({"precision": "fp32"}, "expected one that h100 has, bf16, fp16, fp8"),
        ({"sizes": 3}, "sizes: expected some of"),
        ({"gpu": "cpu", "network": "x.toml"}, "leave it out"),
        ({"tp": 3}, "leave out some of the choices"),
        ({"tp": 0}, "tp=0: expected whole numbers of at least 1"),
        ({"offload": "yes"}, "offload='yes': expected some of True, False"),
        ({"gpus": 1000, "batch": 2048}, "no layout divides this over 1000 h100: .* use a batch of 2000"),
        ({"seq": 0}, "seq=0"),
        ({"model": "gpt3-175b", "seq": 4096}, "2048 learned positions"),
        ({"model": TransformerConfig(max_positions=512), "seq": 1024}, "at most 512 positions"),
        ({"schedule": "fastest"}, "schedule='fastest': expected some of 1f1b"),
        ({"recompute": "selective"}, "expected none or full"),
        ({"zero": True}, "zero=True: expected some of 0, 1, 2, 3"),
        ({"zero": 3, "schedule": "zbv", "pp": 2}, "in a pipeline ZeRO 3 runs under 1f1b"),
        ({"zero": 0, "offload": True}, "offloading needs ZeRO"),
    ],
)
def test_bad_questions_are_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sf.plan(**{"model": "llama3-8b", "gpus": 8, "batch": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["plan"], "needs --model and --gpus"),
        ([*BASE, "--micro", "a"], "--micro a: expected whole numbers"),
        ([*BASE, "--pp", "0"], "--pp 0: expected numbers of at least 1"),
        ([*BASE, "--draw", "x.gif"], "expected a name that ends in .png"),
        ([*BASE, "--out", "."], "it is a folder; give a file, such as run.toml"),
        ([*BASE, "--schedule", ""], "expected words separated by commas"),
        ([*BASE, "--recompute", "both"], "recompute='both': expected none or full"),
        (["plan", "--check", "--gpus", "8"], "--gpus with --check"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], why: str) -> None:
    """Before the search: nothing is printed."""
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert why in str(result.exception)
    assert not result.output


def test_what_cannot_be_written_is_still_shown(tmp_path: Path) -> None:
    result = run(*BASE, "--precision", "fp8", "--out", str(tmp_path / "run.toml"))
    assert "no fp8" in str(result.exception)
    assert "Memory of the best layout" in result.output


def test_the_help_names_every_gpu() -> None:
    (option,) = (each for each in get_command(app).commands["plan"].params if each.name == "gpu")  # type: ignore[attr-defined]
    assert set(re.findall(r"[\w-]*\d[\w-]*", option.help)) == GPUS.keys()


def test_more_processes_share_this_machines_memory() -> None:
    with pytest.raises(sf.DoesNotFit, match="no layout fits on 2 processes of this machine, nor on fewer") as raised:
        sf.plan("gpt-1t", gpus=2, gpu="cpu", batch=2)
    assert raised.value.smallest is None


def test_what_train_cannot_run_is_not_written() -> None:
    made = sf.plan("llama3-8b", gpus=8, batch=8, precision="fp8", tp=1, pp=1)
    with pytest.raises(ValueError, match="no context parallelism and no fp8"):
        made.toml()


def test_other_numbers_of_stages_are_not_written() -> None:
    chosen = {"pp": 4, "tp": 1, "schedule": "interleaved_1f1b", "batch": 64, "count": 1}
    assert "interleaved_1f1b" in sf.plan("llama3-8b", gpus=8, **chosen).toml()
    with pytest.raises(ValueError, match="runs interleaved_1f1b with 2 stages on a rank"):
        sf.plan("llama3-8b", gpus=8, interleave=4, **chosen).toml()


def test_the_check_prints_every_source_and_fails_for_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, held = plan_page.sources(), check.memory()
    run_of = sources[0].steps[0].run
    layout = replace(run_of.layout, micro=1)
    monkeypatch.setattr(check, "steps", lambda: sources)
    monkeypatch.setattr(check, "layouts", lambda runs: [check.Chosen(run_of, 0.01, layout, None)])
    result = run("plan", "--check")
    assert result.exit_code == 0, result.output
    assert "megatron2021-T1: 10 of 10 steps within 15%, a constant MFU 6: holds" in " ".join(result.output.split())
    assert "all judged predictions hold" in result.output
    monkeypatch.setattr(check, "memory", lambda: [replace(each, predicted=2 * each.reported) for each in held])
    assert run("plan", "--check").exit_code == 1
    monkeypatch.setattr(check, "memory", lambda: held)
    monkeypatch.setattr(check, "layouts", lambda runs: [check.Chosen(run_of, 0.3, layout, None)])
    result = run("plan", "--check")
    assert result.exit_code == 1
    assert "off: layout of" in result.output


def test_a_space_is_what_the_choices_say() -> None:
    made = sf.plan("llama3-8b", gpus=8, batch=16, tp=2, zero=[1], recompute="full")
    for each in made.found:
        assert (each.layout.tp, each.layout.recompute) == (2, "full")
        assert each.layout.zero == 1
    assert Space().cp == (1,)
