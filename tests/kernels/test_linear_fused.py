"""Gated layers, and what backward fuses across layers: the kernels against the fp64 oracle."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from oracle import assert_matches
from torch.nn import functional as F

from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.linear import gated_linear, linear_act
from shardfuse.kernels.linear.config import forced, pick_config
from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.runtime import dispatch, tuning
from shardfuse.kernels.runtime.chips import CHIPS

launch = pytest.importorskip("shardfuse.kernels.linear.launch", reason="Triton is not installed")
plan = pytest.importorskip("shardfuse.kernels.linear.plan", reason="Triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS = [registry.op(name) for name in ("gated_linear", "dgrad_act", "dgrad_gated", "wgrad_accumulate")]
CASES = [(spec, case) for spec in SPECS for case in spec.tagged("test")]


@pytest.mark.interpret
@pytest.mark.parametrize(("spec", "case"), CASES, ids=lambda value: value.name)
def test_kernels_match_the_oracle(spec, case):
    assert_matches(spec, case, spec.make_inputs(case, DEVICE, seed=1))


@pytest.mark.interpret
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(32, 64, 32, 4, 2, use_tma=True, epilogue_subtile=True),
        GemmConfig(32, 64, 32, 4, 2, use_tma=False, epilogue_subtile=True),
        GemmConfig(16, 32, 32, 4, 2, use_tma=True, split_k=3),
        GemmConfig(16, 32, 16, 4, 2, use_tma=False, split_k=7),  # more parts than K has blocks: some are empty
        GemmConfig(16, 32, 32, 4, 2, use_tma=True, swap=True),
        GemmConfig(64, 16, 64, 4, 2, use_tma=True, group_m=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_kind_of_configuration(spec, config):
    case = spec.tagged("test")[0]
    if spec.name == "gated_linear":
        if config.epilogue_subtile:
            pytest.skip("two products are never cut in halves: config.py says why")
        case = dataclasses.replace(case, options=case.options | {"bias": False})
    if config.swap and spec.name == "wgrad_accumulate":
        pytest.skip("wgrad's row sums stand on the rows of op(A), which swapping would move")
    sizes = case.sizes | ({"T": 68, "D": 40, "F": 72} if spec.name == "wgrad_accumulate" else {})
    case = dataclasses.replace(case, sizes=sizes)
    inputs = spec.make_inputs(case, DEVICE, seed=2)
    oracle = spec.run(registry.to_double(inputs), case, "reference")
    low = spec.run(inputs, case, "reference")
    with _only_for(spec, config):
        ours, again = (spec.run(inputs, case, "triton") for _ in range(2))
    found = [accuracy.judge(name, ours[name], low[name], oracle[name], terms=spec.terms(case)) for name in oracle]
    assert all(v.ok for v in found), "; ".join(map(str, found))
    assert all(torch.equal(ours[name], again[name]) for name in ours)  # nothing is added in an order left to chance


@contextlib.contextmanager
def _only_for(spec, config):
    """Force ``config``, except where the gradient of a gated layer chains two products or sums rows."""
    if spec.name != "gated_linear":
        with forced(config):
            yield
        return
    inner = plan.pick_config

    def pick(arch, gemm):
        return config if gemm.combine == "gated" else inner(arch, gemm)

    plan.pick_config = pick
    tuning.forget()
    try:
        yield
    finally:
        plan.pick_config = inner
        tuning.forget()


@pytest.mark.interpret
def test_bias_gradients_add_up_by_position():
    """Blocks of tokens are added element by element and reduced once: equal positions in two blocks cancel exactly.

    A block that is reduced by itself rounds 2^24 + 31 first. It holds 2 to 32 tokens.
    """
    dz, x = torch.zeros(64, 40, device=DEVICE), torch.ones(64, 72, device=DEVICE)
    dz[0], dz[1], dz[32] = 2.0**24, 31.0, -(2.0**24)
    _, db = launch.linear_wgrad((dz,), x, [True])
    assert torch.equal(db, torch.full_like(db, 31.0))


@pytest.mark.interpret
def test_rows_do_not_depend_on_their_batch():
    """In row-invariant mode a token's result is bitwise the same alone, among few and among many."""
    torch.manual_seed(0)
    x, w, b = torch.randn(70, 136, device=DEVICE), torch.randn(72, 136, device=DEVICE), torch.randn(72, device=DEVICE)

    def both(x):
        return linear_act(x, w, b, activation="gelu_tanh", impl="triton"), gated_linear(x, w, w, impl="triton")

    with dispatch.row_invariance():
        whole = both(x)
        for first, last in ((0, 1), (3, 8), (31, 65), (69, 70)):
            for y, of_all in zip(both(x[first:last]), whole):
                assert torch.equal(y, of_all[first:last])
    assert not dispatch.row_invariant()


