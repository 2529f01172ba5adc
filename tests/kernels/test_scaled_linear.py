"""scaled_linear and fp8_linear: products against the oracle, quantisation bit by bit, training, the ops in torch."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
from oracle import assert_matches
from torch import nn
from torch.nn import functional as F

from shardfuse.bench.harness import gate
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.dev.cases.scaled_linear import tensor_core_error
from shardfuse.kernels.scaled_linear import fp8_linear, op, quantize, reference, scaled_linear, schemas
from shardfuse.layers.fp8 import RECIPES, Fp8Linear

SPEC = registry.op("scaled_linear")
pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = reference.DTYPES


def same_bits(ours, theirs):
    """Equal shapes and values, NaN where there is NaN."""
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.interpret
@pytest.mark.parametrize("case", SPEC.tagged("test"), ids=lambda case: case.name)
def test_kernels_match_the_oracle(case):
    assert_matches(SPEC, case, SPEC.make_inputs(case, DEVICE, seed=1))


def test_the_tensor_cores_error_is_allowed_where_they_add():
    case = SPEC.tagged("test")[0]
    assert SPEC.allowed(case, torch.device("cpu")) == 0.0
    longest = max(case.sizes.values())
    assert SPEC.allowed(case, torch.device("cuda", 0)) == pytest.approx(longest**0.5 / 8192)
    loosened = dataclasses.replace(SPEC, allowed=lambda case, device: 0.5)
    strict, loose = (gate.check_case(spec, case, torch.device("cpu"), "reference") for spec in (SPEC, loosened))
    assert max(verdict.budget for verdict in strict) < 0.5
    assert {verdict.budget for verdict in loose} == {0.5}


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("source", "layout"), [(torch.float32, "rows"), (torch.bfloat16, "columns"), (torch.float16, "rows")]
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantisation_bit_by_bit(dtype, source, layout):
    """Values, scales, amaxes and transposed copies of both implementations; magnitudes over seven decades."""
    x = (torch.randn(20, 40) * torch.logspace(-4, 3, 800).view(20, 40)).to(source)
    x[5], x[7, 3] = 0, x[7, 3] * 0
    if layout == "columns":
        x = x.t().contiguous().t()
    for options in ({}, {"scaling": "row"}, {"scale": torch.tensor(0.37)}):
        ours, theirs = (quantize(x, dtype, transpose=True, impl=impl, **options) for impl in ("triton", "reference"))
        for name in ours._fields:
            same_bits(getattr(ours, name), getattr(theirs, name))
        same_bits(ours.values_t if "scaling" not in options else ours.values, quantized_by_hand(x, ours, options))


def quantized_by_hand(x, found, options):
    """x over its scale by torch's own cast, once more."""
    dtype = found.values.dtype
    largest = torch.finfo(dtype).max
    values = (x.float() * (1 / found.scale)).clamp(-largest, largest)
    return (values if "scaling" in options else values.t()).to(dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_fp8_number_and_every_tie(dtype, impl):
    """All finite numbers of the format and the points half-way between neighbours, through a scale of 1."""
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()].unique()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, grid * (1 + 2.0**-20)]).clamp(grid[0], grid[-1])
    found = quantize(points.view(1, -1), dtype, scale=torch.tensor(1.0), impl=impl)
    same_bits(found.values[0], points.to(dtype))
    distance = (found.values[0].float() - points).abs()
    assert torch.equal(distance, (points[:, None] - grid).abs().amin(1))  # the nearest, whoever casts


@pytest.mark.interpret
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_zero_infinite_and_nan(impl, scaling):
    x = torch.zeros(3, 20)
    found = quantize(x, E4M3, scaling, impl=impl)
    assert (found.scale == 1).all()
    assert not found.values.float().any()
    assert not found.amax.any()
    x[1, 4], x[1, 5], x[1, 6], x[1, 7] = float("inf"), float("nan"), 1000.0, -1e-30
    found = quantize(x, E5M2, scaling, impl=impl)
    assert (found.scale == 1).all()
    assert found.amax.max() == float("inf")
    assert found.values[1, 4:8].float().isnan().tolist() == [True, True, False, False]  # an overflow stays visible
    assert not found.values[0].float().any()
    tiny = quantize(torch.full((1, 8), 1e-40), E4M3, scaling, impl=impl)
    assert tiny.values.float().isfinite().all()
    saturated = quantize(torch.tensor([[1e30, -1e30, 3.0]]), E4M3, scale=torch.tensor(1.0), impl=impl)
    assert saturated.values.float().tolist() == [[448.0, -448.0, 3.0]]
    empty = quantize(torch.zeros(0, 5), E4M3, scaling, transpose=True, impl=impl)
    assert empty.values.shape == (0, 5)
    assert empty.values_t.shape == (5, 0)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_delayed_scaling_is_a_window_over_amaxes(impl):
    """Scale from the largest of the last calls, then this call's amax in front: TransformerEngine's recipe."""
    history = torch.zeros(3)
    seen: list[float] = []
    for amax in (2.0, 8.0, 1.0, 0.5, 0.25, 4.0):
        x = torch.tensor([[amax, -amax / 3, 0.0]])
        found = quantize(x, E4M3, history=history, margin=1, impl=impl)
        window = max(seen[-3:], default=0.0)
        assert found.scale.item() == pytest.approx(window * 2 / 448 if window else 1.0, rel=1e-6)
        assert found.amax == amax
        seen.append(amax)
        assert history.tolist() == (seen[::-1] + [0.0] * 3)[:3]


