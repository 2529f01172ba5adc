"""linear_act and gated_linear within torch: refusals, autocast, compiled and captured calls, what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardfuse import ColumnParallelLinear, ParallelMLP
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.linear import gated_linear, linear_act, schemas
from shardfuse.kernels.runtime import device, dispatch

launch = pytest.importorskip("shardfuse.kernels.linear.launch", reason="Triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up_weight": torch.zeros(5, 8)}, r"gate weight has shape \(6, 8\) but the up weight \(5, 8\)"),
        ({"gate_weight": torch.zeros(6, 7)}, r"gated_linear: weight 0 has shape \(6, 7\).*expected \[F, 8\]"),
        ({"gate_bias": torch.zeros(1)}, r"gated_linear: bias 0 has shape \(1,\): expected \[6\]"),
        ({"up_weight": torch.zeros(6, 8, dtype=torch.float16)}, "cast them to one dtype"),
        ({"activation": "swish"}, "activation='swish': expected one of identity"),
    ],
)
def test_bad_input_of_a_gated_layer(change, message):
    good = {"x": torch.zeros(3, 8), "gate_weight": torch.zeros(6, 8), "up_weight": torch.zeros(6, 8)}
    with pytest.raises(ValueError, match=message):
        gated_linear(**(good | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": torch.zeros(3, 5)}, r"residual has shape \(3, 5\): expected \(3, 6\), that of the result"),
        ({"residual": torch.zeros(6)}, r"residual has shape \(6,\)"),
        ({"residual": torch.zeros(3, 6, dtype=torch.float64)}, "cast them to one dtype"),
        ({"weight": [torch.zeros(6, 8)] * 2, "residual": torch.zeros(3, 6)}, "a residual goes with one weight"),
        ({"residual": torch.zeros(3, 6, device="meta")}, "move them together"),
    ],
)
def test_bad_residual(change, message):
    good = {"x": torch.zeros(3, 8), "weight": torch.zeros(6, 8)}
    with pytest.raises(ValueError, match=message):
        linear_act(**(good | change))


@pytest.mark.interpret
def test_sizes_past_32_bits_are_refused():
    x = torch.zeros(1, 8, device=DEVICE).expand(2**31 + 5, 8)
    with pytest.raises(ValueError, match=r"x has shape \(2147483653, 8\): the kernel's sizes may not exceed"):
        linear_act(x, torch.zeros(1, 8, device=DEVICE), impl="triton")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("T", [1, 16, 300, 4096])
def test_cuda_graphs_capture_the_kernels(T):
    """Descriptor scratch and split workspaces included: a replay on new data equals a plain call."""
    torch.manual_seed(0)
    x = torch.randn(T, 512, device=DEVICE, dtype=torch.bfloat16)
    w, u = (torch.randn(1024, 512, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def call():
        return gated_linear(linear_act(x, w[:512], activation="gelu_tanh"), w, u)

    for _ in range(2):  # compile before the capture
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(captured, call())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="compiles kernels for the GPU at hand")
@pytest.mark.parametrize("gated", [False, True])
def test_inductor_equals_eager(gated):
    torch.manual_seed(0)
    w, u = (torch.randn(256, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def step(x):
        y = gated_linear(x, w, u) if gated else linear_act(x, w, activation="gelu_tanh")
        return torch.autograd.grad(y.float().square().sum(), [x, w])

    compiled = torch.compile(step, dynamic=True)
    for T in (7, 64, 500):
        x = torch.randn(T, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), step(x)))


@pytest.mark.interpret
@pytest.mark.parametrize("activation", ["relu", "squared_relu"])
def test_an_overflow_does_not_vanish(activation):
    """NaN and inf pass through the activation and its gradient as they do through torch's."""
    x = torch.tensor([[float("nan"), float("inf"), -1.0]], device=DEVICE, requires_grad=True)
    results = []
    for impl in ("triton", "reference"):
        y = linear_act(x, torch.eye(3, device=DEVICE)[:1], activation=activation, impl=impl)
        results.append((y, *torch.autograd.grad(y, [x], torch.ones_like(y))))
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(*results))
    assert results[0][0].isnan().all()


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
def test_one_buffer_for_several_gradients(gated, monkeypatch):
    """Programs of one launch do not wait for each other: gradients that meet in a buffer take a launch each."""
    launches = []
    inner = schemas.linear_wgrad_
    monkeypatch.setattr(schemas, "linear_wgrad_", lambda *a: (launches.append(len(a[0])), inner(*a))[1])
    torch.manual_seed(0)
    x = torch.randn(9, 8, device=DEVICE)
    w, v = (torch.randn(6, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    for t in (w, v):
        t.main_grad = torch.zeros_like(t, requires_grad=False)
    options = {"fuse_wgrad_accumulation": True, "impl": "triton"}
    y = gated_linear(x, w, w, **options) if gated else sum(linear_act(x, [w, v, w], **options))
    y.sum().backward()
    assert launches == ([1, 1] if gated else [1, 1, 1])
    exact = [t.detach().double().requires_grad_() for t in (w, v)]
    products = [F.linear(x.double(), t) for t in (exact[0], exact[1], exact[0])]
    (F.silu(products[0]) * products[2] if gated else sum(products)).sum().backward()
    assert accuracy.within("dw", w.main_grad, exact[0].grad, 2 * accuracy.rounding(torch.float32, 16)).ok


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("fused", [False, True])
def test_no_inputs_at_all(impl, fused):
    """D = 0: the product is zero, the bias and its gradient are not."""
    x, w = torch.zeros(3, 0, device=DEVICE), torch.zeros(6, 0, device=DEVICE, requires_grad=True)
    b = torch.arange(6.0, device=DEVICE).requires_grad_()
    w.main_grad, b.main_grad = torch.zeros(6, 0, device=DEVICE), torch.zeros(6, device=DEVICE)
    y = linear_act(x, w, b, impl=impl, fuse_wgrad_accumulation=fused)
    assert torch.equal(y, b.detach().expand(3, 6))
    y.sum().backward()
    assert torch.equal(b.main_grad if fused else b.grad, torch.full((6,), 3.0, device=DEVICE))


@pytest.mark.interpret
def test_derivatives_that_kernels_lack_are_refused():
    x, w = torch.randn(2, 8, device=DEVICE, requires_grad=True), torch.randn(6, 8, device=DEVICE, requires_grad=True)
    for call in (lambda: linear_act(x, w, impl="triton"), lambda: gated_linear(x, w, w, impl="triton")):
        with pytest.raises(RuntimeError, match="create_graph=True asks for second derivatives"):
            torch.autograd.grad(call().sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="forward-mode differentiation has no kernel"):
            torch.func.jvp(lambda w: linear_act(x.detach(), w, impl="triton"), (w.detach(),), (w.detach(),))


@pytest.mark.interpret
def test_only_what_backward_reads_is_saved():
    x, w, r = torch.randn(5, 8, device=DEVICE), torch.randn(6, 8, device=DEVICE), torch.randn(5, 6, device=DEVICE)
    for needed, sizes in (("x", {48, 30}), ("w", {40, 30}), ("r", set()), ("xw", {48, 40, 30})):
        leaves = [t.detach().requires_grad_(name in needed) for name, t in (("x", x), ("w", w), ("r", r))]
        saved: list[int] = []

        def keep(t, saved=saved):
            saved.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = linear_act(leaves[0], leaves[1], activation="silu", residual=leaves[2], impl="triton")
        assert set(saved) == sizes, needed
        y.sum().backward()
        assert all((leaf.grad is not None) == leaf.requires_grad for leaf in leaves)


@pytest.mark.parametrize("arch", registry.TARGETS)
def test_a_single_row_may_claim_any_pitch(arch):
    """[1, D] is contiguous whatever its stride: neither the configuration nor the arguments depend on that."""
    found = []
    for row in (torch.empty(1, 4096, dtype=torch.bfloat16, device="meta"),
                torch.empty(4096, 1, dtype=torch.bfloat16, device="meta").t()):  # fmt: skip
        with device.capture(arch) as launches:
            launch.linear_act_fwd(row, (row.new_empty(4096, 4096),), (None,), None, "identity", False)
        found.append((launches[0].config, launches[0].args["a_strides"]))
    assert found[0] == found[1]


def test_a_gpu_too_old_for_the_kernels_runs_the_reference(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    old = torch.device("cuda", 99)
    choice = dispatch.choose("linear_act", old)
    assert choice == dispatch.Choice("reference", "the kernels need compute capability 8.0, and this GPU has 7.5")
    with pytest.raises(RuntimeError, match=r"this GPU has 7\.5"):
        dispatch.choose("linear_act", old, "triton")


@pytest.mark.interpret
def test_biases_of_any_stride():
    x, w = torch.randn(6, 24, device=DEVICE), torch.randn(16, 24, device=DEVICE)
    for bias in (torch.randn(32)[::2], torch.randn(16, 3)[:, 1], torch.randn(1).expand(16)):
        bias = bias.to(DEVICE)
        for call in (
            lambda impl, b=bias: linear_act(x, w, b, activation="relu", impl=impl),
            lambda impl, b=bias: gated_linear(x, w, w, b, b, impl=impl),
        ):
            torch.testing.assert_close(call("triton"), call("reference"))


@pytest.mark.interpret
def test_buffers_that_no_kernel_can_add_to_are_refused():
    dz, x = torch.randn(4, 8, device=DEVICE), torch.randn(4, 16, device=DEVICE)
    dw, db = torch.zeros(8, 16, device=DEVICE), torch.zeros(8, device=DEVICE)
    for buffers in (([dw.t().contiguous().t()], [db]), ([dw], [torch.zeros(16, device=DEVICE)[::2]])):
        with pytest.raises(ValueError, match=r"a buffer has shape .* expected one that is contiguous"):
            schemas.linear_wgrad_([dz], x, *buffers)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_wide_residual_stays_wide_under_autocast(impl):
    x, w = torch.randn(4, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE, requires_grad=True)
    residual = torch.full((4, 8), 1000.3, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = linear_act(x, w, residual=residual, impl=impl)
        branch = linear_act(x, w, impl=impl)
        assert torch.equal(linear_act(x, w, residual=x, impl=impl), x + branch)
    assert y.dtype == torch.float32
    assert torch.equal(y, residual + branch)
    assert torch.equal(torch.autograd.grad(y.sum(), residual)[0], torch.ones_like(residual))


@pytest.mark.interpret
def test_nothing_is_computed_for_outputs_that_nobody_uses():
    x = torch.randn(4, 8, device=DEVICE)
    weights = [torch.randn(8, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
    ys = linear_act(x, weights, activation="relu", impl="triton")
    dzs = {"shapes": []}

    def spy(found, *rest):
        dzs["shapes"].append(len(found))
        return inner(found, *rest)

    inner, launch.linear_wgrad = launch.linear_wgrad, spy
    try:
        ys[1].sum().backward()
    finally:
        launch.linear_wgrad = inner
    assert dzs["shapes"] == [1]
    assert [w.grad is None for w in weights] == [True, False, True]
    weights[0].requires_grad_(False)
    assert [y.requires_grad for y in linear_act(x, weights, activation="relu", impl="triton")] == [False, True, True]
    x.requires_grad_()
    ys = linear_act(x, weights, activation="relu", impl="triton")
    plain = linear_act(x, weights, activation="relu", impl="reference")
    for chosen in ((0,), (0, 2), (0, 1, 2)):
        found, expected = (
            torch.autograd.grad(sum(each[i].square().sum() for i in chosen), x, retain_graph=True)
            for each in (ys, plain)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.interpret
def test_a_backward_inside_autocast(impl):
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    weights = [torch.randn(8, 8, device=DEVICE, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)

    def step():
        first, second = linear_act(x, weights, impl=impl, fuse_wgrad_accumulation=True)
        return (first + second).sum()

    (plain,) = torch.autograd.grad(step(), x)
    loss = step()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        (inside,) = torch.autograd.grad(loss, x)
    assert torch.equal(plain, inside)


@pytest.mark.interpret
def test_exports_with_any_number_of_tokens():
    class Layer(torch.nn.Module):
        def forward(self, x, w):
            return gated_linear(linear_act(x, w, activation="gelu_tanh", impl="triton"), w, w, impl="triton")

    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=512)
    w = torch.randn(8, 8, device=DEVICE)
    example = torch.randn(2, 3, 8, device=DEVICE), w
    program = torch.export.export(
        Layer(), example, dynamic_shapes={"x": {0: batch, 1: length}, "w": None}, strict=False
    )
    x = torch.randn(5, 7, 8, device=DEVICE)
    torch.testing.assert_close(program.module()(x, w), Layer()(x, w))


def test_meta_tensors_and_transforms():
    x, w = torch.empty(2, 8, device="meta"), torch.empty(4, 8, device="meta")
    assert linear_act(x, (w, w))[1].shape == (2, 4)
    assert gated_linear(x, w, w).shape == (2, 4)
    w, rows = torch.randn(4, 8), torch.randn(3, 2, 8)
    torch.testing.assert_close(torch.vmap(lambda x: linear_act(x, (w, w))[0])(rows), rows @ w.t())


def test_what_autocast_leaves_alone_is_refused():
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for operands in ((x.int(), (w, w)), (x, (w.double(), w))):
            with pytest.raises(ValueError, match="autocast leaves fp64 and integers as they are"):
                linear_act(*operands)


@pytest.mark.interpret
def test_x_may_be_its_own_residual_under_compile():
    w = torch.randn(8, 8, device=DEVICE)
    layer = torch.compile(lambda x: linear_act(x, w, residual=x, impl="triton"), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 8, requires_grad=True, device=DEVICE)
    y, expected = layer(x), linear_act(x, w, residual=x, impl="triton")
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_results_may_be_changed_in_place(shape: tuple[int, ...]):
    x = torch.randn(*shape, requires_grad=True, device=DEVICE)
    w = torch.randn(8, 8, requires_grad=True, device=DEVICE)
    column, mlp = ColumnParallelLinear(8, 8, device=DEVICE), ParallelMLP(8, 16, device=DEVICE)
    calls = [
        *(lambda impl=impl: linear_act(x, w, activation="gelu_tanh", impl=impl) for impl in ("reference", "triton")),
        *(lambda impl=impl: gated_linear(x, w, w, impl=impl) for impl in ("reference", "triton")),
        lambda: column(x),
        lambda: mlp(x),
    ]
    for call in calls:
        (expected,) = torch.autograd.grad((3 * call() + x).sum(), x)
        (found,) = torch.autograd.grad(call().mul_(3).add_(x).sum(), x)
        assert torch.equal(found, expected)
