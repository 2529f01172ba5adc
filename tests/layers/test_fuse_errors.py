"""Errors while ``fuse`` looks at modules: a module's own are an answer, and told; those of ours are raised."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign import foreign, tokens
from torch import nn

from shardfuse import explain
from shardfuse.layers.fuse import Fused, Match, fuse, products, unfuse
from shardfuse.layers.fuse.matchers import activations, attention, feed_forward, graph, head, norms, rotary
from shardfuse.layers.fuse.ranks import heads, table
from shardfuse.layers.fuse.spelled_out import eager_attention
from shardfuse.layers.fuse.stages import cut, documents

pytest.importorskip("transformers")


def _raise(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("an error of ours")


class _Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight.T) + self.bias


class _Silent(ValueError):
    def __str__(self) -> str:
        raise TypeError("no message")


class _SaysNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise _Silent if self.training else ValueError("a line\n" * 99)


def _with_own_linear() -> nn.Module:
    return nn.Sequential(_Linear(8, 16), nn.GELU(), _Linear(16, 8))


# What is broken, and what a model is then fused that reaches it.
OURS: dict[str, tuple[Any, str, Callable[[], nn.Module]]] = {
    "points of activations": (activations, "_points", lambda: foreign("llama")),
    "our activations": (activations, "apply_activation", lambda: foreign("llama")),
    "our norms": (norms, "_norm", lambda: foreign("llama")),
    "comparing norms": (norms, "_close", lambda: foreign("llama")),
    "norms to try": (norms, "_candidates", lambda: foreign("gpt2")),
    "our rotation": (rotary, "apply_rope", lambda: foreign("llama")),
    "our linear": (products.F, "linear", _with_own_linear),
    "comparing anything": (torch, "allclose", lambda: foreign("opt")),
    "a traced graph": (graph._Rewriter, "run", lambda: foreign("llama")),
    "a graph's purity": (graph, "_is_pure", lambda: foreign("llama")),
    "a graph's code": (graph, "_compiled", lambda: foreign("llama")),
    "code that is read": (graph._Code, "asks_too_much", lambda: foreign("llama")),
    "statements": (feed_forward, "_blocks", lambda: foreign("opt")),
    "attention that is written out": (attention, "attending", lambda: foreign("bloom")),
    "a forward's source": (eager_attention, "_waiting", lambda: foreign("bloom")),
    "heads": (head, "names_in", lambda: foreign("llama")),
}


@pytest.mark.parametrize("name", OURS)
def test_an_error_of_ours_is_raised_with_the_path(name: str, monkeypatch: pytest.MonkeyPatch):
    where, what, build = OURS[name]
    model = build()
    rotary.ours.cache_clear()
    monkeypatch.setattr(where, what, _raise)
    with pytest.raises(
        RuntimeError, match=r"could not look at .* \(\w+\): ZeroDivisionError: an error of ours"
    ) as found:
        fuse(model)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert not any(isinstance(module, Fused) for module in model.modules())


@pytest.mark.parametrize(
    ("where", "what", "run"),
    [
        (heads, "_read", lambda model: _heads(model)),
        (heads, "_arguments", lambda model: _heads(model)),
        (table.torch, "equal", lambda model: table.Table().match(model.get_input_embeddings())),
        (cut, "_same", lambda model: cut.cut_of(model, "lm_head")),
        (cut._Trial, "_check", lambda model: cut.cut_of(model, "lm_head")),
        (documents, "_separates", documents.why_mixed),
    ],
)
def test_trials_over_ranks_and_stages_raise_errors_of_ours(
    where: Any, what: str, run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
):
    model = foreign("llama")
    run(model)
    monkeypatch.setattr(where, what, _raise)
    with pytest.raises(ZeroDivisionError, match="an error of ours"):
        run(model)


def _heads(model: Any) -> Any:
    module = model.model.layers[0].self_attn
    found = heads.heads_of(module, type(module).forward, heads.numbered(module))
    assert found is not None
    return found


class _Needs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a mask")


class _Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x)) if x.sum() > 0 else self.fc(x)


def test_errors_of_the_modules_are_quoted():
    model = fuse(nn.Sequential(_Needs(), _Decides(), nn.LayerNorm(8)))
    why = {row.path: row.why for row in explain(model).rows}
    assert why["0"] == "no matcher knows it; its forward raises KeyError: 'a mask'"
    assert "of its parent, its forward, traced, raises TraceError: symbolically traced variables" in why["1.fc"]
    assert [isinstance(each, Fused) for each in model] == [False, False, True]
    for training, said in ((True, "_Silent"), (False, "ValueError: a line")):
        model = fuse(nn.Sequential(_SaysNothing(), nn.LayerNorm(8)).train(training))
        assert explain(model).rows[0].why == f"no matcher knows it; its forward raises {said}"


# --- what fuse did is told --------------------------------------------------------------------------------------------


def test_what_was_fused_is_logged(caplog: pytest.LogCaptureFixture):
    model = foreign("llama")
    with caplog.at_level(logging.INFO, "shardfuse.fuse"), warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(model)
        fuse(model)
    fused = sum(isinstance(module, Fused) for module in model.modules())
    stock = sum(row.layers for row in explain(model).rows if row.runs == "torch")
    assert [record.getMessage() for record in caplog.records] == [
        f"fused {fused} of {fused + stock} modules; {stock} stay stock: sf.explain(model)"
    ]


def test_a_call_that_finds_nothing_warns():
    with pytest.warns(UserWarning, match="nothing was fused: no matcher knows a module of this Sequential"):
        fuse(nn.Sequential(nn.Conv2d(1, 1, 1)))
    with pytest.warns(UserWarning, match="no matcher knows a module that filter_fn lets through"):
        fuse(nn.LayerNorm(8), filter_fn=lambda *_: False)


def test_a_printed_model_says_what_runs():
    model = foreign("llama")
    stock = repr(model)
    fuse(model)
    assert "(norm): LlamaRMSNorm((32,), eps=1e-06, fused: rms_norm)" in repr(model)
    assert "fused: gated_linear(gate_proj, up_proj; silu), linear_act(down_proj)" in repr(model)
    mlp: Any = model.model.layers[0].mlp  # type: ignore[union-attr,index]
    mlp.down_proj.register_forward_hook(lambda *_: None)
    assert "stock: down_proj has hooks" in repr(mlp)
    assert repr(unfuse(model)).replace("\n", "") == stock.replace("\n", "")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_a_stock_model_is_explained_as_it_would_be(kind: str):
    model = foreign(kind)
    held = {path: (type(module), dict(module.__dict__)) for path, module in model.named_modules()}
    said = explain(model, batch=(1, 8))
    assert all(held[path] == (type(module), module.__dict__) for path, module in model.named_modules())
    assert said.preview
    assert "after fuse(model)" in str(said)
    found = explain(fuse(model), batch=(1, 8))
    assert not found.preview
    assert (said.rows, said.moved) == (found.rows, found.moved)
    assert len(said.moved) > 3
    assert not explain(nn.Conv2d(1, 1, 1)).preview


class _Updates(nn.Module):
    """Its forward changes what it holds, and reaches a child by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch_norm, self.fc = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.order, self.seen, self.options = [self.norm, self.fc], list[str](), {"calls": 0}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.options["calls"] += 1
        self.seen.append(type(x).__name__)
        for each in self.order:
            x = each(x)
        return self.batch_norm(x)