@pytest.mark.interpret
def test_scales_mean_what_torch_means():
    x, w = quantize(torch.randn(32, 64)), quantize(torch.randn(48, 64))
    try:
        theirs = torch._scaled_mm(x.values, w.values.t(), x.scale, w.scale, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"torch._scaled_mm does not run here: {str(error).splitlines()[0]}")
    for impl in ("triton", "reference"):
        ours = scaled_linear(x.values, w.values, x.scale, w.scale, impl=impl)
        # Both round exact sums of few products: not to bf16's last place where the order of addition decides.
        assert accuracy.within("y", ours, theirs, torch.finfo(torch.bfloat16).eps).ok


@pytest.mark.interpret
def test_one_scale_beside_one_for_each_row():
    x, w = quantize(torch.randn(6, 32), scaling="row"), quantize(torch.randn(40, 32))
    exact = (x.values.double() * x.scale) @ (w.values.double() * w.scale).t()
    for weight_scale in (w.scale, w.scale.view(1, 1)):
        y = scaled_linear(x.values, w.values, x.scale, weight_scale, out_dtype=torch.float32, impl="triton")
        assert accuracy.within("y", y, exact, max(4 * torch.finfo(torch.float32).eps, tensor_core_error(32, DEVICE))).ok


# ----------------------------------------------------------------------------------------------------- training


def plain(x, weight, dy, scaling):
    """The three products from their definitions, on dequantised tensors in fp64."""

    def dequantised(t, dtype, dim):
        largest = torch.finfo(dtype).max
        scale = (t.abs().amax() if scaling == "tensor" else t.abs().amax(dim, keepdim=True)) / largest
        return (t / scale).to(dtype).double() * scale

    y = dequantised(x, E4M3, 1) @ dequantised(weight, E4M3, 1).t()
    dx = dequantised(dy, E5M2, 1) @ dequantised(weight, E4M3, 0)
    dw = dequantised(dy, E5M2, 0).t() @ dequantised(x, E4M3, 0)
    return y, dx, dw


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_gradients_are_products_of_quantised_tensors(scaling, impl):
    x, w, dy = torch.randn(33, 40, requires_grad=True), torch.randn(24, 40, requires_grad=True), torch.randn(33, 24)
    y = fp8_linear(x, w, scaling=scaling, impl=impl)
    ours = (y, *torch.autograd.grad(y, (x, w), dy))
    exact = plain(x.detach(), w.detach(), dy, scaling)
    unquantised = (x @ w.t(), dy @ w, dy.t() @ x)
    for mine, fp8, full in zip(ours, exact, unquantised):
        # A product with 1 / scale may round a number to the other neighbour than a quotient: rarely, and by one last
        # place, which costs a fraction of what all roundings together cost. Scales of another kind cost more.
        assert accuracy.within("y", mine, fp8, 0.5 * accuracy.relative_error(fp8, full.double())).ok
        assert accuracy.within("y", mine, full, 2**-3).ok  # half of e5m2's last place


@pytest.mark.interpret
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_only_the_gradients_asked_for(frozen, monkeypatch):
    products = []
    inner = op._product
    monkeypatch.setattr(op, "_product", lambda *a, **k: (products.append(1), inner(*a, **k))[1])
    leaves = {"x": torch.randn(5, 8), "weight": torch.randn(6, 8), "bias": torch.randn(6)}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    fp8_linear(*leaves.values(), impl="triton").sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is None} == {frozen}
    assert len(products) == (3 if frozen == "bias" else 2)


