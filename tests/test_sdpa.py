"""Attention on torch's paths: every feature and their combinations against plain fp64 loops, and the choice of path.

Without a GPU the ragged FlashAttention kernel is stood in for by its own formulas (`ragged_kernel`), put below torch's
`varlen_attn`, so that what it is given and what is made of its results, gradients included, is tested here. What runs
on a GPU is tested there, in the same cases.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

from shardfuse.kernels import accuracy, dispatch
from shardfuse.layers import sdpa, sdpa_paths
from shardfuse.layers.sdpa import REFUSALS, attend, choose_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STARTS = [0, 23, 23, 24, 29, 40]  # one long sequence, an empty one, one of a single token, short ones
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "packed": {"packed": True},
    "bidirectional": {"causal": False},
}


def _combinations() -> list[tuple[str, ...]]:
    names = [c for size in range(len(FEATURES) + 1) for c in itertools.combinations(FEATURES, size)]
    return [c for c in names if not {"window", "bidirectional"} <= set(c)]


def _inputs(
    heads: int = 6, kv_heads: int = 2, size: int = 80, tokens: int = STARTS[-1], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """q, k, v [T, heads, size] and sinks [heads]; scores of a size at which soft-caps and sinks matter."""
    q = 2 * torch.randn(tokens, heads, size)
    k, v = torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.randn(heads).to(dtype)


def _options(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in FEATURES[name].items()}


def _oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor,
    starts: list[int],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    packed: bool = False,
) -> torch.Tensor:
    """The formulas, sequence by sequence and head by head: [T, N, H]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    sequences = []
    for start, end in pairwise(starts):
        i, j = torch.arange(end - start).unsqueeze(1), torch.arange(end - start)
        hidden = torch.zeros(end - start, end - start, dtype=torch.bool)
        if causal:
            hidden |= j > i
        if window is not None:
            hidden |= i - j >= window
        heads = []
        for n in range(q.shape[1]):
            scores = q[start:end, n] @ k[start:end, n // group].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp().masked_fill(hidden.to(q.device), 0)
            total = weights.sum(-1, keepdim=True) + (sink_logits[n].exp() if sinks else 0)
            heads.append(weights / total @ v[start:end, n // group])
        sequences.append(torch.stack(heads, dim=1))
    return torch.cat(sequences)


def _call(tensors: tuple[torch.Tensor, ...], options: dict[str, Any], **more: Any) -> torch.Tensor:
    """``attend`` on packed tokens, or on the two sequences of 20 that the same tokens make."""
    q, k, v, sinks = tensors
    options = dict(options)
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor(STARTS, dtype=torch.int32, device=q.device)
    else:
        options["batch_size"] = 2
    if options.pop("sinks", False):
        options["sinks"] = sinks
    return attend(q, k, v, **options, **more)


def _results(run: Any, tensors: tuple[torch.Tensor, ...], grad: torch.Tensor | None) -> dict[str, torch.Tensor]:
    leaves = [t.detach().requires_grad_(grad is not None) for t in tensors]
    out = run(*leaves)
    results = {"out": out}
    if grad is not None:
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
        results |= {name: g for name, g in zip(("dq", "dk", "dv", "dsinks"), grads) if g is not None}
    return results


def _judge(tensors: tuple[torch.Tensor, ...], options: dict[str, Any], *, backward: bool = True, **more: Any) -> None:
    """The call against the oracle in fp64; the oracle in the inputs' own precision sets the budget."""
    starts = STARTS if options.get("packed") else [0, 20, 40]
    grad = torch.randn(tensors[0].shape).to(tensors[0]) if backward else None
    ours = _results(lambda *t: _call(t, options, **more), tensors, grad)
    plain = lambda *t: _oracle(*t, starts, **options)
    low = _results(plain, tensors, grad)
    exact = _results(plain, tuple(t.double() for t in tensors), grad)
    assert set(ours) == set(exact)
    verdicts = [accuracy.judge(name, value, low[name], exact[name]) for name, value in ours.items()]
    # Some results are a handful of numbers, which the low precision may hit by luck: one budget for the call.
    budget = max(verdict.budget for verdict in verdicts)
    for verdict in verdicts:
        assert verdict.error <= budget, f"{verdict}, of the call {budget:.2e}"


# ---------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("names", _combinations(), ids="-".join)
def test_every_combination(names):
    """What auto takes on a CPU, and each of the paths that run there."""
    options = _options(names)
    paths = ["auto", "math"]
    if not {"softcap", "sinks"} & set(names):
        paths.append("mask")
    for path in paths:
        _judge(_inputs(), options, path=path)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 8), (7, 1, 16), (9, 3, 20), (4, 4, 1)])
