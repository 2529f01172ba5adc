"""What ``explain`` tells of memory: figures derived by hand from the shapes, and a model that stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import counted
import pytest
import torch
from foreign import foreign
from torch import nn

from shardfuse import explain
from shardfuse.bench.page import front
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.fuse import Fused, fuse
from shardfuse.layers.fuse.traffic import Both, Traffic, traffic

transformers = pytest.importorskip("transformers")
NEEDS_TRITON = pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")

B, S, D, F, V, H = 3, 8, 32, 48, 64, 8  # foreign.py's sizes
T, HEADS, KEYS = B * S, 4 * H, 2 * H  # features of all heads of queries, and of keys
FP32 = 4


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products in fp32 on a GPU run in the kernels only if they may round to tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def _counted(device: str, on: str = "cpu") -> dict[str, Both]:
    return traffic(fuse(foreign("llama", device=on)), torch.device(device), torch.ones(B, S, dtype=torch.long))


@NEEDS_TRITON
@pytest.mark.usefixtures("tf32")
def test_figures_of_a_gpu_by_hand():
    """In elements but for single bytes; what a norm returns is kept by who reads it."""
    found = _counted("cuda")
    norm = found["model.norm"]
    assert norm.stock.kept == FP32 * (2 * T * D + T)  # x, x / rms, 1 / rms
    assert norm.fused == Traffic(
        FP32 * (T * D + T), 1, FP32 * (2 * T * D + D + T)
    )  # reads x and weight, writes y, rstd
    mlp = found["model.layers.0.mlp"]
    assert mlp.stock.kept == FP32 * T * (D + 4 * F)  # x, gate, silu(gate), up and their product
    assert mlp.fused.kept == FP32 * T * (D + 3 * F)  # x, gate, up, their product
    assert (mlp.stock.ops, mlp.fused.ops) == (5, 2)
    assert mlp.stock.moved == FP32 * (3 * D * F + T * (3 * D + 3 * F + 2 * F + 3 * F))
    assert mlp.fused.moved == FP32 * (3 * D * F + T * (2 * D + 3 * F + F))
    attention = found["model.layers.1.self_attn"]
    assert attention.stock.kept == attention.fused.kept  # neither keeps anything for the rotation but tables
    assert attention.stock.ops - attention.fused.ops == 2 + 2 * 5 - 1  # one product of three; q and k in one launch
    whole = found[""]
    scores = T * (V + D)  # their log-softmax, hidden states
    assert whole.stock.kept == FP32 * scores + 8 * T + FP32  # shifted labels, the number of those that count
    assert whole.fused.kept == FP32 * (V * D + 2 * T * D + 1)  # formed gradients; hidden states for who reads logits
    assert found.keys() == {
        *("", "model.norm"),
        *(
            f"model.layers.{i}.{part}"
            for i in range(2)
            for part in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
        ),
    }


def test_figures_of_a_cpu_are_of_what_runs_there():
    found = _counted("cpu")
    mlp = found["model.layers.0.mlp"]
    assert mlp.fused == mlp.stock  # plain torch
    assert mlp.stock.kept == FP32 * T * (D + 4 * F)


@NEEDS_TRITON
def test_a_model_on_the_meta_device_is_counted_alike():
    assert _counted("cuda", on="meta") == _counted("cuda")


def test_attention_is_counted_with_what_it_gets_in_a_run(monkeypatch: pytest.MonkeyPatch):
    """Its mask and its keys' heads: transformers reads what positions say, and fake ones say nothing."""
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        mask = options.get("attn_mask", args[1] if len(args) > 1 else None)
        seen.append((mask is None, options.get("is_causal"), options.get("enable_gqa"), tuple(key.shape)))
        return attend(query, key, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model, tokens = fuse(foreign("llama")).train(), torch.ones(1, S, dtype=torch.long)
    model(tokens, labels=tokens, use_cache=False)
    real = list(dict.fromkeys(seen))
    seen.clear()
    traffic(model, torch.device("cuda"), tokens)
    assert list(dict.fromkeys(seen)) == real
    assert real[0][0], "a mask in a run"


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.register_buffer("last", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.norm(x)
        self.last = self.seen[0]
        return self.seen


@pytest.mark.parametrize(
    ("make", "x"),
    [(_Remembers, torch.randn(5, D)), (lambda: foreign("gpt2"), torch.ones(2, S, dtype=torch.long))],
    ids=["writes to itself", "gpt2"],
)
def test_the_model_stays_as_it_was(make: Callable[[], nn.Module], x: torch.Tensor):
    model = fuse(make()).eval()
    before = [(type(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    counts, drawn = dispatch.counts.copy(), torch.get_rng_state()
    explanation = explain(model, x)
    assert explanation.moved
    assert dispatch.counts == counts
    assert torch.equal(torch.get_rng_state(), drawn)
    for module, (kind, held, buffers) in zip(model.modules(), before, strict=True):
        assert type(module) is kind
        assert vars(module).keys() == held.keys()
        assert not module._forward_hooks
        assert not module.training
        assert all(module._buffers[name] is buffer for name, buffer in buffers.items())
    assert sum(isinstance(module, Fused) for module in model.modules()) > 0


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU at hand decides")
def test_a_gpu_that_is_not_there_is_hopper_whose_measurements_decide():
    """Above 64 tokens cuBLAS is faster there than the kernel of gated layers; what is kept stays the same."""
    model = fuse(foreign("llama", torch.bfloat16))

    def mlp(*batch: int) -> Traffic:
        found = traffic(model, torch.device("cuda"), torch.ones(batch, dtype=torch.long))
        return found["model.layers.0.mlp"].fused

    assert (mlp(1, 64).ops, mlp(1, 65).ops) == (2, 5)
    assert mlp(1, 65).kept == 65 * mlp(1, 64).kept / 64
    explained = explain(model, "cuda")
    assert str(explained).startswith("cuda (sm_90: there is no GPU here), ")
    (row,) = (row for row in explained.rows if row.op.startswith("gated_linear"))
    assert row.runs == "reference"
    assert "bench/results/nvidia-h200/gated.json" in row.why


@NEEDS_TRITON
@pytest.mark.usefixtures("tf32")
def test_explain_shows_it_where_it_is_asked_for():
    model = fuse(foreign("llama"))
    assert explain(model, "cuda").moved == ()
    explanation = explain(model, "cuda", batch=(B, S))
    whole = explanation.moved[-1]
    assert (whole.path, explanation.batch) == ("together", (B, S))
    assert whole.fused == sum((each.fused for each in explanation.moved[:-1]), Traffic())
    assert whole.fused.kept < whole.stock.kept
    assert whole.fused.ops < whole.stock.ops
    mlp = next(each for each in explanation.moved if each.path == "model.layers.*.mlp")
    assert (mlp.layers, mlp.stock.kept) == (2, 2 * FP32 * T * (D + 4 * F))
    text = str(explanation)
    assert f"a training forward of [{B}, {S}] as on cuda" in text
    assert "43.0 -> 33.8 kB" in text
    assert max(map(len, text[text.index("a training forward") :].splitlines())) <= 110
    record = json.loads(json.dumps(explanation.record()))
    assert record["moved"][-1]["fused"]["kept"] == whole.fused.kept


class _OfItsOwn(torch.Tensor):
    pass


def test_what_cannot_be_counted_says_why():
    experts = explain(fuse(foreign("mixtral")), batch=(1, 4))
    assert experts.moved == ()
    assert "cannot be counted on fake tensors: " in experts.not_counted
    assert experts.not_counted in " ".join(str(experts).split())
    assert explain(nn.Conv1d(1, 1, 1), torch.ones(1, 1, 4)).batch == ()  # nothing would be fused
    sharded = fuse(foreign("llama"))
    sharded.lm_head.weight = nn.Parameter(sharded.lm_head.weight.data.as_subclass(_OfItsOwn))
    assert "lm_head.weight is a _OfItsOwn: ask before" in explain(sharded, batch=(1, 4)).not_counted
    for wrong in (7, (0, 4), "4, 4"):
        with pytest.raises(ValueError, match=r"expected the shape of token ids, such as \(4, 2048\)"):
            explain(nn.Linear(2, 2), batch=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beside an input of \[1, 4\]: pass one of them"):
        explain(nn.Linear(2, 2), torch.ones(1, 4), batch=(1, 4))


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU at hand decides")
def test_the_committed_figures_are_counted():
    """Those of the README and of docs/fuse.md."""
    here, lines = counted.counted()
    filed, page = json.loads(front.COUNTED.read_text()), counted.PAGE.read_text()
    if here["versions"] != filed["versions"]:
        pytest.skip(f"the figures are of {filed['versions']}, installed are {here['versions']}")
    assert here == filed, "run python tests/support/counted.py --write"
    assert front.renewed(page, lines) == page, "run python tests/support/counted.py --write"
