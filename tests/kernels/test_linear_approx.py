"""The activations as 16-bit results get them on NVIDIA's chips: on a model of the instructions that errs as they may.

No CPU has these instructions, so the kernels' own functions run in the interpreter with a model in their place. The PTX
ISA documents, in its section on floating-point instructions, how far each may err: ``ex2.approx.ftz.f32`` by 2^-22 of
the result, ``rcp.approx.ftz.f32`` by one unit in the last place, ``tanh.approx.f32`` by 2^-11 of the result. The model
errs by all of that, each way, and of the results the one counts that is furthest off. A GPU runs the instructions.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import reference
from shardfuse.kernels.runtime import device

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = triton.language
activations = pytest.importorskip("shardfuse.kernels.linear.activations", reason="Triton is not installed")
launch = pytest.importorskip("shardfuse.kernels.linear.launch", reason="Triton is not installed")
act, act_grad = activations.act, activations.act_grad

EX2, RCP, TANH = 2.0**-22, 2.0**-23, 2.0**-11  # of the result
SMOOTH = ("gelu_erf", "gelu_tanh", "quick_gelu", "silu")
BLOCK = 2**16
ERRORS = {"ex2": 0.0, "rcp": 0.0}  # of the model, now
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _kernel(z_ptr, y_ptr, d_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + offs)
    tl.store(y_ptr + offs, act(z, ACTIVATION, True))
    tl.store(d_ptr + offs, act_grad(z, ACTIVATION, True))


@triton.jit
def _erf_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, activations._erf(tl.load(x_ptr + offs)))


@triton.jit
def _flush(x):
    return tl.where(tl.abs(x) < 2.0**-126, 0.0, x)


@triton.jit
def _exp2(x):
    return _flush((tl.exp2(_flush(x).to(tl.float64)) * (1.0 + ERRORS["ex2"])).to(tl.float32))


@triton.jit
def _reciprocal(x):
    return _flush(((1.0 + ERRORS["rcp"]) / _flush(x).to(tl.float64)).to(tl.float32))


def _results(monkeypatch, activation: str, z: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(act(z), act'(z)) in fp32: the GPU's, or without one the model's for every choice of the signs of its errors."""
    signs = [(0, 0)]
    if DEVICE.type == "cpu":
        monkeypatch.setattr(activations, "_exp2", _exp2)
        monkeypatch.setattr(activations, "_reciprocal", _reciprocal)
        signs = list(itertools.product((-1, 1), repeat=2))
    found = []
    for ex2, rcp in signs:
        ERRORS.update(ex2=ex2 * EX2, rcp=rcp * RCP)
        y, d = torch.empty_like(z, device=DEVICE), torch.empty_like(z, device=DEVICE)
        _kernel[(z.numel() // BLOCK,)](z.to(DEVICE), y, d, ACTIVATION=activation, BLOCK=BLOCK)
        found.append((y.cpu(), d.cpu()))
    return found


def _inputs() -> torch.Tensor:
    """Every bf16 and every fp16 number, and of the fp32 numbers every 2^13th: whole programs of them."""
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    single = torch.arange(-(2**31), 2**31, 2**13, dtype=torch.int64).to(torch.int32)
    return torch.cat([half.view(torch.bfloat16).float(), half.view(torch.float16).float(), single.view(torch.float32)])


def _exact(activation: str, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """act and act' in fp64. torch's erf would leave 1 + erf without a digit where it is small; ndtr keeps them all."""
    z = z.double()
    if activation == "gelu_erf":
        cdf = torch.special.ndtr(z)
        return z * cdf, cdf + z * torch.exp(-0.5 * z * z) * (2 * torch.pi) ** -0.5
    return reference.apply_activation(z, activation), reference.act_grad(torch.ones_like(z), z, activation)


def _verdicts(outs: list[torch.Tensor], low: torch.Tensor, exact: torch.Tensor, z: torch.Tensor):
    """The judge on every sign and binade of z by itself, where a small result has no large one to hide behind."""
    rounded = exact.to(low.dtype)
    usual = rounded.isfinite()
    low = torch.where(low.isfinite(), low, rounded)  # fp32 may overflow on the reference's way to a finite result
    stacked = torch.stack([out.to(low.dtype) for out in outs])
    worst = (stacked.double() - exact).abs().nan_to_num(nan=torch.inf).argmax(0, keepdim=True)
    out = stacked.gather(0, worst)[0]
    binade = torch.frexp(z).exponent.clamp(-20, 20)
    for negative, of in itertools.product((False, True), range(-20, 21)):
        chosen = usual & (binade == of) & (torch.signbit(z) == negative)
        yield accuracy.judge(f"{'-' * negative}2^{of - 1}", out[chosen], low[chosen], exact[chosen])
    for one in stacked:  # infinities and NaN: those of the definition
        assert torch.equal(one[~usual].isnan(), rounded[~usual].isnan())
        assert torch.equal(one[~usual].nan_to_num(nan=0.0), rounded[~usual].nan_to_num(nan=0.0))


@pytest.mark.interpret
@pytest.mark.skipif(torch.version.hip is not None, reason="AMD's chips keep the exact forms")
@pytest.mark.parametrize("activation", SMOOTH)
def test_approximations_are_within_the_rule(activation, monkeypatch):
    z = _inputs()
    act = reference.apply_activation(z, activation)
    if activation == "gelu_erf":  # as it is defined, with the digits that 1 + erf loses: torch's need not lose them
        act = z * (0.5 * (1 + torch.erf(z * 2**-0.5)))
    lows = act, reference.act_grad(torch.ones_like(z), z, activation)
    outs = zip(*_results(monkeypatch, activation, z))
    for name, of, low, exact in zip(("act", "act_grad"), outs, lows, _exact(activation, z)):
        for dtype in (torch.bfloat16, torch.float16):
            wrong = [str(verdict) for verdict in _verdicts(list(of), low.to(dtype), exact, z) if not verdict.ok]
            assert not wrong, (name, dtype, wrong)


@pytest.mark.spoiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_tanh_approx_is_not(activation, dtype):
    """Why the gate is no 0.5 + 0.5 tanh.approx(x / 2): where that is small, little but the error is left."""
    z = torch.linspace(-8.0, -0.25, 2**12)
    u = z / 2 if activation == "silu" else (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    outs = [z * (0.5 + 0.5 * torch.tanh(u) * (1 + sign * TANH)) for sign in (-1, 1)]
    low = reference.apply_activation(z, activation).to(dtype)
    verdicts = list(_verdicts(outs, low, _exact(activation, z)[0], z))
    assert "-2^2" in [verdict.name for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize(
    ("arch", "dtype", "approximates"),
    [
        ("sm_80", torch.bfloat16, True),
        ("sm_90", torch.bfloat16, True),
        ("sm_100", torch.float16, True),
        ("sm_90", torch.float32, False),
        ("gfx942", torch.bfloat16, False),
    ],
)
def test_what_is_stored_in_16_bits_is_approximated(arch, dtype, approximates):
    """On NVIDIA's chips; split products too, and a gradient by itself."""
    x, w, z = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((8192, 4096), (4096, 4096), (8192, 4096)))
    with device.capture(arch) as launches:
        for T in (16, 8192):
            launch.linear_act_fwd(x[:T], (w,), (None,), None, "gelu_tanh", False)
        launch.gated_linear_fwd(x, (w, w), (None, None), "silu", True)
        launch.linear_dgrad_act(x, w, z, "gelu_erf", True)
        launch.linear_dgrad_gated(x, w, z, z, "silu", True)
        launch.act_grad(z, z, "gelu_erf")
    found = {launch.args["APPROX"] for launch in launches if launch.args["EPILOGUE"] != "partial"}
    assert found == {approximates}
    with device.capture(arch) as launches:
        launch.linear_act_fwd(x, (w,), (None,), None, "identity", False)
    assert [launch.args["APPROX"] for launch in launches] == [False]


def test_fp8_operands_count_by_their_result():
    from shardfuse.kernels.scaled_linear import launch as scaled

    x, w = (torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta") for shape in ((8192, 4096), (4096, 4096)))
    scale = torch.empty(1, device="meta")
    with device.capture("sm_90") as launches:
        for out in (torch.bfloat16, torch.float32):
            scaled.scaled_linear(x, w, scale, scale, None, "gelu_tanh", out)
    assert [launch.args["APPROX"] for launch in launches] == [True, False]


def test_the_interpreter_keeps_the_exact_forms():
    from shardfuse.kernels.linear.plan import approximates

    assert not approximates(device.INTERPRETER, "silu", torch.bfloat16)


@pytest.mark.parametrize("terms", [0, 1, 64])
def test_only_products_of_some_terms_are_flattened(terms):
    """A flattened kernel assumes that K > 0: its main loop and its epilogue are one."""
    dz, x = (torch.empty(terms, width, dtype=torch.bfloat16, device="meta") for width in (512, 256))
    with device.capture("sm_90") as launches:
        launch.linear_wgrad((dz,), x, [True])
        launch.linear_act_fwd(dz.t(), (x.t(),), (None,), None, "identity", False)
    assert [launch.args["FLATTEN"] for launch in launches] == [terms > 0] * 2


def test_erf_is_within_two_units_in_the_last_place():
    """As far as CUDA's erff may be off, whose polynomials these are; results below 2^-126 may be flushed."""
    x = _inputs()
    y = torch.empty_like(x, device=DEVICE)
    _erf_kernel[(x.numel() // BLOCK,)](x.to(DEVICE), y, BLOCK=BLOCK)
    exact = torch.special.erf(x.double())
    unit = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 23)
    off = ((y.cpu().double() - exact) / unit).abs()
    assert torch.equal(off.isnan(), x.isnan())
    assert off.nan_to_num().max() <= 2.0 + 1e-3
