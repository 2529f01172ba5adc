"""``fuse`` where a module is not what it looks like, or is no longer what it was: the numbers are the stock ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from shardfuse import explain
from shardfuse.layers.fuse import Fused, Match, fuse, stats
from shardfuse.layers.fuse.matchers.head import Logits

# ------------------------------------------------------------------------------------------------------ feed-forward


class _TwoLayers(nn.Module):
    """act(fc1(x)) and fc2, and something that a trace would settle."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act: Any = nn.GELU()
        self.drop = nn.Dropout(0.0)
        self.adapter: nn.Module | None = None
        self.config = SimpleNamespace(k=1.0)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class _Default(_TwoLayers):
    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if scale is None else y * scale


class _AsksForTheMode(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(self.act(self.fc1(x)))
        return y * 2 if torch.is_grad_enabled() else y


class _AsksForTheType(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(self.act(self.fc1(x)))
        return y * 2 if isinstance(x, torch.Tensor) else y


class _ReadsABuffer(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x))) * self.factor.item()


class _Keeps(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 1
        return self.fc2(self.act(self.fc1(x)))


class _MakesATensor(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x))) * torch.tensor(2.0)


class _Overwrites(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(x)
        x.mul_(0.5)
        return self.fc2(self.act(h)) + x


class _ReadsItsConfig(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x))) * self.config.k


class _ReadsAChild(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.dropout(self.act(self.fc1(x)), self.drop.p, True))


class _MayAdapt(_TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(self.act(self.fc1(x)))
        return y if self.adapter is None else self.adapter(y)


def _same(module: nn.Module, stock: nn.Module, *args: Any, **kwargs: Any) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    expected = stock(x.clone(), *args, **kwargs)
    torch.manual_seed(0)
    torch.testing.assert_close(module(x.clone(), *args, **kwargs), expected)


def _pair(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    stock = kind()
    return fuse(copy.deepcopy(stock)), stock


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
@pytest.mark.parametrize(
    "kind",
    [_Default, _AsksForTheMode, _AsksForTheType, _Keeps, _MakesATensor, _Overwrites, _ReadsItsConfig],
)
def test_what_a_trace_would_settle_is_not_traced(kind: type[_TwoLayers]):
    module, stock = _pair(kind)
    assert not isinstance(module, Fused)
    _same(module, stock)
    with torch.no_grad():
        _same(module, stock)
    if kind is _Default:
        _same(module, stock, 3.0)


def _other_function(module: Any) -> None:
    module.act = nn.ReLU()


def _other_formula(module: Any) -> None:
    module.act.approximate = "tanh"


def _rate(module: Any) -> None:
    module.drop.p = 1.0


def _adapted(module: Any) -> None:
    module.adapter = nn.Hardtanh(-0.1, 0.1)


@pytest.mark.parametrize(
    ("kind", "change"),
    [(_TwoLayers, _other_function), (_TwoLayers, _other_formula), (_ReadsAChild, _rate), (_MayAdapt, _adapted)],
)
def test_what_changed_since_is_seen(kind: type[_TwoLayers], change: Callable[[Any], None]):
    module, stock = _pair(kind)
    assert isinstance(module, Fused)
    _same(module, stock)
    for each in (module, stock):
        change(each)
    assert module.why_stock() is not None
    _same(module, stock)


def test_buffers_are_read_at_each_call():
    module, stock = _pair(_ReadsABuffer)
    assert isinstance(module, Fused)
    for each in (module, stock):
        each.factor.fill_(5.0)
    _same(module, stock)


def test_a_longer_sequence_is_seen():
    module, stock = _pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    assert isinstance(module, Fused)
    extra = nn.Linear(8, 8)
    for each in (module, stock):
        each.append(extra)
    _same(module, stock)
    assert type(module[:2]) is type(module)
    _same(module[:2], stock[:2])  # made by the class itself, without a match


def test_arguments_by_name_and_none():
    module, stock = _pair(_TwoLayers)
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x=x), stock(x=x))
    assert inspect.signature(module.forward) == inspect.signature(stock.forward)
    with pytest.raises(TypeError):
        module()


class _Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
def test_linear_layers_of_one_class_that_differ():
    models = [_TwoLayers() for _ in range(2)]
    for model, scale in zip(models, (1.0, 3.0)):
        model.fc1 = _Scaled(8, 16)
        model.fc1.scale = scale
        _same(fuse(copy.deepcopy(model)), model)


