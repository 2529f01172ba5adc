"""rms_norm and layer_norm: the kernels against the fp64 oracle, and the ops as torch sees them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from oracle import assert_matches
from torch.nn import functional as F

from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.dropout import dropout
from shardfuse.kernels.norm import config, layer_norm, op, rms_norm, schemas
from shardfuse.kernels.runtime import dispatch, library, onednn

pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NORMS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
EPS32 = torch.finfo(torch.float32).eps


def leaves(name, T, D, **options):
    """x and the parameters of ``name``, as leaves."""
    shapes = ((T, D), (D,), (D,))[: 3 if name == "layer_norm" else 2]
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


# ------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("case", registry.op("rms_norm").tagged("test"), ids=lambda case: case.name)
def test_kernels_match_the_oracle(name, case):
    assert_matches(registry.op(name), case, registry.op(name).make_inputs(case, DEVICE, seed=1))


def test_the_reference_is_what_its_docstring_says():
    """From the definitions, in fp64: offsets, a dropped share, statistics of the sum."""
    x, r, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 10), (6, 10), (10,), (10,)))
    rng_key = torch.tensor([7])
    more = {"residual": r, "dropout_p": 0.4, "rng_key": rng_key, "stream": 2, "row_start": 9}
    s = r + dropout(x, 0.4, rng_key, stream=2, row_start=9)
    y = s / (s.square().mean(1, keepdim=True) + 1e-3).sqrt() * (1 + w)
    for ours, expected in zip(rms_norm(x, w, eps=1e-3, weight_offset=1.0, **more), (y, s)):
        torch.testing.assert_close(ours, expected)
    away = s - s.mean(1, keepdim=True)
    y = away / (away.square().mean(1, keepdim=True) + 1e-3).sqrt() * (1 + w) + b
    for ours, expected in zip(layer_norm(x, w, b, eps=1e-3, weight_offset=1.0, **more), (y, s)):
        torch.testing.assert_close(ours, expected)
    assert (dropout(x, 0.4, rng_key, stream=2, row_start=9) == 0).any()


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
def test_offsets_past_two_to_the_31(name):
    """Rows 2^30 elements apart, forward and backward: only the touched pages exist."""
    pitch, D = 2**30, 16
    storage = torch.empty(3 * pitch + D, dtype=torch.float16)
    x = storage.as_strided((4, D), (pitch, 1))
    x.copy_(torch.randn(4, D))
    near = x.contiguous().requires_grad_()
    far = x.detach().requires_grad_()
    w = torch.randn(D, dtype=torch.float16, requires_grad=True)
    dy = torch.randn(4, D, dtype=torch.float16)
    results = []
    for each in (near, far):
        y = NORMS[name](each, w, impl="triton")
        dx, dw = torch.autograd.grad(y, (each, w), dy)
        results.append((y, dx, dw))
    assert all(map(torch.equal, *results))
    y, s = NORMS[name](far.detach(), w, residual=near.detach(), impl="triton")
    assert torch.equal(s, 2 * near)


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
def test_a_row_does_not_depend_on_its_company(name):
    """A slice of the batch gives the same bits, forward and backward."""
    x, *params = leaves(name, 9, 48)
    dy = torch.randn(9, 48)
    y = NORMS[name](x, *params, impl="triton")
    (dx,) = torch.autograd.grad(y, x, dy)
    part = x.detach()[5:6].requires_grad_()
    y_part = NORMS[name](part, *params, impl="triton")
    (dx_part,) = torch.autograd.grad(y_part, part, dy[5:6])
    assert torch.equal(y[5:6], y_part)
    assert torch.equal(dx[5:6], dx_part)


@pytest.mark.interpret
def test_large_means_do_not_cancel():
    """The variance of numbers around 1000 is that of numbers around 0."""
    x = torch.randn(5, 700)
    y = layer_norm(x + 1000, eps=1e-6, impl="triton")
    exact = F.layer_norm((x + 1000).double(), (700,), eps=1e-6)
    assert accuracy.within("y", y, exact, 1000 * EPS32).ok  # what the mean's last place is worth


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
def test_layouts_and_shapes(name):
    """Batches, vectors, strided rows, expanded gradients, a residual that is x itself."""
    norm = NORMS[name]
    x, *params = leaves(name, 6, 24)
    expected = norm(x, *params, impl="reference")
    for view in (x.view(2, 3, 24), x.repeat(1, 2)[:, ::2], x.t().contiguous().t()):
        reference = norm(view, *params, impl="reference")
        torch.testing.assert_close(norm(view, *params, impl="triton"), reference)
    torch.testing.assert_close(norm(x[0], *params, impl="triton"), expected[0])
    doubled = norm(x, *params, residual=x, impl="triton")
    torch.testing.assert_close(doubled, norm(x, *params, residual=x, impl="reference"))
    for impl in ("triton", "reference"):
        y, s = norm(x, *params, residual=x, impl=impl)
        grads = torch.autograd.grad(y.sum() + 2 * s.sum(), [x, *params])
        if impl == "triton":
            ours = grads
    torch.testing.assert_close(ours, grads)


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
def test_nothing_comes_of_nothing(name):
    for shape in ((0, 24), (2, 0, 24), (3, 0)):
        x = torch.randn(shape, requires_grad=True)
        params = [torch.ones(shape[-1], requires_grad=True) for _ in range(2 if name == "layer_norm" else 1)]
        y, s = NORMS[name](x, *params, residual=x.detach(), impl="triton")
        assert y.shape == s.shape == x.shape
        dx, *grads = torch.autograd.grad(y.sum() + s.sum(), [x, *params])
        assert dx.shape == x.shape
        assert all(not grad.any() for grad in grads)


# ------------------------------------------------------------------------------------------------------ autograd


@pytest.fixture
def launched(monkeypatch):
    """What backward asks of its launch: in each call the dtypes of dx, dresidual, dweight, dbias, None: not wanted."""
    calls = []
    launch = library.imported(schemas.LAUNCH)
    inner = launch.norm_bwd
    monkeypatch.setattr(launch, "norm_bwd", lambda *args: (calls.append(args[-4:]), inner(*args))[1])
    return calls


@pytest.mark.interpret
@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "x residual", "weight bias", "x residual weight"])
def test_only_the_gradients_asked_for(frozen, launched):
    names = ("x", "residual", "weight", "bias")
    tensors = dict(zip(names, (torch.randn(5, 8), torch.randn(5, 8), torch.randn(8), torch.randn(8))))
    for name, leaf in tensors.items():
        leaf.requires_grad_(name not in frozen.split())
    grads = []
    for impl in ("triton", "reference"):
        y, s = layer_norm(tensors["x"], tensors["weight"], tensors["bias"], residual=tensors["residual"], impl=impl)
        assert s.requires_grad == (not {"x", "residual"} <= set(frozen.split()))
        wanted = [leaf for leaf in tensors.values() if leaf.requires_grad]
        grads.append(torch.autograd.grad(y.square().sum(), wanted))
    torch.testing.assert_close(*grads)
    (asked,) = launched
    assert (asked[2] is not None, asked[3] is not None) == ("weight" not in frozen, "bias" not in frozen)
    # The gradients of x and residual are one tensor where nothing was dropped.
    assert sum(dtype is not None for dtype in asked[:2]) == (0 if "residual" in frozen else 1)


@pytest.mark.interpret
def test_a_gradient_of_the_sum_alone_runs_no_norm(launched):
    x, r, w = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True), torch.ones(8)
    _, s = rms_norm(x, w.requires_grad_(), residual=r, impl="triton")
    ds = torch.randn(5, 8)
    s.backward(ds)
    assert torch.equal(x.grad, ds)
    assert torch.equal(r.grad, ds)
    assert w.grad is None
    assert not launched


@pytest.mark.interpret
@pytest.mark.parametrize("first", ["inputs", "parameters"])
def test_a_split_backward_forms_each_gradient_once(first, launched):
    """The inputs' gradients in one pass, the parameters' in another, as zero-bubble pipelines ask for them."""
    x, *params = leaves("layer_norm", 7, 40)
    r, dy, ds = torch.randn(7, 40, requires_grad=True), torch.randn(7, 40), torch.randn(7, 40)

    def run():
        return layer_norm(x, *params, residual=r, impl="triton")

    whole = torch.autograd.grad(run(), [x, r, *params], (dy, ds))
    launched.clear()
    outs = run()
    parts = {"inputs": [x, r], "parameters": params}
    second = "parameters" if first == "inputs" else "inputs"
    split = {first: torch.autograd.grad(outs, parts[first], (dy, ds), retain_graph=True)}
    split[second] = torch.autograd.grad(outs, parts[second], (dy, ds))
    assert all(map(torch.equal, split["inputs"], whole))
    if first == "inputs":  # the pass forms all of them at once
        assert all(map(torch.equal, split["parameters"], whole[2:]))
    else:  # asked for alone they come from another kernel, compiled apart: rounding may differ
        torch.testing.assert_close(split["parameters"], whole[2:], rtol=1e-5, atol=1e-5)
    formed = [i for asked in launched for i, dtype in enumerate(asked) if dtype is not None]
    assert sorted(formed) == [0, 2, 3]
    assert len(launched) == (1 if first == "inputs" else 2)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference", "auto"])
@pytest.mark.parametrize("name", NORMS)
def test_x_may_be_carried_on(name, impl, launched):
    """(y, x): what else comes of x has its gradient added in the norm's backward."""
    x, *params = leaves(name, 6, 24)
    dy, ds = torch.randn(6, 24), torch.randn(6, 24)
    y, same = NORMS[name](x, *params, carry=True, impl=impl)
    assert torch.equal(same, x)
    ours = torch.autograd.grad((y, same), [x, *params], (dy, ds))
    expected = torch.autograd.grad((NORMS[name](x, *params, impl="reference"), x * 1), [x, *params], (dy, ds))
    torch.testing.assert_close(ours, expected)
    assert len(launched) == (impl == "triton" or (impl == "auto" and DEVICE.type == "cuda"))
    with torch.no_grad():
        assert NORMS[name](x, *params, carry=True, impl=impl)[1] is x
    with pytest.raises(ValueError, match="carry=True beside a residual"):
        NORMS[name](x, *params, carry=True, residual=x, impl=impl)


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
def test_results_may_be_changed_in_place(name):
    x, *params = leaves(name, 2, 24)
    x3 = x.view(1, 2, 24)
    expected = torch.autograd.grad(2 * NORMS[name](x3, *params, impl="reference").sum(), [x, *params])
    y = NORMS[name](x3, *params, impl="triton")
    torch.testing.assert_close(torch.autograd.grad(y.mul_(2).sum(), [x, *params]), expected)
    y, s = NORMS[name](x3, *params, residual=x3, impl="triton")
    s.add_(1)  # which backward needs as it was
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.interpret
def test_second_derivatives_are_refused_by_the_kernel_and_there_in_the_reference():
    x, w = leaves("rms_norm", 3, 8, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x, w: rms_norm(x, w, weight_offset=1.0), (x, w))
    x, w = leaves("rms_norm", 3, 8)
    y = rms_norm(x, w, impl="triton")
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.interpret
def test_forward_mode_takes_the_reference():
    x, w = torch.randn(3, 8), torch.randn(8)
    _, slope = torch.func.jvp(lambda x: rms_norm(x, w), (x,), (torch.ones(3, 8),))
    assert slope.any()
    with pytest.raises(RuntimeError, match="forward-mode differentiation has no kernel"):
        torch.func.jvp(lambda x: rms_norm(x, w, impl="triton"), (x,), (torch.ones(3, 8),))


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's own rms_norm
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", NORMS)
def test_autocast_gives_what_torch_gives(name, impl):
    """bf16 activations, fp32 parameters and residual stream, as autocast leaves them."""
    _, *params = leaves(name, 1, 24)
    x = torch.randn(6, 24, dtype=torch.bfloat16)
    r = torch.randn(6, 24)
    stock = getattr(F, name)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        for each in (x, r):
            y = NORMS[name](each, *params, impl=impl)
            theirs = stock(each, (24,), *params, **({"eps": 1e-6} if name == "rms_norm" else {}))
            assert y.dtype == theirs.dtype
            # Each side may err as a sum over the row does, or as its rounding to 16 bits.
            assert accuracy.within("y", y, theirs, accuracy.FACTOR * accuracy.rounding(y.dtype, terms=24)).ok
        y, s = NORMS[name](x, *params, residual=r, impl=impl)
        assert torch.equal(s, x + r)
        assert y.dtype == stock(s, (24,)).dtype
    for grad, param in zip(torch.autograd.grad(y.sum(), params), params):
        assert grad.dtype == param.dtype


