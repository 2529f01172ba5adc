"""Runs of a model beside its real work leave its buffers and the random states as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import Engine, Request, explain, fuse
from shardfuse.layers.fuse.stages.cut import cut_of
from shardfuse.layers.fuse.stages.documents import why_mixed
from shardfuse.layers.trial import trial
from shardfuse.serving.graphs import Graphs, Run
from shardfuse.testing import tiny_model


class Counter(nn.Module):
    """Passes its input on, and keeps what running statistics and growing tables keep."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.tensor(float("nan")))
        self.register_buffer("table", torch.zeros(1))
        self.length = 1  # of the table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        self.calls += 1
        self.largest.copy_(x.detach().abs().max())
        if self.length < len(x):
            self.length, self.table = len(x), torch.zeros(len(x))
        return x


def _model() -> Any:
    model = copy.deepcopy(tiny_model(dtype=torch.float32, vocab_size=32))
    model.counter = Counter()
    model.register_forward_hook(lambda module, args, out: module.counter(out))
    return model


def test_buffers_and_random_states_are_put_back() -> None:
    counter, state = Counter(), torch.get_rng_state()
    calls, largest = counter.calls, counter.largest
    with contextlib.suppress(ZeroDivisionError), trial(counter, "no module"):
        counter(torch.ones(2))
        raise ZeroDivisionError
    assert counter.calls is calls
    assert counter.largest is largest
    assert calls == 0
    assert largest.isnan()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(counter.table) == counter.length == 2  # which belong together


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(1).expand(4),
        lambda: torch.ones(0),
        lambda: torch.ones(2, 3, dtype=torch.bool).t(),
    ],
    ids=["quantised", "coo", "csr", "conjugate", "expanded", "empty", "transposed"],
)
def test_buffers_of_any_kind_pass(made: Callable[[], torch.Tensor]) -> None:
    model, buffer = nn.Module(), made()
    model.register_buffer("held", buffer)
    with trial(model):
        pass
    assert model.held is buffer


def test_large_buffers_are_left_alone() -> None:
    model = nn.Module()
    model.register_buffer("weights", torch.zeros((1 << 20) + 1))
    with trial(model):
        model.weights.add_(1)
    assert model.weights[0] == 1


@pytest.mark.parametrize("captured", [False, True])
def test_an_engine_counts_the_steps_of_requests_alone(captured: bool) -> None:
    """What is tried at its construction, in its warm-up and before a capture is no step."""
    model = _model()

    def capture(compute: Run) -> tuple[torch.Tensor, Run]:
        return compute(), compute

    engine = Engine(model, num_blocks=32, block_size=4, enforce_eager=True)
    if captured:
        engine._runner.graphs = Graphs(capture, 8, 64)
    engine.warmup()
    assert model.counter.calls == 0
    engine.generate([Request([1, 2], max_new_tokens=4)])
    assert model.counter.calls == engine.stats.steps == 4


def _stock(kind: Any = None) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return (kind or transformers.LlamaForCausalLM)(transformers.LlamaConfig(vocab_size=32, **sizes)).eval()


def test_the_check_of_fuse_leaves_no_trace() -> None:
    model = _stock()
    mlp = model.model.layers[0].mlp
    mlp.counter = Counter()
    mlp.act_fn.register_forward_hook(lambda module, args, out: mlp.counter(out))
    fuse(model, check={"input_ids": torch.tensor([[1, 2, 3]])})
    assert mlp.counter.calls == 0


def test_explain_leaves_no_trace() -> None:
    model = _stock()
    model.counter = Counter()
    model.register_forward_hook(lambda module, args, out: (model.counter(out.logits), None)[1])
    largest = model.counter.largest
    explain(fuse(model), torch.tensor([[1, 2, 3]]))
    assert model.counter.calls == 0
    assert model.counter.largest is largest
    assert type(model.counter.table) is torch.Tensor  # and no fake tensor


def test_cutting_a_model_into_stages_leaves_no_trace() -> None:
    """The trials run the model's own forward on stand-ins for its modules."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")

    class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.model.passes.add_(1)
            return transformers.LlamaForCausalLM.forward(self, *args, **kwargs)

    model = _stock(Counting)
    model.model.register_buffer("passes", torch.zeros(1))
    state = torch.get_rng_state()
    cut_of(model, "lm_head")
    why_mixed(model)
    assert model.model.passes == 0
    assert torch.equal(torch.get_rng_state(), state)