class _StraightThrough(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (F.relu(x) - x).detach()


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
@pytest.mark.parametrize(
    "act", [_StraightThrough(), nn.Hardtanh(0.0, 1000.0), nn.ReLU6()], ids=lambda act: type(act).__name__
)
def test_activations_that_only_look_like_ours(act: nn.Module):
    stock = _TwoLayers()
    stock.act = act
    module = fuse(copy.deepcopy(stock))
    assert not isinstance(module, Fused)


# ------------------------------------------------------------------------------------------------------------- norms


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach() * self.weight


class _OverAnotherDimension(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps)


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
@pytest.mark.parametrize(
    "norm", [_Detached(), _OverAnotherDimension(), nn.GroupNorm(1, 8)], ids=lambda m: type(m).__name__
)
def test_norms_that_only_look_like_ours(norm: nn.Module):
    assert not isinstance(fuse(norm), Fused)


def _pruned(norm: Any) -> None:
    prune.l1_unstructured(norm, "weight", 0.5)


def _parametrized(norm: Any) -> None:
    parametrize.register_parametrization(norm, "weight", nn.Softplus())


def _assigned(norm: Any) -> None:
    weight = norm.weight.detach() * 2
    del norm._parameters["weight"]
    norm.weight = weight  # as replicas of DataParallel hold theirs


def _other_eps(norm: Any) -> None:
    norm.eps = 0.5


@pytest.mark.parametrize("change", [_pruned, _parametrized, _assigned, _other_eps])
def test_a_norm_reads_its_weight_where_it_is(change: Callable[[Any], None]):
    stock = nn.LayerNorm(8)
    nn.init.normal_(stock.weight)
    module = fuse(copy.deepcopy(stock))
    for each in (module, stock):
        change(each)
    _same(module, stock)
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(input=x), stock(input=x))


# --------------------------------------------------------------------------------------------------------- attention


class _Attention(nn.Module):
    def __init__(self, width_of_keys: int = 8) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.k_proj, self.v_proj = nn.Linear(width_of_keys, 8), nn.Linear(width_of_keys, 8)

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None = None, change: bool = False) -> torch.Tensor:
        q = self.q_proj(x)
        if change:
            x += 1
        keys = x if keys is None else keys
        return torch.cat([q, self.k_proj(keys), self.v_proj(keys)], -1)