@pytest.mark.parametrize("names", [(), ("window", "packed"), ("softcap", "sinks")], ids="-".join)
def test_heads(heads, kv_heads, size, names):
    _judge(_inputs(heads, kv_heads, size), _options(names))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("names", [(), ("window",), ("packed",), ("softcap", "sinks", "packed")], ids="-".join)
def test_dtypes(dtype, names):
    _judge(_inputs(dtype=dtype), _options(names))


@pytest.mark.parametrize("names", [(), ("window",), ("packed",), ("softcap", "sinks", "packed")], ids="-".join)
def test_fp64_is_computed_in_fp64(names):
    tensors, options = tuple(t.double() for t in _inputs()), _options(names)
    exact = _oracle(*tensors, STARTS if options.get("packed") else [0, 20, 40], **options)
    assert accuracy.relative_error(_call(tensors, options), exact) < torch.finfo(torch.float32).eps ** 2 * 1000


@pytest.mark.parametrize("window", [1, 2, 39, 40, 1000])
def test_windows(window):
    """The query itself counts: a window of 1 sees nothing else, and one as long as the sequence sees it all."""
    tensors = _inputs()
    _judge(tensors, {"window": window}, backward=False)
    q, k, v, _ = tensors
    if window == 1:
        torch.testing.assert_close(attend(q, k, v, window=1, batch_size=1), v.repeat_interleave(3, dim=1))
    if window >= 40:
        torch.testing.assert_close(attend(q, k, v, window=window, batch_size=1), attend(q, k, v, batch_size=1))


def test_window_counts_as_transformers():
    masking = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    theirs = masking.sliding_window_causal_mask_function(5)
    i, j = torch.arange(12).unsqueeze(1), torch.arange(12)
    ours = sdpa_paths.visible_pairs(True, 5, None)
    assert torch.equal(ours(i, j), theirs(0, 0, i, j).expand(12, 12))


def test_scale():
    for names in ((), ("softcap", "sinks"), ("packed", "window")):
        _judge(_inputs(), {**_options(names), "scale": 0.3})


def test_layouts():
    """[B, S, N, H], the same flattened with batch_size, and slices of a fused projection."""
    q, k, v, sinks = _inputs()
    flat = attend(q, k, v, window=4, sinks=sinks, batch_size=2)
    batched = [t.unflatten(0, (2, 20)) for t in (q, k, v)]
    torch.testing.assert_close(attend(*batched, window=4, sinks=sinks), flat.unflatten(0, (2, 20)))
    torch.testing.assert_close(attend(*batched, window=4, sinks=sinks, batch_size=2), flat.unflatten(0, (2, 20)))
    fused = torch.cat((q, k, v), dim=1)
    slices = fused.split([6, 2, 2], dim=1)
    assert not slices[0].is_contiguous()
    for options in ({}, {"window": 4}, {"sinks": sinks}):
        torch.testing.assert_close(
            attend(*slices, batch_size=2, **options), attend(q, k, v, batch_size=2, **options), rtol=0, atol=0
        )


def test_attention_to_another_sequence():
    q, k, v, sinks = _inputs()
    for options in ({}, {"softcap": 1.5}, {"sinks": sinks}):
        out = attend(q[None, :7], k[None], v[None], causal=False, **options)
        exact = torch.cat([attend(q[None, i : i + 1], k[None], v[None], causal=False, **options) for i in range(7)], 1)
        torch.testing.assert_close(out, exact)
        assert attend(q[None, :0], k[None], v[None], causal=False, **options).shape == (1, 0, 6, 80)


@pytest.mark.parametrize(
    "names", [(), ("window",), ("sinks",), ("softcap",), ("packed",), ("packed", "window", "sinks")]
)
@pytest.mark.parametrize("batch", [0, 2])
def test_empty(names, batch):
    """No tokens: an empty result, and gradients of zero for what has elements."""
    q, k, v, sinks = (t.requires_grad_() for t in (*(torch.empty(0, heads, 16) for heads in (6, 2, 2)), torch.randn(6)))
    options = _options(names)
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.zeros(batch + 1, dtype=torch.int32)
        call = (q, k, v)
    else:
        call = tuple(t.unflatten(1, (-1, t.shape[1])).view(batch, 0, t.shape[1], 16) for t in (q, k, v))
    if options.pop("sinks", False):
        options["sinks"] = sinks
    out = attend(*call, **options)
    assert out.shape == call[0].shape
    out.sum().backward()
    assert q.grad.shape == q.shape
    assert "sinks" not in options or torch.equal(sinks.grad, torch.zeros(6))


