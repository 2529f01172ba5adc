"""Timelines of pipeline schedules: torch's order, idle shares against the closed forms, memory, the command."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardfuse.cli import app
from shardfuse.commands.schedule_costs import price
from shardfuse.layers.config import TransformerConfig
from shardfuse.layers.mlp import ParallelMLP
from shardfuse.layers.stage_costs import measured_costs
from shardfuse.parallel.pipeline import modelled_costs, orders, stage_costs
from shardfuse.parallel.pipeline.orders import order
from shardfuse.parallel.pipeline.schedules import SCHEDULES, check_microbatches, find
from shardfuse.parallel.pipeline.timeline import Costs, closed_form, simulate

POINTS = 0.05  # TARGETS: idle share in simulation and on paper
COSTS = [Costs(), Costs(1, 1.2, 0.8), Costs(1, 1.6, 0.4), Costs(2, 2, 1), Costs(1, 1.8, 1)]
SINGLE = [name for name in SCHEDULES if find(name).stages_per_rank == 1]


def _agrees(name: str, ranks: int, microbatches: int, costs: Costs) -> None:
    step = simulate(name, ranks, microbatches, costs)
    form = closed_form(name, ranks, microbatches, costs)
    assert form is not None
    assert abs(step.idle_share - form) < POINTS, (name, ranks, microbatches, costs)
    assert max(step.idle) < 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_share_is_the_closed_forms(name: str):
    for ranks in (2, 4):
        for microbatches in (2 * ranks, 4 * ranks):
            for costs in COSTS:
                _agrees(name, ranks, microbatches, costs)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [3, 8, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_share_is_the_closed_forms_for_many_ranks(name: str, ranks: int):
    for microbatches in (2 * ranks, 3 * ranks):
        for costs in COSTS:
            _agrees(name, ranks, microbatches, costs)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "costs"),
    [
        ("interleaved_1f1b", 4, 3, Costs()),
        ("interleaved_zb", 4, 3, Costs()),
        ("interleaved_zb", 4, 8, Costs(1, 0.5, 1)),
        ("interleaved_zb", 4, 8, Costs(1, 2, 2)),
        ("zbv", 4, 2, Costs()),
        ("zbv", 4, 4, Costs()),
        ("zbv", 4, 8, Costs(2, 1, 1)),
        ("zbv", 4, 8, Costs(1, 1, 3)),
        ("dualpipev", 4, 8, Costs(1, 0.5, 0.5)),
        ("dualpipev", 4, 8, Costs(1, 1, 3)),
    ],
)
def test_formulas_are_not_stretched(name: str, ranks: int, microbatches: int, costs: Costs):
    assert closed_form(name, ranks, microbatches, costs) is None


@pytest.mark.parametrize("costs", [Costs(1, 0.5, 2), Costs(3, 1, 0)])
def test_formulas_of_whole_backwards_hold_for_all_costs(costs: Costs):
    for name in ("naive", "gpipe", "1f1b", "interleaved_1f1b"):
        _agrees(name, 4, 8, costs)


def test_schedules_rank_as_they_are_meant_to():
    """Beyond the closed forms: the numbers differ, and in the right direction."""
    idle = {name: simulate(name, 4, 16).idle_share for name in SCHEDULES}
    assert idle["naive"] == pytest.approx(0.75)
    assert idle["gpipe"] == pytest.approx(idle["1f1b"]) == pytest.approx(3 / 19)
    assert idle["zbv"] < idle["dualpipev"] < idle["interleaved_1f1b"] < idle["1f1b"] < idle["naive"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_runs_once_and_after_what_it_needs(name: str):
    ranks, microbatches = 4, 8
    step = simulate(name, ranks, microbatches, Costs(1, 1.5, 0.5))
    stages = ranks * step.stages_per_rank
    ends = {one[2:]: one.end for passes in step.passes for one in passes}
    assert len(ends) == sum(map(len, step.passes))
    kinds = Counter((one.kind, one.stage) for passes in step.passes for one in passes)
    for stage in range(stages):
        assert kinds["F", stage] == microbatches
        assert kinds["B", stage] + kinds["I", stage] == microbatches
        assert kinds["W", stage] == kinds["I", stage]
    assert bool(sum(kinds["I", stage] for stage in range(stages))) == find(name).splits_backward
    for passes in step.passes:
        for one, following in pairwise(passes):
            assert one.end <= following.start
        for start, _, kind, stage, microbatch in passes:
            if kind == "F" and stage:
                assert start >= ends["F", stage - 1, microbatch]
            if kind in "BI":
                assert start >= ends["F", stage, microbatch]
                if stage < stages - 1:
                    behind = [ends.get((half, stage + 1, microbatch)) for half in "BI"]
                    assert start >= max(end for end in behind if end is not None)
            if kind == "W":
                assert start >= ends["I", stage, microbatch]


class _Recorder:
    """A pipeline stage that records the actions of torch's schedule without computing or sending."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.done: list[tuple[str, int]] = []
        self.stage_index, self.group_rank, self.num_stages, self.group_size = rank, rank, ranks, ranks
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.submod, self.device, self.group = nn.Identity(), torch.device("cpu"), None

    def forward_one_chunk(self, index: int, *args: Any, **options: Any) -> None:
        self.done.append(("F", index))

    def backward_one_chunk(self, index: int, **options: Any) -> None:
        self.done.append(("B", index))

    def perform_reduce_grad(self, scale: int) -> None:
        pass

    def release_fwd_send_outputs(self, index: int) -> None:
        """Called from torch 2.15 on."""

    def _no_ops(self, index: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_ops


@pytest.mark.parametrize("name", SINGLE)
def test_the_order_is_the_one_that_torch_runs(name: str, monkeypatch: pytest.MonkeyPatch):
    ranks, microbatches = 3, 5
    kind = find(name).kind
    monkeypatch.setattr(kind, "_initialize_stage", lambda *args, **options: None)
    for rank in range(ranks):
        stage = _Recorder(rank, ranks)
        schedule = kind(stage, microbatches)
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        ours = [(todo.kind, todo.microbatch) for (todo,) in order(name, ranks, microbatches)[rank]]
        assert ours == stage.done


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb", "zbv"])
def test_the_order_is_the_one_that_torch_lists(name: str):
    compared = 0
    for ranks in range(1, 7):
        for microbatches in (*range(1, 2 * ranks + 3), 4 * ranks):
            try:
                check_microbatches(name, microbatches, ranks)
            except ValueError:
                continue
            assert order(name, ranks, microbatches) == orders.torchs(name, ranks, microbatches)
            compared += 1
    assert compared > 40


def test_what_stays_in_memory():
    assert simulate("naive", 4, 8).peak_activations == (1, 1, 1, 1)
    assert simulate("gpipe", 4, 8).peak_activations == (8, 8, 8, 8)
    assert simulate("1f1b", 4, 8).peak_activations == (4, 3, 2, 1)
    # Megatron's: (P - 1) 2 + (v - 1) P + 1 stages' worth on the first rank, v = 2
    assert simulate("interleaved_1f1b", 4, 8).peak_activations[0] == 5.5
    assert max(simulate("zbv", 4, 8).peak_activations) == 4  # as 1F1B's first rank: arXiv:2401.10241, section 6
    held = simulate("zbv", 4, 8, Costs(held=1.5))
    assert max(held.peak_activations) > 4


def test_each_stage_has_its_own_costs():
    slow_head = simulate("gpipe", 2, 3, [Costs(1, 1, 1), Costs(2, 2, 2)])
    # The head's three forwards and backwards follow each other; before them the first forward, after them the last
    # backward of the stage in front.
    assert slow_head.end == 1 + 3 * 2 + 3 * 4 + 2
    assert slow_head.idle == pytest.approx((1 - 9 / 21, 1 - 18 / 21))
    recomputed = simulate("gpipe", 2, 3, Costs().recomputed())
    assert recomputed.end == 4 * (1 + 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("zbx", 4, 8), "schedule='zbx': expected one of naive, gpipe"),
        (("dualpipev", 4, 7), "needs at least 8 micro-batches, not 7"),
        (("1f1b", 4, 3), "needs at least 4 micro-batches"),
        (("interleaved_1f1b", 4, 9), "do not divide"),
        (("gpipe", 0, 8), "ranks=0: expected at least 1"),
        (("zbv", 2, 8, [Costs()] * 2), "costs: 2 were given, and zbv over 2 ranks has 4 stages"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_cannot_be_is_refused(arguments: Any, says: str):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        simulate(*arguments)


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"weight=-1: expected a cost of at least 0"):
        Costs(weight=-1)
    with pytest.raises(ValueError, match="one of them has to take time"):
        Costs(0, 0, 0)


def test_modelled_costs():
    short, long = (modelled_costs.modelled("llama3-8b", 8192, length=length) for length in (1024, 8192))
    assert short.weight == long.weight  # attention has no weights
    more = long.forward - short.forward
    assert more > 0
    assert long.backward - short.backward == pytest.approx(modelled_costs.ATTENTION_BACKWARD * more)
    halved = modelled_costs.modelled("llama3-8b", 8192, length=8192, tp=2)
    assert 0.4 < halved.step / long.step < 0.7
    for arguments, says in [
        ({"model": "llama9"}, "model='llama9'"),
        ({"arch": "sm_1"}, "target='sm_1'"),
        ({"tp": 3}, "do not divide"),
        ({"tokens": 100}, "not a whole number of sequences"),
    ]:
        with pytest.raises(ValueError, match=says):
            modelled_costs.modelled(**{"model": "llama3-8b", "tokens": 8192, "length": 1024, **arguments})


def test_measured_costs_split_backward_as_pipelines_do(monkeypatch: pytest.MonkeyPatch):
    seconds = {"forward": 3.0, "input": 5.0, "weight": 2.0}
    clock = SimpleNamespace(now=0.0)

    class Product(torch.autograd.Function):
        """Its backward is called for the gradient of the input, and once more for that of the weight."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            ctx.halves = iter(("input", "weight"))
            clock.now += seconds["forward"]
            return x @ weight

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            clock.now += seconds[next(ctx.halves)]
            return dy @ weight.T, x.T @ dy

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(x, self.weight)

    monkeypatch.setattr(stage_costs.time, "perf_counter", lambda: clock.now)
    stage = Stage()
    stage.weight.grad = before = torch.ones(4, 4)
    assert stage_costs.measured(stage, torch.randn(3, 4), rounds=2) == Costs(3.0, 5.0, 2.0)
    assert stage.weight.grad is before
    assert bool((before == 1).all())
    with pytest.raises(ValueError, match="rounds=0"):
        stage_costs.measured(stage, torch.randn(3, 4), rounds=0)


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["schedule", *arguments])


def test_the_command_prints_timeline_and_table():
    result = _run("1f1b", "--stages", "2", "--microbatches", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("1f1b: 2 pipeline ranks of 1 stage, 4 micro-batches")
    assert lines[1].startswith("rank 0")
    assert lines[1].index("F0") < lines[1].index("F1") < lines[1].index("·") < lines[1].index("B0")
    assert any(line.split() == ["0", "20.0%", "2"] for line in lines)
    assert "closed form: 20.0% idle" in result.stdout


def test_the_command_prints_json(tmp_path: Path):
    result = _run("zbv", "--stages", "2", "--microbatches", "4", "--weight-cost", "0.5", "--json")
    report = json.loads(result.stdout.splitlines()[-1])
    step = simulate("zbv", 2, 4, Costs(weight=0.5))
    assert report["idle_share"] == step.idle_share
    assert report["closed_form"] == closed_form("zbv", 2, 4, Costs(weight=0.5))
    assert report["passes"][1][0] == step.passes[1][0]._asdict()


def test_the_command_prints_no_closed_form_where_there_is_none():
    result = _run("zbv", "--stages", "4", "--microbatches", "4", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["closed_form"] is None
    assert "closed form: none for these numbers." in result.output


def test_the_command_takes_modelled_costs():
    result = _run("gpipe", "--microbatches", "4", "--model", "llama3-8b", "--length", "1024", "--recompute", "--json")
    costs = modelled_costs.modelled("llama3-8b", 8192, length=1024).recomputed()
    assert json.loads(result.stdout.splitlines()[-1])["end"] == simulate("gpipe", 4, 4, costs).end
    with pytest.raises(ValueError, match="--forward-cost and --model both give costs"):
        price("gpipe", 4, 4, given={"forward": 1.0, "held": 1.0}, model="llama3-8b")
    with pytest.raises(ValueError, match="--tp needs a --model"):
        price("gpipe", 4, 4, given={}, shape={"tp": 2})
    with pytest.raises(ValueError, match=r"--set data\.seq=8 needs a file to --measure"):
        price("gpipe", 4, 4, given={}, assignments=["data.seq=8"])


def test_the_command_measures_a_run(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nnum_layers = 5\nhidden_size = 32\nintermediate_size = 64\nvocab_size = 300\n"
        "[data]\nseq = 16\n[parallel]\ndp_replicate = 2\n"
    )
    arguments = ("zbv", "--stages", "2", "--microbatches", "4", "--measure", str(file))
    result = _run(*arguments, "--set", "data.batch=24", "--recompute", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert "ms for 3 x 16 tokens, fp32, measured on cpu" in result.output
    costs = [Costs(**each) for each in report["costs"]]
    assert report["end"] == pytest.approx(simulate("zbv", 2, 4, costs).end)
    assert report["unit"] == "ms"
    assert report["closed_form"] is None
    assert report["stages"][0].startswith("embedding")
    assert report["stages"][-1].endswith("head")
    assert sum(int(count) for count in re.findall(r"(\d+) block", " ".join(report["stages"]))) == 5
    assert costs[0].backward == 0  # no gradient of tokens
    assert min(part for each in costs[1:] for part in (each.forward, each.backward, each.weight)) > 0
    for wrong, says in [
        (("--set", "parallel.tp=2"), "--set parallel.tp=1"),
        (("--model", "llama3-8b"), "leave one"),
        (("--stages", "0"), "ranks=0: expected at least 1"),
        (("--stages", "4"), "a model of 7 parts cannot be cut into 8 pipeline stages"),
    ]:
        assert says in str(_run(*arguments, *wrong).exception)


@pytest.mark.parametrize("split", [True, False])
def test_what_is_recomputed_is_recomputed_once_while_it_is_measured(monkeypatch: pytest.MonkeyPatch, split: bool):
    config = TransformerConfig(num_layers=1, hidden_size=32, intermediate_size=64, vocab_size=300)
    ran: list[int] = []
    forward = ParallelMLP.forward
    monkeypatch.setattr(ParallelMLP, "forward", lambda *given, **named: ran.append(1) or forward(*given, **named))
    _, block, head = measured_costs(config, 2, 8, rounds=2, split=split, recompute=True)
    assert len(ran) == 2 * 3  # forward and once more in backward; two rounds and the one before them
    assert (block.weight > 0) is split
    assert (head.weight > 0) is split
    assert min(block.forward, block.backward, head.backward) > 0


def test_parts_of_a_transformer_are_measured_on_one_block():
    config = TransformerConfig(num_layers=3, hidden_size=32, intermediate_size=64, vocab_size=300)
    before = torch.get_rng_state()
    embedding, *blocks, head = measured_costs(config, 2, 8, rounds=1, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(blocks) == 3
    assert len(set(blocks)) == 1
    assert embedding.backward == 0 < min(embedding.weight, head.forward, head.backward, head.weight)
    first = stage_costs.joined([embedding, *blocks], first=True)
    assert first.step == pytest.approx(embedding.step + 3 * blocks[0].step)
    assert first.backward == 0  # torch's first stage runs its whole backward in the weights' pass
    assert stage_costs.joined(blocks, first=False).backward == pytest.approx(3 * blocks[0].backward)
    assert stage_costs.slowest([Costs(1, 5, 2), Costs(3, 4, 2)]) == Costs(3, 5, 2)


def test_the_command_draws(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="pictures want matplotlib (the extra 'bench')")
    path = tmp_path / "deep" / "zbv.png"
    assert _run("zbv", "--stages", "2", "--microbatches", "4", "--draw", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = _run("zbv", "--draw", str(tmp_path / "zbv.png"))
    assert isinstance(result.exception, ImportError)
    assert "pip install 'shardfuse[bench]'" in str(result.exception)
    assert not (tmp_path / "zbv.png").exists()