@pytest.mark.interpret
def test_a_split_backward_quantises_once(monkeypatch):
    """Input gradients in one pass, weight gradients in a later one: the history moves once, the results are whole."""
    x, w, dy = torch.randn(9, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True), torch.randn(9, 8)
    histories = torch.ones(3, 4)
    y = fp8_linear(x, w, histories=histories, impl="triton")
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (dw,) = torch.autograd.grad(y, w, dy)
    assert histories[2].tolist() == [dy.abs().max().item(), 1, 1, 1]
    y = fp8_linear(x, w, histories=torch.ones(3, 4), impl="triton")
    for split, whole in zip((dx, dw), torch.autograd.grad(y, (x, w), dy)):
        assert torch.equal(split, whole)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_weight_gradients_accumulate_in_main_grad(impl):
    x, w, b = torch.randn(9, 16), torch.randn(8, 16, requires_grad=True), torch.randn(8, requires_grad=True)
    dy = torch.randn(9, 8)
    dw, db = torch.autograd.grad(fp8_linear(x, w, b, impl=impl), (w, b), dy)
    w.main_grad, b.main_grad = torch.ones(8, 16), torch.ones(8)
    fp8_linear(x, w, b, fuse_wgrad_accumulation=True, impl=impl).backward(dy)
    assert w.grad is None
    torch.testing.assert_close(w.main_grad, 1 + dw)
    torch.testing.assert_close(b.main_grad, 1 + db)


@pytest.mark.interpret
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_trains_in_fp8(recipe):
    """The kernels follow the reference, which quantises alike; both follow fp32 as far as fp8's rounding lets them."""

    def losses(layer):
        torch.manual_seed(0)
        x, target = torch.randn(16, 16), torch.randn(16, 16)
        model = nn.Sequential(layer(16, 32), nn.GELU(), layer(32, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        out = []
        for _ in range(4):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    exact = losses(nn.Linear)
    ours, theirs = (losses(partial(Fp8Linear, recipe=recipe, impl=impl)) for impl in ("triton", "reference"))
    assert exact[-1] < 0.95 * exact[0]
    cost = max(abs(a - b) for a, b in zip(theirs, exact))  # what quantising costs, by the reference
    assert 0 < cost < 0.1 * exact[0]
    assert ours == pytest.approx(exact, abs=accuracy.FACTOR * cost)
    assert ours[-1] < 0.97 * ours[0]


# -------------------------------------------------------------------------------------------------------- layer


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_saved_as_nn_linear_is(recipe):
    stock, ours = nn.Linear(8, 6), Fp8Linear(8, 6, recipe=recipe)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())
    ours(torch.randn(4, 8))
    stock.load_state_dict(ours.state_dict())
    assert "recipe=" + recipe in repr(ours)


def test_a_layer_keeps_its_history_in_fp32():
    layer = Fp8Linear(8, 6)
    x = torch.full((2, 8), 1.001)
    layer(x)
    kept = layer.amax_history.view(torch.float32)[0, 0]
    assert kept == x[0, 0]
    layer.to(torch.bfloat16)
    assert layer.amax_history.view(torch.float32)[0, 0] == kept
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    layer.reset_parameters()
    assert not layer.amax_history.any()


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_autocast(impl):
    x, layer = torch.randn(2, 3, 16), Fp8Linear(16, 8, recipe="current", impl=impl)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = layer(x)
    assert (y.dtype, y.shape) == (torch.bfloat16, (2, 3, 8))
    y.float().sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


# ------------------------------------------------------------------------------------------------ torch and users


@pytest.mark.interpret
def test_opcheck():
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(6, 20)
    for transpose, scale in ((False, None), (True, torch.tensor(0.5))):
        torch.library.opcheck(schemas.quantize, (x, E5M2, transpose, scale), test_utils=utils)
        torch.library.opcheck(schemas.quantize_rows, (x, E4M3, transpose), test_utils=utils)
        torch.library.opcheck(schemas.quantize_delayed_, (x, E5M2, transpose, torch.ones(4), 0), test_utils=utils)
    a, b = quantize(x), quantize(torch.randn(10, 20))
    operands = (a.values, b.values, a.scale, b.scale)
    bias = torch.randn(10)
    utils = utils[1:]  # the schema check compares arguments by arithmetic, which fp8 has none of
    torch.library.opcheck(schemas.scaled_linear, (*operands, bias, "relu", torch.bfloat16), test_utils=utils)
    torch.library.opcheck(schemas.scaled_linear_, (*operands, torch.zeros(6, 10)), test_utils=utils)


@pytest.mark.interpret
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_compile_fullgraph_dynamic(recipe):
    """One graph serves several token counts and equals eager: gradients, and the history that both passes move."""
    eager = Fp8Linear(16, 8, recipe=recipe, impl="triton")
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 19):
        x, dy = torch.randn(T, 16, requires_grad=True), torch.randn(T, 8)
        results = []
        for layer, call in ((eager, eager), (traced, compiled)):
            y = call(x)
            results.append((y, *torch.autograd.grad(y, (x, *layer.parameters()), dy)))
        assert all(map(torch.equal, *results))
    if recipe == "delayed":
        assert torch.equal(eager.amax_history, traced.amax_history)
        assert eager.amax_history[:, :2].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6, 7).to(E4M3)}, r"weight has shape \(6, 7\).*expected \[F, 8\]"),
        ({"weight": torch.zeros(6, 8)}, r"weight is torch\.float32: expected torch\.float8_e4m3fn.*quantize\(\) makes"),
        ({"bias": torch.zeros(5)}, r"bias has shape \(5,\): expected \[6\]"),
        ({"x_scale": torch.ones(2)}, r"x_scale is torch\.float32 \[2\]: expected fp32 with 1 or 3 elements"),
        ({"weight_scale": torch.ones(6).half()}, r"weight_scale is torch\.float16 \[6\]: expected fp32"),
        ({"activation": "gelu"}, "activation='gelu': expected one of identity"),
        ({"out_dtype": torch.float64}, r"out_dtype=torch\.float64: expected bf16"),
        ({"x_scale": torch.ones(1, device="meta")}, "x_scale is on meta.*move them together"),
        ({"impl": "cuda"}, "impl='cuda': expected one of auto, triton, onednn, reference"),
    ],
)
def test_bad_products(change, message):
    with torch.device("cpu"):  # where the parameters above were made
        good = {"x": torch.zeros(3, 8).to(E4M3), "weight": torch.zeros(6, 8).to(E4M3)}
        good |= {"x_scale": torch.ones(3, 1), "weight_scale": torch.ones(6, 1), "bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=message):
        scaled_linear(**(good | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 8)}, r"x has shape \(2, 3, 8\): expected \[R, C\]"),
        ({"x": torch.zeros(3, 8, dtype=torch.int32)}, r"x is torch\.int32: expected bf16"),
        ({"dtype": torch.int8}, r"dtype=torch\.int8: expected one of torch\.float8_e4m3fn"),
        ({"scaling": "block"}, "scaling='block': expected one of tensor, row"),
        ({"scaling": "row", "scale": torch.ones(3)}, "scale and history go with scaling='tensor'"),
        ({"scale": torch.ones(3)}, r"scale is torch\.float32 \[3\]: expected fp32 with one element"),
        ({"scale": torch.ones(1), "history": torch.ones(1)}, "not both"),
        ({"history": torch.ones(3, 4)}, r"history is torch\.float32 \[3, 4\].*expected contiguous fp32 \[length\]"),
    ],
)
def test_bad_quantisation(change, message):
    with torch.device("cpu"), pytest.raises(ValueError, match=message):
        quantize(**({"x": torch.zeros(3, 8)} | change))