def test_a_preview_runs_on_things_of_its_own():
    model, hooked = _Updates(), []
    model.fc.register_forward_hook(lambda *_: hooked.append(1))
    said = explain(model, torch.randn(4, 8))
    assert (said.preview, said.not_counted) == (True, "")
    assert {each.path: each.fused.ops for each in said.moved}["norm"] > 0
    assert (model.calls.item(), model.batch_norm.num_batches_tracked.item()) == (0, 0)  # type: ignore[union-attr,operator]
    assert (model.seen, model.options, hooked) == ([], {"calls": 0}, [])


class _Breaks(nn.Module, dict):  # type: ignore[type-arg]
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("no copies")


def test_what_cannot_be_previewed_is_explained_as_it_is():
    said = explain(_Breaks())
    assert (said.preview, said.no_preview) == (False, "ValueError: no copies")
    assert "what fuse(model) would do is not known: ValueError: no copies" in " ".join(str(said).split())
    assert said.rows[0].why == "not a layer of this package"


def test_a_matcher_that_fails_is_a_reason_for_explain(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.LayerNorm(8), _Needs())
    fuse(model)
    monkeypatch.setattr(norms, "_width", _raise)
    assert "our matcher Norm could not look at 1" in {row.path: row.why for row in explain(model).rows}["1"]


class _Doubles(Fused):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class _Fails(Fused):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 999]


class _Mine:
    def __init__(self, kind: Any) -> None:
        self.fused = kind

    def match(self, module: nn.Module) -> Match | None:
        return Match(()) if type(module) is nn.Identity else None


def test_the_check_names_the_matcher():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Identity()), torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"fuse: 1, fused by your matcher [\w.]*_Mine: error .* > budget"):
        fuse(model, matchers=[_Mine(_Doubles)], check=x)
    with pytest.raises(
        ValueError, match=r"1, fused by your matcher [\w.]*_Mine, raises IndexError.*nothing was changed"
    ):
        fuse(model, matchers=[_Mine(_Fails)], check=x)
    broken = SimpleNamespace(fused=_Doubles, match=_raise)
    with pytest.raises(RuntimeError, match=r"your matcher .*SimpleNamespace could not look at the model"):
        fuse(model, matchers=[broken])
    assert not any(isinstance(module, Fused) for module in model.modules())


def test_the_check_refuses_what_has_no_values():
    with pytest.raises(ValueError, match="it is on the meta device, or fake"):
        fuse(foreign("llama"), check={"input_ids": tokens().to("meta")})
    with pytest.raises(ValueError, match="it is on the meta device, or fake"):
        fuse(foreign("llama", device="meta"), check={"input_ids": tokens()})

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(ValueError, match="the batch ran none of the 1 modules"):
        fuse(Skips(), check=torch.randn(2, 8))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:fuse. nothing was fused")
def test_modules_that_are_no_python_yet_or_no_more_stay_stock():
    stock = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    for model in (torch.jit.script(stock), torch.jit.trace(stock, torch.ones(2, 8))):
        assert not explain(model).preview
        fuse(model)
    lazy = fuse(nn.Sequential(nn.Sequential(nn.LazyLinear(8), nn.GELU()), nn.LayerNorm(8)))
    assert [isinstance(each, Fused) for each in lazy] == [False, True]
    lazy(torch.ones(2, 5))
    assert "linear_act" in repr(fuse(lazy))
