"""linear_cross_entropy and linear_log_probs: kernels, against eager in fp64, what they form and keep, over ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shardfuse.kernels import accuracy, dispatch, registry
from shardfuse.kernels.cross_entropy import chunks, reference, schemas
from shardfuse.kernels.cross_entropy.reference import Loss
from shardfuse.kernels.dispatch import Choice
from shardfuse.kernels.linear import parts
from shardfuse.layers.loss import linear_cross_entropy, linear_log_probs
from shardfuse.parallel import collectives
from shardfuse.parallel.mesh import tp_group
from shardfuse.parallel.sharding import ShardSpec, make_parameter, unwrap

SPEC = registry.op("linear_cross_entropy")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T, D, V = 19, 8, 45
EVERY: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 3.0}
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]
TRITON = Choice("triton", "asked for")


@pytest.fixture(autouse=True)
def _on_device():
    """Factory functions make their tensors where the kernels run."""
    torch.manual_seed(0)
    with DEVICE:
        yield


def leaves(dtype: torch.dtype = torch.float32, *, bias: bool = True, rows: int = T) -> list[Any]:
    found = [torch.randn(rows, D), torch.randn(V, D), torch.randn(V)]
    return [t.to(dtype).requires_grad_() for t in found[: 2 + bias]] + [None] * (not bias)


def draw_targets(rows: int = T) -> torch.Tensor:
    targets = torch.randint(V, (rows,))
    targets[::5] = -100
    return targets


def eager(hidden, weight, targets, bias=None, **options):
    """What a model would write: F.linear, F.cross_entropy, and the extra terms by hand."""
    return eager_loss(F.linear(hidden, weight, bias), targets, **options)


def eager_loss(z, targets, *, reduction="mean", softcap=None, z_loss=0.0, ignore_index=-100, **smoothing):
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, targets, reduction=reduction, ignore_index=ignore_index, **smoothing)
    if z_loss:
        counts = targets != ignore_index
        extra = z_loss * z.logsumexp(1).square() * counts
        loss = loss + {"none": extra, "sum": extra.sum(), "mean": extra.sum() / counts.sum()}[reduction]
    return loss


def with_grads(call, tensors, targets, gain, **options) -> dict[str, torch.Tensor]:
    hidden, weight, bias = tensors
    loss = call(hidden, weight, targets, bias, **options)
    named = {name: t for name, t in zip(("dhidden", "dweight", "dbias"), tensors) if t is not None and t.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), gain.to(loss.dtype))
    return {"loss": loss.detach()} | dict(zip(named, grads))


def gain_for(reduction: str, rows: int = T) -> torch.Tensor:
    """The gradient that comes in: rows differ where they can."""
    return torch.rand(rows) if reduction == "none" else torch.tensor(2.5)


def double(tensors):
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


# ------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.interpret
@pytest.mark.parametrize("case", SPEC.tagged("test"), ids=lambda case: case.name)
def test_kernels_match_the_oracle(case):
    inputs = SPEC.make_inputs(case, DEVICE, seed=1)
    ours = SPEC.run(inputs, case, "triton")
    low = SPEC.run(inputs, case, "reference")
    oracle = SPEC.run(registry.to_double(inputs), case, "reference")
    assert ours.keys() == oracle.keys()
    verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name]) for name in oracle]
    assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))


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
    assert accuracy.judge("loss", found, low.detach(), exact.detach()).ok
    (dexact,), (dlow,) = (torch.autograd.grad(o.sum(), i) for o, i in ((exact, leaf), (low, leaf32)))
    # The interpreter cuts bf16 off where a GPU rounds it.
    verdict = accuracy.judge("dlogits", torch.cat(grads, 1), dlow.to(dtype), dexact)
    assert verdict.ok, verdict


def options_of(loss: Loss) -> dict[str, Any]:
    return {"label_smoothing": loss.label_smoothing, "z_loss": loss.z_loss, "softcap": loss.softcap}


@pytest.mark.parametrize("impl", IMPLS)
def test_a_target_outside_the_vocabulary_is_not_read(impl):
    """Its loss and gradient are NaN, those of the others what they were; padding words are outside as well."""
    rows, weight = torch.randn(6, D), torch.randn(V + 3, D)
    targets = torch.tensor([1, V, -1, 2**40, -(2**40), 7])
    loss, triton = Loss(V, 0, V, -100, 0.1, 0.0, None), impl == "triton"
    losses, drows, _, _ = schemas.once(rows, weight, None, targets, *loss, 4, [True, False, False], triton)
    expected = torch.tensor([False, True, True, True, True, False])
    assert torch.equal(losses.isnan(), expected)
    assert torch.equal(drows.isnan().all(1), expected)
    assert torch.equal(drows.isnan().any(1), expected)
    stats = schemas.statistics(rows, weight, None, targets, *loss, None, triton)
    torch.testing.assert_close(reference.losses(stats, targets, loss), losses, equal_nan=True)


@pytest.mark.interpret
def test_opcheck():
    rows, weight, bias = torch.randn(6, 4), torch.randn(10, 4), torch.randn(10)
    targets, stats, gain = torch.randint(9, (6,)), torch.rand(4, 6), torch.rand(6)
    # The gradient lives in an autograd.Function around these ops, so registration of autograd does not apply.
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    loss = Loss(9, 0, 9, -100, 0.1, 0.01, 4.0)
    torch.library.opcheck(schemas.statistics, (rows, weight, bias, targets, *loss, 4, True), test_utils=utils)
    for want, triton in (([True, True, True], True), ([False, True, False], False)):
        args = (rows, weight, bias, targets, *loss, None, want, triton)
        torch.library.opcheck(schemas.once, args, test_utils=utils)
        args = (rows, weight, bias, targets, stats, gain, *loss, None, want, triton)
        torch.library.opcheck(schemas.again, args, test_utils=utils)


# ----------------------------------------------------------------------------------------------- one process


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
        assert accuracy.relative_error(ours[name], exact) < V * torch.finfo(torch.float64).eps, name


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
    verdicts = [accuracy.judge(name, ours[name].to(dtype), low[name], oracle[name]) for name in oracle]
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
    verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name]) for name in oracle]
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
        verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name]) for name in oracle]
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


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_gradients_asked_for(impl, reduction, frozen, monkeypatch):
    products = count_products(monkeypatch)
    tensors, targets, gain = leaves(), draw_targets(), gain_for(reduction)
    names = ["hidden", "weight", "bias"]
    tensors[names.index(frozen)].requires_grad_(False)
    options = {"reduction": reduction, "chunk_tokens": 64}
    ours = with_grads(linear_cross_entropy, tensors, targets, gain, impl=impl, **options)
    assert f"d{frozen}" not in ours
    exact = with_grads(eager, double(tensors), targets, gain, reduction=reduction)
    low = with_grads(eager, tensors, targets, gain, reduction=reduction)
    for name in exact:
        assert accuracy.judge(name, ours[name], low[name], exact[name]).ok, name
    assert products == {
        "forward": 1 if reduction == "mean" else 2,
        "input_grad": int(frozen != "hidden"),
        "param_grads": 1,
    }


def count_products(monkeypatch) -> dict[str, int]:
    """How often each of the steps of a linear layer runs."""
    counts = dict.fromkeys(("forward", "input_grad", "param_grads"), 0)

    def counting(name, inner):
        def call(*args, **kwargs):
            counts[name] += 1
            return inner(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(parts, name, counting(name, getattr(parts, name)))
    return counts


def test_without_gradients_nothing_is_formed(monkeypatch):
    products = count_products(monkeypatch)
    hidden, weight, bias = leaves()
    targets = draw_targets()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=64)
    assert not loss.requires_grad
    assert products == {"forward": 1, "input_grad": 0, "param_grads": 0}
    torch.testing.assert_close(loss, eager(hidden, weight, targets, bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_split_backward(reduction, monkeypatch):
    """Inputs in one pass, parameters in the next: a scalar loss repeats nothing, and both give the whole gradients."""
    products = count_products(monkeypatch)
    (hidden, weight, bias), targets, gain = leaves(), draw_targets(), gain_for(reduction)
    options = {"reduction": reduction, "chunk_tokens": 64}
    whole = with_grads(linear_cross_entropy, (hidden, weight, bias), targets, gain, **options)
    products.update(dict.fromkeys(products, 0))
    x = hidden.detach().requires_grad_()
    loss = linear_cross_entropy(x * 1, weight, targets, bias, **options)
    dinputs, groups = stage_backward_input([loss], [gain], [x], iter([weight, bias]))
    assert torch.equal(dinputs[0], whole["dhidden"])
    assert weight.grad is None
    stage_backward_weight(iter([weight, bias]), groups)
    assert torch.equal(weight.grad, whole["dweight"])
    assert torch.equal(bias.grad, whole["dbias"])
    assert products["input_grad"] == products["forward"] // (1 if reduction == "mean" else 3) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_that_is_kept_gives_its_gradients_again(reduction):
    tensors, targets, gain = leaves(), draw_targets(), gain_for(reduction)
    hidden, weight, bias = tensors
    loss = linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, chunk_tokens=8)
    first = [g.clone() for g in torch.autograd.grad(loss, tensors, gain, retain_graph=True)]
    second = torch.autograd.grad(loss, tensors, gain)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    loss = linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, chunk_tokens=8)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, tensors, gain, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("dtype", "impl"),
    [
        (torch.float32, "reference"),
        (torch.bfloat16, "reference"),
        pytest.param(torch.bfloat16, "triton", marks=pytest.mark.interpret),
    ],
)
def test_gradients_accumulate_in_main_grad(impl, dtype, reduction):
    tensors, targets, gain = leaves(dtype), draw_targets(), gain_for(reduction)
    hidden, weight, bias = tensors
    options = {"reduction": reduction, "chunk_tokens": 12, "impl": impl}
    returned = with_grads(linear_cross_entropy, tensors, targets, gain, **options)
    for param in (weight, bias):
        param.main_grad = torch.ones_like(param, dtype=torch.float32, requires_grad=False)
    loss = linear_cross_entropy(hidden, weight, targets, bias, fuse_wgrad_accumulation=True, **options)
    (dweight,) = torch.autograd.grad(loss, weight, gain.to(loss.dtype), retain_graph=True)  # captured: returned
    assert torch.equal(dweight, returned["dweight"])
    assert (weight.main_grad == 1).all()
    loss.backward(gain.to(loss.dtype))
    assert weight.grad is None
    assert bias.grad is None
    assert torch.equal(hidden.grad, returned["dhidden"])
    eps = torch.finfo(dtype).eps
    for param, name in ((weight, "dweight"), (bias, "dbias")):
        assert accuracy.relative_error(param.main_grad - 1, returned[name]) < 2 * eps


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
        budget = accuracy.judge(name, ours[name].half(), low[name].half(), exact).budget
        assert accuracy.relative_error(ours[name], exact) < budget, name
    with torch.autocast(DEVICE.type, torch.float16), pytest.raises(ValueError, match=r"weight is torch.float64"):
        linear_cross_entropy(tensors[0], tensors[1].double(), targets)


@pytest.mark.parametrize(
    ("impl", "reduction"),
    [("reference", "none"), ("reference", "mean"), pytest.param("triton", "mean", marks=pytest.mark.interpret)],
)
def test_compile_fullgraph_dynamic(impl, reduction):
    """What is traced once serves several token counts and equals eager."""
    _, weight, bias = leaves()
    options = {"reduction": reduction, "chunk_tokens": 8, "impl": impl, **EVERY}
    graphs, counts = [], []

    def step(hidden, targets):
        return linear_cross_entropy(hidden, weight, targets, bias, **options).sum()

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (9, 17):
        hidden, targets = torch.randn(rows, D, requires_grad=True), draw_targets(rows)
        found = [torch.autograd.grad(call(hidden, targets), (hidden, weight, bias)) for call in (compiled, step)]
        for ours, theirs in zip(*found):
            torch.testing.assert_close(ours, theirs)
        counts.append(len(graphs))
    assert counts[0] == counts[1]


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


def test_calls_are_counted_and_small_ones_are_stock(monkeypatch):
    hidden, weight, bias = leaves()
    products = count_products(monkeypatch)
    before = dispatch.counts["linear_cross_entropy", "reference"]
    loss = linear_cross_entropy(hidden, weight, draw_targets(), bias, impl="reference")
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    assert dhidden.requires_grad  # stock calls have second derivatives
    assert dispatch.counts["linear_cross_entropy", "reference"] == before + 1
    assert DEVICE.type == "cuda" or not any(products.values())


def test_how_large_a_chunk_is():
    def size(length, width, depth, itemsize=2, summed=True, in_flight=1):
        return chunks.chunk_size(length, width, depth, itemsize, summed=summed, in_flight=in_flight)

    assert size(2048, 131072, 64, 4) == 256  # an eighth of the tokens
    assert size(2048, 131072, 4096, summed=False) == 256
    assert size(2048, 131072, 4096) == 1024  # a quarter of the depth: the sum of dW is read and written for each
    assert size(16384, 131072, 4096) == 1024  # 256 MiB
    assert size(16384, 16384, 4096, in_flight=2) == 1024  # two of them are an eighth of the tokens
    assert size(10, 10**9, 64) == 64
    for length in (1, 63, 64, 1000, 10**6):
        for width in (1, 1000, 200_000):
            rows = size(length, width, 4096)
            assert rows % 64 == 0
            assert rows == 64 or rows * width * 2 <= chunks.MOST_BYTES


MEMORY = """
import json, re, torch, torch.nn.functional as F
from shardfuse.layers.loss import linear_cross_entropy

