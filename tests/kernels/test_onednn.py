"""Products by oneDNN: right where the op inside is silently wrong, chosen by a table; weights packed and dropped."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from oracle import assert_matches
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from tuning_case import shipped_tables

import shardfuse as sf
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.linear import cpu, cpu_tables, gated_linear, linear_act, onednn_autograd, onednn_schemas
from shardfuse.kernels.linear import onednn as steps
from shardfuse.kernels.runtime import autograd, dispatch, onednn, processor, tuning
from shardfuse.parallel.cross_entropy import linear_cross_entropy

WHY_NOT = onednn.why_not(torch.float32)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

RAW = torch.ops.mkldnn._linear_pointwise if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
CASES = [(op, case) for op in ("linear_act", "gated_linear") for case in registry.op(op).tagged("test")]
CPU = torch.device("cpu")


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def raw(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert RAW is not None
    return RAW(x, weight, None, "none", (), "")


def choices() -> set[str]:
    """What ran since the last question."""
    found = {impl for op, impl in dispatch.counts if op in ("linear_act", "gated_linear", "linear_cross_entropy")}
    dispatch.counts.clear()
    return found


Table = Callable[..., None]


@pytest.fixture
def table(tmp_path) -> Iterator[Table]:
    """``table(train=16, packed=1)``: from how many tokens on oneDNN wins, for weights of any size; 0 means never. The
    kinds of the engine are in it only if they are given."""
    with shipped_tables(tmp_path / "shipped") as write:
        arch = processor.architecture()

        def fill(**tokens: int) -> None:
            entries = [
                {
                    "op": cpu_tables.OP,
                    "bucket": cpu_tables.bucket(kind, 1),
                    "config": {"from_tokens": tokens.get(kind, 0)},
                    "measured": {},
                    "source": "a measurement",
                    "source_hash": tuning.source_hash(cpu_tables.SOURCES),
                }
                for kind in cpu_tables.KINDS
                if kind in tokens or not kind.startswith("served")
            ]
            content = {"format": 2, "arch": arch, "dry": False, "origin": {}, "entries": entries}
            write(content | {"sources": {cpu_tables.OP: list(cpu_tables.SOURCES)}}, f"{arch}.json")
            linear_act(torch.ones(1, 1), torch.ones(1, 1))  # reads it, as importing the package does
            dispatch.counts.clear()

        yield fill
    tuning.forget()


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case.name}" for op, case in CASES])
def test_matches_the_oracle(op: str, case: registry.Case):
    spec = registry.op(op)
    inputs = spec.make_inputs(case, CPU, seed=3)
    lacks = onednn.why_not(case.dtype)
    if lacks:
        with pytest.raises(RuntimeError, match="impl='onednn' was asked for, but oneDNN"):
            spec.run(inputs, case, "onednn")
        return
    choices()
    assert_matches(spec, case, inputs, impl="onednn")
    assert choices() == {"onednn", "reference"}


def test_gradients_arrive_where_the_raw_op_silently_has_none():
    x, weight = leaves((5, 8), (6, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once in a process
        with contextlib.suppress(RuntimeError):
            raw(x, weight).sum().backward()
    assert weight.grad is None
    linear_act(x, weight, impl="onednn").sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(6, 8))


def test_autocast_applies_where_the_raw_op_ignores_it():
    if onednn.why_not(torch.bfloat16):
        pytest.skip(str(onednn.why_not(torch.bfloat16)))
    x, weight = leaves((5, 8), (6, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert raw(x, weight).dtype == torch.float32
        y = linear_act(x, weight, impl="onednn")
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_what_the_raw_op_refuses_is_refused_by_name_or_computed():
    for dtype in (torch.float64, torch.int32):
        x, weight = torch.ones(5, 8).to(dtype), torch.ones(6, 8).to(dtype)
        with pytest.raises(RuntimeError):
            raw(x, weight)
        with pytest.raises(RuntimeError, match=rf"oneDNN has no products in {str(dtype)[6:]};"):
            linear_act(x, weight, impl="onednn")
    with pytest.raises(ValueError, match="cast them to one dtype"):
        linear_act(torch.ones(5, 8), torch.ones(6, 8, dtype=torch.bfloat16), impl="onednn")
    empty = torch.ones(5, 0), torch.ones(6, 0)
    with pytest.raises(RuntimeError):
        raw(*empty)
    bias = torch.arange(6.0)
    assert torch.equal(linear_act(*empty, bias, activation="relu", impl="onednn"), bias.expand(5, 6))
    with pytest.raises(RuntimeError, match="the tensors are on 'cuda' and it runs on CPUs"):
        dispatch.choose("linear_act", torch.device("cuda"), "onednn", onednn=dispatch.OneDNN())
    assert linear_act(torch.ones(2, 8, device="meta"), torch.ones(6, 8, device="meta"), impl="onednn").is_meta


@pytest.mark.parametrize("shape", [(8,), (0, 8), (1, 8), (2, 3, 8)])
def test_any_leading_dimensions(shape: tuple[int, ...]):
    x, weight, bias = leaves(shape, (6, 8), (6,))
    found = {}
    for impl in ("onednn", "reference"):
        y = linear_act(x, weight, bias, activation="gelu_tanh", impl=impl)
        found[impl] = [y, *torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))]
    for ours, low in zip(found["onednn"], found["reference"]):
        torch.testing.assert_close(ours, low)


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_a_result_may_be_changed_in_place(shape: tuple[int, ...], activation: str):
    """As Falcon's block does with its feed-forward layer's."""
    x, weight = leaves(shape, (6, 8))
    grads = []
    for impl in ("onednn", "reference"):
        y = linear_act(x, weight, activation=activation, impl=impl)
        y += 1
        grads.append(torch.autograd.grad(y.square().sum(), [x, weight]))
    for ours, low in zip(*grads):
        torch.testing.assert_close(ours, low)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
@pytest.mark.parametrize("activation", ["identity", "gelu_tanh"])
def test_second_derivatives_are_torchs_own(shape: tuple[int, ...], activation: str):
    x, weight, bias = leaves(shape, (6, 8), (6,))
    found = {}
    for impl in ("onednn", "reference"):
        y = linear_act(x, weight, bias, activation=activation, impl=impl)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found[impl] = torch.autograd.grad(dx.norm(), [x, weight, bias])
    for ours, low in zip(found["onednn"], found["reference"]):
        torch.testing.assert_close(ours, low)


def test_second_derivatives_are_refused_where_there_are_none():
    x, weight = leaves((5, 8), (6, 8))
    frozen = weight.detach()
    for y in (linear_act(x, frozen, impl="onednn"), gated_linear(x, weight, weight * 2, impl="onednn")):
        with pytest.raises(RuntimeError, match="create_graph=True asks for second derivatives"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_backward_does_not_read_may_change():
    x, weight = leaves((5, 8), (6, 8))
    inner = x * 1
    y = linear_act(inner, weight.detach(), impl="onednn")
    inner += 1  # a frozen weight has no gradient that would want x
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(5, 8))


def test_operands_with_gaps_and_overlaps():
    """A bias of a column, an expanded one; windows of a signal; one row for all."""
    table, signal = torch.randn(8, 3), torch.randn(12)
    x, weight = torch.randn(5, 8), torch.randn(8, 8)
    for bias in (table[:, 1], torch.randn(1).expand(8)):
        torch.testing.assert_close(linear_act(x, weight, bias, impl="onednn"), F.linear(x, weight, bias))
        gated = gated_linear(x, weight, weight, bias, bias, impl="onednn")
        torch.testing.assert_close(gated, F.silu(F.linear(x, weight, bias)) * F.linear(x, weight, bias))
    for rows, matrix in (
        (signal.unfold(0, 8, 1), weight),
        (x, torch.randn(15).unfold(0, 8, 1)),
        (x, torch.randn(1, 8).expand(8, 8)),
        (x[:1].expand(5, 8), weight.t()),
    ):
        leaf = matrix.detach().requires_grad_()
        y = linear_act(rows, leaf, impl="onednn")
        torch.testing.assert_close(y, F.linear(rows, matrix))
        (dw,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        torch.testing.assert_close(dw, torch.ones_like(y).t() @ rows)


@pytest.mark.parametrize("sizes", [(0, 8, 6), (5, 0, 6), (5, 8, 0)])
def test_empty_operands(sizes: tuple[int, int, int]):
    T, D, N = sizes
    x, weight, bias = leaves((T, D), (N, D), (N,))
    for gated in (False, True):
        args = (x, weight, weight, bias, bias) if gated else (x, weight, bias)
        y = (gated_linear if gated else linear_act)(*args, impl="onednn")
        assert y.shape == (T, N)
        found = torch.autograd.grad(y.sum(), [x, weight, bias])
        assert [each.shape for each in found] == [x.shape, weight.shape, bias.shape]


def test_forward_mode_and_transforms_run_the_reference(table: Table):
    table(train=1)
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    rows = torch.func.vmap(lambda row: linear_act(row, weight, activation="silu"))(x)
    torch.testing.assert_close(rows, F.silu(F.linear(x, weight)))
    assert choices() == {"reference"}
    with pytest.raises(RuntimeError, match=r"torch\.func's transforms have no kernel"):
        torch.func.vmap(lambda row: linear_act(row, weight, impl="onednn"))(x)


# --- as torch sees it -------------------------------------------------------------------------------------------------


def test_opcheck():
    x, w, b, dy = (torch.randn(shape) for shape in ((5, 8), (6, 8), (6,), (5, 6)))
    ops = onednn_schemas
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")  # autograd is around these ops
    for op, args in (
        (ops.linear_act_fwd, (x, [w, w + 1], [b, None], None, "gelu_tanh", True)),
        (ops.linear_act_fwd, (x, [w], [b], dy, "identity", False)),
        (ops.gated_linear_fwd, (x, [w, w + 1], [None, b], "silu", True)),
        (ops.gated_linear_fwd, (x, [w, w + 1], [None, b], "quick_gelu", False)),
        (ops.linear_dgrad, ([dy, dy + 1], [w, w + 1])),
        (ops.linear_dgrad_act, (dy, w, torch.randn(5, 8), "relu", True)),
        (ops.linear_dgrad_gated, (dy, w, torch.randn(5, 8), torch.randn(5, 8), "silu", True)),
        (ops.linear_wgrad, ([dy], x, [True])),
        (ops.linear_wgrad_, ([dy], x, [torch.zeros(6, 8)], [torch.zeros(6)])),
        (ops.act_grad, (dy, dy + 1, "gelu_erf")),
        (ops.gated_act_grad, (dy, dy + 1, dy - 1, "silu")),
    ):
        torch.library.opcheck(op, args, test_utils=utils)


def _compiles(backend: str) -> None:
    x, w, u, v = leaves((5, 8), (6, 8), (6, 8), (8, 6))

    def step(x: torch.Tensor) -> torch.Tensor:
        h = gated_linear(x, w, u, impl="onednn")
        return linear_act(h, v, activation="gelu_tanh", residual=x, impl="onednn")

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    dy = torch.randn(5, 8)
    ours, eager = (torch.autograd.grad(run(x), [x, w, u, v], dy) for run in (compiled, step))
    for ours_grad, grad in zip(ours, eager):
        torch.testing.assert_close(ours_grad, grad)


def test_compiles_fullgraph():
    _compiles("aot_eager")


@pytest.mark.nightly
def test_compiles_in_inductor_where_the_raw_op_fails():
    _compiles("inductor")


def test_symbolic_sizes_tie_no_graph_to_the_table(table: Table):
    table(train=4)
    weight = torch.randn(6, 8)
    counter = CompileCounter()
    step = torch.compile(lambda x: linear_act(x, weight), backend=counter, fullgraph=True, dynamic=True)
    for tokens in (3, 9, 2):
        step(torch.randn(tokens, 8))
    assert counter.frame_count == 1
    chosen = torch.compile(lambda x: linear_act(x[x[:, 0] > 0], weight), backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        chosen(torch.randn(9, 8))
    layer = sf.ColumnParallelLinear(8, 6)
    tokens = torch.export.Dim("tokens", min=1, max=64)
    torch.export.export(layer, (torch.randn(5, 8),), dynamic_shapes={"x": {0: tokens}})
    x = torch.randn(5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(layer, (x,), check_trace=False)
    torch.testing.assert_close(traced(x), layer(x))


def test_auto_compiles_to_torchs_own_and_a_request_to_our_op(table: Table):
    table(train=1)
    weight = torch.randn(6, 8)
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(str(graph.graph))
        return graph

    for impl, there in (("auto", False), ("onednn", True)):
        torch._dynamo.reset()
        step = torch.compile(lambda x: linear_act(x, weight, activation="relu", impl=impl), backend=backend)  # noqa: B023
        step(torch.randn(5, 8))
        assert ("onednn_linear_act_fwd" in seen.pop()) == there


# --- backward ---------------------------------------------------------------------------------------------------------


def test_a_backward_forms_what_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """By the short Function, and by the one that a split backward needs."""
    x, weight, bias = leaves((5, 8), (6, 8), (6,))
    formed: list[tuple[int, ...]] = []

    def noted(*args: Any) -> torch.Tensor:
        formed.append(tuple(args[0].shape))
        return inner(*args)

    inner = onednn.product
    monkeypatch.setattr(onednn, "product", noted)
    monkeypatch.setattr(onednn_autograd, "product", noted)
    dy, forward, dgrad, wgrad = torch.randn(5, 6), (5, 8), (5, 6), (6, 5)
    for splitting in (False, True):
        with autograd.split_backward(splitting):
            y = linear_act(x, weight, bias, activation="silu", impl="onednn")
            torch.autograd.grad(y, [x], dy, retain_graph=True)
            assert formed == [forward, dgrad]
            formed.clear()
            torch.autograd.grad(y, [weight, bias], dy)
            assert formed == [wgrad]
            formed.clear()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_has_the_same_bits(reentrant: bool):
    x, weight, bias = leaves((5, 8), (6, 8), (6,))
    run = lambda x: linear_act(x, weight, bias, activation="gelu_tanh", impl="onednn")
    plain = torch.autograd.grad(run(x).square().sum(), [x, weight, bias])
    checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(plain, (x.grad, weight.grad, bias.grad)))


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_buffers(into: torch.dtype):
    dtype = torch.float32 if into == torch.float32 else torch.bfloat16
    if onednn.why_not(dtype):
        pytest.skip(str(onednn.why_not(dtype)))
    x, weight, bias = (t.detach().to(dtype).requires_grad_() for t in leaves((5, 8), (6, 8), (6,)))
    weight.main_grad, bias.main_grad = torch.ones(6, 8, dtype=into), torch.ones(6, dtype=into)
    for _ in range(2):
        linear_act(x, weight, bias, fuse_wgrad_accumulation=True, impl="onednn").sum().backward()
    assert weight.grad is None
    exact = 1 + 2 * x.detach().double().sum(0).expand(6, 8)
    assert accuracy.judge("dw", weight.main_grad, exact.to(into), exact, terms=10, roundings=4).ok
    assert torch.equal(bias.main_grad, torch.full((6,), 11.0, dtype=into))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_vocabulary_projection(table: Table, reduction: str):
    hidden, weight = leaves((7, 8), (33, 8))
    targets = torch.randint(33, (7,))
    found = {}
    table(train=2)
    for impl in ("auto", "onednn", "reference"):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl=impl)
        found[impl] = [loss, *torch.autograd.grad(loss.sum(), [hidden, weight])]
        assert choices() == {"reference" if impl == "reference" else "onednn"}
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = F.cross_entropy(F.linear(*exact), targets, reduction=reduction)
    for name, ours, low, right in zip(
        ("loss", "dhidden", "dweight"),
        found["auto"],
        found["reference"],
        [loss, *torch.autograd.grad(loss.sum(), exact)],
    ):
        assert accuracy.judge(name, ours.detach(), low.detach(), right.detach(), terms=33).ok
    assert all(torch.equal(a, b) for a, b in zip(found["auto"], found["onednn"]))


# --- chosen -----------------------------------------------------------------------------------------------------------


def test_auto_follows_the_table(table: Table):
    weight = torch.randn(6, 8)
    for thresholds, pack, expected in (
        ({"train": 4}, False, {3: "reference", 4: "onednn", 9: "onednn"}),
        ({"train": 4}, True, {9: "reference"}),
        ({"packed": 2}, True, {1: "reference", 2: "onednn"}),
        ({}, False, {1000: "reference"}),
    ):
        table(**thresholds)
        for tokens, impl in expected.items():
            for x in (torch.randn(tokens, 8), torch.randn(1, tokens, 8)):
                with torch.no_grad():
                    linear_act(x, weight, pack_weight=pack)
                assert choices() == {impl}
    table(packed_act=2)
    with torch.no_grad():
        linear_act(torch.randn(2, 8), weight, activation="relu", pack_weight=True)
        assert choices() == {"onednn"}
    linear_act(torch.randn(2, 8), weight.requires_grad_(), activation="relu", pack_weight=True)
    assert choices() == {"reference"}  # packed weights are for inference


def test_sizes_beyond_the_table_are_as_its_last(table: Table):
    table(train=2)
    assert cpu.wins(torch.empty(2, 3000), torch.empty(7, 3000), "identity", False)
    linear_act(torch.randn(2, 1), torch.randn(1, 1))
    assert choices() == {"onednn"}


def test_other_dtypes_autocast_and_row_invariance_take_torchs_own(table: Table):
    table(train=1)
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    linear_act(x.double(), weight.double())
    linear_act(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        linear_act(x, weight)
    with dispatch.row_invariance():
        linear_act(x, weight)
    assert choices() == {"reference"}


class Noted(torch.Tensor):
    """A subclass whose products are its own affair."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_of_other_kinds_see_stock_calls(table: Table):
    table(train=1)
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    for pair in ((x.as_subclass(Noted), weight), (x, weight.as_subclass(Noted))):
        linear_act(*pair)
        assert "linear" in Noted.seen
        Noted.seen.clear()
    assert choices() == {"reference"}


