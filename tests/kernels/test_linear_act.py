"""linear_act: the kernels against the fp64 oracle, and the op as torch sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_matches
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.linear import ACTIVATIONS, linear_act, schemas
from shardfuse.kernels.runtime import device, dispatch

SPEC = registry.op("linear_act")
pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize("case", SPEC.tagged("test"), ids=lambda case: case.name)
def test_kernels_match_the_oracle(case):
    assert_matches(SPEC, case, SPEC.make_inputs(case, DEVICE, seed=1))


@pytest.mark.interpret
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    # Errors are measured against the largest element: there must be some of them, or one that cancels decides. Sizes of
    # 1 are among the cases above.
    T=st.one_of(st.just(0), st.integers(8, 70)),
    D=st.integers(8, 70),
    F=st.integers(32, 70),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    weights=st.integers(1, 3),
    bias=st.booleans(),
)
def test_any_size(T, D, F, dtype, activation, weights, bias):
    options = {"activation": activation, "weights": weights, "bias": bias, "layout": "rows", "residual": False}
    case = registry.Case("drawn", dtype, {"T": T, "D": D, "F": F}, options)
    assert_matches(SPEC, case, SPEC.make_inputs(case, DEVICE, seed=T + D + F))


@pytest.mark.interpret
def test_offsets_past_two_to_the_31(monkeypatch):
    """Rows 2^30 elements apart: the third row's offset does not fit 32 bits. Only the touched pages exist."""
    pitch, D = 2**30, 16
    storage = torch.empty(3 * pitch + D, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((4, D), (pitch, 1))
    x.copy_(torch.arange(4 * D).view(4, D) / 64)
    w = torch.eye(D, dtype=torch.float16, device=DEVICE)
    assert torch.equal(linear_act(x, w, impl="triton"), x.contiguous())
    if DEVICE.type == "cpu":
        # The same through masked pointers: a row pitch that TMA cannot take.
        x = storage.as_strided((3, D), (pitch + 1, 1))
        x.copy_(torch.arange(3 * D).view(3, D) / 64)
        assert torch.equal(linear_act(x, w, impl="triton"), x.contiguous())


@pytest.mark.interpret
@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "x+weight"])
def test_only_the_gradients_asked_for(frozen, monkeypatch):
    launched: list[str] = []  # layouts of products: "nn" forms x's gradient, "tn" the weight's
    inner = device.Prepared.launch

    def watched(self: Any, grid: Any, tensors: Any, *, on: torch.Tensor) -> None:
        gemm = self._launched["gemm"]
        launched.extend([] if gemm is None else [gemm.layout])
        inner(self, grid, tensors, on=on)

    monkeypatch.setattr(device.Prepared, "launch", watched)
    leaves = {"x": torch.randn(5, 8), "weight": torch.randn(6, 8), "bias": torch.randn(6)}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen.split("+"))
    linear_act(*leaves.values(), activation="relu", impl="triton").sum().backward()
    wanted = {name for name, leaf in leaves.items() if leaf.requires_grad}
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == wanted
    assert ("nn" in launched) == ("x" in wanted)
    assert ("tn" in launched) == ("weight" in wanted)
    stock = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves.values()]
    F.relu(F.linear(*stock)).sum().backward()
    for ours, theirs in zip(leaves.values(), stock):
        if theirs.grad is not None:
            assert accuracy.within("grad", ours.grad, theirs.grad, 2 * accuracy.rounding(torch.float32, 8)).ok


@pytest.mark.interpret
def test_batch_dimensions_and_no_grad():
    x, w, b = torch.randn(2, 3, 8), torch.randn(10, 8), torch.randn(10)
    with torch.no_grad():
        y = linear_act(x, w, b, activation="silu", impl="triton")
    assert y.shape == (2, 3, 10)
    assert not y.requires_grad
    torch.testing.assert_close(y, F.silu(F.linear(x, w, b)))


@pytest.mark.interpret
def test_opcheck():
    x, z, w, b = torch.randn(6, 8), torch.randn(6, 10), torch.randn(10, 8), torch.randn(10)
    # The gradient lives in an autograd.Function around these ops, so registration of autograd does not apply.
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for save in (False, True):
        args = (x, [w, w], [b, None], None, "gelu_tanh", save)
        torch.library.opcheck(schemas.linear_act_fwd, args, test_utils=utils)
        torch.library.opcheck(schemas.linear_act_fwd, (x, [w], [b], z, "relu", save), test_utils=utils)
        torch.library.opcheck(schemas.gated_linear_fwd, (x, [w, w], [b, None], "silu", save), test_utils=utils)
        torch.library.opcheck(schemas.linear_dgrad_act, (x, w.t(), z, "gelu_erf", save), test_utils=utils)
        torch.library.opcheck(schemas.linear_dgrad_gated, (x, w.t(), z, z, "silu", save), test_utils=utils)
    torch.library.opcheck(schemas.linear_wgrad_, ([z], x, [w.clone()], [b.clone()]), test_utils=utils)
    torch.library.opcheck(schemas.gated_act_grad, (z, z, z, "silu"), test_utils=utils)
    torch.library.opcheck(schemas.linear_dgrad, ([z, z], [w, w]), test_utils=utils)
    torch.library.opcheck(schemas.linear_wgrad, ([z, z], x, [True, False]), test_utils=utils)
    torch.library.opcheck(schemas.act_grad, (z, z, "silu"), test_utils=utils)


