"""The backward of linear_cross_entropy: what is formed and kept for whoever asks for gradients, and its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
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
    gain_for,
    leaves,
    with_grads,
)

from shardfuse.kernels.cross_entropy import chunks
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.loss import linear_cross_entropy
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight

pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_gradients_asked_for(impl, reduction, frozen, request):
    products = count_products(request)
    tensors, targets, gain = leaves(), draw_targets(), gain_for(reduction)
    names = ["hidden", "weight", "bias"]
    tensors[names.index(frozen)].requires_grad_(False)
    options = {"reduction": reduction, "chunk_tokens": 64}
    ours = with_grads(linear_cross_entropy, tensors, targets, gain, impl=impl, **options)
    assert f"d{frozen}" not in ours
    exact = with_grads(eager, double(tensors), targets, gain, reduction=reduction)
    low = with_grads(eager, tensors, targets, gain, reduction=reduction)
    for name in exact:
        verdict = accuracy.judge(name, ours[name], low[name], exact[name], terms=V)
        assert verdict.ok, verdict
    assert products == {
        "forward": 1 if reduction == "mean" else 2,
        "input_grad": int(frozen != "hidden"),
        "param_grads": 1,
    }


def test_without_gradients_nothing_is_formed(request):
    products = count_products(request)
    hidden, weight, bias = leaves()
    targets = draw_targets()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=64)
    assert not loss.requires_grad
    assert products == {"forward": 1, "input_grad": 0, "param_grads": 0}
    torch.testing.assert_close(loss, eager(hidden, weight, targets, bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_split_backward(reduction, request):
    """Inputs in one pass, parameters in the next: a scalar loss repeats nothing, and both give the whole gradients."""
    products = count_products(request)
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
    for param, name in ((weight, "dweight"), (bias, "dbias")):
        exact = returned[name].double()
        # The gradient's own rounding, and that of the sums with the ones that were there, chunk by chunk.
        ones = accuracy.relative_error(1 + exact, exact)
        budget = 2 * torch.finfo(dtype).eps + accuracy.rounding(torch.float32, T) * (1 + ones)
        assert accuracy.within(name, param.main_grad.double() - 1, exact, budget).ok


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


# --- memory -----------------------------------------------------------------------------------------------------------


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
T, V, D = 2048, 32 * 1024, 64
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

# The first call also brings libraries and threads into memory. The peak only grows, so the smaller comes first.
linear_cross_entropy(hidden, weight, targets).backward()
ours = peak(lambda: linear_cross_entropy(hidden, weight, targets))
none = peak(lambda: linear_cross_entropy(hidden, weight, targets, reduction="none").mean())
eager = peak(lambda: F.cross_entropy(F.linear(hidden, weight), targets))
print(json.dumps({"ours": ours, "none": none, "eager": eager}))
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="measures a process on a CPU; the benchmark measures a GPU's memory")
def test_memory_is_an_eighth_of_eagers(capsys):
    """Peak resident memory of forward and backward, V = 32k, T = 2k, measured in a process of its own."""
    # glibc then returns every large block as it is freed, so that what was resident before is not used again.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    with capsys.disabled():
        print("".join(f"\n  {name}: {peak / 2**20:.0f} MiB" for name, peak in peaks.items()))
    logits = 2048 * 32 * 1024 * 4
    assert peaks["eager"] > 2 * logits  # it was measured at all
    assert 0 < peaks["ours"] <= peaks["eager"] / 8
    assert 0 < peaks["none"] <= peaks["eager"] / 8