def test_without_a_table_nothing_is_chosen(table: Table):
    tuning.forget()
    linear_act(torch.randn(5000, 8), torch.randn(6, 8))
    assert choices() == {"reference"}
    (row, _) = sf.explain(sf.ParallelMLP(8, 16)).rows
    assert "no table says where oneDNN is faster on this processor" in row.why
    assert "shardfuse bench calibrate --cpu" in row.why


@pytest.mark.parametrize("fault", ["wrong", "refused", "missing"])
def test_what_the_probe_finds_broken_is_not_used(table: Table, monkeypatch: pytest.MonkeyPatch, fault: str):
    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        if fault == "refused":
            raise RuntimeError("no such post-op")
        return torch.zeros(len(x), len(weight))

    monkeypatch.setattr(onednn, "_lacks", {})
    if fault == "missing":
        monkeypatch.delattr(torch.ops.mkldnn, "_linear_pointwise", raising=False)
        monkeypatch.setattr(type(torch.ops.mkldnn), "__getattr__", lambda *_: (_ for _ in ()).throw(AttributeError()))
    else:
        monkeypatch.setattr(onednn, "product", product)
    table(train=1)
    linear_act(torch.randn(5, 8), torch.randn(6, 8))
    assert choices() == {"reference"}
    said = {
        "wrong": "computes a product with 'identity' wrong",
        "refused": "no such post-op",
        "missing": "has no torch",
    }
    monkeypatch.setattr(dispatch, "_decided", {})
    with pytest.raises(RuntimeError, match=said[fault]):
        linear_act(torch.randn(5, 8), torch.randn(6, 8), impl="onednn")


