"""Peers in the benchmarks of the paged ops compute, and store, the same as the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench_paged_case import CPU, FP8, FP32, GPU, QUANTISED, TINY, written

from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.suites import cache_write, paged_peers
from shardfuse.bench.suites.paged import Operands, Step, decodes
from shardfuse.bench.suites.paged_mixed import chunk_beside
from shardfuse.bench.suites.paged_prefill import prompts
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.dev.cases import kv_cache as kv_cases
from shardfuse.kernels.dev.registry import to_double
from shardfuse.kernels.paged_attention import paged_attention
from shardfuse.kernels.runtime import dispatch


def expected(operands: Operands) -> torch.Tensor:
    return paged_attention(*operands.paged, impl="reference", k_scale=operands.k_scale, v_scale=operands.v_scale)


def agree(operands: Operands, out: Any, wide: torch.Tensor | None = None) -> None:
    """The same as the reference, by the rule for kernels: that one's fp64 result is the oracle."""
    if not operands.step.quantised:
        exact = replace(operands, q=operands.q.double(), kv_cache=operands.kv_cache.double())
    else:
        exact = replace(operands, q=operands.q.double())
    verdict = judge("out", out, expected(operands), expected(exact), terms=max(operands.step.seq_lens))
    assert verdict.ok, str(verdict)


def tokens_first(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)  # [S, N, Q, H]


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [decodes(3, 9, **FP32), prompts(2, 7, **FP32)], ids=lambda step: step.name)
def test_sdpa_computes_the_same(step):
    assert paged_peers.dense(step)
    operands = Operands.of(step, CPU, 0)
    agree(operands, tokens_first(paged_peers.sdpa(operands)()))


def test_packed_sdpa_computes_the_same():
    operands = Operands.of(decodes(3, 9, **FP32), CPU, 0)
    agree(operands, paged_peers.sdpa_packed(operands)().flatten(1, 2))


@pytest.mark.parametrize(
    "step",
    [
        prompts(2, 4, context=3, **FP32),
        Step((3, 4), (1, 1), **FP32),
        decodes(2, 9, **TINY, **QUANTISED["fp8_per_tensor"]),
    ],
    ids=["behind a context", "ragged", "quantised"],
)
def test_dense_calls_take_no_other_steps(step):
    assert not paged_peers.dense(step)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [Q, N, H] standing at the end of k, v [L, K, H]."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


