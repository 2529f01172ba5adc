"""linear_cross_entropy and linear_log_probs in one process: the kernels, and the loss against eager in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_case import (
    EVERY,
    IMPLS,
    D,
    T,
    V,
    count_products,
    double,
    draw_targets,
    eager,
    eager_loss,
    gain_for,
    leaves,
    with_grads,
)
from oracle import assert_matches

from shardfuse.kernels.cross_entropy import chunks, reference, schemas
from shardfuse.kernels.cross_entropy.reference import Loss
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.runtime import dispatch
from shardfuse.kernels.runtime.dispatch import Choice
from shardfuse.layers.loss import linear_cross_entropy, linear_log_probs

SPEC = registry.op("linear_cross_entropy")
pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.parametrize("case", SPEC.tagged("test"), ids=lambda case: case.name)
def test_kernels_match_the_oracle(case):
    assert_matches(SPEC, case, SPEC.make_inputs(case, DEVICE, seed=1))


def chunk_of_logits(dtype: torch.dtype, loss: Loss, first: int, width: int, wide: torch.Tensor) -> tuple[Any, Loss]:
    """Columns [first, first + width) of logits, as one rank has them, with what lies beyond the vocabulary."""
    logits = torch.full((len(wide), width), 77.0)
    there = max(0, min(width, wide.shape[1] - first))
    logits[:, :there] = wide[:, first : first + there]
    return logits.to(dtype), loss.part(first, width)


@pytest.mark.parametrize(
    "width", [45, 40, 20], ids=lambda width: f"{-(-60 // width)}ranks"
)  # the last has few, or none
@pytest.mark.parametrize(
    ("dtype", "every"), [(torch.float32, True), (torch.bfloat16, False)], ids=["fp32-every", "bf16"]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_statistics_combine_and_make_the_gradient(impl, dtype, width, every):
    """Of the very logits, so that fp32 is the measure in bf16 too; scores of -inf, a rank of nothing else, no words."""
    choice, terms = Choice(impl, ""), (0.1, 0.02, 3.0) if every else (0.0, 0.0, None)
    loss = Loss(V, 0, V, -100, *terms)
    wide = (torch.randn(T, V) * 4).to(dtype)
    wide[3, 1:9] = wide[4, :40] = -float("inf")
    targets = draw_targets()
    targets[3], targets[4] = 0, 44
    shards = [chunk_of_logits(dtype, loss, first, width, wide) for first in range(0, 60, width)]
    stats = torch.stack([torch.empty(4, T) for _ in shards])
    for (logits, part), out in zip(shards, stats):
        chunks._statistics(logits, targets, part, choice, out)
    found, grads = torch.empty(T), []
    for logits, part in shards:
        chunks._gradient_(logits, targets, stats, None, part, choice, found)
        grads.append(logits[:, : part.columns])
        assert not logits[:, part.columns :].any()

    leaf = wide.double().requires_grad_()
    exact = eager_loss(leaf, targets, reduction="none", **options_of(loss))
    leaf32 = wide.float().requires_grad_()
    low = eager_loss(leaf32, targets, reduction="none", **options_of(loss))
    assert accuracy.judge("loss", found, low.detach(), exact.detach(), terms=V).ok
    (dexact,), (dlow,) = (torch.autograd.grad(o.sum(), i) for o, i in ((exact, leaf), (low, leaf32)))
    verdict = accuracy.judge("dlogits", torch.cat(grads, 1), dlow.to(dtype), dexact, terms=V)
    assert verdict.ok, verdict


def options_of(loss: Loss) -> dict[str, Any]:
    return {"label_smoothing": loss.label_smoothing, "z_loss": loss.z_loss, "softcap": loss.softcap}


@pytest.mark.parametrize("impl", IMPLS)
def test_a_target_outside_the_vocabulary_is_not_read(impl):
    """Its loss and gradient are NaN, those of the others what they were; padding words are outside as well."""
    rows, weight = torch.randn(6, D), torch.randn(V + 3, D)
    targets = torch.tensor([1, V, -1, 2**40, -(2**40), 7])
    loss = Loss(V, 0, V, -100, 0.1, 0.0, None)
    losses, drows, _, _ = schemas.once(rows, weight, None, targets, *loss, 4, [True, False, False], impl)
    expected = torch.tensor([False, True, True, True, True, False])
    assert torch.equal(losses.isnan(), expected)
    assert torch.equal(drows.isnan().all(1), expected)
    assert torch.equal(drows.isnan().any(1), expected)
    stats = schemas.statistics(rows, weight, None, targets, *loss, None, impl)
    torch.testing.assert_close(reference.losses(stats, targets, loss), losses, equal_nan=True)


@pytest.mark.interpret
def test_opcheck():
    rows, weight, bias = torch.randn(6, 4), torch.randn(10, 4), torch.randn(10)
    targets, stats, gain = torch.randint(9, (6,)), torch.rand(4, 6), torch.rand(6)
    # The gradient lives in an autograd.Function around these ops, so registration of autograd does not apply.
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    loss = Loss(9, 0, 9, -100, 0.1, 0.01, 4.0)
    torch.library.opcheck(schemas.statistics, (rows, weight, bias, targets, *loss, 4, "triton"), test_utils=utils)
    sides = [([True, True, True], "triton"), ([False, True, False], "reference")]
    sides += [([True] * 3, "onednn")] if rows.device.type == "cpu" else []
    for want, impl in sides:
        args = (rows, weight, bias, targets, *loss, None, want, impl)
        torch.library.opcheck(schemas.once, args, test_utils=utils)
        args = (rows, weight, bias, targets, stats, gain, *loss, None, want, impl)
        torch.library.opcheck(schemas.again, args, test_utils=utils)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 7, 64], ids=["small", "chunks", "one-chunk"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"ignore_index": 3}, EVERY], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fp64_is_eager_exactly(reduction, options, chunk):
    """Up to the order of additions."""
    tensors, targets, gain = leaves(torch.float64), draw_targets(), gain_for(reduction)
    targets[2] = 3
    targets = targets.masked_fill(targets == -100, 3) if "ignore_index" in options else targets
    ours = with_grads(linear_cross_entropy, tensors, targets, gain, reduction=reduction, chunk_tokens=chunk, **options)
    theirs = with_grads(eager, tensors, targets, gain, reduction=reduction, **options)
    for name, exact in theirs.items():
        assert ours[name].dtype == torch.float64
        verdict = accuracy.within(name, ours[name], exact, V * torch.finfo(torch.float64).eps)
        assert verdict.ok, verdict


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_low_precision(impl, dtype, reduction):
    tensors, targets, gain = leaves(dtype), draw_targets(), gain_for(reduction)
    options = {"reduction": reduction, **EVERY}
    ours = with_grads(linear_cross_entropy, tensors, targets, gain, chunk_tokens=12, impl=impl, **options)
    low = with_grads(eager, tensors, targets, gain, **options)
    oracle = with_grads(eager, double(tensors), targets, gain, **options)
    assert ours["loss"].dtype == torch.float32
    # Made of logits in the low precision, and judged so.
    verdicts = [accuracy.judge(name, ours[name].to(dtype), low[name], oracle[name], terms=V) for name in oracle]
    assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))
    assert all(ours[name].dtype == dtype for name in oracle if name != "loss")


@pytest.mark.parametrize("impl", IMPLS)
def test_log_probs(impl):
    tensors, targets, gain = leaves(bias=False), draw_targets(), gain_for("none")

    def plain(hidden, weight, targets, bias):
        logp = F.linear(hidden, weight).log_softmax(-1)
        return logp.gather(1, targets.clamp(min=0)[:, None]).squeeze(1) * (targets != -100)

    ours = with_grads(linear_log_probs, tensors, targets, gain, chunk_tokens=8, impl=impl)
    low, oracle = (with_grads(plain, each, targets, gain) for each in (tensors, double(tensors)))
    verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name], terms=V) for name in oracle]
    assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))
    assert not torch.signbit(ours["loss"][0])  # ignored: 0, not -0


@pytest.mark.parametrize("rows", [4, 0], ids=["all-ignored", "no-tokens"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("impl", IMPLS)
def test_no_target_counts(impl, reduction, rows):
    """As F.cross_entropy has it: NaN for the mean of nothing, else 0, and no gradient."""
    tensors, targets = leaves(rows=rows), torch.full((rows,), -100)
    gain = gain_for(reduction, rows)
    options = {"reduction": reduction, **EVERY}
    ours = with_grads(linear_cross_entropy, tensors, targets, gain, chunk_tokens=3, impl=impl, **options)
    stock = with_grads(
        eager, double(tensors), targets, gain, reduction=reduction, label_smoothing=EVERY["label_smoothing"]
    )
    for name, exact in stock.items():
        torch.testing.assert_close(ours[name].double(), exact, rtol=0, atol=0, equal_nan=True)


def test_words_that_are_padding():
    """Rows of weight beyond the vocabulary, whatever is in them."""
    hidden, weight, bias = leaves()
    targets, words = draw_targets().clamp(max=40), 41
    with torch.no_grad():
        weight[words:], bias[words:] = 1e4, 1e4
    for reduction in ("mean", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.1}
        gain = gain_for(reduction)
        ours = with_grads(
            linear_cross_entropy,
            (hidden, weight, bias),
            targets,
            gain,
            vocab_size=words,
            chunk_tokens=8,
            **options,
        )
        for name in ("dweight", "dbias"):
            assert not ours[name][words:].any()
            ours[name] = ours[name][:words]
        cut = [t.detach().clone().requires_grad_() for t in (hidden, weight[:words], bias[:words])]
        low, oracle = (with_grads(eager, each, targets, gain, **options) for each in (cut, double(cut)))
        verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name], terms=V) for name in oracle]
        assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))


def test_shapes_layouts_and_results_that_may_be_changed():
    _, weight, bias = leaves()
    targets = draw_targets(12)
    columns = torch.randn(D, 12).t()
    whole = linear_cross_entropy(columns, weight, targets, bias, reduction="none", chunk_tokens=5)
    batched = linear_cross_entropy(
        columns.reshape(3, 4, D), weight, targets.view(3, 4).int(), bias, reduction="none", chunk_tokens=5
    )
    assert batched.shape == (3, 4)
    assert torch.equal(batched.flatten(), whole)
    one = linear_cross_entropy(columns[1], weight, targets[1], bias, reduction="none", chunk_tokens=1)
    assert one.shape == ()
    for reduction in ("mean", "sum", "none"):
        for chunk in (None, 5):
            loss = linear_cross_entropy(columns, weight, targets, bias, reduction=reduction, chunk_tokens=chunk)
            loss *= 2
            loss.sum().backward()
    assert linear_log_probs(columns.view(12, D), weight, targets).add_(1).shape == (12,)


def test_autocast_and_a_large_gradient_in_fp16():
    """Autocast computes in its dtype from fp32 parameters; GradScaler's first scale, infinite in fp16, does no harm."""
    tensors, targets = leaves(), draw_targets()
    gain = torch.tensor(65536.0)
    with torch.autocast(DEVICE.type, torch.float16):
        ours = with_grads(linear_cross_entropy, tensors, targets, gain, chunk_tokens=8)
    assert all(value.dtype == torch.float32 for value in ours.values())
    halved = [t.detach().half().requires_grad_() for t in tensors]
    oracle = with_grads(eager, double(halved), targets, gain)
    low = with_grads(eager, tensors, targets, gain)
    for name, exact in oracle.items():
        verdict = accuracy.judge(name, ours[name].half(), low[name].half(), exact, terms=V)
        assert verdict.ok, verdict
    with torch.autocast(DEVICE.type, torch.float16), pytest.raises(ValueError, match=r"weight is torch.float64"):
        linear_cross_entropy(tensors[0], tensors[1].double(), targets)