def test_explain_says_from_how_many_tokens_on(table: Table):
    table(train=16, packed=2, packed_act=3)
    mlp = sf.ParallelMLP(8, 16)
    assert [(row.runs, row.why[:28]) for row in sf.explain(mlp).rows] == [
        ("onednn", "faster from 16 tokens on, th")
    ] * 2
    first, last = sf.explain(mlp.eval()).rows
    assert "from 3 tokens" in first.why
    assert "from 2 tokens" in last.why


def test_layers_and_fused_models_choose_alike(table: Table):
    """Training and inference of a layer in one process: by the table, and equal to what is asked for by name."""
    table(train=4, packed=4, packed_act=4)
    auto, asked = (sf.ParallelMLP(8, 16, impl=impl) for impl in ("auto", "onednn"))
    asked.load_state_dict(auto.state_dict())
    for tokens, impl in ((3, "reference"), (6, "onednn")):
        x = torch.randn(tokens, 8)
        for train in (True, False):
            auto.train(train), asked.train(train)
            choices()
            with torch.set_grad_enabled(train):
                y = auto(x)
                assert choices() == {impl}
                if impl == "onednn":
                    assert torch.equal(y, asked(x))


def test_torchs_own_calls_count_and_fail_as_ops_do(table: Table):
    table()
    for gated in (False, True):
        mlp = sf.ParallelMLP(8, 16, gated=gated).eval()
        dispatch.counts.clear()
        mlp(torch.randn(2, 8))
        ops = ["gated_linear", "linear_act"] if gated else ["linear_act"]
        assert [dispatch.counts[op, "reference"] for op in ops] == ([1, 1] if gated else [2])
        with pytest.raises(ValueError, match=r"weight 0 has shape \(16, 8\) but x has \(2, 9\)"):
            mlp(torch.randn(2, 9))