def test_no_keys():
    q, k, v, sinks = _inputs()
    for options in ({}, {"sinks": sinks}, {"softcap": 1.5}):
        assert torch.equal(attend(q[None], k[None, :0], v[None, :0], causal=False, **options), torch.zeros(1, *q.shape))


def test_result_may_be_changed():
    q, k, v, _ = _inputs()
    for options in ({"batch_size": 2}, {"window": 4, "batch_size": 2}, {"cu_seqlens": torch.tensor(STARTS).int()}):
        out = attend(q, k, v, **options)
        expected = out.clone() + 1
        assert torch.equal(out.add_(1), expected)


def test_autocast():
    """As torch's function under autocast: computed and returned in the low precision, gradients in the inputs' own."""
    for names in ((), ("window",), ("softcap", "sinks"), ("packed",)):
        tensors = _inputs()
        low = [t.bfloat16().float() for t in tensors[:3]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = _call(tensors, _options(names))
            leaf = tensors[0].clone().requires_grad_()
            _call((leaf, *tensors[1:]), _options(names)).float().sum().backward()
        assert out.dtype == torch.bfloat16
        assert leaf.grad.dtype == torch.float32
        exact = _call((*low, tensors[3]), _options(names))
        assert accuracy.relative_error(out, exact) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("path", ["auto", "math", "mask", "loop"])
def test_dropout(path):
    """Weights are dropped and the rest scaled: equal scores and one-hot values show each of them."""
    size, p = 64, 0.25
    q = torch.zeros(size, 4, size)
    v = torch.eye(size).unsqueeze(1).expand(size, 4, size)
    options = {"cu_seqlens": torch.tensor([0, size]).int()} if path == "loop" else {"batch_size": 1}
    out = attend(q, q, v, causal=False, dropout_p=p, path=path, **options)
    kept = 1 / (size * (1 - p))
    assert torch.all((out == 0) | ((out - kept).abs() < 1e-6))
    share = (out == 0).float().mean().item()
    assert abs(share - p) < 6 * (p * (1 - p) / out.numel()) ** 0.5
    assert not torch.equal(out, attend(q, q, v, causal=False, dropout_p=p, path=path, **options))


# ---------------------------------------------------------------------------------------------------- varlen


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


@pytest.mark.parametrize("names", [c for c in _combinations() if "softcap" not in c], ids="-".join)
def test_varlen(ragged_kernel, names):
    _judge(_inputs(), _options(names), path="varlen")
    assert ragged_kernel.calls == ["forward", "backward"]


def test_varlen_lengths(ragged_kernel):
    """max_seqlen is a bound that only has to hold; one of 1 is not handed on."""
    q, k, v, _ = _inputs()
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
    q, k, v, sinks = _inputs()
    batch = [t.unflatten(0, (2, 20)) for t in (q, k, v)]
    for options in ({}, {"sinks": sinks}):
        out = attend(batch[0][:, :7], *batch[1:], causal=False, path="varlen", **options)
        torch.testing.assert_close(out, attend(batch[0][:, :7], *batch[1:], causal=False, path="math", **options))


def test_sinks_split_backward_forms_each_gradient_once(ragged_kernel):
    tensors = [t.requires_grad_() for t in _inputs()]
    out = _call(tuple(tensors), {"sinks": True, "window": 5}, path="varlen")
    grad = torch.randn_like(out)
    inputs = torch.autograd.grad(out, tensors[:3], grad, retain_graph=True)
    assert ragged_kernel.calls.count("backward") == 1
    (dsinks,) = torch.autograd.grad(out, tensors[3:], grad)
    assert ragged_kernel.calls.count("backward") == 1
    expected = _results(lambda *t: _call(t, {"sinks": True, "window": 5}, path="math"), tuple(tensors), grad)
    for ours, name in zip((*inputs, dsinks), ("dq", "dk", "dv", "dsinks")):
        torch.testing.assert_close(ours, expected[name])


def test_sinks_refuse_second_derivatives(ragged_kernel):
    tensors = [t.requires_grad_() for t in _inputs()]
    out = _call(tuple(tensors), {"sinks": True}, path="varlen")
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


# ---------------------------------------------------------------------------------------------------- flex


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "names", [(), ("bidirectional", "packed"), ("window", "softcap", "sinks", "packed")], ids="-".join
)
def test_flex(names):
    _judge(_inputs(), _options(names), backward=False, path="flex")


