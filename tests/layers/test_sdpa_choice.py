"""Which of torch's paths attention takes, what it hands to torch, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdpa_case import STARTS, make_inputs

from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.attention import sdpa
from shardfuse.layers.attention.sdpa import REFUSALS, attend, choose_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# --- the choice -------------------------------------------------------------------------------------------------------


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
    q, k, v, sinks = make_inputs()
    for options, path in (({}, "sdpa"), ({"window": 4}, "mask"), ({"sinks": sinks}, "math")):
        before = dispatch.counts["attention", path]
        attend(q[None], k[None], v[None], **options)
        assert dispatch.counts["attention", path] == before + 1


def test_default_is_torchs_function_and_nothing_else(monkeypatch):
    """The common call reaches torch with its arguments as they are, grouped heads and all."""
    seen = {}
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: seen.update(options) or args[0])
    q, k, v = (t.unflatten(0, (2, 20)) for t in make_inputs()[:3])
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
        attend(*(t.unsqueeze(0).to("meta", dtype) for t in make_inputs()[:3]), window=window)
        assert seen.pop() == expected


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refused(key: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match="attend") as error:
        attend(*args, **options)
    assert REFUSALS[key] in str(error.value)


def test_refusals():
    q, k, v, sinks = make_inputs()
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
    q, k, v, _ = make_inputs()
    with pytest.raises(ValueError, match=match.partition("=nan")[0]):
        attend(q[None], k[None], v[None], **BAD[match])


def test_bad_tensors():
    q, k, v, _ = (t.unsqueeze(0) for t in make_inputs())
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
    q, k, v, _ = make_inputs()
    with pytest.raises(ValueError, match="cu_seqlens"):
        attend(q, k, v, cu_seqlens=torch.tensor(starts, dtype=torch.int32))


def test_bad_lengths():
    q, k, v, _ = make_inputs()
    with pytest.raises(ValueError, match="int32"):
        attend(q, k, v, cu_seqlens=torch.tensor(STARTS))
    with pytest.raises(ValueError, match="a sequence of 23 tokens"):
        attend(q, k, v, cu_seqlens=torch.tensor(STARTS, dtype=torch.int32), max_seqlen=22)