class _CallsSuper(_Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class _Counts(_Attention):
    """Its forward changes what it reads afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self._scale = 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.count()
        return self.core(x) * self.calls

    def count(self) -> None:
        self.calls += 1

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return self.k_proj(x) + self.q_proj(x) * self.v_proj(x)


class _ByAProperty(_Counts):
    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.scale = self._scale + 1
        return self.core(x) * self._scale * self.scale


class _BySuper(_Counts):
    def count(self) -> None:
        super().count()


class _ByItself(_Counts):
    def count(self) -> None:
        vars(self)["calls"] += 1


class _ByAChild(_Counts):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()

    def count(self) -> None:
        whole = self
        self.child.forward = lambda x: setattr(whole, "calls", whole.calls + 1)
        self.child(None)


class _KeepsAMethod(_Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not hasattr(self, "kept"):
            self.kept = self.core
        self.count()
        return self.kept(x) * self.calls


class _HasAMethod(_Counts):
    def __init__(self) -> None:
        super().__init__()
        self.core = MethodType(_ByAProperty.core, self)  # type: ignore[method-assign]


class _HidesAChild(_Counts):
    extra: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Tanh()

    def core(self, x: torch.Tensor) -> torch.Tensor:
        y = _Counts.core(self, x)
        return y if self.extra is None else torch.tanh(y)


class _HidesAnAttribute(_Counts):
    gain = property(lambda self: 7.0)

    def __init__(self) -> None:
        super().__init__()
        vars(self)["gain"] = 1.0

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return _Counts.core(self, x) * self.gain  # type: ignore[operator]


class _Deletes(_Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.count()
        self.late = self.calls
        y = self.core(x) * self.late
        vars(self).pop("late")
        return y if not hasattr(self, "late") else y * 0


@pytest.mark.parametrize(
    "kind",
    [
        *(_Counts, _ByAProperty, _BySuper, _ByItself, _ByAChild, _KeepsAMethod, _HasAMethod, _HidesAChild),
        *(_HidesAnAttribute, _Deletes),
    ],
)
def test_attributes_that_change_in_a_call_are_read_as_they_are(kind: type[_Counts]):
    """Three calls of each class, in which `forward` changes an attribute by another way."""
    stock, x = kind(), torch.randn(2, 3, 8)
    module: Any = fuse(kind())
    module.load_state_dict(stock.state_dict())
    assert isinstance(module, Fused)
    with stats(module) as ran:
        for _ in range(3):
            torch.testing.assert_close(module(x), stock(x))
    assert module.calls == stock.calls
    assert ran.total_of("linear_act") == (1 if kind is _KeepsAMethod else 3)


@pytest.mark.filterwarnings("ignore:fuse. nothing was fused")
def test_projections_of_other_inputs_run_alone():
    module, stock = _pair(_Attention)
    with stats(module) as ran:
        _same(module, stock)
    assert ran.total_of("linear_act") == 1
    assert module.why_stock() is None
    _same(module, stock, torch.randn(4, 8))
    assert module.why_stock() == "its projections get different inputs"
    with stats(module) as ran:
        _same(module, stock)
    assert ran.total_of("linear_act") == 0
    module, stock = _pair(_Attention)
    _same(module, stock, None, True)  # x is overwritten between the products
    module, stock = _pair(lambda: _Attention(5))
    assert not isinstance(module, Fused)
    _same(module, stock, torch.randn(4, 5))
    module, stock = _pair(_CallsSuper)
    _same(module, stock)


# ------------------------------------------------------------------------------------------------- whole models, check


def test_global_hooks_see_every_child():
    module, x = fuse(_TwoLayers()), torch.randn(2, 8)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda each, *_: seen.append(each))
    try:
        module(x)
    finally:
        handle.remove()
    assert {module.fc1, module.act, module.fc2} <= set(seen)
    assert module.why_stock() is None


class _Nan(Fused):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan")


class _WrongGradient(Fused):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * x).detach() + x - x.detach()


@pytest.mark.parametrize("kind", [_Nan, _WrongGradient])
def test_the_check_sees_nan_and_gradients(kind: type[Fused]):
    matcher = SimpleNamespace(fused=kind, match=lambda each: Match(()) if type(each) is _Double else None)
    with pytest.raises(ValueError, match="fuse: 1, fused by your matcher"):
        fuse(nn.Sequential(nn.Linear(8, 8), _Double()), matchers=[matcher], check=torch.randn(3, 8))


class _Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def model() -> nn.Module:
    pytest.importorskip("transformers")
    return fuse(_llama()).train()


def _llama() -> Any:
    from foreign import foreign

    return foreign("llama")


def test_transformers_reads_the_signature(model: Any):
    stock = _llama()
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    padded = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(padded, **options), stock.generate(padded, **options))
    assert type(model)(model.config).lm_head.weight.shape == model.lm_head.weight.shape


class _SumOfSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


def _first_without_a_graph(logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return logits.square().sum()


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits.square().sum(),
        _first_without_a_graph,
        _SumOfSquares.apply,
        lambda logits: torch.utils.checkpoint.checkpoint(lambda x: x.square().sum(), logits, use_reentrant=False),
        lambda logits: (torch.tanh(logits.float() / 3) * 3).square().sum(),
    ],
)
def test_logits_have_their_gradients_whoever_reads_them(model: Any, read: Callable[[torch.Tensor], torch.Tensor]):
    stock = _llama().train()
    batch = torch.randint(1, 64, (2, 6))
    for each in (stock, model):
        out = each(batch, labels=batch, use_cache=False)
        assert isinstance(out.logits, Logits) == (each is model)
        (out.loss + read(out.logits)).backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_logits_of_autocast_keep_its_dtype(model: Any):
    batch = torch.randint(1, 64, (2, 6))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch, labels=batch, use_cache=False)
        expected = _llama().train()(batch, use_cache=False).logits
    assert out.logits.dtype == expected.dtype == torch.bfloat16
    assert (out.logits + 0).dtype == torch.bfloat16
    out.logits.float().sum().backward()


def test_explain_of_what_runs_partly(model: Any):
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda *_: None)
    rows = {(row.op, row.layers) for row in explain(model).rows if row.kind == "LlamaAttention"}
    assert rows == {("apply_rope", 2), ("linear_act(q_proj, k_proj, v_proj)", 1)}
    model.loss_function = lambda logits, **_: logits.sum()
    assert not any(row.op.startswith("linear_cross_entropy") for row in explain(model).rows)