def test_transforms_and_forward_mode_take_torchs_own_functions_at_any_size():
    hidden, weight = torch.randn(64, 8, dtype=torch.float64), torch.randn(20000, 8, dtype=torch.float64)
    targets = torch.randint(20000, (64,))
    call = lambda hidden: linear_cross_entropy(hidden, weight, targets)
    expected = lambda hidden: F.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(torch.func.grad(call)(hidden), torch.func.grad(expected)(hidden))
    tangent = torch.randn_like(hidden)
    for found, wanted in zip(*(torch.func.jvp(each, (hidden,), (tangent,)) for each in (call, expected))):
        torch.testing.assert_close(found, wanted)


def test_calls_are_counted_and_small_ones_are_stock(request):
    hidden, weight, bias = leaves()
    products = count_products(request)
    before = dispatch.counts["linear_cross_entropy", "reference"]
    loss = linear_cross_entropy(hidden, weight, draw_targets(), bias, impl="reference")
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    assert dhidden.requires_grad  # stock calls have second derivatives
    assert dispatch.counts["linear_cross_entropy", "reference"] == before + 1
    assert DEVICE.type == "cuda" or not any(products.values())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_errors_say_what_to_do(monkeypatch):
    hidden, weight, _ = leaves()
    targets = draw_targets()

    def refused(message, *args, error=ValueError, **options):
        with pytest.raises(error, match=message):
            linear_cross_entropy(*args, **options)

    refused(r"hidden has shape \[19, 8\] and weight \[8, 45\]", hidden, weight.t(), targets)
    refused(r"targets have shape \[18\].*expected \[19\]", hidden, weight, targets[1:])
    refused(r"bias has shape \[8\]: expected \[45\]", hidden, weight, targets, hidden[0])
    refused("targets are torch.float32", hidden, weight, targets.float())
    refused("hidden is torch.float32 but weight is torch.float64", hidden, weight.double(), targets)
    refused("reduction='median'", hidden, weight, targets, reduction="median")
    refused("label_smoothing=1.5", hidden, weight, targets, label_smoothing=1.5)
    refused("z_loss=-1", hidden, weight, targets, z_loss=-1)
    refused("softcap=0", hidden, weight, targets, softcap=0)
    refused("chunk_tokens=0", hidden, weight, targets, chunk_tokens=0)
    refused("vocab_size=46.*expected 1 to 45", hidden, weight, targets, vocab_size=46)
    refused("has no main_grad", hidden, weight, targets, fuse_wgrad_accumulation=True)
    refused(
        "torch.float64 has no kernel",
        *(t.double() for t in (hidden, weight)),
        targets,
        impl="triton",
        error=RuntimeError,
    )
    monkeypatch.setenv("SHARDFUSE_DEBUG", "1")  # so that a GPU looks too
    for impl in ("reference", "triton"):
        refused("target 45 is neither in the vocabulary of 45 nor", hidden, weight, torch.full((T,), 45), impl=impl)
    with pytest.raises(ValueError, match="linear_log_probs: target -1 is neither in the vocabulary of 45 nor"):
        linear_log_probs(hidden, weight, torch.full((T,), -1))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: on a CPU such targets are refused")
def test_a_gpu_is_not_asked_for_its_targets():
    hidden, weight, _ = leaves()
    targets = torch.full((T,), V)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(hidden, weight, targets)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan()
