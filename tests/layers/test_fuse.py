"""``fuse``: foreign models that run our ops, against themselves as they were."""

from __future__ import annotations

import copy
import io
import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import ARCHITECTURES, foreign, tokens
from fused_models import PAGE, page
from model_scan import OUTCOMES, RECORD, scan
from torch import nn

from shardfuse import explain
from shardfuse.bench.harness.gate import join_layers
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.norm import layer_norm
from shardfuse.layers.fuse import Fused, Match, fuse, stats, unfuse
from shardfuse.layers.fuse.matchers.head import Logits
from shardfuse.layers.fuse.matchers.head import _logits as lazy_logits
from shardfuse.layers.fuse.matchers.head import _loss as lazy_loss
from shardfuse.layers.fuse.report import stayed

transformers = pytest.importorskip("transformers")

TERMS = 2048  # two layers, forward and backward, and the norms between: what sums that follow one another come to
EVERY_DAY = ("llama", "gemma3_text", "phi3", "gpt2", "falcon")
# The forward calls that one run of the fused model makes: of linear_act, gated_linear, the norms, apply_rope.
CALLS = {
    "bloom": (4, 0, 6, 0),
    "cohere": (4, 2, 3, 2),
    "falcon": (4, 0, 3, 2),
    "gemma2": (4, 2, 9, 2),
    "gemma3_text": (4, 2, 13, 2),
    "gpt2": (4, 0, 5, 0),
    "gpt_neox": (4, 0, 5, 2),
    "gpt_oss": (2, 0, 5, 2),
    "gptj": (6, 0, 3, 4),
    "granite": (4, 2, 5, 2),
    "llama": (4, 2, 5, 2),
    "mistral": (4, 2, 5, 2),
    "mixtral": (2, 0, 5, 2),
    "mpt": (4, 0, 5, 0),
    "olmo2": (4, 2, 9, 2),
    "opt": (4, 0, 5, 0),
    "phi": (6, 0, 3, 2),
    "phi3": (2, 2, 5, 2),
    "qwen2": (4, 2, 5, 2),
    "qwen3": (4, 2, 9, 2),
    "stablelm": (4, 2, 5, 2),
    "starcoder2": (6, 0, 5, 2),
}
DAILY_AND_NIGHTLY = [
    pytest.param(kind, marks=[] if kind in EVERY_DAY else [pytest.mark.nightly]) for kind in ARCHITECTURES
]


def _trained(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """Logits, loss, gradients by layer, and the parameters after ``steps`` of AdamW.

    The gradient of a key's bias is rounding alone. AdamW would make steps of lr of it, but for its eps.
    """
    model.train()
    batch = tokens()
    found: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    for step in range(steps):
        torch.manual_seed(step)  # dropout
        out = model(batch, labels=batch, use_cache=False)
        optimizer.zero_grad()
        out.loss.backward()
        if step == 0:
            found = {"logits": out.logits.detach(), "loss": out.loss.detach()}
            grads = {f"d_{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found |= join_layers(grads)
        optimizer.step()
    return found | {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", DAILY_AND_NIGHTLY)
def test_trains_as_the_stock_model(kind: str):
    stock, ours, oracle = foreign(kind), foreign(kind), foreign(kind, torch.float64)
    names = list(ours.state_dict())
    assert fuse(ours) is ours
    assert list(ours.state_dict()) == names
    expected, low, exact = _trained(ours, 10), _trained(stock, 10), _trained(oracle, 10)
    assert expected.keys() == exact.keys()
    verdicts = [accuracy.judge(name, expected[name], low[name], exact[name], terms=TERMS) for name in exact]
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_generates_the_same_tokens_with_our_ops(kind: str):
    model, batch = foreign(kind), tokens()
    # No token twice: small random models repeat themselves, which a wrong model may do as well.
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "no_repeat_ngram_size": 1,
    }
    expected, logits = model.generate(batch, **options), model(batch).logits
    fuse(model)
    assert torch.equal(model.generate(batch, **options), expected)
    with stats(model) as ran:
        model(batch)
    norms = ran.total_of("rms_norm") + ran.total_of("layer_norm")
    assert (ran.total_of("linear_act"), ran.total_of("gated_linear"), norms, ran.total_of("apply_rope")) == CALLS[kind]
    assert all(path for path, _, _ in ran)  # each call by the path of its module
    unfuse(model)
    assert not any(isinstance(module, Fused) for module in model.modules())
    assert torch.equal(model(batch).logits, logits)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(5)], ids=str)
