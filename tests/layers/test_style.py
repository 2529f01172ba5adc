"""Styles: plain models that torch's parallelize_module turns into ours, against themselves on one process, in fp64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from shardfuse import ColumnParallelLinear, ParallelMLP, RowParallelLinear, VocabParallelEmbedding
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.style import ColumnParallel, FusedMLP, RowParallel, SequenceParallelNorm, VocabParallel
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import everyone
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import gather

WIDTH, FFN, VOCABULARY, TOKENS = 16, 24, 20, 6
TERMS = 4 * (WIDTH + FFN)  # two layers, forward and backward: what sums that follow one another come to


PADDING = 3


class Gated(nn.Module):
    """A feed-forward layer as Llama's own code names it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, FFN, bias=bias)
        self.w2 = nn.Linear(FFN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, FFN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Plain(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.c_proj = nn.Linear(WIDTH, FFN)  # the first: names are the model's to choose
        self.fc2 = nn.Linear(FFN, WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.fc2(F.gelu(self.c_proj(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, PADDING)
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, FFN), nn.Tanh(), nn.Linear(FFN, WIDTH))
        self.layers = nn.ModuleList([Gated(bias=True), Plain()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in (self.mix, *self.layers):
            x = x + layer(self.norm(x))
        return x


PLAN: dict[str, Any] = {
    "table": VocabParallel(),
    "mix.0": ColumnParallel(),
    "mix.2": RowParallel(),
    "layers.0": FusedMLP(gate="w1", up="w3", down="w2", activation="silu"),
    "layers.1": FusedMLP(up="c_proj", down="fc2", activation="gelu_erf"),
}


def _model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def _step(model: nn.Module) -> torch.Tensor:
    y = model(torch.arange(TOKENS))
    y.square().mean().backward()
    return y.detach()


def _same(name: str, ours: torch.Tensor, expected: torch.Tensor) -> list[str]:
    verdict = accuracy.judge(name, ours, expected, expected, terms=TERMS)
    return [] if verdict.ok else [str(verdict)]


def _against_one_process(rank: int, world: int) -> list[str]:
    reference = _model()
    model = _model(seed=rank)  # rank 0's weights are everybody's
    mesh = init_mesh(tp=world)
    assert mesh is not None
    before = dict(model.named_modules())
    names = list(model.state_dict())
    assert parallelize_module(model, mesh["tp"], PLAN) is model
    collectives.calls.clear()
    y, expected = _step(model), _step(reference)
    found = _same("y", y, expected)
    crossed = {site: n for (op, site), n in collectives.calls.items() if op == "all_reduce"}
    kinds = [VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear, ParallelMLP, ParallelMLP]
    for path, kind in zip(PLAN, kinds):
        module = model.get_submodule(path)
        if not isinstance(module, kind) or module is not before[path]:
            found.append(f"{path} is {type(module).__name__}")
    if list(model.state_dict()) != names:
        found.append(f"names are {list(model.state_dict())}")
    if sum(crossed.values()) != 1 + 2 * 3:  # the embedding's, and each pair's, forward and backward
        found.append(f"all-reduces: {crossed}")
    whole = full_state_dict(model)
    for (name, param), theirs in zip(model.named_parameters(), reference.parameters()):
        if not torch.equal(whole[name], theirs.detach()):
            found.append(f"{name} is not rank 0's")
        assert param.grad is not None
        found += _same(f"{name}.grad", gather(param.grad), theirs.grad)
    return found


@pytest.mark.ranks
def test_a_plain_model_becomes_ours(ranks):
    assert ranks(2, _against_one_process) == [[], []]


def _by_tokens(rank: int, world: int, kind: type[nn.Module]) -> list[str]:
    """Norm and MLP on this rank's tokens."""
    torch.manual_seed(0)
    plain = nn.Sequential(kind(WIDTH), Gated(bias=False)).double()
    ours = copy.deepcopy(plain)
    mesh = init_mesh(tp=world)
    assert mesh is not None
    mlp = FusedMLP(gate="w1", up="w3", down="w2", activation="silu", sequence_parallel=True)
    parallelize_module(ours, mesh["tp"], {"0": SequenceParallelNorm(), "1": mlp})
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    y, expected = ours(x.chunk(world)[rank]), plain(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    found = _same("y", y.detach(), expected.detach().chunk(world)[rank])
    for (name, param), theirs in zip(ours.named_parameters(), plain.parameters()):
        assert param.grad is not None
        found += _same(f"{name}.grad", gather(param.grad), theirs.grad)
    return found


@pytest.mark.ranks
def test_norms_sum_their_gradients_where_tokens_are_split(ranks):
    for kind in (nn.LayerNorm, nn.RMSNorm):
        assert ranks(2, _by_tokens, kind) == [[], []]


def _local_and_meta(rank: int, world: int) -> list[str]:
    mesh = init_mesh(tp=world)
    assert mesh is not None
    with torch.device("meta"):
        empty = Gated(bias=True)
    mlp = functools.partial(FusedMLP, gate="w1", up="w3", down="w2", activation="silu")
    parallelize_module(empty, mesh["tp"], mlp())
    local = parallelize_module(Gated(bias=True), mesh["tp"], mlp(params="local"))
    shapes = [[*param.shape] for param in local.parameters()]
    frozen = Gated(bias=False)
    frozen.w1.weight.requires_grad_(False)
    parallelize_module(frozen, mesh["tp"], mlp())
    found = [] if empty.w1.weight.is_meta and empty.w1.weight.shape == (FFN, WIDTH) else ["meta"]
    found += [] if shapes == [[FFN // 2, WIDTH], [FFN // 2], [WIDTH, FFN // 2], [FFN // 2, WIDTH]] else [str(shapes)]
    found += [] if [p.requires_grad for p in frozen.parameters()] == [False, True, True] else ["frozen"]
    return found


@pytest.mark.ranks
def test_modes_and_flags_are_kept(ranks):
    assert ranks(2, _local_and_meta) == [[], []]


class Tied(nn.Module):
    """An embedding and its head, with a square weight: it can be split along either dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def _tied(rank: int, world: int) -> list[str]:
    mesh = init_mesh(tp=world)
    assert mesh is not None
    torch.manual_seed(0)
    plain = Tied().double()
    ours, refused = copy.deepcopy(plain), copy.deepcopy(plain)
    parallelize_module(ours, mesh["tp"], {"table": VocabParallel(), "head": ColumnParallel(gather_output=True)})
    found = [] if ours.head.weight is ours.table.weight else ["untied"]
    found += _same("y", _step(ours), _step(plain)) + _same(
        "grad", gather(ours.table.weight.grad), plain.table.weight.grad
    )
    with pytest.raises(
        ValueError, match=r"split along dimension 0 of 2 ranks .* expects it split along dimension 1 of 2"
    ):
        parallelize_module(refused, mesh["tp"], {"table": VocabParallel(), "head": RowParallel()})
    return found if type(refused.head) is nn.Linear else [*found, "changed"]


@pytest.mark.ranks
def test_tied_parameters_stay_tied_or_are_refused(ranks):
    assert ranks(2, _tied) == [[], []]


@pytest.fixture
def alone():
    """A mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_mesh()
    assert everyone().size == 1
    assert mesh is not None
    yield mesh["tp"]
    dist.destroy_process_group()


def test_one_process_has_the_stock_results(alone):
    model = _model()
    expected = _step(model)
    model.zero_grad()
    parallelize_module(model, alone, PLAN)
    assert not _same("y", _step(model), expected)


def _refusals() -> dict[str, tuple[Callable[[], nn.Module], Any, str]]:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    heard = Gated(False)
    heard.register_forward_hook(lambda *_: None)
    gated = {"gate": "w1", "up": "w3", "down": "w2"}
    return {
        "kind": (nn.ReLU, ColumnParallel(), r"expected nn.Linear, not ReLU; name another module"),
        "subclass": (lambda: nn.Bilinear(2, 2, 2), RowParallel(), "not Bilinear"),
        "hooks": (lambda: hooked, RowParallel(), "has hooks, which would be lost"),
        "hooks of an MLP": (lambda: heard, FusedMLP(**gated, activation="silu"), "the Gated has hooks"),
        "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), VocabParallel(), "the embedding has max_norm"),
        "norm": (lambda: nn.LayerNorm((2, 4)), SequenceParallelNorm(), "expected a norm over the last dimension"),
        "child": (lambda: Gated(False), FusedMLP(up="up", down="w2", activation="silu"), "no child 'up'; it has w1"),
        "activation": (lambda: Gated(False), FusedMLP(**gated, activation="gelu_erf"), "computes something else"),
        "exchanged": (
            lambda: Gated(True),
            FusedMLP(gate="w3", up="w1", down="w2", activation="silu"),
            "are gate and up exchanged",
        ),
        "dropout": (lambda: Plain(0.5), FusedMLP(up="c_proj", down="fc2", activation="gelu_erf"), "does it drop out"),
        "sizes": (
            lambda: Gated(False),
            FusedMLP(gate="w1", up="w2", down="w3", activation="silu", check=False),
            r"FusedMLP\(w1, w2, w3, silu\): w2 is nn.Linear\(24, 16\), expected nn.Linear\(16, 24\)",
        ),
    }


@pytest.mark.parametrize("name", _refusals())
def test_what_cannot_be_ours_is_refused_and_left_as_it_was(alone, name):
    build, style, message = _refusals()[name]
    module = build()
    kind, names = type(module), list(module.state_dict())
    with pytest.raises(ValueError, match=message):
        parallelize_module(module, alone, style)
    assert type(module) is kind
    assert list(module.state_dict()) == names


def test_an_unknown_activation_is_refused_at_once():
    with pytest.raises(ValueError, match="activation='swish': expected one of identity"):
        FusedMLP(up="w1", down="w2", activation="swish")