# --- packed -----------------------------------------------------------------------------------------------------------


def packing_layer() -> tuple[Any, torch.Tensor]:
    layer = sf.ColumnParallelLinear(8, 16, activation="gelu_tanh", impl="onednn").eval()
    x = torch.randn(5, 8)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
    assert onednn.packed_bytes(layer.weight) == 16 * 8 * 4
    return layer, x


def right(layer: Any, x: torch.Tensor) -> bool:
    exact = F.gelu(F.linear(x.double(), layer.weight.double(), layer.bias.double()), approximate="tanh")
    low = F.gelu(F.linear(x, layer.weight, layer.bias), approximate="tanh")
    with torch.no_grad():
        return accuracy.judge("y", layer(x), low.detach(), exact.detach(), terms=8).ok


def test_weights_are_packed_at_their_second_inference_call():
    layer = sf.ColumnParallelLinear(8, 16, impl="onednn").eval()
    x = torch.randn(5, 8)
    with torch.inference_mode():
        for call in range(3):
            layer(x)
            assert (onednn.packed_bytes(layer.weight) > 0) == (call > 0)
    packed = onednn.packed(layer.weight)
    with torch.no_grad():
        layer(x)
    assert onednn.packed(layer.weight) is packed  # once
    assert "0.0 MB of weights packed for inference" in " ".join(str(sf.explain(layer)).split())
    assert sf.explain(layer).packed == 16 * 8 * 4


