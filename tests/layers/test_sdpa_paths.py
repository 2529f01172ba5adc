"""Attention's paths beside torch's own function: ragged FlashAttention, flex_attention, and all of them compiled.

Without a GPU the ragged FlashAttention kernel is stood in for by its own formulas (`ragged_kernel`), put below torch's
`varlen_attn`, so that what it is given and what is made of its results, gradients included, is tested here. What runs
on a GPU is tested there, in the cases of test_sdpa.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from sdpa_case import STARTS, call_attend, every_combination, judge, make_inputs, options_of, with_grads
from torch.nn.attention import flex_attention as torch_flex

from shardfuse.layers.attention import sdpa, sdpa_paths
from shardfuse.layers.attention.sdpa import attend

# --- varlen -----------------------------------------------------------------------------------------------------------


def _seen(cu_q: torch.Tensor, cu_k: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """FlashAttention's masks [Tq, Tk]: documents, and windows that are aligned at the sequences' ends."""
    seen = torch.zeros(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
    for (start, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist())):
        i = torch.arange(end - start).unsqueeze(1) + (last - first) - (end - start)
        j = torch.arange(last - first)
        seen[start:end, first:last] = (j >= (i - left if left >= 0 else 0)) & (
            j <= (i + right if right >= 0 else 1 << 30)
        )
    return seen


class _RaggedKernel:
    """FlashAttention's ragged kernel by its formulas, in plain torch: what aten's op gives on a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @staticmethod
    def _scores(q, k, cu_q, cu_k, scale, left, right):
        wide = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("inh,jnh->nij", q.float(), wide) * scale
        return scores.masked_fill(~_seen(cu_q, cu_k, left, right), -torch.inf)

    def forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None, **unused,
    ):  # fmt: skip
        self.calls.append("forward")
        assert not dropout_p
        assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q >= int(cu_q.diff().max())
        assert max_k >= int(cu_k.diff().max())
        scores = self._scores(q, k, cu_q, cu_k, scale, window_size_left, window_size_right)
        values = v.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out = torch.einsum("nij,jnh->inh", scores.softmax(-1), values).to(q.dtype)
        nothing = torch.zeros((), dtype=torch.uint64)
        return out, scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64), nothing, torch.empty(0, dtype=q.dtype)

    def backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng, unused, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        """Dao, arXiv:2307.08691, section 3.1.2: from the result and the log-sum-exp that are handed in."""
        self.calls.append("backward")
        group = q.shape[1] // k.shape[1]
        weights = (self._scores(q, k, cu_q, cu_k, scale, window_size_left, window_size_right) - lse.unsqueeze(-1)).exp()
        keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
        rows = (dout.float() * out.float()).sum(-1).t().unsqueeze(-1)
        dscores = weights * (torch.einsum("inh,jnh->nij", dout.float(), values) - rows) * scale
        dq = torch.einsum("nij,jnh->inh", dscores, keys)
        dk = torch.einsum("nij,inh->jnh", dscores, q.float()).unflatten(1, (-1, group)).sum(2)
        dv = torch.einsum("nij,inh->jnh", weights, dout.float()).unflatten(1, (-1, group)).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@pytest.fixture
def ragged_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_RaggedKernel]:
    kernel = _RaggedKernel()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", kernel.forward, "CPU")
    library.impl("_flash_attention_backward", kernel.backward, "CPU")
    monkeypatch.setattr(sdpa, "_why_not_varlen", lambda *facts: None)
    yield kernel
    library._destroy()


@pytest.mark.parametrize("names", [c for c in every_combination() if "softcap" not in c], ids="-".join)
def test_varlen(ragged_kernel, names):
    judge(make_inputs(), options_of(names), path="varlen")
    assert ragged_kernel.calls == ["forward", "backward"]


def test_varlen_lengths(ragged_kernel):
    """max_seqlen is a bound that only has to hold; one of 1 is not handed on."""
    q, k, v, _ = make_inputs()
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32)
    expected = attend(q, k, v, cu_seqlens=cu_seqlens, path="math")
    for bound in (None, 23, 40, 4096):
        out = attend(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=bound, path="varlen")
        torch.testing.assert_close(out, expected)
    single = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    starts, longest = sdpa_paths._ragged(q[None, :2], single, 1)
    assert starts is single
    assert longest == 2


def test_varlen_attention_to_another_sequence(ragged_kernel):
    q, k, v, sinks = make_inputs()
    batch = [t.unflatten(0, (2, 20)) for t in (q, k, v)]
    for options in ({}, {"sinks": sinks}):
        out = attend(batch[0][:, :7], *batch[1:], causal=False, path="varlen", **options)
        torch.testing.assert_close(out, attend(batch[0][:, :7], *batch[1:], causal=False, path="math", **options))