@pytest.mark.parametrize("name", NORMS)
def test_autocast_on_a_gpu_is_fp32(name, monkeypatch):
    """The rule, where no GPU is: what CUDA's autocast runs in fp32 includes both norms, but rms_norm not in 2.11."""
    cuda, call = torch.device("cuda", 0), op._Call(name, 1e-6, 0.0, 0.0, 0, 0, False)
    assert op._result_dtype(call, torch.bfloat16, cuda) == torch.bfloat16
    with torch.autocast("cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else monkeypatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
        cast = name == "layer_norm" or not torch.__version__.startswith("2.11.")
        assert op._result_dtype(call, torch.bfloat16, cuda) == (torch.float32 if cast else torch.bfloat16)
        assert op._result_dtype(call, torch.float64, cuda) == torch.float64
        assert op._result_dtype(call, torch.bfloat16, torch.device("cpu")) == torch.bfloat16


# ------------------------------------------------------------------------------------------------ torch and users


@pytest.mark.interpret
def test_opcheck():
    x, w, b = torch.randn(6, 20), torch.randn(20), torch.randn(20, dtype=torch.bfloat16)
    r, rng_key = torch.randn(6, 20, dtype=torch.bfloat16), torch.tensor([5])
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    stats = torch.ones(6), torch.zeros(6)
    fp32, bf16 = torch.float32, torch.bfloat16
    for args in (
        (x, None, w, None, None, False, 1e-6, 1.0, 0.0, 0, 0, fp32),
        (r, x, None, None, rng_key, True, 1e-6, 0.0, 0.3, 1, 2, bf16),
        (r, r, w, b, None, True, 1e-6, 0.0, 0.0, 0, 0, bf16),
    ):
        torch.library.opcheck(schemas.norm_fwd, args, test_utils=utils)
    for args in (
        (x, None, x, w, stats[0], None, None, 1.0, 0.0, 0, 0, fp32, None, fp32, None),
        (r, x, x, None, *stats, rng_key, 0.0, 0.3, 1, 2, bf16, fp32, None, None),
        (x, None, x, w, *stats, None, 0.0, 0.0, 0, 0, None, None, fp32, bf16),
    ):
        torch.library.opcheck(schemas.norm_bwd, args, test_utils=utils)


@pytest.mark.interpret
@pytest.mark.parametrize("name", NORMS)
def test_compile_fullgraph_dynamic(name):
    """One graph serves several token counts and equals eager, gradients included, masks too."""
    _, *params = leaves(name, 1, 16)
    rng_key = torch.tensor([11])
    layer = SimpleNamespace(eps=1e-3, p=0.25, row_start=7)  # numbers of which torch.compile makes inputs

    def call(x, r, rng_key):
        more = {"eps": layer.eps, "row_start": layer.row_start, "impl": "triton"}
        y, s = NORMS[name](x, *params, residual=r, dropout_p=layer.p, rng_key=rng_key, **more)
        return y, *NORMS[name](s, *params, residual=r, **more)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 19):
        x, r = torch.randn(T, 16, requires_grad=True), torch.randn(T, 16, requires_grad=True)
        grads = [torch.randn(T, 16) for _ in range(3)]
        results = []
        for run in (call, compiled):
            outs = run(x, r, rng_key)
            results.append((*outs, *torch.autograd.grad(outs, (x, r, *params), grads)))
        torch.testing.assert_close(*results, rtol=4 * EPS32, atol=4 * EPS32)