def test_a_loss_without_logits(kind: str, items: Any):
    """Plain, soft-capped and scaled, as a mean and as Trainer's sum. Code that reads the logits gets them."""
    stock, model, batch = foreign(kind, torch.float64).train(), fuse(foreign(kind, torch.float64)).train(), tokens()
    labels = batch.masked_fill(batch % 5 == 0, -100)
    given = {} if items is None else {"num_items_in_batch": items}
    expected = stock(batch, labels=labels, use_cache=False, **given)
    with stats(model) as ran:
        out = model(batch, labels=labels, use_cache=False, **given)
    assert ran["", "linear_cross_entropy", "reference"] == 1
    assert isinstance(out.logits, Logits)
    assert out.logits.shape == expected.logits.shape
    assert out.logits.float()._value is None  # as accelerate asks of all that is in 16 bits
    assert out.logits._value is None
    torch.testing.assert_close(out.loss, expected.loss.double(), rtol=1e-5, atol=0, check_dtype=False)
    torch.testing.assert_close(out.logits.argmax(-1), expected.logits.argmax(-1))
    for each in (out, expected):  # a loss of the user's own
        each.logits.square().mean().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert accuracy.relative_error(ours.grad, theirs.grad) < 1e-5


def test_a_loss_of_logits_that_no_op_forms_has_its_gradients():
    """Squashed by a tanh without a soft-cap behind it: the stock loss, of logits that are computed for it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head, labels = nn.Linear(8, 16).double(), torch.arange(10).view(2, 5)
    found = []
    for logits_of, loss_of in ((partial(lazy_logits, head), lazy_loss), (head, ForCausalLMLoss)):
        hidden = torch.linspace(-1, 1, 80, dtype=torch.float64).view(2, 5, 8).requires_grad_()
        loss = loss_of(torch.tanh(logits_of(hidden)), labels, vocab_size=16)
        found.append((loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight, head.bias])))
    for ours, theirs in zip(*found, strict=True):
        assert accuracy.relative_error(ours, theirs) < 1e-6


@torch.no_grad()
def test_logits_of_weights_that_changed_are_refused():
    model, batch = fuse(foreign("llama")).train(), tokens()
    with torch.enable_grad():
        early, late = (model(batch, labels=batch, use_cache=False) for _ in range(2))
    kept = early.logits.clone()
    model.lm_head.weight.data.mul_(1.01)
    assert torch.equal(early.logits, kept)
    with pytest.raises(RuntimeError, match=r"read out\.logits before optimizer\.step\(\)"):
        late.logits.argmax()


def test_another_loss_function_is_left_alone():
    model, batch = fuse(foreign("llama")).train(), tokens()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    out = model(batch, labels=batch)
    assert type(out.logits) is torch.Tensor
    assert torch.equal(out.loss, out.logits.sum())
    assert model.why_stock() == "its loss_function is not transformers' for causal language models"
    del model._loss_function
    model.lm_head = Doubled(32, 64, bias=False)
    assert model.why_stock() == "lm_head is a Doubled"
    assert type(model(batch, labels=batch).logits) is torch.Tensor


def _sharded(rank: int, world: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    stock, model = foreign("llama").train(), fuse(foreign("llama")).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ValueError, match="fully_shard gives one"):
        unfuse(model)
    batch = tokens(2 * world)
    with stats(model) as ran:
        for each, rows in ((stock, batch), (model, batch[2 * rank : 2 * rank + 2])):
            each(rows, labels=rows, use_cache=False).loss.backward()
    assert ran["model.layers.0.mlp", "gated_linear", "reference"] == ran["", "linear_cross_entropy", "reference"] == 1
    pairs = zip(model.parameters(), stock.parameters(), strict=True)
    return [float(accuracy.relative_error(ours.grad.full_tensor(), theirs.grad)) for ours, theirs in pairs]


@pytest.mark.ranks
def test_fused_before_fsdp2(ranks: Any):
    for errors in ranks(2, _sharded):
        assert max(errors) < 1e-5


def test_other_models_of_the_class_stay_as_they_are():
    one, other = foreign("llama"), foreign("llama")
    fuse(one)
    assert isinstance(one.model.norm, Fused)
    assert isinstance(one.model.norm, type(other.model.norm))
    assert not any(isinstance(module, Fused) for module in other.modules())
    assert type(one.model.norm).__name__ == "LlamaRMSNorm"


def test_twice_is_once_and_copies_are_fused():
    model, batch = fuse(fuse(foreign("llama"))), tokens()
    expected = model(batch).logits
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    for twin in (copy.deepcopy(model), torch.load(kept, weights_only=False)):
        assert sum(isinstance(m, Fused) for m in twin.modules()) == sum(isinstance(m, Fused) for m in model.modules())
        assert torch.equal(twin(batch).logits, expected)
    unfuse(model)
    assert "_match" not in model.model.norm.__dict__


def test_filter_fn_and_strict():
    model = foreign("llama")
    fuse(model, filter_fn=lambda module, path: "layers.1" not in path)
    assert [isinstance(layer.mlp, Fused) for layer in model.model.layers] == [True, False]
    fuse(model, strict=True)
    with pytest.raises(ValueError, match="experts, or other parameters") as error:
        fuse(foreign("gpt_oss"), strict=True)
    assert "model.layers.0.mlp.experts (GptOssExperts)" in str(error.value)
    with pytest.raises(TypeError, match=r"model is a list: expected an nn\.Module"):
        fuse([])  # type: ignore[arg-type]


def test_meta_models_and_weights_loaded_later():
    model, stock = foreign("phi3", device="meta"), foreign("phi3")
    fuse(model)
    model.load_state_dict(stock.state_dict(), assign=True)
    for name, buffer in stock.named_buffers():
        model.get_submodule(name.rpartition(".")[0]).register_buffer(name.rpartition(".")[2], buffer)
    batch = tokens()
    torch.testing.assert_close(model(batch).logits, stock(batch).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_compiles_without_a_graph_break(kind: str):
    model, batch = fuse(foreign(kind)), tokens()
    expected = model(batch, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch, use_cache=False).logits, expected)
    model.train()
    compiled(batch, use_cache=False).logits.square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_gradient_checkpointing_and_autocast():
    stock, model, batch = foreign("opt"), fuse(foreign("opt")), tokens()
    grads = []
    for each in (stock, model):
        each.train()
        each.gradient_checkpointing_enable()
        for module in each.modules():
            if isinstance(module, nn.Dropout) or hasattr(module, "dropout"):
                module.dropout = 0.0
        with torch.autocast("cpu", torch.bfloat16):
            each(batch, labels=batch, use_cache=False).loss.backward()
        grads.append(each.model.decoder.layers[0].fc1.weight.grad)
    assert accuracy.relative_error(grads[1], grads[0]) < 8 * torch.finfo(torch.bfloat16).eps


# ------------------------------------------------------------------------------------------ modules that change later


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.w2 = nn.Linear(12, 8)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w3(x) * F.silu(self.w1(x))) * self.scale


class Doubled(nn.Linear):
    """An adapter: not what nn.Linear computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_changed_since_runs_stock():
    model, x = fuse(Gated()), torch.randn(3, 8)
    assert model.why_stock() is None
    model.scale = 3.0
    assert model.why_stock() == "scale was 2.0 when it was fused, and is 3.0"
    torch.testing.assert_close(model(x), Gated.forward(model, x))
    model.scale = 2.0
    seen = []
    handle = model.w1.register_forward_hook(lambda *_: seen.append(1))
    assert model.why_stock() == "w1 has hooks"
    model(x)
    assert seen == [1]
    handle.remove()
    model.w1 = Doubled(8, 12, bias=False)
    assert model.why_stock() == "w1 is a Doubled"
    torch.testing.assert_close(model(x), Gated.forward(model, x))
    assert stayed(model)[0].why == "w1 is a Doubled"


