"""``fuse`` on attention that a module spells out: it runs torch's SDPA where that is the same, and stock elsewhere."""

from __future__ import annotations

import gc
import linecache
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import foreign, tokens
from spelled_out import (
    AsksForTheType,
    Capped,
    Detached,
    HidesItsGraph,
    InPlace,
    LearnedBias,
    ManySteps,
    MaskedWeights,
    OtherAxis,
    OtherScale,
    Overwrites,
    OverwritesScores,
    Plain,
    ScaledWeights,
    SoftMask,
    Temperature,
    TwoSoftmaxes,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import explain
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.fuse import Fused, fuse, stats, unfuse
from shardfuse.layers.fuse.spelled_out import additive_mask
from shardfuse.layers.fuse.spelled_out.eager_attention import _source, _waiting
from shardfuse.layers.fuse.spelled_out.scores import Weights

pytest.importorskip("transformers")

KINDS = ("bloom", "mpt", "gptj", "codegen", "gpt_neo")
LAYERS = 2
TERMS = 2048
GREEDY: dict[str, Any] = {
    "max_new_tokens": 6,
    "use_cache": True,
    "do_sample": False,
    "eos_token_id": None,
    "no_repeat_ngram_size": 1,
}
IDS = tokens()
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[0, :4] = RIGHT[0, -3:] = 0


class _Count(TorchDispatchMode):
    """How often SDPA and softmax ran, and SDPA's masks."""

    def __enter__(self) -> Any:
        self.calls: Counter[str] = Counter()
        self.masks: list[torch.Tensor | None] = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(F, "scaled_dot_product_attention", partial(self.sdpa, F.scaled_dot_product_attention))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.patch.undo()
        super().__exit__(*args)

    def sdpa(self, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls["sdpa"] += 1
        self.masks.append(kwargs.get("attn_mask"))
        return function(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls["softmax"] += func is torch.ops.aten._softmax.default
        return func(*args, **(kwargs or {}))


def _reason(model: nn.Module) -> str:
    """What ``explain`` says of the first attention."""
    return next(row.why for row in explain(model).rows if row.op == "attention")


def _run(model: nn.Module, mask: torch.Tensor | None, **options: Any) -> dict[str, torch.Tensor]:
    """Logits where there are tokens, loss and gradients."""
    labels = IDS if mask is None else IDS.masked_fill(mask == 0, -100)
    out = model(IDS, attention_mask=mask, labels=labels, use_cache=False, **options)
    out.loss.backward()
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits[labels >= 0].detach(), "loss": out.loss.detach(), **grads}


def _judge(ours: Any, low: Any, exact: Any, **options: Any) -> None:
    assert ours.keys() == low.keys() == exact.keys()
    verdicts = [accuracy.judge(name, ours[name], low[name], exact[name], terms=TERMS, **options) for name in exact]
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []


@pytest.mark.parametrize("mask", [None, RIGHT, LEFT], ids=["all", "right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_the_stock_model(kind: str, mask: torch.Tensor | None):
    stock, ours, oracle = foreign(kind).train(), fuse(foreign(kind)).train(), foreign(kind, torch.float64).train()
    with _Count() as count, stats(ours) as ran:
        found = _run(ours, mask)
    expected = _run(stock, mask)
    # In fp64 some stock models have NaN for queries that see nothing.
    exact = {n: x.double() for n, x in expected.items()} if mask is LEFT else _run(oracle, mask)
    _judge(found, expected, exact)
    if mask is LEFT:  # the gradients of queries that see nothing are the stock ones
        assert count.calls == Counter(softmax=LAYERS)
        assert "sees no key" in _reason(ours)
    else:
        assert count.calls == Counter(sdpa=LAYERS)
        assert ran.total_of("attention", "sdpa") == LAYERS
        assert "torch's scaled_dot_product_attention" in _reason(ours)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_generates_the_same_tokens(kind: str):
    """From a padded batch, each row of which is as long; then not a single bit differs from before."""
    model = foreign(kind)
    options = {**GREEDY, "attention_mask": LEFT, "pad_token_id": 0}
    expected, logits = model.generate(IDS, **options), model(IDS, attention_mask=LEFT).logits
    fuse(model, check={"input_ids": IDS, "attention_mask": LEFT})
    with _Count() as count:
        assert torch.equal(model.generate(IDS, **options), expected)
    assert count.calls == Counter(sdpa=LAYERS, softmax=LAYERS * (GREEDY["max_new_tokens"] - 1))  # one query: stock
    assert "torch's scaled_dot_product_attention" in _reason(model)
    torch.testing.assert_close(model(IDS, attention_mask=LEFT).logits, logits)  # padding has its numbers, too
    unfuse(model)
    assert not any(isinstance(module, Fused) for module in model.modules())
    assert torch.equal(model(IDS, attention_mask=LEFT).logits, logits)


@pytest.mark.parametrize("kind", ["mpt", pytest.param("bloom", marks=pytest.mark.nightly)])
@torch.no_grad()
def test_generates_with_a_static_cache(kind: str):
    model, options = foreign(kind), {**GREEDY, "cache_implementation": "static", "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    assert torch.equal(fuse(model).generate(IDS, **options), expected)


_RATE = {"gptj": "attn_pdrop", "bloom": "attention_dropout"}


@pytest.mark.parametrize("kind", _RATE)
def test_dropped_weights_are_the_stock_ones(kind: str):
    stock, ours = (foreign(kind, **{_RATE[kind]: 0.3}).train() for _ in range(2))
    fuse(ours)
    torch.manual_seed(0)
    expected = _run(stock, RIGHT)
    torch.manual_seed(0)
    with _Count() as count:
        found = _run(ours, RIGHT)
    assert count.calls == Counter(softmax=LAYERS)
    assert "weights are dropped" in _reason(ours)
    _judge(found, expected, {name: value.double() for name, value in expected.items()})
    with _Count() as count:
        ours.eval()(IDS)
    assert count.calls == Counter(sdpa=LAYERS)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_asked_for(kind: str):
    """As numbers and with their gradients."""
    stock, ours = foreign(kind), fuse(foreign(kind))
    expected, found = (model(IDS, output_attentions=True, use_cache=False).attentions for model in (stock, ours))
    with torch.no_grad():
        assert found[1].mean().isfinite()  # who looks first does not take the graph away
    for theirs, mine in zip(expected, found, strict=True):
        torch.testing.assert_close(mine * 1, theirs)
        for each in (theirs, mine):
            each.square().sum().backward(retain_graph=True)
    for (name, mine), theirs in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_weights_out_of_a_reentrant_checkpoint_are_refused():
    model = fuse(foreign("mpt")).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    weights = model(IDS, output_attentions=True, use_cache=False).attentions[0]
    assert isinstance(weights, Weights)
    assert weights.shape == (2, 4, 10, 10)
    with torch.no_grad():
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 10))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        weights.sum()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["gptj", pytest.param("bloom", marks=pytest.mark.nightly)])
def test_checkpointed(kind: str, reentrant: bool):
    stock, ours = foreign(kind).train(), fuse(foreign(kind)).train()
    for model in (stock, ours):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with _Count() as count:
        found = _run(ours, RIGHT)
    assert count.calls == Counter(sdpa=2 * LAYERS)
    expected = _run(stock, RIGHT)
    _judge(found, expected, {name: value.double() for name, value in expected.items()})


@pytest.mark.parametrize(
    "kind", ["mpt", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS if kind != "mpt")]
)
def test_under_autocast(kind: str):
    models = foreign(kind).train(), fuse(foreign(kind)).train()
    oracle = _run(foreign(kind, torch.float64).train(), RIGHT)
    with torch.autocast("cpu", torch.bfloat16), _Count() as count:
        low, found = (_run(model, RIGHT) for model in models)
    assert count.calls == Counter(sdpa=LAYERS, softmax=LAYERS)
    _judge(found, low, oracle, computed=torch.bfloat16, roundings=24)


@pytest.mark.parametrize(
    "kind", ["mpt", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS if kind != "mpt")]
)
def test_compiled_in_one_graph(kind: str):
    stock, model, nodes = foreign(kind), fuse(foreign(kind)), Counter[str]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes.update(getattr(node.target, "__name__", "") for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for ids, mask in ((IDS, None), (IDS[:, :9], LEFT[:, :9])):
        nodes.clear()
        seen = torch.ones_like(ids) if mask is None else mask
        logits, expected = (each(ids, attention_mask=mask, use_cache=False).logits for each in (compiled, stock))
        torch.testing.assert_close(logits[seen > 0], expected[seen > 0])
        assert nodes["scaled_dot_product_attention"] == LAYERS
    torch._dynamo.reset()


def test_one_mask_for_all_layers_that_nobody_keeps():
    model = fuse(foreign("bloom")).train()
    with _Count() as count:
        loss = model(IDS, attention_mask=RIGHT, labels=IDS, use_cache=False).loss
    one, other = (mask for mask in count.masks if mask is not None)
    assert one.data_ptr() == other.data_ptr()
    del one, other, count, loss
    gc.collect()
    assert len(additive_mask._kept) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_no_scores(kind: str):
    def kept(model: nn.Module) -> int:
        squares = []

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.is_floating_point() and x.shape[-2:] == (10, 10):
                squares.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(IDS, attention_mask=RIGHT, labels=IDS, use_cache=False).loss
        loss.backward()
        return len({x.data_ptr() for x in squares})

    layered = LAYERS if kind == "gpt_neo" else 1  # each of its layers has a mask of its own
    assert kept(fuse(foreign(kind)).train()) == layered
    assert kept(foreign(kind).train()) >= LAYERS


def test_a_mask_that_was_overwritten_is_made_anew():
    mask = torch.zeros(1, 1, 3, 3)
    first = additive_mask.shared_mask((("+", mask),), torch.float32)
    assert additive_mask.shared_mask((("+", mask),), torch.float32) is first
    mask[..., 0] = -1.0
    assert float(additive_mask.shared_mask((("+", mask),), torch.float32).sum()) == -3


@torch.no_grad()
def test_positions_keep_their_precision_in_16_bits():
    """MPT adds biases in fp32 that are large for early queries: what counts is their difference."""
    length = 512
    bias = torch.linspace(0.5, 0.01, 4).view(4, 1, 1) * torch.arange(1 - length, 1).view(1, 1, length)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    x = torch.randn(1, length, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    low, exact = (foreign("mpt", dtype).transformer.blocks[0].attn for dtype in (torch.bfloat16, torch.float64))
    for param, rounded in zip(exact.parameters(), low.parameters(), strict=True):
        param.copy_(rounded)
    expected, oracle = (each(y, bias, None, future)[0] for each, y in ((low, x), (exact, x.double())))
    with _Count() as count:
        found = fuse(low)(x, bias, None, future)[0]
    assert count.calls == Counter(sdpa=1)
    verdict = accuracy.judge("attention", found, expected, oracle, terms=length, roundings=3)
    assert verdict.ok, verdict


def test_falcon_with_alibi_runs_its_own_sdpa():
    model = foreign("falcon", alibi=True)
    with _Count() as count:
        expected = model(IDS, attention_mask=LEFT).logits
    fuse(model)
    with _Count() as again:
        torch.testing.assert_close(model(IDS, attention_mask=LEFT).logits, expected)
    assert count.calls == again.calls == Counter(sdpa=LAYERS)
    assert not any("attention" in module._match.ops for module in model.modules() if isinstance(module, Fused))


# ---------------------------------------------------------------------------------------- modules of a user's own


def _compare(kind: type[Plain], expected: Counter[str]) -> Any:
    torch.manual_seed(0)
    stock = kind()
    ours = kind()
    ours.load_state_dict(stock.state_dict())
    fuse(ours)
    x = torch.randn(2, 6, 16)
    results = []
    for module in (stock, ours):
        with _Count() as count:
            y = module(x)
        (y.square().sum() + 0 * module.temperature).backward()
        results.append([y, *(param.grad for param in module.parameters())])
    torch.testing.assert_close(*results)
    assert count.calls == expected
    return ours


@pytest.mark.parametrize("kind", [Plain, OtherScale, ManySteps, LearnedBias])
def test_hand_written_attention_runs_sdpa(kind: type[Plain]):
    ours = _compare(kind, Counter(sdpa=1))
    assert "attention" in ours._match.ops


@pytest.mark.parametrize(
    "kind", [OtherAxis, SoftMask, TwoSoftmaxes, ScaledWeights, MaskedWeights, Capped, Temperature, InPlace]
)
def test_what_computes_something_else_stays_stock(kind: type[Plain]):
    ours = _compare(kind, Counter(softmax=2 if kind is TwoSoftmaxes else 1))
    assert "is done with its scores" in _reason(ours)


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
@pytest.mark.parametrize("kind", [Detached, AsksForTheType])
def test_what_scores_cannot_stand_for_is_not_matched(kind: type[Plain]):
    assert not isinstance(_compare(kind, Counter(softmax=1)), Fused)


def test_an_autograd_function_of_scores_is_refused():
    with pytest.raises(RuntimeError, match="filter_fn"):
        fuse(HidesItsGraph())(torch.randn(2, 6, 16))


@torch.no_grad()
def test_what_is_overwritten_is_refused():
    with pytest.raises(RuntimeError, match="overwrites scores"):
        fuse(OverwritesScores())(torch.randn(2, 6, 16))
    with pytest.raises(RuntimeError, match="have been overwritten"):
        fuse(Overwrites())(torch.randn(2, 6, 16))


def test_code_that_is_not_its_source_stays_stock(tmp_path: Any):
    """As where a file was edited after its import."""
    path = tmp_path / "edited.py"
    path.write_text("import torch\ndef attention(q, k, v):\n    return torch.softmax(q @ k.mT, -1) @ v\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert _waiting(scope["attention"]) is not None
    path.write_text(path.read_text().replace("-1", "-2"))
    linecache.checkcache(str(path))
    _source.cache_clear()
    assert _waiting.__wrapped__(scope["attention"]) is None