@pytest.mark.parametrize("name", NORMS)
def test_on_a_cpu_the_plain_call_is_torchs_own(name):
    """Bit for bit, and counted."""
    with torch.device("cpu"):
        x, *params = leaves(name, 6, 24)
    before = dispatch.counts[name, "reference"]
    y = NORMS[name](x, *params, eps=1e-5)
    assert torch.equal(y, getattr(F, name)(x, (24,), *params, eps=1e-5))
    assert dispatch.counts[name, "reference"] == before + 1


@torch.no_grad()
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("shape", [(1, 512), (33, 64), (2, 3, 24), (512, 48), (5, 4096), (0, 8)], ids=str)
def test_rms_norm_of_a_serving_block(shape, eps):
    """On a CPU: within the budget of the definition, with a residual and without a weight."""
    x, r = torch.randn(shape, device="cpu"), torch.randn(shape, device="cpu")
    weight = torch.rand(shape[-1], device="cpu") + 0.5
    for w, residual in ((weight, None), (None, None), (weight, r)):
        s = x if residual is None else x + residual
        with onednn.serving():
            options = {"carry": True} if residual is None else {"residual": residual}
            y, kept = rms_norm(x, w, eps=eps, **options)
        low = F.rms_norm(s, s.shape[-1:], w, eps)
        exact = F.rms_norm(s.double(), s.shape[-1:], None if w is None else w.double(), eps)
        verdict = accuracy.judge("y", y, low, exact, terms=shape[-1])
        assert verdict.ok, verdict
        assert torch.equal(kept, s)


