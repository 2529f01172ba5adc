"""Modules of a split model that are not split: they compute with plain tensors, and keep DTensors for torch's tools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shardfuse import explain, full_state_dict, fuse, init_mesh

CLOSE = 1e-11


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def _shifted(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x * norm.weight


class _Reader(nn.Module):
    """Reads parameters as models do: its own, of lists, of children that it does not call, and in other functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.split = _FeedForward()
        self.position, self.own = nn.Embedding(8, 16), nn.Parameter(torch.rand(16))
        self.listed = nn.ParameterList([nn.Parameter(torch.rand(16)) for _ in range(2)])
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.rand(16))})
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)  # reads its norms' weights
        self.parametrized = parametrizations.weight_norm(nn.Linear(16, 16))
        self.chain = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1))
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.tied, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.tied.weight = self.chain[0].weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position.weight + self.own * self.listed[0] * self.listed[1] * self.named["one"]
        x = _shifted(self.split(x), self.norm) + self.norm(x)
        x = x + self.attention(x, x, x)[0]
        x = self.parametrized(x) + self.tied(x) + self.frozen(x)
        x = checkpoint(self.chain, x, use_reentrant=False)
        for layer in self.linears:
            x = F.linear(x, layer.weight, layer.bias)
        x, _ = checkpoint(self.recurrent, x, use_reentrant=False)
        y: torch.Tensor = self.encoder(x)
        return y


class _Odd(nn.Module):
    """Reads parameters in ways that its forward's code does not name, or changes them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.split, self.layer = way, _FeedForward(), nn.Linear(16, 16)
        self.scale, self.number = nn.Parameter(torch.rand(16)), nn.Parameter(torch.arange(16), requires_grad=False)
        self.held = lambda: self.layer.weight
        self.scripted = torch.jit.script(nn.Linear(16, 16))
        if way == "a forward of its own":
            stock = self.layer.forward
            self.layer.forward = lambda x: 2 * stock(x)  # type: ignore[method-assign]

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer.weight * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, way = self.split(x) * self.number, self.way
        if way in ("checkpoint", "reentrant checkpoint"):
            return checkpoint(self._scaled, x, use_reentrant=way != "checkpoint")
        if way == "a new parameter" and self.training:
            self.scale = nn.Parameter(self.scale.detach() + 1)
            self.training = False
        weight = self.held() if way == "lambda" else getattr(self.layer, "".join(("wei", "ght")))
        y: torch.Tensor = self.layer(x) + self.scripted(x) + x @ weight * self.scale
        return y


WAYS = ["checkpoint", "reentrant checkpoint", "a new parameter", "lambda", "a computed name"]
WAYS += ["a forward of its own"]


def _oddly(rank: int, world: int, way: str) -> list[float]:
    mesh, hits = init_mesh(tp=world, device_type="cpu"), []
    stock, model = _Odd(way).double(), _Odd(way).double()
    model.layer.weight.register_hook(lambda _: hits.append(1))  # type: ignore[arg-type]
    model.layer.weight.note = "kept"  # type: ignore[assignment]
    fuse(model, mesh)
    x, errors = torch.randn(2, 8, 16, dtype=torch.float64), []
    for _ in range(2):
        for each in (stock, model):
            each.zero_grad()
            each(x).square().sum().backward()
        grads = [[param.grad for param in each.parameters() if param.grad is not None] for each in (model, stock)]
        errors += [_apart(*grads), _apart(list(model.parameters()), list(stock.parameters()))]
    assert (model.layer.weight.note, hits) == ("kept", [1, 1])
    type(model)(way)(x.float())  # an instance that was never fused
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_stock_code_reads_whole_parameters_oddly(ranks: Any, way: str) -> None:
    for errors in ranks(2, _oddly, way):
        assert max(errors) < CLOSE, errors


def _albert(rank: int, world: int) -> float:
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.AlbertForSequenceClassification(config).double())
    stock, model = models
    fuse(model, init_mesh(tp=world, device_type="cpu"))
    for each in models:
        each(torch.arange(2, 14).view(2, 6)).logits.square().sum().backward()
    return _apart(*[[param.grad for param in each.parameters() if param.grad is not None] for each in (model, stock)])


@pytest.mark.ranks
def test_a_norm_after_the_heads_is_not_summed(ranks: Any) -> None:
    """ALBERT's attention ends in a norm of whole rows: every rank has its whole gradient."""
    pytest.importorskip("transformers")
    for error in ranks(2, _albert):
        assert error < CLOSE


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def _apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert len(ours) == len(theirs)
    scale = max(float(x.detach().double().norm()) for x in theirs)
    return max(float((_whole(a) - b.detach()).double().norm()) for a, b in zip(ours, theirs)) / scale


def _reads(rank: int, world: int) -> list[float]:
    mesh = init_mesh(tp=world, device_type="cpu")
    stock, model = _Reader().double(), _Reader().double()
    if rank:
        with torch.no_grad():
            model.own.zero_()  # every rank gets rank 0's
    names = list(model.state_dict())
    fuse(model, mesh)
    assert {type(param) for param in model.parameters()} == {DTensor}
    assert list(model.state_dict()) == names
    x, errors = torch.randn(2, 8, 16, dtype=torch.float64), []
    for _ in range(3):
        for each in (stock, model):
            each(x).square().sum().backward()
        grads = [[param.grad for param in each.parameters() if param.grad is not None] for each in (model, stock)]
        errors.append(_apart(*grads))
        for each in (stock, model):
            torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3, foreach=True).step()
            each.zero_grad()
        errors.append(_apart(list(model.parameters()), list(stock.parameters())))
    for each in (stock, model):
        each.eval()
    with torch.no_grad():
        errors.append(_apart([model(x)], [stock(x)]))
    with torch.inference_mode():
        errors.append(_apart([model(x)], [stock(x)]))
    again = _Reader().double()
    again.load_state_dict(full_state_dict(model))
    errors.append(_apart(list(model.parameters()), list(again.parameters())))
    fresh = _Reader().double()
    model.load_state_dict(fresh.state_dict())
    errors.append(_apart(list(model.parameters()), list(fresh.parameters())))
    with pytest.raises(RuntimeError, match=r"must match the size"):
        model(x[..., :-1])
    assert {type(param) for param in model.parameters()} == {DTensor}  # put back after an error
    assert "a look-up: there is nothing to fuse" in str(explain(model))
    return errors


@pytest.mark.ranks
def test_stock_code_reads_whole_parameters(ranks: Any) -> None:
    for errors in ranks(2, _reads):
        assert max(errors) < CLOSE, errors