class Twisted(nn.Module):
    """Looks like a feed-forward module and is none that we have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.kind == "tanh":
            return self.down_proj(torch.tanh(gate) * up)
        if self.kind == "read twice":
            return self.down_proj(F.silu(gate) * up + gate)
        if self.kind == "other input":
            return self.down_proj(F.silu(gate) * self.up_proj(x + 1))
        return self.down_proj(F.leaky_relu(gate))


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
@pytest.mark.parametrize("kind", ["tanh", "read twice", "other input", "leaky"])
def test_what_only_looks_alike_computes_what_it_did(kind: str):
    model, x = Twisted(kind), torch.randn(3, 8)
    expected = model(x)
    torch.testing.assert_close(fuse(model)(x), expected)
    with stats(model) as ran:
        model(x)
    assert ran.total_of("gated_linear") == 0
    if kind in ("tanh", "read twice", "leaky"):
        assert not isinstance(model, Fused)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.p = nn.Linear(8, 12), nn.Linear(12, 8), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.fc2(F.relu(self.fc1(x))), self.p, self.training)


def test_dropout_follows_the_mode():
    model, x = fuse(Dropping()), torch.randn(64, 8)
    assert isinstance(model, Fused)
    model.eval()
    torch.testing.assert_close(model(x), Dropping.forward(model, x))
    model.train()
    assert 0.2 < (model(x) == 0).float().mean() < 0.8


class _Doubling(Fused):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class _MatchesIdentity:
    fused = _Doubling

    def match(self, module: nn.Module) -> Match | None:
        return Match(("doubling",)) if type(module) is nn.Identity else None


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class _WithoutEps(Fused):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(layer_norm(x, self.norm.weight, self.norm.bias, eps=1.0))


class _MatchesNormed:
    fused = _WithoutEps

    def match(self, module: nn.Module) -> Match | None:
        return Match(("layer_norm(norm)",), {"norm": nn.LayerNorm}) if type(module) is Normed else None


def test_a_matcher_may_read_a_child_that_is_fused_itself():
    model, x = nn.Sequential(Normed()), torch.randn(3, 8)
    expected = model(x)
    with pytest.raises(ValueError, match=r"fuse: 0, fused by .*_MatchesNormed: error .* > budget"):
        fuse(model, matchers=[_MatchesNormed()], check=x)
    fuse(model, matchers=[_MatchesNormed()])
    assert isinstance(model[0].norm, Fused)
    with stats(model) as ran:
        assert not torch.allclose(model(x), expected)
    assert ran == {("0", "layer_norm", "reference"): 1}
    unfuse(model)
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
def test_a_forward_of_its_own_keeps_a_module_stock():
    model = Gated()
    stock = model.forward
    model.forward = lambda x: stock(x)  # as accelerate's hooks do
    assert not isinstance(fuse(model), Fused)
    assert "fuse before" in stayed(model)[0].why
    del model.forward
    fuse(model)
    assert model.why_stock() is None
    model.w2.forward = model.w2.forward
    assert model.why_stock() == "w2 has a forward of its own"


def test_explain_says_what_runs_where_and_what_stayed():
    model = fuse(Gated())
    rows = {(row.path, row.op): (row.runs, row.why) for row in explain(model).rows}
    assert rows["(model)", "gated_linear(w1, w3; silu)"][0] == rows["(model)", "linear_act(w2)"][0] == "reference"
    assert rows["w1", ""] == ("with its parent", "the model")
    model.scale = 3.0
    rows = {row.path: (row.runs, row.why) for row in explain(model).rows}
    assert rows["w1"] == ("torch", "a product by itself: torch's library runs it")
    assert explain(nn.Linear(2, 2)).rows[0].why == "not a layer of this package"
    assert json.loads(json.dumps(explain(model).record()))["rows"][0]["path"] == "w1"


def test_the_page_of_models_is_what_was_found():
    assert page() == PAGE.read_text(), "run python tests/support/fused_models.py --write"


def test_own_matchers_and_the_check():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Identity()), torch.randn(3, 8)
    expected = model(x)
    with pytest.raises(ValueError, match=r"fuse: 1, fused by .*: error .* > budget .*; nothing was changed"):
        fuse(model, matchers=[_MatchesIdentity()], check=x)
    assert torch.equal(model(x), expected)
    fuse(model, matchers=[_MatchesIdentity()])
    assert torch.equal(model(x), 2 * expected)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_the_check_passes_with_a_cache_among_the_arguments(kind: str):
    model, batch = foreign(kind), tokens()
    fuse(model, check={"input_ids": batch})
    assert sum(isinstance(module, Fused) for module in model.modules()) > 6
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.nightly(seconds=100)
def test_every_causal_language_model_of_transformers():
    """None comes to wrong numbers, and none is worse off than the record says."""
    record = json.loads(RECORD.read_text())
    version = record.pop("transformers")
    if version != transformers.__version__:
        pytest.skip(f"the record is of transformers {version}, and this is {transformers.__version__}")
    before = {name: OUTCOMES.index(outcome) for outcome, names in record.items() for name in names}
    worse = [
        f"{name}: {OUTCOMES[before[name]]} before, now {outcome}: {remark}"
        for name, outcome, remark in scan(sorted(before))
        if OUTCOMES.index(outcome) > before[name] and outcome != "timed out"
    ]
    assert worse == []
    assert record["wrong"] == {}