@pytest.mark.interpret
@pytest.mark.parametrize("weights", [1, 2])
def test_compile_fullgraph_dynamic(weights):
    """One graph, traced once, serves several token counts and equals eager, gradients included."""

    def step(x, ws, bs):
        ys = linear_act(x, ws, bs, activation="gelu_tanh", impl="triton")
        return sum(y.square().sum() for y in ys)

    ws = [torch.randn(12, 8, requires_grad=True) for _ in range(weights)]
    bs = [torch.randn(12, requires_grad=True) for _ in range(weights)]
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 9, 33):
        x = torch.randn(T, 8, requires_grad=True)
        eager = torch.autograd.grad(step(x, ws, bs), [x, *ws, *bs])
        ours = torch.autograd.grad(compiled(x, ws, bs), [x, *ws, *bs])
        for a, b in zip(ours, eager):
            assert torch.equal(a, b)


def test_compile_reference_is_visible_to_the_compiler():
    """impl="auto" on a CPU is plain torch inside a graph, not an opaque op."""
    x, w = torch.randn(4, 8, device="cpu"), torch.randn(6, 8, device="cpu")
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    y = torch.compile(lambda x, w: linear_act(x, w, activation="relu"), fullgraph=True, backend=backend)(x, w)
    torch.testing.assert_close(y, F.relu(F.linear(x, w)))
    assert targets
    assert not any("shardfuse" in target for target in targets)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_autocast(impl):
    x, w, b = torch.randn(6, 8), torch.randn(10, 8, requires_grad=True), torch.randn(10, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = linear_act(x, w, b, activation="gelu_erf", impl=impl)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert w.grad.dtype == b.grad.dtype == torch.float32
    exact = F.gelu(F.linear(x.double(), w.double(), b.double()))
    # Inputs, weights and the result are each rounded to bf16 once.
    assert accuracy.within("y", y, exact, 3 * torch.finfo(torch.bfloat16).eps).ok


@pytest.mark.interpret
def test_activation_checkpointing():
    x, w, b = (t.requires_grad_() for t in (torch.randn(6, 8), torch.randn(10, 8), torch.randn(10)))

    def layer(x):
        return linear_act(x, w, b, activation="gelu_tanh", impl="triton")

    plain = torch.autograd.grad(layer(x).square().sum(), (x, w, b))
    rerun = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), (x, w, b))
    assert all(torch.equal(a, b) for a, b in zip(plain, rerun))


@pytest.mark.interpret
def test_an_mlp_trains_on_the_kernels():
    """Five steps of a two-layer MLP through the kernels alone follow the stock path."""

    def losses(impl):
        torch.manual_seed(0)
        x, target = torch.randn(12, 16), torch.randn(12, 16)
        up, down = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)
        params = [*up.parameters(), *down.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.5)
        out = []
        for _ in range(5):
            hidden = linear_act(x, up.weight, up.bias, activation="gelu_tanh", impl=impl)
            loss = F.mse_loss(linear_act(hidden, down.weight, down.bias, impl=impl), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    before = dispatch.counts.copy()
    ours = losses("triton")
    assert dispatch.counts["linear_act", "triton"] - before["linear_act", "triton"] == 10
    assert ours[-1] < 0.8 * ours[0]
    # fp32 sums in another order: a few roundings per step, five steps.
    assert ours == pytest.approx(losses("reference"), rel=100 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6, 7)}, r"weight 0 has shape \(6, 7\).*expected \[F, 8\]"),
        ({"weight": torch.zeros(8), "bias": None}, r"weight 0 has shape \(8,\).*expected \[F, 8\]"),
        ({"bias": torch.zeros(1, 6)}, r"bias 0 has shape \(1, 6\): expected \[6\]"),
        ({"bias": torch.zeros(1)}, r"bias 0 has shape \(1,\): expected \[6\]"),
        ({"bias": torch.zeros(5)}, r"bias 0 has shape \(5,\): expected \[6\]"),
        ({"activation": "gelu"}, "activation='gelu': expected one of identity"),
        ({"weight": torch.zeros(6, 8, dtype=torch.float16)}, "cast them to one dtype"),
        ({"weight": [torch.zeros(6, 8)] * 4, "bias": None}, "4 weights given: expected 1 to 3"),
        ({"weight": [torch.zeros(6, 8)] * 2}, "bias is one tensor but weight is a sequence"),
        ({"weight": [torch.zeros(6, 8)] * 2, "bias": [None]}, "1 biases for 2 weights"),
        ({"x": torch.tensor(1.0)}, "x is a scalar"),
        ({"weight": torch.zeros(6, 8, device="meta"), "bias": None}, "move them together"),
        ({"impl": "cuda"}, "impl='cuda': expected one of auto, triton, onednn, reference"),
    ],
)
def test_bad_input(change, message):
    with torch.device("cpu"):  # where the parameters above were made
        good = {"x": torch.zeros(3, 8), "weight": torch.zeros(6, 8), "bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=message):
        linear_act(**(good | change))


def test_explicit_triton_is_refused_not_replaced():
    x = torch.zeros(3, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"impl='triton' was asked for, but torch\.float64 has no kernel"):
        linear_act(x, torch.zeros(6, 8, dtype=torch.float64), impl="triton")


def test_a_wrong_kernel_would_be_caught():
    """The check has teeth: an output off by 1 % fails it."""

    def run(inputs, case, impl):
        found = SPEC.run(inputs, case, impl)
        return {name: out * 1.01 for name, out in found.items()} if impl == "triton" else found

    case = SPEC.tagged("test")[0]
    with pytest.raises(AssertionError, match="y0: error"):
        assert_matches(dataclasses.replace(SPEC, run=run), case, SPEC.make_inputs(case, DEVICE, seed=1))