torch.set_num_threads(1)
T, V, D = 2048, 128 * 1024, 64
hidden, weight, targets = torch.randn(T, D), torch.randn(V, D), torch.randint(V, (T,))
hidden.requires_grad_(), weight.requires_grad_()

# Not getrusage's peak: that begins with the peak of the process that started this one.
def memory(kind):
    return int(re.search(rf"^{kind}:\\s+(\\d+) kB$", open("/proc/self/status").read(), re.M)[1]) * 1024

def peak(loss):
    hidden.grad = weight.grad = None
    before = memory("VmRSS")
    loss().backward()
    return memory("VmHWM") - before

# The peak only grows, so the smaller comes first.
ours = peak(lambda: linear_cross_entropy(hidden, weight, targets))
none = peak(lambda: linear_cross_entropy(hidden, weight, targets, reduction="none").mean())
eager = peak(lambda: F.cross_entropy(F.linear(hidden, weight), targets))
print(json.dumps({"ours": ours, "none": none, "eager": eager}))
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="measures a process on a CPU; the benchmark measures a GPU's memory")
def test_memory_is_an_eighth_of_eagers(capsys):
    """Peak resident memory of forward and backward, V = 128k, T = 2k, measured in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    with capsys.disabled():
        print("".join(f"\n  {name}: {peak / 2**20:.0f} MiB" for name, peak in peaks.items()))
    logits = 2048 * 128 * 1024 * 4
    assert peaks["eager"] > 2 * logits  # it was measured at all
    assert 0 < peaks["ours"] <= peaks["eager"] / 8
    assert 0 < peaks["none"] <= peaks["eager"] / 8


# ------------------------------------------------------------------------------------------------ over ranks


def _ranks_body(
    rank: int,
    world: int,
    reduction: str,
    dtype: torch.dtype,
    impl: str,
    params: str,
    sequence_parallel: bool,
    words: int,
) -> list[str]:
    """Loss and gradients over ranks against one process in fp64; how often ranks talk."""
    group = tp_group(dist.group.WORLD)
    rows, tokens, chunk = -(-V // world), 18, 7
    torch.manual_seed(3)
    hidden, whole = (
        torch.randn(tokens, D).to(dtype),
        {"w": torch.randn(rows * world, D), "b": torch.randn(rows * world)},
    )
    whole = {name: t.to(dtype) for name, t in whole.items()}
    targets, gain = torch.randint(words, (tokens,)), gain_for(reduction, tokens)
    targets[::5] = -100
    options = {"reduction": reduction, **EVERY}

    specs = {name: ShardSpec(name, t.shape, 0, group) for name, t in whole.items()}
    weight, bias = (make_parameter(whole[name][spec.index].clone(), spec, params) for name, spec in specs.items())
    own = collectives.local_slice(hidden, group, 0) if sequence_parallel else hidden.clone()
    collectives.reset_counts()
    ours = with_grads(
        linear_cross_entropy, (own.requires_grad_(), weight, bias), targets, gain, group=group, vocab_size=words,
        sequence_parallel=sequence_parallel, chunk_tokens=chunk, impl=impl, **options,
    )  # fmt: skip
    (ours["dweight"], ours["dbias"]), _ = unwrap((ours["dweight"], ours["dbias"]))

    exchanges = math.ceil(tokens / chunk) if reduction != "none" else 1
    kind = "all_reduce" if reduction != "none" else "all_gather"
    expected = {(kind, "loss.statistics"): exchanges}
    expected["reduce_scatter" if sequence_parallel else "all_reduce", "loss.in.grad"] = 1
    if sequence_parallel:
        expected["all_gather", "loss.in"] = 1
    assert dict(collectives.calls) == expected
    wide = 8 if dtype == torch.float64 else 4
    share = 4 * tokens * wide * (world if reduction != "none" else 1)
    assert collectives.payload[kind, "loss.statistics"] == share  # four numbers per token and rank, whatever V is

    def alone(to):
        cut = [hidden.to(to), whole["w"][:words].to(to), whole["b"][:words].to(to)]
        found = with_grads(eager, [t.requires_grad_() for t in cut], targets, gain, **options)
        for name, leaf in (("dweight", "w"), ("dbias", "b")):
            padded = torch.zeros_like(whole[leaf], dtype=to)
            padded[:words] = found[name]
            found[name] = padded[specs[leaf].index]
        if sequence_parallel:
            found["dhidden"] = collectives.local_slice(found["dhidden"], group, 0)
        return found

    low, oracle = alone(dtype), alone(torch.float64)
    found = []
    for name, exact in oracle.items():
        if dtype == torch.float64:
            error = accuracy.relative_error(ours[name], exact)
            found += [] if error < V * torch.finfo(dtype).eps else [f"{name}: {error}"]
        else:
            verdict = accuracy.judge(name, ours[name].to(dtype), low[name], exact)
            found += [] if verdict.ok else [str(verdict)]
    with torch.no_grad():
        again = linear_cross_entropy(
            own, weight, targets, bias, group=group, vocab_size=words, sequence_parallel=sequence_parallel, impl=impl,
            **options,
        )  # fmt: skip
    torch.testing.assert_close(again, ours["loss"])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "reduction", "dtype", "impl", "params", "sequence_parallel", "words"),
    [
        (2, "mean", torch.float64, "auto", "dtensor", False, V),
        (2, "sum", torch.float64, "auto", "local", True, V),
        (2, "none", torch.float64, "auto", "dtensor", True, V),
        (2, "mean", torch.float32, "triton", "dtensor", True, V),
        (2, "none", torch.float32, "triton", "local", False, V),
        (2, "mean", torch.bfloat16, "auto", "local", False, V),
        (2, "mean", torch.float64, "auto", "local", False, 20),  # the second rank has padding only
        (2, "none", torch.float32, "triton", "local", False, 20),
        (3, "mean", torch.float64, "auto", "local", False, 31),
    ],
)
def test_over_ranks(ranks, world, reduction, dtype, impl, params, sequence_parallel, words):
    for rank, wrong in enumerate(ranks(world, _ranks_body, reduction, dtype, impl, params, sequence_parallel, words)):
        assert not wrong, f"rank {rank}: {wrong}"


def _omission_body(rank: int, world: int, reduction: str, site: str) -> bool:
    """Whether leaving a collective out changes the loss or a gradient."""
    group = tp_group(dist.group.WORLD)
    torch.manual_seed(5)
    hidden, weight, targets = torch.randn(8, D), torch.randn(2, 12, D)[group.rank], torch.randint(24, (8,))
    tensors = [collectives.local_slice(hidden, group, 0).requires_grad_(), weight.clone().requires_grad_(), None]

    def run():
        gain = torch.ones(8) if reduction == "none" else torch.ones(())
        options = {"group": group, "sequence_parallel": True, "reduction": reduction}
        return with_grads(linear_cross_entropy, tensors, targets, gain, **options)

    right = run()
    with collectives.omit(site):
        wrong = run()
    return any(not torch.allclose(right[name], wrong[name]) for name in right)


@pytest.mark.ranks
@pytest.mark.parametrize("site", ["loss.in", "loss.statistics", "loss.in.grad"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_collective_is_needed(ranks, reduction, site):
    assert all(ranks(2, _omission_body, reduction, site))


def _split_body(rank: int, world: int) -> dict[str, Any]:
    """A split backward over ranks sums the hidden states' gradient once, and main_grad takes a DTensor's part."""
    group = tp_group(dist.group.WORLD)
    torch.manual_seed(7)
    x, whole, targets = torch.randn(T, D), torch.randn(24, D), torch.randint(24, (T,))
    spec = ShardSpec("w", whole.shape, 0, group)
    weight = make_parameter(whole[spec.index].clone(), spec)
    weight.main_grad = torch.zeros(12, D)
    x.requires_grad_()
    collectives.reset_counts()
    options = {"group": group, "chunk_tokens": 8, "fuse_wgrad_accumulation": True}
    loss = linear_cross_entropy(x, weight, targets, **options)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert not weight.main_grad.any()
    loss.backward(inputs=[weight])
    assert weight.grad is None
    counted = collectives.calls["all_reduce", "loss.in.grad"]

    leaf, exact = whole.double().requires_grad_(), x.detach().double().requires_grad_()
    dexact, dleaf = torch.autograd.grad(eager(exact, leaf, targets), (exact, leaf))
    errors = [accuracy.relative_error(dx, dexact), accuracy.relative_error(weight.main_grad, dleaf[spec.index])]
    return {"sums": counted, "errors": errors}


@pytest.mark.ranks
def test_a_split_backward_over_ranks(ranks):
    for found in ranks(2, _split_body):
        assert found["sums"] == 1
        assert max(found["errors"]) < V * torch.finfo(torch.float32).eps


def _compiled_body(rank: int, world: int, reduction: str, sequence_parallel: bool) -> None:
    group = tp_group(dist.group.WORLD)
    options = {"group": group, "sequence_parallel": sequence_parallel, "reduction": reduction}

    def step(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, **options).mean()

    torch.manual_seed(9)
    hidden, weight, targets = torch.randn(6, D), torch.randn(2, 12, D)[rank], torch.randint(24, (6,))
    if sequence_parallel:
        hidden = collectives.local_slice(hidden, group, 0)
    tensors = [hidden.requires_grad_(), weight.clone().requires_grad_()]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(*(torch.autograd.grad(call(*tensors, targets), tensors) for call in (compiled, step))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.ranks
@pytest.mark.parametrize(("reduction", "sequence_parallel"), [("mean", False), ("none", True)])
def test_compiles_over_ranks(ranks, reduction, sequence_parallel):
    ranks(2, _compiled_body, reduction, sequence_parallel)


def _errors_body(rank: int, world: int) -> str:
    group = tp_group(dist.group.WORLD)
    hidden, weight = torch.randn(4, D), torch.randn(3, D)
    with pytest.raises(ValueError, match=r"vocab_size=7.*3 rows on each of 2 ranks: expected 1 to 6"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), group=group, vocab_size=7)
    with pytest.raises(ValueError, match=r"expected \[8\], one for each of 2 ranks' tokens"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), group=group, sequence_parallel=True)
    with pytest.raises(ValueError) as caught:
        linear_cross_entropy(hidden, weight, torch.tensor([0, 6, 1, 2]), group=group)
    return str(caught.value)


@pytest.mark.ranks
def test_errors_over_ranks(ranks):
    first, second = ranks(2, _errors_body)
    assert first == second
    assert "target 6 is neither in the vocabulary of 6" in first


def test_transforms_and_forward_mode_take_torchs_own_functions_at_any_size():
    hidden, weight = torch.randn(64, 8, dtype=torch.float64), torch.randn(20000, 8, dtype=torch.float64)
    targets = torch.randint(20000, (64,))
    call = lambda hidden: linear_cross_entropy(hidden, weight, targets)
    expected = lambda hidden: F.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(torch.func.grad(call)(hidden), torch.func.grad(expected)(hidden))
    tangent = torch.randn_like(hidden)
    for found, wanted in zip(*(torch.func.jvp(each, (hidden,), (tangent,)) for each in (call, expected))):
        torch.testing.assert_close(found, wanted)
