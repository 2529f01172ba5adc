"""``shardfuse.explain``: what it says is what then runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import shardfuse
from shardfuse.kernels.runtime import dispatch

CONFIG = shardfuse.TransformerConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2
)


def _rows(explanation: Any) -> dict[str, Any]:
    return {row.path: row for row in explanation.rows}


@pytest.mark.parametrize(
    ("model", "x", "error", "message"),
    [
        ("x", None, TypeError, r"explain: model is a str: expected an nn.Module"),
        (nn.Linear(2, 2), "gpu", ValueError, r"explain: x='gpu': expected an input, or a device such as 'cpu'"),
        (nn.Linear(2, 2), [1.0], ValueError, r"explain: x=\[1.0\]: expected an input"),
    ],
)
def test_what_cannot_be_explained(model: Any, x: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        shardfuse.explain(model, x)


def test_tells_every_layer_once_and_counts_parameters():
    model = shardfuse.ParallelTransformer(CONFIG)
    explanation = shardfuse.explain(model)
    rows = _rows(explanation)
    again = [row for row in explanation.rows if row.op == "apply_rope"]  # attention's second row
    assert len(rows) == len(explanation.rows) - len(again) == 12
    assert all(row.layers == (3 if ".*." in path else 1) for path, row in rows.items())
    total = sum(param.numel() for param in model.parameters())
    assert sum(row.parameters * row.layers for row in rows.values()) == total
    assert explanation.parameters == explanation.parameters_per_rank == total
    fc = rows["model.layers.*.mlp.c_fc"]
    assert (fc.kind, fc.op, fc.layout) == ("ColumnParallelLinear", "linear_act", "weight [24, 16], bias [24]")
    assert [row.path for row in again] == ["model.layers.*.self_attn"]
    assert [row.op for row in explanation.rows if row.path == "model.layers.*.self_attn"] == ["attention", "apply_rope"]


def test_says_what_runs_and_why():
    x = torch.randn(2, 16)
    for impl, why in (("auto", "torch's own product|no table says|oneDNN|this torch"), ("reference", "asked for")):
        mlp = shardfuse.ParallelMLP(16, 24, impl=impl)
        dispatch.counts.clear()
        mlp(x)
        (ran,) = {impl for op, impl in dispatch.counts if op == "linear_act"}
        for row in shardfuse.explain(mlp, x).rows:
            assert row.runs == ran
            assert re.match(why, row.why)


def test_says_what_would_run_elsewhere(monkeypatch: pytest.MonkeyPatch):
    mlp = shardfuse.ParallelMLP(16, 24, impl="triton")
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.setattr(dispatch, "_TRITON_VERSION", "3.7.1")
    assert {(row.runs, row.why) for row in shardfuse.explain(mlp, "cuda").rows} == {("triton", "asked for")}
    wide = shardfuse.ParallelMLP(16, 24, dtype=torch.float64)
    assert "no kernel" in shardfuse.explain(wide, "cuda").rows[0].why
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.setattr(dispatch, "_TRITON_VERSION", None)
    for row in shardfuse.explain(mlp, "cuda").rows:
        assert row.runs == "refused"
        assert "Triton is not installed" in row.why


def test_lists_foreign_modules_that_own_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), shardfuse.ParallelMLP(4, 8))
    rows = _rows(shardfuse.explain(model))
    assert list(rows) == ["0", "2.c_fc", "2.c_proj"]
    assert (rows["0"].kind, rows["0"].runs, rows["0"].layout) == ("Linear", "torch", "weight [4, 3], bias [4]")
    assert _rows(shardfuse.explain(shardfuse.RMSNorm(4)))["(model)"].parameters == 4


def test_tied_weights_count_once():
    config = shardfuse.TransformerConfig(vocab_size=40, hidden_size=16, num_layers=1, num_heads=4, tie_embeddings=True)
    model = shardfuse.ParallelTransformer(config)
    assert shardfuse.explain(model).parameters == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_fits_the_terminal_and_says_a_reason_once(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    explanation = shardfuse.explain(shardfuse.ParallelTransformer(CONFIG))
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= columns
    joined = " ".join(text.split())
    for number, why in enumerate(dict.fromkeys(row.why for row in explanation.rows), 1):
        assert joined.count(why) == 1
        assert f"[{number}]" in text
    for row in explanation.rows:
        assert row.where in text.replace("\n", "")


def test_prints_as_text_and_as_a_table():
    explanation = shardfuse.explain(shardfuse.ParallelTransformer(CONFIG))
    text = str(explanation)
    assert text.startswith("cpu, 1 tensor-parallel rank, ")
    assert "model.layers.0-2.post_attention_layernorm" in text
    assert "weight [16, 16], bias [16]" in text
    assert "3 x 272" in text
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    console.print(explanation)
    assert "weight [40, 16]" in console.export_text()


def _ranks_body(rank: int, world: int) -> tuple[int, int, str, str, str]:
    from shardfuse.parallel.core.mesh import tp_group

    model = shardfuse.ParallelTransformer(CONFIG, mesh=tp_group(dist.group.WORLD))
    explanation = shardfuse.explain(model)
    rows = _rows(explanation)
    layouts = (rows[f"model.layers.*.{name}"].layout for name in ("mlp.c_fc", "mlp.c_proj", "input_layernorm"))
    return explanation.ranks, explanation.parameters - explanation.parameters_per_rank, *layouts


@pytest.mark.ranks
def test_tells_how_parameters_are_split(ranks: Any):
    per_layer = 2 * 16 * 16 + 2 * 8 * 16 + 16 + 2 * 8 + 2 * 24 * 16 + 24  # all but norms and row biases
    split = 3 * per_layer + 2 * 40 * 16
    for result in ranks(2, _ranks_body):
        assert result == (
            2,
            split // 2,
            "weight [24/2, 16], bias [24/2]",
            "weight [16, 24/2], bias [16]",
            "weight [16], bias [16]",
        )


@pytest.mark.parametrize("interpreting", [False, True])
def test_auto_on_a_cpu_names_what_would_run_the_kernel(monkeypatch: pytest.MonkeyPatch, interpreting):
    """The interpreter alone would not: auto takes the reference with it, too."""
    monkeypatch.setattr(dispatch, "_INTERPRETING", interpreting)
    monkeypatch.setattr(dispatch, "_AUTO", "auto")
    choice = dispatch._decide("op", torch.device("cpu"), "auto", None, None, None)
    assert choice.impl == "reference"
    assert "impl='triton'" in choice.reason
    assert "TRITON_INTERPRET" not in choice.reason


@pytest.mark.parametrize(
    ("triton", "numpy", "remedy"),
    [
        ("3.6.0", "2.5.2", "pip install 'numpy<2.4'"),
        ("3.6.0", "2.3.5", None),
        ("3.7.0", "2.5.2", None),
        ("3.8.0", "2.4.6", None),
        ("3.9.0", "2.3.5", "pip install 'triton<3.9'"),
        ("unknown", "2.5.2", None),
    ],
)
def test_an_interpreter_that_breaks_is_refused(monkeypatch: pytest.MonkeyPatch, triton, numpy, remedy):
    reason = dispatch._why_no_interpreter(triton, numpy)
    assert (reason is None) == (remedy is None)
    monkeypatch.setattr(dispatch, "_INTERPRETER_BREAKS", reason)
    monkeypatch.setattr(dispatch, "_INTERPRETING", True)
    monkeypatch.setattr(dispatch, "_TRITON_VERSION", triton)
    if remedy is None:
        assert dispatch._decide("op", torch.device("cpu"), "triton", None, None, None).triton
        return
    with pytest.raises(RuntimeError, match=re.escape(remedy)):
        dispatch._decide("op", torch.device("cpu"), "triton", None, None, None)
    assert dispatch._why_not_triton(torch.device("cuda")) != reason  # a GPU needs no interpreter