def test_sinks_split_backward_forms_each_gradient_once(ragged_kernel):
    tensors = [t.requires_grad_() for t in make_inputs()]
    out = call_attend(tuple(tensors), {"sinks": True, "window": 5}, path="varlen")
    grad = torch.randn_like(out)
    inputs = torch.autograd.grad(out, tensors[:3], grad, retain_graph=True)
    assert ragged_kernel.calls.count("backward") == 1
    (dsinks,) = torch.autograd.grad(out, tensors[3:], grad)
    assert ragged_kernel.calls.count("backward") == 1
    expected = with_grads(lambda *t: call_attend(t, {"sinks": True, "window": 5}, path="math"), tuple(tensors), grad)
    for ours, name in zip((*inputs, dsinks), ("dq", "dk", "dv", "dsinks")):
        torch.testing.assert_close(ours, expected[name])


def test_sinks_refuse_second_derivatives(ragged_kernel):
    tensors = [t.requires_grad_() for t in make_inputs()]
    out = call_attend(tuple(tensors), {"sinks": True}, path="varlen")
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


# --- flex -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "names", [(), ("bidirectional", "packed"), ("window", "softcap", "sinks", "packed")], ids="-".join
)
def test_flex(names):
    judge(make_inputs(), options_of(names), backward=False, path="flex")


@pytest.mark.parametrize("names", [("softcap",), ("window", "softcap", "sinks", "packed")], ids="-".join)
def test_flex_gradients(monkeypatch, names):
    """torch differentiates flex_attention on a CPU only where it is neither compiled nor asked about the device."""
    monkeypatch.setattr(sdpa, "_why_not_flex", lambda *facts: None)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    judge(make_inputs(), options_of(names), path="flex")


def test_flex_compiles_each_kind_of_layer_by_itself(monkeypatch):
    """torch.compile gives up at a code object's eighth graph, so that kinds of layers must not share one."""
    monkeypatch.setattr(torch, "compile", lambda function, *, fullgraph: function)
    make = sdpa_paths._compiled_flex.__wrapped__
    window, full = make(("window",)), make(("full",))
    assert len({f.__code__.co_name for f in (window, full, sdpa_paths._flex_graph)}) == 1
    assert len({id(f.__code__) for f in (window, full, sdpa_paths._flex_graph)}) == 3
    q, k, v, _ = make_inputs()
    args = (q[None], k[None], v[None], False, 0.1, None, None, None, None)
    monkeypatch.setattr(torch_flex, "flex_attention", lambda q, *rest, **options: q + options["scale"])
    assert torch.equal(full(*args), q[None] + 0.1)


# --- compile ----------------------------------------------------------------------------------------------------------

COMPILED = {
    "sdpa": (),
    "mask": ("window", "packed"),
    "math": ("window", "softcap", "sinks", "packed"),
    "varlen": ("window", "packed"),
    "varlen with sinks": ("sinks",),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile(ragged_kernel, name):
    """One graph for all lengths, results and gradients those of the eager call. (All dynamic where that is quick.)"""
    names, path = COMPILED[name], name.split()[0]
    torch._dynamo.reset()

    def run(q, k, v, sinks, cu_seqlens):
        options = options_of(names)
        options.pop("packed", None)
        extra = {"cu_seqlens": cu_seqlens} if "packed" in names else {"batch_size": 1}
        if options.pop("sinks", False):
            extra["sinks"] = sinks
        return attend(q, k, v, path=path, **options, **extra)

    dynamic = True if path in ("sdpa", "mask") else None
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (40, 17):
        tensors = make_inputs(size=16, tokens=tokens)
        if dynamic is None:
            for t in tensors[:3]:
                torch._dynamo.mark_dynamic(t, 0)
        cu_seqlens = torch.tensor([0, 9, tokens], dtype=torch.int32)
        grad = torch.randn(tensors[0].shape)
        ours = with_grads(functools.partial(compiled, cu_seqlens=cu_seqlens), tensors, grad)
        theirs = with_grads(functools.partial(run, cu_seqlens=cu_seqlens), tensors, grad)
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key])


def test_compiled_packed_batch_leaves_the_loop():
    torch._dynamo.reset()
    q, k, v, _ = make_inputs(size=16)
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens=cu_seqlens), attend(q, k, v, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("path", ["mask", "math", "varlen"])
def test_no_path_reads_the_device(monkeypatch, path):
    """Tensors without data: whoever asks for some raises. (What is on a CPU may be read.)"""
    monkeypatch.setattr(sdpa, "_why_not_varlen", lambda *facts: None)
    q, k, v, sinks = (t.to("meta") for t in make_inputs(dtype=torch.bfloat16))
    cu_seqlens = torch.empty(6, dtype=torch.int32, device="meta")
    options = {} if path == "mask" else {"sinks": sinks}
    out = attend(q, k, v, cu_seqlens=cu_seqlens, window=5, path=path, **options)
    assert out.is_meta
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