STEPS = {
    "decodes": Step((9, 3, 20), (1, 1, 1), **FP32),
    "mixed": Step((9, 0, 20), (1, 6, 3), **FP32),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_varlen_attn_is_told_where_sequences_begin(step, monkeypatch):
    from torch.nn.attention import varlen

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        assert (max_q, max_k) == (max(step.queries), max(step.seq_lens))
        assert window_size == (-1, 0)
        assert enable_gqa
        assert cu_q.dtype == cu_k.dtype == torch.int32
        parts = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()))
        return torch.cat([dense_attention(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in parts])

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    operands = Operands.of(step, CPU, 0)
    agree(operands, paged_peers.varlen(operands)())


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_flashinfer_is_told_which_pages_a_sequence_has(step, monkeypatch):
    planned: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
            assert (workspace.dtype, layout) == (torch.uint8, "HND")

        def _attend(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            outs = []
            pages = pairwise(planned["indptr"].tolist())
            for (a, b), (c, d), used in zip(pairwise(planned["qo"].tolist()), pages, planned["used"].tolist()):
                table = planned["indices"][c:d].long()
                length = (d - c - 1) * step.page + used
                k, v = (x[table].transpose(1, 2).flatten(0, 1)[:length] for x in kv)
                outs.append(dense_attention(q[a:b], k, v))
            return torch.cat(outs)

        run = _attend

    class Decode(Wrapper):
        def plan(self, indptr, indices, last_page_len, heads, kv_heads, head_size, page, **dtypes):
            assert (heads, kv_heads, head_size, page) == (4, 2, 16, 4)
            planned.update(indptr=indptr, indices=indices, used=last_page_len, qo=torch.arange(len(indptr)))

    class Prefill(Wrapper):
        def plan(self, qo, indptr, indices, last_page_len, heads, kv_heads, head_size, page, *, causal, **dtypes):
            assert causal
            assert (heads, kv_heads, head_size, page) == (4, 2, 16, 4)
            planned.update(indptr=indptr, indices=indices, used=last_page_len, qo=qo)

    library = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    library.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    operands = Operands.of(step, CPU, 0)
    agree(operands, paged_peers.flashinfer(operands)())


@pytest.mark.parametrize(
    "step",
    [Step((150, 3), (1, 1), **FP32), Step((140, 0), (5, 5), **FP32)],
    ids=["decodes", "chunks"],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_finds_its_pages(step, monkeypatch):
    monkeypatch.setattr(paged_peers, "compiled", lambda function: function)
    assert paged_peers._in_flex(replace(step, short=True))
    operands = Operands.of(step, CPU, 0)
    agree(operands, tokens_first(paged_peers.Flex()(operands)()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "step",
    [decodes(3, 700), decodes(3, 700, queries=5), prompts(2, 300), chunk_beside(90, 2, 300)]
    + [decodes(3, 700, **how) for how in QUANTISED.values()],
    ids=lambda step: step.name,
)
def test_every_peer_computes_the_same_on_a_gpu(step):
    step = replace(step, short=True)
    operands = Operands.of(step, GPU, 0)
    for peer in paged_peers.peers(Settings(GPU)).values():
        if not peer.takes(step) or peer.name == paged_peers.FLASHINFER:
            continue
        call = peer.prepare(operands)
        out = call()
        if peer.name == paged_peers.VLLM:
            out = call.keywords["out"]  # type: ignore[attr-defined]
        agree(operands, tokens_first(out) if out.dim() == 4 else out)


# --- vLLM's kernels ---------------------------------------------------------------------------------------------------


def test_loader_finds_nothing_where_there_is_nothing(tmp_path):
    assert paged_peers.load_vllm(tmp_path) is None
    assert paged_peers.load_vllm_writes(tmp_path) is None


IMPORTS = """
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.triton_attention_helpers import helper
from vllm.v1.kv_cache_interface import KVQuantMode
init_logger(__name__).debug_once("loaded")
batch_invariant = envs.VLLM_BATCH_INVARIANT

def unified_attention():
    return helper(), current_platform.fp8_dtype(), KVQuantMode.FP8_PER_TENSOR, tl, triton, batch_invariant
"""


def test_loader_gives_the_files_what_they_import_and_takes_it_away_again(tmp_path, monkeypatch):
    installed = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", installed)
    (tmp_path / "triton_unified_attention.py").write_text(IMPORTS)
    (tmp_path / "triton_attention_helpers.py").write_text("def helper():\n    return 'helped'\n")
    found = paged_peers.load_vllm(tmp_path)
    assert found is not None
    import triton
    import triton.language as tl

    assert found() == ("helped", FP8, 1, tl, triton, False)
    assert sys.modules["vllm"] is installed
    assert not [name for name in sys.modules if name.startswith("vllm.")]
    assert paged_peers.load_vllm_writes(tmp_path) is None  # that file is not there


@pytest.mark.parametrize("text", ["import vllm.nowhere\n", "def another(): ...\n"], ids=["import", "function"])
def test_loader_says_what_to_do_about_files_that_do_not_load(tmp_path, text):
    (tmp_path / "triton_unified_attention.py").write_text(text)
    with pytest.raises(RuntimeError, match=r"triton_unified_attention\.py does not load .* of one release of vLLM"):
        paged_peers.load_vllm(tmp_path)
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


def test_no_kernels_without_triton(tmp_path, monkeypatch):
    (tmp_path / "triton_unified_attention.py").write_text("def unified_attention(): ...\n")
    monkeypatch.setattr(dispatch, "triton_version", lambda: None)
    assert paged_peers.load_vllm(tmp_path) is None


def test_files_of_others_are_ignored_by_git():
    root = Path(__file__).parents[2]
    assert f"{paged_peers.VLLM_FOLDER.parts[0]}/" in (root / ".gitignore").read_text().splitlines()


@pytest.mark.interpret
@pytest.mark.parametrize(
    "step",
    [
        decodes(2, 21, **FP32),
        Step((9, 0), (1, 6), note="mixed", **FP32),
        *(decodes(1, 19, **(TINY | {"dtype": torch.float32}), **how) for how in QUANTISED.values()),
    ],
    ids=lambda step: step.name,
)
def test_vllm_computes_the_same(step):
    launcher = paged_peers.load_vllm()
    if launcher is None:
        pytest.skip(f"no vLLM kernels in {paged_peers.VLLM_FOLDER}")
    operands = Operands.of(step, CPU, 0)
    call = paged_peers.vllm(operands, launcher)
    call()
    agree(operands, call.keywords["out"])  # type: ignore[attr-defined]


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["t7-k2-h16-p4-fp32", "t9-k3-h12-p1-fp32-e4m3-written"])
def test_vllm_writes_the_same(name, monkeypatch):
    launchers = paged_peers.load_vllm_writes()
    if launchers is None:
        pytest.skip(f"no vLLM kernels in {paged_peers.VLLM_FOLDER}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    problem = written("write_kv", name)
    inputs = problem.spec.make_inputs(problem.case, CPU, 0)
    call = cache_write._vllm(problem, inputs, launchers)
    call()
    k_cache, v_cache, *scales = call.args[2:6]  # type: ignore[attr-defined]
    want = kv_cases.run(inputs, problem.case, "reference")
    slots = inputs["slot_mapping"][:-1]
    quantised = problem.case.options["scales"] is not None
    for part, cache, scale in zip("kv", (k_cache, v_cache), scales if quantised else (None, None)):
        values = cache.float() if scale is None else cache.float() * scale.unsqueeze(-1)
        theirs, ours = (x.flatten(0, 1)[slots] for x in (values, want[f"{part}_cache"].transpose(1, 2)))
        verdict = judge(part, theirs, ours.float(), inputs[part][:-1].double())
        assert verdict.ok, str(verdict)


# --- writes: eager, and our own ops one by one ------------------------------------------------------------------------

WRITES = [
    ("write_kv", "t7-k2-h16-p4-fp32"),
    ("write_kv", "t9-k3-h12-p1-fp32-e4m3-written"),
    ("write_kv", "t6-k2-h16-v8-p4-bf16-int8-given-slots_first"),
    ("norm_rope_write_kv", "t7-n4-k2-h16-p4-fp32"),
    ("norm_rope_write_kv", "t6-n4-k2-h16-p5-fp32-e4m3-given"),
    ("norm_rope_write_kv", "t6-n4-k2-h24-p4-fp32-e4m3-written-r8"),
    ("norm_rope_write_kv", "t6-n2-k2-h8-p4-bf16-r0-nonorm"),
]
STEPS_OF_A_WRITE = [
    (cache_write.EAGER, *write) for write in WRITES
] + [(cache_write.STEPS, *write) for write in WRITES if write[0] == "norm_rope_write_kv"]  # fmt: skip


@pytest.mark.parametrize(("peer", "op", "name"), STEPS_OF_A_WRITE)
def test_peers_of_a_write_store_the_same(peer, op, name):
    problem = written(op, name)
    theirs, ours, exact = (problem.spec.make_inputs(problem.case, CPU, 0) for _ in range(3))
    one_by_one = partial(cache_write._one_by_one, impl="reference")
    q = (cache_write._eager if peer == cache_write.EAGER else one_by_one)(problem, theirs)()
    want = kv_cases.run(ours, problem.case, "reference")
    oracle = kv_cases.run(to_double(exact), problem.case, "reference")
    nothing = theirs | {"slot_mapping": torch.full_like(theirs["slot_mapping"], -1)}
    found = kv_cases.run(nothing, problem.case, "reference") | ({} if q is None else {"q": q})
    assert found.keys() == want.keys() == oracle.keys()
    for part in found:
        low, high = want[part].to(problem.case.dtype), oracle[part]
        verdict = judge(part, found[part].to(problem.case.dtype), low, high, terms=problem.spec.terms(problem.case))
        assert verdict.ok, str(verdict)


def test_eager_copy_moves_the_same_blocks():
    problem = written("copy_blocks", "3x6x2x4x5-e4m3-n4-dim1-turned")
    theirs, ours = (next(cache_write._input_sets(problem, CPU, 1)) for _ in range(2))
    cache_write._eager_copy(problem, theirs)()
    cache_write._ours(problem, ours, "reference")()
    assert torch.equal(theirs["cache"].view(torch.uint8), ours["cache"].view(torch.uint8))