@torch.no_grad()
def test_a_serving_block_keeps_what_rms_norm_promises():
    x, weight = torch.randn(9, 4096, device="cpu"), torch.rand(4096, device="cpu")
    with onednn.serving():
        y = rms_norm(x, weight)
        assert torch.equal(rms_norm(x[5:6], weight), y[5:6])  # whatever its company
        assert torch.equal(rms_norm(x, weight, impl="reference"), F.rms_norm(x, (4096,), weight, 1e-6))
        with torch.enable_grad():
            assert torch.equal(rms_norm(x, weight), F.rms_norm(x, (4096,), weight, 1e-6))
        x[1, 5], x[2, 5], x[3] = float("nan"), float("inf"), 0.0
        y = rms_norm(x, weight)
        with pytest.raises(ValueError, match="weight has shape"):
            rms_norm(x, weight[:1])
    assert y[[0, *range(4, 9)]].isfinite().all()
    assert y[1].isnan().all()
    assert y[2, 5].isnan()
    assert torch.equal(y[3], torch.zeros(4096))


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.tensor(1.0)}, "x is a scalar: expected"),
        ({"x": torch.ones(3, 8, dtype=torch.int32)}, r"x is torch\.int32: expected bf16"),
        ({"weight": torch.ones(7)}, r"weight has shape \(7,\) but x has \(3, 8\): expected \(8,\)"),
        ({"bias": torch.ones(1)}, r"bias has shape \(1,\) but x has \(3, 8\): expected \(8,\)"),
        ({"weight": torch.ones(8, dtype=torch.int64)}, r"weight is torch\.int64: expected a floating-point dtype"),
        ({"residual": torch.ones(3, 1)}, r"residual has shape \(3, 1\).*expected \(3, 8\)"),
        ({"weight": torch.ones(8, device="meta")}, "x is on cpu but weight on meta; move them together"),
        ({"dropout_p": 0.5, "rng_key": torch.tensor([1])}, r"dropout_p=0\.5 without a residual"),
        ({"dropout_p": 0.5, "residual": torch.ones(3, 8)}, "needs an RNG key"),
        ({"dropout_p": 1.5, "residual": torch.ones(3, 8), "rng_key": torch.tensor([1])}, r"p=1\.5: expected"),
    ],
)
def test_bad_input(change, message, impl):
    with torch.device("cpu"):
        good = {"x": torch.ones(3, 8), "weight": torch.ones(8), "bias": torch.ones(8)}
        with pytest.raises(ValueError, match=message):
            layer_norm(**(good | change), impl=impl)