@pytest.mark.parametrize("names", [("softcap",), ("window", "softcap", "sinks", "packed")], ids="-".join)
def test_flex_gradients(monkeypatch, names):
    """torch differentiates flex_attention on a CPU only where it is neither compiled nor asked about the device."""
    monkeypatch.setattr(sdpa, "_why_not_flex", lambda *facts: None)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    _judge(_inputs(), _options(names), path="flex")


def test_flex_compiles_each_kind_of_layer_by_itself(monkeypatch):
    """torch.compile gives up at a code object's eighth graph, so that kinds of layers must not share one."""
    monkeypatch.setattr(torch, "compile", lambda function, *, fullgraph: function)
    make = sdpa_paths._compiled_flex.__wrapped__
    window, full = make(("window",)), make(("full",))
    assert len({f.__code__.co_name for f in (window, full, sdpa_paths._flex_graph)}) == 1
    assert len({id(f.__code__) for f in (window, full, sdpa_paths._flex_graph)}) == 3
    q, k, v, _ = _inputs()
    args = (q[None], k[None], v[None], False, 0.1, None, None, None, None)
    monkeypatch.setattr(torch_flex, "flex_attention", lambda q, *rest, **options: q + options["scale"])
    assert torch.equal(full(*args), q[None] + 0.1)


# ---------------------------------------------------------------------------------------------------- compile


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
        options = _options(names)
        options.pop("packed", None)
        extra = {"cu_seqlens": cu_seqlens} if "packed" in names else {"batch_size": 1}
        if options.pop("sinks", False):
            extra["sinks"] = sinks
        return attend(q, k, v, path=path, **options, **extra)

    dynamic = True if path in ("sdpa", "mask") else None
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (40, 17):
        tensors = _inputs(size=16, tokens=tokens)
        if dynamic is None:
            for t in tensors[:3]:
                torch._dynamo.mark_dynamic(t, 0)
        cu_seqlens = torch.tensor([0, 9, tokens], dtype=torch.int32)
        grad = torch.randn(tensors[0].shape)
        ours = _results(functools.partial(compiled, cu_seqlens=cu_seqlens), tensors, grad)
        theirs = _results(functools.partial(run, cu_seqlens=cu_seqlens), tensors, grad)
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key])