def _in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def _through_data(layer: Any) -> None:
    layer.weight.data.mul_(2)  # torch counts no change


def _replaced(layer: Any) -> None:
    layer.weight.data = torch.randn(16, 8)


def _replaced_like(layer: Any) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def _new_like(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))


def _loaded(layer: Any) -> None:
    layer.load_state_dict({name: value * 2 for name, value in layer.state_dict().items()})


def _new(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(torch.randn(16, 8))


@pytest.mark.parametrize("change", [_in_place, _through_data, _replaced, _loaded, _new])
def test_changed_weights_are_never_multiplied_as_they_were(change: Callable[[Any], None]):
    layer, x = packing_layer()
    change(layer)
    assert all(right(layer, x) for _ in range(3))


def attention_layers() -> tuple[Any, torch.Tensor]:
    """q, k and v of attention, packed as one matrix."""
    layers = sf.layers.attention.attention.ParallelAttention(16, 4, 2, impl="onednn").eval()
    x = torch.randn(5, 16)
    with torch.no_grad():
        for _ in range(2):
            columns(layers, x)
    return layers, x


def columns(layers: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = (layers.q_proj, layers.k_proj, layers.v_proj)
    return linear_act(
        x, [part.weight for part in parts], [part.bias for part in parts], pack_weight=True, impl="onednn"
    )


def agree(layers: Any, x: torch.Tensor) -> bool:
    exact = [F.linear(x, part.weight, part.bias) for part in (layers.q_proj, layers.k_proj, layers.v_proj)]
    return all(torch.allclose(y, right, 1e-4, 1e-4) for y, right in zip(columns(layers, x), exact, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("gone", [[], ["q"], ["k", "v"], ["q", "k", "v"]], ids=lambda names: "".join(names) or "none")
def test_weights_that_share_a_product_are_packed_as_one(gone: list[str]):
    layers, x = attention_layers()
    for name in gone:
        layers.get_submodule(f"{name}_proj").bias = None
    y = columns(layers, x)
    assert all(part._base is y[0]._base is not None for part in y)  # columns of one result
    assert agree(layers, x)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layers.get_parameter(f"{name}.weight")
        assert onednn.packed_bytes(weight) == 4 * weight.numel()
        assert onednn.packed(weight) is weight  # alone it is not packed
    assert agree(layers, torch.randn(1, 16))
    assert agree(layers, torch.randn(2, 3, 16))


@torch.no_grad()
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("serving", [False, True], ids=["", "serving"])
@pytest.mark.parametrize("change", [_in_place, _through_data, _replaced_like, _new_like])
def test_one_that_changes_unpacks_all(change: Callable[[Any], None], name: str, serving: bool):
    layers, x = attention_layers()
    change(layers.get_submodule(name))
    with onednn.serving() if serving else contextlib.nullcontext():
        assert all(agree(layers, x) for _ in range(3))
    assert onednn.packed_bytes(layers.v_proj.weight)  # and are packed anew


@torch.no_grad()
def test_a_serving_block_sees_what_torch_counts():
    """Samples are compared when the block begins, torch's count of changes at each call."""
    layers, x = attention_layers()
    with onednn.serving():
        assert agree(layers, x)
        layers.k_proj.weight.mul_(2)
        assert agree(layers, x)


def test_training_one_of_them_drops_all():
    layers, x = attention_layers()
    layers.train().k_proj(x).sum().backward()
    assert not any(onednn.packed_bytes(param) for param in layers.parameters())


def _loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, torch.arange(5), impl="onednn")


def _product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return linear_act(x, weight, impl="onednn")


def _compiled(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(_product, backend="aot_eager")(weight, x)


def _counted(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False):
        return _product(weight, x)


def _on_a_device(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return _product(weight, x)


@pytest.mark.parametrize("use", [_loss, _product, _compiled, _counted, _on_a_device])
@pytest.mark.parametrize("grad", [False, True])
def test_no_path_multiplies_what_a_weight_was(use: Callable[..., torch.Tensor], grad: bool):
    """Whoever reads a packed weight asks whether it is still the weight."""
    weight, x = torch.nn.Parameter(torch.randn(16, 8)), torch.randn(5, 8)
    with torch.no_grad():
        for _ in range(2):
            linear_act(x, weight, pack_weight=True, impl="onednn")
        assert onednn.packed_bytes(weight)
        weight.mul_(3)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(use(weight, x), use(weight.detach().clone().requires_grad_(), x))


def test_the_probe_does_not_depend_on_defaults():
    source = """
import torch
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    from shardfuse.kernels.runtime import onednn
    import shardfuse.kernels.linear
print(onednn.why_not(torch.float32))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None", done.stderr


def test_a_training_step_drops_what_was_packed():
    layer, x = packing_layer()
    layer.train()(x).sum().backward()
    assert onednn.packed_bytes(layer.weight) == 0
    assert id(layer.weight) not in onednn._packed


def test_packed_copies_go_with_their_weights():
    before = len(onednn._packed)
    layer, _ = packing_layer()
    assert len(onednn._packed) == before + 1
    del layer
    gc.collect()
    assert len(onednn._packed) == before


def test_packing_leaves_no_trace_in_the_module():
    layer, x = packing_layer()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert onednn.packed_bytes(twin.weight) == 0
        assert right(twin, x)
    assert {name: type(value) for name, value in layer.state_dict().items()} == dict.fromkeys(
        ("weight", "bias"), torch.Tensor
    )


def test_views_of_one_call_are_not_packed():
    whole, x = torch.randn(32, 8), torch.randn(5, 8)
    with torch.no_grad():
        before = len(onednn._packed)
        for _ in range(3):
            linear_act(x, whole[:16], pack_weight=True, impl="onednn")
        assert len(onednn._packed) == before
        held = whole[:, :4]  # neither rows nor columns lie together
        for _ in range(3):
            y = linear_act(x[:, :4], held, pack_weight=True, impl="onednn")
        assert onednn.packed_bytes(held) == 0
    torch.testing.assert_close(y, x[:, :4] @ held.t())


def test_the_engine_has_rows_of_its_own_in_a_table(table: Table):
    table(served=1, served_act=2)
    x, weight = torch.randn(1, 8), torch.randn(4, 8)
    with torch.no_grad(), onednn.serving(compare=False):
        assert cpu.wins(x, weight, "identity", True)
        assert not cpu.wins(x, weight, "silu", True)
        assert cpu.wins(x, weight, "any", True)
        assert not cpu.wins(x, weight, "identity", False)
    assert not cpu.wins(x, weight, "identity", True)


def test_the_engine_packs_whatever_mode_the_model_is_in(table: Table):
    table(packed=1, packed_act=1)
    config = {"style": "gated", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2}
    model = sf.ParallelTransformer(sf.TransformerConfig(**config, num_heads=2, num_kv_heads=1, max_positions=32))
    requests = [sf.Request([1, 2, 3], max_new_tokens=4), sf.Request([5], max_new_tokens=4)]
    answers = sf.Engine(model, num_blocks=8).generate(requests)
    assert model.training
    assert choices() == {"onednn"}
    layers = [module for module in model.modules() if isinstance(module, sf.RowParallelLinear)]
    assert layers
    assert all(onednn.packed_bytes(layer.weight) for layer in layers)
    model(torch.arange(4)[None])
    assert choices() == {"reference"}  # training's rows of the table
    table()
    assert sf.Engine(model, num_blocks=8).generate(requests) == answers
    assert choices() == {"reference"}


def test_packing_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onednn, "PACKS", False)
    layer, x = sf.ColumnParallelLinear(8, 16, activation="gelu_tanh", impl="onednn").eval(), torch.randn(5, 8)
    assert all(right(layer, x) for _ in range(3))
    assert onednn.packed_bytes(layer.weight) == 0


def test_shared_steps_are_the_references():
    assert steps.act_grad is not None
    assert {name for name in dir(onednn_schemas) if name.startswith(("linear_", "gated_", "act_"))} == {
        name for name in vars(steps) if name.startswith(("linear_", "gated_", "act_"))
    }
