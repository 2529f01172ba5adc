"""paged_attention and vLLM's own Triton kernel on the same pages, where its files lie (bench/suites/paged_peers.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfuse.bench.suites.paged_peers import KVQuantMode, load_vllm
from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.dev.cases import paged_attention as cases
from shardfuse.kernels.dev.cases import paged_features as features
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.paged_attention.op import split_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_SEGMENTS = 4
_FP16 = {"head size": "32", "q": "q fp16"}
_FP32 = {"head size": "80", "q": "q fp32"}

# What both can do, in features' words; what is not named is as a plain call has it. Left out is what theirs means
# otherwise (0.33.0): a prefix that a window does not cut off; ALiBi that counts from the context's end, the same only
# where causal and without sinks; a non-causal window, which cuts values off for a whole tile by its first query's.
CASES = (
    {**_FP16, "step": "decode", "heads per KV head": "3"},
    {**_FP32, "step": "mixed", "page size": "4", "heads per KV head": "4", "sinks": "sinks"},
    {**_FP16, "step": "long outlier", "heads per KV head": "8", "window": "window", "sinks": "sinks"},
    {**_FP16, "step": "speculative", "softcap": "soft-cap", "layout": "slots before heads"},
    {**_FP32, "step": "chunk", "ALiBi": "ALiBi", "softcap": "soft-cap", "layout": "a pair"},
    {**_FP16, "step": "chunk", "window": "window", "heads per KV head": "7"},
    {**_FP32, "step": "prefill", "causal": "non-causal", "sinks": "sinks"},
    {**_FP16, "step": "mixed", "prefix": "prefix-LM", "softcap": "soft-cap"},
    {**_FP32, "step": "speculative", "tree": "tree", "sinks": "sinks", "heads per KV head": "2"},
    {**_FP16, "step": "idle sequences", "cache": "cache fp8", "scales": "scale per tensor"},
    {**_FP16, "step": "decode", "cache": "cache fp8", "scales": "scale per token, head", "softcap": "soft-cap"},
    {**_FP32, "step": "mixed", "cache": "cache int8", "scales": "scale per token, head", "window": "window"},
    {**_FP32, "step": "long outlier", "cache": "cache other 16-bit", "page size": "100"},
)


@pytest.fixture(scope="module")
def unified_attention() -> Callable[..., None]:
    found = load_vllm()
    if found is None:
        pytest.skip("vLLM's kernel files are not in .peers/vllm (bench/suites/paged_peers.py names them)")
    return found


def _theirs(unified_attention: Callable[..., None], inputs: dict[str, Any], case: Case, split: bool) -> torch.Tensor:
    """[T, N, H] from vLLM's kernel; ``split``: short queries' keys in segments, merged by its second launch."""
    options, n, h = cases.asked(case), case.sizes["N"], case.sizes["H"]
    q, queries = inputs["q"], options["queries"]
    out = torch.zeros_like(q)
    k, v = (x.transpose(1, 2) for x in split_cache(inputs["kv_cache"], h))  # [blocks, B, K, H]
    # It reads a tile's part of the table, whether the sequence has so many blocks or not.
    tables = torch.nn.functional.pad(inputs["block_tables"], (0, 64)).clamp(0, len(k) - 1)
    asked: dict[str, Any] = {"k_descale": None, "v_descale": None}
    if options["scales"] == "tensor":
        asked = {"k_descale": inputs["k_scale"], "v_descale": inputs["v_scale"]}
        asked["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    elif options["scales"] == "token":
        asked |= {f"{name}_cache": inputs[name].transpose(1, 2) for name in ("k_scale", "v_scale")}
        of_int8 = options["cache"] == torch.int8
        asked["kv_quant_mode"] = KVQuantMode.INT8_PER_TOKEN_HEAD if of_int8 else KVQuantMode.FP8_PER_TOKEN_HEAD
    if options["prefix"]:  # ranges of keys that see each other, ends included
        last = torch.minimum(inputs["prefix_lens"], inputs["seq_lens"]) - 1
        asked["mm_prefix_range"] = torch.stack((torch.zeros_like(last), last), -1)[:, None].contiguous()
    if options["tree"]:
        asked["qq_bias"] = _tree_bias(inputs["tree_mask"][: max(queries), : max(queries)])
    if split:
        segments = q.new_empty(len(q), n, _SEGMENTS, 1 << (h - 1).bit_length(), dtype=torch.float32)
        asked |= {"softmax_segm_output": segments, "seq_threshold_3D": 128, "num_par_softmax_segments": _SEGMENTS}
        asked |= {f"softmax_segm_{name}": segments[..., 0].contiguous() for name in ("max", "expsum")}
    unified_attention(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=inputs["query_start_loc"],
        max_seqlen_q=max(queries),
        seqused_k=inputs["seq_lens"],
        max_seqlen_k=int(inputs["seq_lens"].max()),
        softmax_scale=h**-0.5,
        causal=options["causal"],
        window_size=(-1, -1) if options["window"] is None else (options["window"] - 1, 0),
        block_table=tables,
        softcap=options["softcap"] or 0.0,
        q_descale=None,
        alibi_slopes=inputs.get("alibi_slopes"),
        sinks=inputs.get("sinks"),
        **asked,
    )
    return out


def _tree_bias(tree: torch.Tensor) -> torch.Tensor:
    """0 and -inf for tree [Q, Q], among zeros: interpreted, theirs also reads left of a row, and below the last one."""
    reach = 64
    bias = torch.zeros(len(tree) + 16, 2 * reach, device=tree.device)
    mine = bias[: len(tree), reach : reach + len(tree)]
    mine.masked_fill_(~tree, float("-inf"))
    return mine


def _inputs(case: Case) -> dict[str, Any]:
    inputs = cases.make_inputs(case, DEVICE, seed=0)
    if "tree_mask" in inputs:  # theirs masks by position as well, and has one tree for every sequence
        longest = max(case.options["queries"])
        rows = [i for queries in case.options["queries"] for i in range(queries)]
        tree = inputs["tree_mask"][:longest].tril()
        tree[range(longest), range(longest)] = True
        inputs["tree_mask"][: len(rows)] = tree[rows]
    return inputs


@pytest.mark.interpret
@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: "-".join(chosen.values()).replace(" ", "_"))
def test_agrees_with_vllm(unified_attention: Callable[..., None], chosen: dict[str, str]) -> None:
    """Both within the same budget of the fp64 oracle: the one computes what the other does, as well as it does."""
    case = features.case_of(chosen, "peer")
    inputs = _inputs(case)
    real = sum(case.options["queries"])
    oracle = cases.run(registry.to_double(inputs), case, "reference")["out"][:real]
    low = cases.run(inputs, case, "reference")["out"][:real]
    ours = cases.run(inputs, case, "triton")["out"][:real]
    for split in (False, True) if max(case.options["queries"]) <= 8 else (False,):
        theirs = _theirs(unified_attention, inputs, case, split)[:real]
        for verdict in (
            judge(whose, found, low, oracle, terms=cases.SPEC.terms(case))
            for whose, found in (("ours", ours), ("theirs", theirs))
        ):
            assert verdict.ok, (split, verdict)
