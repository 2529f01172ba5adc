"""Attention on torch's paths: every feature and their combinations against plain fp64 loops."""

from __future__ import annotations

import pytest
import torch
from sdpa_case import STARTS, call_attend, every_combination, judge, make_inputs, options_of, oracle

from shardfuse.kernels.dev import accuracy
from shardfuse.layers.attention import sdpa_paths
from shardfuse.layers.attention.sdpa import attend

# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", every_combination(), ids="-".join)
def test_every_combination(names):
    """What auto takes on a CPU, and each of the paths that run there."""
    options = options_of(names)
    paths = ["auto", "math"]
    if not {"softcap", "sinks"} & set(names):
        paths.append("mask")
    for path in paths:
        judge(make_inputs(), options, path=path)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 8), (7, 1, 16), (9, 3, 20), (4, 4, 1)])
@pytest.mark.parametrize("names", [(), ("window", "packed"), ("softcap", "sinks")], ids="-".join)
def test_heads(heads, kv_heads, size, names):
    judge(make_inputs(heads, kv_heads, size), options_of(names))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("names", [(), ("window",), ("packed",), ("softcap", "sinks", "packed")], ids="-".join)
def test_dtypes(dtype, names):
    judge(make_inputs(dtype=dtype), options_of(names))


@pytest.mark.parametrize("names", [(), ("window",), ("packed",), ("softcap", "sinks", "packed")], ids="-".join)
def test_fp64_is_computed_in_fp64(names):
    tensors, options = tuple(t.double() for t in make_inputs()), options_of(names)
    exact = oracle(*tensors, STARTS if options.get("packed") else [0, 20, 40], **options)
    assert accuracy.within("out", call_attend(tensors, options), exact, torch.finfo(torch.float32).eps ** 2 * 1000).ok


@pytest.mark.parametrize("window", [1, 2, 39, 40, 1000])
def test_windows(window):
    """The query itself counts: a window of 1 sees nothing else, and one as long as the sequence sees it all."""
    tensors = make_inputs()
    judge(tensors, {"window": window}, backward=False)
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
        judge(make_inputs(), {**options_of(names), "scale": 0.3})


def test_layouts():
    """[B, S, N, H], the same flattened with batch_size, and slices of a fused projection."""
    q, k, v, sinks = make_inputs()
    flat = attend(q, k, v, window=4, sinks=sinks, batch_size=2)
    batched = [t.unflatten(0, (2, 20)) for t in (q, k, v)]
    torch.testing.assert_close(attend(*batched, window=4, sinks=sinks), flat.unflatten(0, (2, 20)))
    torch.testing.assert_close(attend(*batched, window=4, sinks=sinks, batch_size=2), flat.unflatten(0, (2, 20)))
    fused = torch.cat((q, k, v), dim=1)
    slices = fused.split([6, 2, 2], dim=1)
    assert not slices[0].is_contiguous()
    for options in ({}, {"window": 4}, {"sinks": sinks}):
        found, expected = (attend(*each, batch_size=2, **options) for each in (slices, (q, k, v)))
        assert accuracy.within("out", found, expected, 2 * accuracy.rounding(torch.float32, sum(q.shape[::2]))).ok


def test_attention_to_another_sequence():
    q, k, v, sinks = make_inputs()
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
    options = options_of(names)
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
    q, k, v, sinks = make_inputs()
    for options in ({}, {"sinks": sinks}, {"softcap": 1.5}):
        assert torch.equal(attend(q[None], k[None, :0], v[None, :0], causal=False, **options), torch.zeros(1, *q.shape))


def test_result_may_be_changed():
    q, k, v, _ = make_inputs()
    for options in ({"batch_size": 2}, {"window": 4, "batch_size": 2}, {"cu_seqlens": torch.tensor(STARTS).int()}):
        out = attend(q, k, v, **options)
        expected = out.clone() + 1
        assert torch.equal(out.add_(1), expected)


def test_autocast():
    """As torch's function under autocast: computed and returned in the low precision, gradients in the inputs' own."""
    for names in ((), ("window",), ("softcap", "sinks"), ("packed",)):
        tensors = make_inputs()
        low = [t.bfloat16().float() for t in tensors[:3]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call_attend(tensors, options_of(names))
            leaf = tensors[0].clone().requires_grad_()
            call_attend((leaf, *tensors[1:]), options_of(names)).float().sum().backward()
        assert out.dtype == torch.bfloat16
        assert leaf.grad.dtype == torch.float32
        exact = call_attend((*low, tensors[3]), options_of(names))
        assert accuracy.within("out", out, exact, 2 * torch.finfo(torch.bfloat16).eps).ok


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


# --- on a GPU ---------------------------------------------------------------------------------------------------------

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's CUDA kernels need a GPU")


def _on_a_gpu(names: tuple[str, ...], path: str) -> None:
    judge(tuple(t.cuda() for t in make_inputs(dtype=torch.bfloat16)), options_of(names), path=path)


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize("names", every_combination(), ids="-".join)
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
    tensors = tuple(t.cuda() for t in make_inputs(heads, kv_heads, size, dtype=torch.float16))
    for names in (("window",), ("sinks", "packed")):
        judge(tensors, options_of(names), path="varlen")


@pytest.mark.gpu
@ON_A_GPU
def test_cuda_graph_on_a_gpu():
    """A captured packed batch follows its lengths when they change."""
    q, k, v, sinks = (t.cuda().bfloat16() for t in make_inputs())
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
    run = lambda: attend(q, k, v, window=5, sinks=sinks, cu_seqlens=cu_seqlens, max_seqlen=40)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    cu_seqlens.copy_(torch.tensor([0, 5, 5, 11, 30, 40]))
    graph.replay()
    torch.testing.assert_close(out, run(), rtol=0, atol=0)