@pytest.mark.parametrize("arch", registry.TARGETS)
def test_row_invariant_products_have_one_configuration(arch):
    def configs(row_invariant):
        return {
            pick_config(
                arch,
                Gemm("nt", M, 4096, 4096, torch.bfloat16, torch.bfloat16, writes=2, row_invariant=row_invariant),
            )
            for M in (1, 16, 64, 256, 1024, 8192, 100_000)
        }

    assert len(configs(True)) == 1
    assert configs(True).pop().split_k == 1
    assert len(configs(False)) > 1  # which is why the mode exists


@pytest.mark.parametrize("arch", registry.TARGETS)
@pytest.mark.parametrize("M", [1, 16, 64, 256])
@pytest.mark.parametrize("N", [896, 4096, 14336])
def test_few_tokens_still_occupy_the_chip(arch, M, N):
    gemm = Gemm("nt", M, N, 4096, torch.bfloat16, torch.bfloat16)
    config = pick_config(arch, gemm)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    sms = CHIPS[arch].sms
    longest = max(1, min(8, gemm.K // (8 * config.block_k)))  # a part has eight blocks of K at least
    assert tiles * config.split_k >= min(sms / 2, tiles * longest)
    assert 1 <= config.split_k <= 8


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
def test_a_split_backward_runs_each_product_once(gated, monkeypatch):
    launched = []
    for name in ("act_grad", "gated_act_grad", "linear_dgrad", "linear_wgrad"):
        inner = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *a, _name=name, _inner=inner: (launched.append(_name), _inner(*a))[1])
    x, w, u = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((5, 8), (6, 8), (6, 8)))

    def layer():
        return gated_linear(x, w, u, impl="triton") if gated else linear_act(x, w, activation="silu", impl="triton")

    params = [w, u] if gated else [w]
    dy = torch.randn(5, 6, device=DEVICE)
    whole = torch.autograd.grad(layer(), [x, *params], dy)
    launched.clear()
    y = layer()
    (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
    assert launched == ["gated_act_grad" if gated else "act_grad", "linear_dgrad"]
    launched.clear()
    grads = torch.autograd.grad(y, params, dy)
    assert launched == ["linear_wgrad"]
    assert all(torch.equal(a, b) for a, b in zip((dx, *grads), whole))


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_weight_gradients_accumulate_in_main_grad(impl, into):
    """Three micro-batches add up in the buffers as they would in fp64; nothing lands in .grad."""
    torch.manual_seed(0)
    w = torch.randn(24, 40, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    b = torch.randn(24, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w.main_grad, b.main_grad = torch.zeros_like(w, dtype=into), torch.zeros_like(b, dtype=into)
    exact_w, exact_b = (t.detach().double().requires_grad_() for t in (w, b))
    low_w, low_b = (torch.zeros_like(t, dtype=into) for t in (w, b))
    for _ in range(3):
        x, dy = (torch.randn(36, size, device=DEVICE, dtype=torch.bfloat16) for size in (40, 24))
        y = linear_act(x, w, b, activation="relu", fuse_wgrad_accumulation=True, impl=impl)
        y.backward(dy)
        F.relu(F.linear(x.double(), exact_w, exact_b)).backward(dy.double())
        stock = [t.detach().requires_grad_() for t in (w, b)]
        F.relu(F.linear(x, *stock)).backward(dy)
        low_w += stock[0].grad
        low_b += stock[1].grad
    assert w.grad is None
    assert b.grad is None
    for name, ours, low, exact in (("dw", w.main_grad, low_w, exact_w), ("db", b.main_grad, low_b, exact_b)):
        verdict = accuracy.judge(name, ours, low, exact.grad, terms=3 * 36)
        assert verdict.ok, str(verdict)
