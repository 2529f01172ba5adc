"""Fused models cut into stages that run one after the other in one process, and models that cannot be cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfuse import parallelize
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.fuse import fuse

EVERY_DAY = ("llama", "gemma2", "gpt2", "opt", "falcon")
BUDGET = 1e-11  # in fp64
CUTS = {
    "single parts": [range(part, part + 1) for part in range(4)],
    "layers": [range(2), range(2, 4)],
    "embeddings": [range(1), range(1, 4)],
    "head": [range(3), range(3, 4)],
}


def _kinds() -> list[Any]:
    try:
        from foreign import ARCHITECTURES
    except ImportError:
        return []
    return [pytest.param(kind, marks=[] if kind in EVERY_DAY else [pytest.mark.nightly]) for kind in ARCHITECTURES]


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], budget: float) -> None:
    assert found.keys() == expected.keys()
    least = (1e-5 if budget == BUDGET else 1e-2) * float(max(value.norm() for value in expected.values()))
    for name, value in expected.items():
        error = float((found[name] - value).norm()) / max(float(value.norm()), least)
        assert error <= budget, name


@pytest.mark.parametrize("kind", _kinds())
def test_stages_in_a_row_are_the_model(kind: str):
    pytest.importorskip("transformers")
    from foreign import foreign, tokens, without_dropout
    from fused_layout_case import IN_FP32, ROUNDED

    budget = ROUNDED if kind in IN_FP32 else BUDGET
    model: Any = fuse(without_dropout(foreign(kind, torch.float64)))
    batch = tokens(3, 9)
    inputs, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[0, 3:], targets[2] = -100, -100
    logits = model(inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    expected, names = _grads(model), list(model.state_dict())
    tied = model.tied_parameters()
    model.keep(range(4))
    for cut in CUTS.values():
        stages: list[Any] = [model.stage(parts) for parts in cut]
        assert [name for name in names if any(name in stage.state_dict() for stage in stages)] == names
        x = inputs
        for stage in stages[:-1]:
            x = stage(x, targets=targets, draws=None)
            assert (x.shape, x.dtype) == ((*inputs.shape, 32), model.boundary(3, 8).dtype)
        (found,) = stages[-1](x, targets, scale=2.0)
        found.backward()
        for name in tied:
            first, last = (stages[i].get_parameter(name) for i in (0, -1))
            assert first is not last
            first.grad += last.grad
        assert accuracy.relative_error(found / 2, loss) <= budget
        _compare({name: grad / 2 for name, grad in _grads(model).items()}, expected, budget)
        with torch.no_grad():
            assert accuracy.relative_error(stages[-1](x), logits) <= budget


# ------------------------------------------------------------------------------------------------ what cannot be cut


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: Any = None) -> torch.Tensor:
        return x + torch.tanh(self.linear(x if not isinstance(shift, torch.Tensor) else x + shift))


class Decoder(nn.Module):
    """A causal language model with the interface of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=16, get_text_config=lambda: self.config)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def loss_function(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        raise NotImplementedError

    def given(self, index: int, x: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        """What a layer is given beside the hidden states."""

    def between(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x

    def behind(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return x

    def added(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = embedded
        for index, layer in enumerate(self.layers):
            x = layer(self.between(index, x), self.given(index, embedded, input_ids))
        logits = self.head(self.behind(self.norm(x), embedded))
        loss = None if labels is None else self.added(self.loss_function(logits, labels, vocab_size=16))
        return {"loss": loss, "logits": logits}


class SharesEmbeddings(Decoder):
    def given(self, index: int, x: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        return x


class SharesAnObject(Decoder):
    def given(self, index: int, x: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        return {}


class SeesTokens(Decoder):
    def given(self, index: int, x: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        return None if tokens is None else (tokens == 0).to(x.dtype)[..., None]


class ChangesBetween(Decoder):
    def between(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if index else x


class DrawsBetween(Decoder):
    def between(self, index: int, x: torch.Tensor) -> torch.Tensor:
        torch.rand(())
        return x


class SkipsToTheEnd(Decoder):
    def behind(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return x + embedded


class AddsToTheLoss(Decoder):
    def added(self, loss: torch.Tensor) -> torch.Tensor:
        loss += 1
        return loss


class OwnParameter(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))


class Uncalled(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)


class SharedLayers(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]


class TiedWithABias(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        self.head.weight = self.embed.weight


class NoList(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]


REFUSED = {
    SharesEmbeddings: "arguments beside hidden states that depend on its parameters",
    SharesAnObject: "hands its layers a dict",
    SeesTokens: "depends on the tokens",
    ChangesBetween: "do not get the result of the layer before as it is",
    DrawsBetween: "draws random numbers between its layers",
    SkipsToTheEnd: "what is behind its layers depends on more than the last one",
    AddsToTheLoss: "adds to the loss of its head",
    OwnParameter: "OwnParameter has parameters of its own beside its layers",
    Uncalled: "does not call other, which has parameters",
    SharedLayers: "layers.0 and layers.2 share a parameter",
    TiedWithABias: "head has parameters beside the one that embeddings and head share",
    NoList: "no nn.ModuleList of layers",
}


def _toy(kind: type[Decoder] = Decoder) -> Any:
    torch.manual_seed(0)
    return fuse(kind().double())


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_the_simple_form_is_refused(kind: type[Decoder], device: str):
    with torch.device(device):
        model: Any = kind()
    fuse(model)
    with pytest.raises(ValueError, match=f"^{kind.__name__} cannot be cut into pipeline stages: .*{REFUSED[kind]}"):
        model.tied_parameters()


@pytest.mark.parametrize("kind", [each for each in REFUSED if each is not AddsToTheLoss])
def test_without_a_pipeline_it_trains_all_the_same(kind: type[Decoder]):
    model = _toy(kind)
    tokens = torch.arange(10).view(2, 5)
    targets = tokens.masked_fill(tokens == 3, -100)
    expected = F.cross_entropy(model(tokens)["logits"].flatten(0, 1), targets.flatten())
    expected.backward()
    grads = _grads(model)
    spread = parallelize(model, microbatches=2)
    assert accuracy.relative_error(spread.step(tokens, targets), expected) <= BUDGET
    _compare(_grads(model), grads, BUDGET)
    assert accuracy.relative_error(spread.evaluate(tokens, targets), expected) <= BUDGET
    assert accuracy.relative_error(spread(tokens), model(tokens)["logits"]) == 0
    assert accuracy.relative_error(spread(tokens, targets), expected) <= BUDGET


def test_what_adds_to_the_loss_is_refused_in_training():
    spread = parallelize(_toy(AddsToTheLoss))
    tokens = torch.arange(10).view(2, 5)
    with pytest.raises(ValueError, match="AddsToTheLoss returns another loss than that of its head"):
        spread.step(tokens, tokens)
    model = _toy()
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=True adds a loss"):
        parallelize(model)


class Shifts(Decoder):
    """Leaves out the last token by itself."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, labels: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": self.loss_function(logits[:, :-1], labels[:, 1:], vocab_size=16), "logits": logits}


def test_a_forward_that_shifts_by_itself_is_refused():
    tokens = torch.arange(10).view(2, 5)
    with pytest.raises(ValueError, match=r"Shifts has logits \[2, 4, 16\] for targets \[2, 5\]"):
        parallelize(_toy(Shifts)).step(tokens, tokens)


def test_what_is_not_fused_is_told_to():
    with pytest.raises(ValueError, match=r"Decoder returns an output object.*fuse\(model, mesh\) first"):
        parallelize(Decoder())
    model = _toy()
    model.head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Decoder would train with another loss than that of its labels: head has"):
        parallelize(model)


def test_hooks_on_the_way_to_the_layers_are_not_skipped():
    pytest.importorskip("transformers")
    from foreign import foreign

    model: Any = fuse(foreign("llama", device="meta"))
    model.model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="its LlamaModel has hooks"):
        model.tied_parameters()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (lambda t: (t.double(), t), "tokens are torch.float64: expected whole numbers"),
        (lambda t: (t[0], t[0]), r"expected tokens \[B, S\]"),
        (lambda t: (t, t[:, 1:]), r"expected tokens \[B, S\] and targets of the same shape"),
        (lambda t: (t + 10, t), "16"),
    ],
)
def test_batches_are_checked(given: Any, what: str):
    spread = parallelize(_toy())
    with pytest.raises(ValueError, match=what):
        spread.step(*given(torch.arange(10).view(2, 5)))


def test_positions_are_checked():
    spread = parallelize(_toy())
    tokens = torch.arange(10).view(2, 5)
    with pytest.raises(ValueError, match="the forward of Decoder takes no position_ids"):
        spread.step(tokens, tokens, positions=torch.arange(5))
    with pytest.raises(ValueError, match=r"positions \[4\]: expected \[5\] or \[2, 5\]"):
        spread.step(tokens, tokens, positions=torch.arange(4))


def test_options_that_a_foreign_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="overlap='chunked': the layers of a fused model choose by themselves"):
        parallelize(_toy(), overlap="chunked")
    with pytest.raises(ValueError, match="recompute=True: Decoder"):
        parallelize(_toy(), recompute=True)


def test_a_stage_has_parts_of_the_model():
    with pytest.raises(ValueError, match=r"parts=range\(2, 9\): expected a range of the model's 5 parts"):
        _toy().stage(range(2, 9))


class Drawn(Decoder):
    """What it draws by is known, except for a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forgotten", torch.ones(2), persistent=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.normal_()


def test_what_would_stay_empty_is_refused():
    with torch.device("meta"):
        models = [Decoder(), Drawn()]
    with pytest.raises(ValueError, match="Decoder is on meta and has no _init_weights: build it on a device"):
        parallelize(fuse(models[0]), seed=0)
    with pytest.raises(ValueError, match="Drawn is on meta, and its _init_weights leaves forgotten as it is"):
        parallelize(fuse(models[1]), seed=0)
    del models[1].forgotten
    state = parallelize(models[1], seed=0).module.state_dict()
    assert all(value.isfinite().all() for value in state.values())