def test_bad_impl_and_no_kernel():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match="impl='cuda': expected one of auto, triton, onednn, reference"):
        rms_norm(x, impl="cuda")
    with pytest.raises(RuntimeError, match=r"torch\.float64 has no kernel"):
        rms_norm(x.double(), impl="triton")


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_blocks(arch):
    """Blocks hold the rows that they say they hold, with no more threads than a program may have."""
    lanes = 64 if arch == "gfx942" else 32
    for width in (1, 2, 80, 1000, 4096, 5120, 8192, 12288, 16384, 20000, 2**20):
        for found in (config.forward_config(arch, width), config.backward_config(arch, width)):
            assert found.block_d % 4 == 0
            assert found.block_d & (found.block_d - 1) == 0
            assert 128 <= found.num_warps * lanes <= 1024
            assert found.block_t * found.block_d <= 16384
        assert config.forward_config(arch, width).block_d >= min(width, 4096)
        if config.sums_fit(arch, width, 2, 2):
            assert width <= 4 * config.backward_config(arch, width).block_d


# ------------------------------------------------------------------------------------------------------ carry


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", NORMS)
def test_what_comes_after_a_carried_x_is_added_up_in_backward(name, impl, monkeypatch):
    x, *params = leaves(name, 5, 24)
    norm = NORMS[name]
    y = norm(x, *params, impl=impl)
    expected = torch.autograd.grad((y.square() + (3 * x).sin()).sum(), [x, *params])
    launches = []
    launch = library.imported(schemas.LAUNCH)
    inner = launch.norm_bwd
    monkeypatch.setattr(launch, "norm_bwd", lambda *args: launches.append(args[1] is not None) or inner(*args))
    y, carried = norm(x, *params, carry=True, impl=impl)
    assert torch.equal(carried, x)
    found = torch.autograd.grad((y.square() + (3 * carried).sin()).sum(), [x, *params])
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs)
    assert launches == ([True] if impl == "triton" else [])


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_what_is_carried_where_gradients_are_missing(impl):
    x, weight = leaves("rms_norm", 5, 24)
    y, carried = rms_norm(x, weight, carry=True, impl=impl)
    (dx,) = torch.autograd.grad(carried.sum(), x, retain_graph=True)  # nothing through the norm
    torch.testing.assert_close(dx, torch.ones_like(x))
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, rms_norm(x, weight, impl=impl))))
    frozen = x.detach()
    y, carried = rms_norm(frozen, weight, carry=True, impl=impl)
    assert carried is frozen
    assert y.requires_grad
    with torch.no_grad():
        assert rms_norm(x, weight, carry=True, impl=impl)[1] is x
    with pytest.raises(ValueError, match="carry=True beside a residual"):
        rms_norm(x, weight, residual=x, carry=True, impl="triton")


@pytest.mark.interpret
def test_carrying_compiles():
    x, weight = leaves("rms_norm", 5, 24)

    def layer(x):
        y, carried = rms_norm(x, weight, carry=True, impl="triton")
        return y + carried.sin()

    expected = layer(x)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)))


# ------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.interpret
@pytest.mark.parametrize("D", [700, 768, 1000])
@pytest.mark.parametrize("value", [1000.1, 31415.9, 3e19])
def test_constant_rows_have_no_variance(D, value):
    x = torch.full((2, D), value)
    assert torch.equal(layer_norm(x, impl="triton"), torch.zeros(2, D))


@pytest.mark.interpret
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_no_number_shows(name, bad):
    x, *params = leaves(name, 3, 24)
    with torch.no_grad():
        x[1, 5] = bad
    y = NORMS[name](x, *params, impl="triton")
    assert y[[0, 2]].isfinite().all()
    assert y[1].isnan().any()