def test_bad_layers():
    with pytest.raises(ValueError, match="recipe='block': expected one of delayed, current, rowwise"):
        Fp8Linear(8, 6, recipe="block")
    with pytest.raises(ValueError, match="amax_history=0"):
        Fp8Linear(8, 6, amax_history=0)
    x, w = torch.zeros(3, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match="histories go with scaling='tensor'"):
        fp8_linear(x, w, scaling="row", histories=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"histories is .*\[2, 4\].*expected contiguous fp32 \[3, length\]"):
        fp8_linear(x, w, histories=torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("hip", "properties", "why"),
    [
        (None, {"major": 8, "minor": 0}, "sm_80 does not multiply fp8"),
        (None, {"major": 8, "minor": 9}, None),
        (None, {"major": 9, "minor": 0}, None),
        ("6.4", {"gcnArchName": "gfx942:sramecc+"}, "gfx942 does not multiply torch.float8_e4m3fn"),
        ("6.4", {"gcnArchName": "gfx950"}, None),
    ],
)
def test_chips_without_the_formats(hip, properties, why, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    chip = type("Properties", (), properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    reason = op._why_no_fp8(torch.device("cuda", 7))
    assert reason is None if why is None else why in reason
    if why is not None:
        with pytest.raises(RuntimeError, match=why):
            op.scaled_linear_choice(torch.device("cuda", 7), "triton")
        assert op.scaled_linear_choice(torch.device("cuda", 7)).impl == "reference"