def test_compiled_packed_batch_leaves_the_loop():
    torch._dynamo.reset()
    q, k, v, _ = _inputs(size=16)
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens=cu_seqlens), attend(q, k, v, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("path", ["mask", "math", "varlen"])
def test_no_path_reads_the_device(monkeypatch, path):
    """Tensors without data: whoever asks for some raises. (What is on a CPU may be read.)"""
    monkeypatch.setattr(sdpa, "_why_not_varlen", lambda *facts: None)
    q, k, v, sinks = (t.to("meta") for t in _inputs(dtype=torch.bfloat16))
    cu_seqlens = torch.empty(6, dtype=torch.int32, device="meta")
    options = {} if path == "mask" else {"sinks": sinks}
    out = attend(q, k, v, cu_seqlens=cu_seqlens, window=5, path=path, **options)
    assert out.is_meta
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


# ---------------------------------------------------------------------------------------------------- the choice


def test_choice_on_a_cpu():
    choose = lambda **facts: choose_path(CPU, torch.float32, 64, **facts).impl
    assert choose() == "sdpa"
    assert choose(causal=False, dropout_p=0.1) == "sdpa"
    assert choose(packed=True, softcap=1.0) == "loop"
    assert choose(window=8, dropout_p=0.1) == "mask"
    assert choose(sinks=True) == "math"
    assert choose(softcap=1.0, grad=False) == "math"


# (facts, what is taken at 8.0 and 9.0): dtype, head size, features.
ON_CUDA = [
    ((torch.bfloat16, 128), {}, "sdpa"),
    ((torch.float32, 128), {"dropout_p": 0.1}, "sdpa"),
    ((torch.bfloat16, 128), {"packed": True}, "varlen"),
    ((torch.float16, 80), {"window": 128}, "varlen"),
    ((torch.bfloat16, 256), {"window": 128, "sinks": True, "packed": True}, "varlen"),
    ((torch.bfloat16, 256), {"softcap": 50.0, "window": 4096, "packed": True}, "flex"),
    ((torch.bfloat16, 20), {"packed": True}, "flex"),
    ((torch.float32, 64), {"sinks": True, "packed": True}, "flex"),
    ((torch.bfloat16, 512), {"window": 8}, "flex"),
    ((torch.bfloat16, 128), {"packed": True, "dropout_p": 0.1}, "mask"),
    ((torch.float32, 12), {"window": 8}, "mask"),
    ((torch.float64, 64), {"packed": True}, "mask"),
    ((torch.float64, 64), {"sinks": True}, "math"),
]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_choice_on_cuda(monkeypatch, capability):
    monkeypatch.setattr(sdpa, "_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "_TRITON_VERSION", "3.7.1")
    for (dtype, size), facts, expected in ON_CUDA:
        choice = choose_path(CUDA, dtype, size, **facts)
        assert choice.impl == expected, (dtype, size, facts, choice)
        assert choice.reason


def test_choice_on_lesser_cuda_devices(monkeypatch):
    monkeypatch.setattr(dispatch, "_TRITON_VERSION", "3.7.1")
    half = (CUDA, torch.float16)
    monkeypatch.setattr(sdpa, "_capability", lambda device: (8, 6))
    assert choose_path(*half, 256, packed=True).impl == "flex"  # no backward of FlashAttention there
    assert choose_path(*half, 256, packed=True, grad=False).impl == "varlen"
    assert choose_path(*half, 128, packed=True).impl == "varlen"
    monkeypatch.setattr(sdpa, "_capability", lambda device: (7, 5))
    assert choose_path(*half, 64, packed=True).impl == "mask"
    assert choose_path(*half, 64, softcap=1.0).impl == "math"
    monkeypatch.setattr(dispatch, "_TRITON_VERSION", None)
    monkeypatch.setattr(sdpa, "_capability", lambda device: (9, 0))
    choice = choose_path(*half, 64, softcap=1.0)
    assert choice.impl == "math"
    assert "Triton" in choice.reason


def test_what_ran_is_counted():
    q, k, v, sinks = _inputs()
    for options, path in (({}, "sdpa"), ({"window": 4}, "mask"), ({"sinks": sinks}, "math")):
        before = dispatch.counts["attention", path]
        attend(q[None], k[None], v[None], **options)
        assert dispatch.counts["attention", path] == before + 1


def test_default_is_torchs_function_and_nothing_else(monkeypatch):
    """The common call reaches torch with its arguments as they are, grouped heads and all."""
    seen = {}
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: seen.update(options) or args[0])
    q, k, v = (t.unflatten(0, (2, 20)) for t in _inputs()[:3])
    attend(q, k, v, scale=0.5)
    assert seen == {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.5, "enable_gqa": True
    }  # fmt: skip


def test_heads_are_expanded_for_kernels_that_cannot_share_them(monkeypatch):
    """On CUDA only FlashAttention takes grouped heads, and it takes neither masks nor fp32."""
    seen = []

    def stand_in(q, k, v, **options):
        seen.append((k.shape[1], options["enable_gqa"]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", stand_in)
    for dtype, window, expected in (
        (torch.bfloat16, None, (2, True)),
        (torch.float32, None, (6, False)),
        (torch.bfloat16, 4, (6, False)),
    ):
        attend(*(t.unsqueeze(0).to("meta", dtype) for t in _inputs()[:3]), window=window)
        assert seen.pop() == expected


# ---------------------------------------------------------------------------------------------------- refusals


def _refused(key: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match="attend") as error:
        attend(*args, **options)
    assert REFUSALS[key] in str(error.value)


def test_refusals():
    q, k, v, sinks = _inputs()
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32)
    _refused("lengths", q[None, :7], k[None], v[None])
    _refused("packed lengths", q, k[:30], v[:30], cu_seqlens=cu_seqlens)
    _refused("packed layout", q[None], k[None], v[None], cu_seqlens=cu_seqlens)
    _refused("packed layout", q, k, v, cu_seqlens=cu_seqlens, batch_size=1)
    _refused("batch", q, k, v)
    _refused("max_seqlen", q[None], k[None], v[None], max_seqlen=40)
    _refused("window", q[None], k[None], v[None], window=4, causal=False)
    _refused("dropout", q[None], k[None], v[None], softcap=1.0, dropout_p=0.1)
    _refused("dropout", q[None], k[None], v[None], sinks=sinks, dropout_p=0.1)
    assert attend(q[None], k[None], v[None], sinks=sinks, dropout_p=0.1, path="math").shape == (1, 40, 6, 80)


BAD = {
    "window=0": {"window": 0},
    "softcap=0": {"softcap": 0.0},
    "softcap=nan": {"softcap": float("nan"), "sinks": torch.zeros(6)},
    "sinks": {"sinks": torch.zeros(5)},
    "dropout_p=1": {"window": 4, "dropout_p": 1.0},
    "path='flash'": {"path": "flash"},
    "path='sdpa'": {"path": "sdpa", "window": 4},
    "path='mask'": {"path": "mask", "softcap": 1.0},
    "path='loop'": {"path": "loop"},
    "path='varlen'": {"path": "varlen"},
    "batch_size=3": {"batch_size": 3},
}


@pytest.mark.parametrize("match", BAD)
def test_bad_options(match):
    q, k, v, _ = _inputs()
    with pytest.raises(ValueError, match=match.partition("=nan")[0]):
        attend(q[None], k[None], v[None], **BAD[match])


def test_bad_tensors():
    q, k, v, _ = (t.unsqueeze(0) for t in _inputs())
    for bad, match in (
        ((q[0], k, v), "expected all"),
        ((q, k, v[:, :5]), "two equal shapes"),
        ((q, k[..., :8], v[..., :8]), "two equal shapes"),
        ((q[:, :, :5], k, v), "5 query heads"),
        ((q.double(), k, v), "one floating dtype"),
    ):
        with pytest.raises(ValueError, match=match):
            attend(*bad, window=4)
    with pytest.raises(ValueError, match="batch_size=7"):
        attend(q[0], k[0], v[0], batch_size=7)


@pytest.mark.parametrize("starts", [[0, 50], [1, 40], [0, 30, 20, 40], [], [[0, 40]]])
def test_bad_cu_seqlens(starts):
    q, k, v, _ = _inputs()
    with pytest.raises(ValueError, match="cu_seqlens"):
        attend(q, k, v, cu_seqlens=torch.tensor(starts, dtype=torch.int32))


def test_bad_lengths():
    q, k, v, _ = _inputs()
    with pytest.raises(ValueError, match="int32"):
        attend(q, k, v, cu_seqlens=torch.tensor(STARTS))
    with pytest.raises(ValueError, match="a sequence of 23 tokens"):
        attend(q, k, v, cu_seqlens=torch.tensor(STARTS, dtype=torch.int32), max_seqlen=22)


# ---------------------------------------------------------------------------------------------------- on a GPU


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's CUDA kernels need a GPU")


def _on_a_gpu(names: tuple[str, ...], path: str) -> None:
    _judge(tuple(t.cuda() for t in _inputs(dtype=torch.bfloat16)), _options(names), path=path)


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize("names", _combinations(), ids="-".join)
def test_on_a_gpu(names):
    """The kernels that a CPU can only stand in for, on each path that takes the call and needs no compiler."""
    paths = ["math"] + ["varlen"] * ("softcap" not in names) + ["mask"] * (not {"softcap", "sinks"} & set(names))
    for path in paths:
        _on_a_gpu(names, path)


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize(
    "names",
    [
        ("softcap",),
        ("sinks",),
        ("window", "packed"),
        ("bidirectional", "packed"),
        ("window", "softcap", "sinks", "packed"),
    ],
    ids="-".join,
)
def test_flex_on_a_gpu(names):
    _on_a_gpu(names, "flex")


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(7, 1, 16), (9, 3, 24), (8, 8, 256)])
def test_heads_on_a_gpu(heads, kv_heads, size):
    tensors = tuple(t.cuda() for t in _inputs(heads, kv_heads, size, dtype=torch.float16))
    for names in (("window",), ("sinks", "packed")):
        _judge(tensors, _options(names), path="varlen")


@pytest.mark.gpu
@ON_A_GPU
def test_cuda_graph_on_a_gpu():
    """A captured packed batch follows its lengths when they change."""
    q, k, v, sinks = (t.cuda().bfloat16() for t in _inputs())
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
    run = lambda: attend(q, k, v, window=5, sinks=sinks, cu_seqlens=cu_seqlens, max_seqlen=40)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    cu_seqlens.copy_(torch.tensor([0, 5, 5, 11, 30, 40]))
    graph.replay()
    torch.testing.assert_close(out, run(), rtol=0, atol=0)
