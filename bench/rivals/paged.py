"""Attention over a paged cache by torch, FlashInfer, vLLM and SGLang.

All but SGLang's are the peers of the benchmarks (``bench/suites/paged_peers.py``), which brings operands into their
layouts before the timing: torch's gather a sequence's keys. FlashInfer's adapter follows the signatures of
flashinfer-python 0.7.2, vLLM's those of vllm 0.33.0, SGLang's those of sglang 0.5.23. No GPU has run these three.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from ...kernels.dev.cases.paged_attention import asked
from ...kernels.dev.registry import Case
from ..harness.rivals import Outputs, Prepared, Rival
from ..suites import paged_peers
from ..suites.paged import Operands, Prepare, Step
from .eager import no_compiler

Tensor = torch.Tensor
OP = "paged_attention"
# The options of a case that none of these rivals has, with the values that mean that a case does without them.
_WITHOUT: dict[str, Any] = {
    "causal": True,
    "window": None,
    "softcap": None,
    "sinks": False,
    "alibi": False,
    "prefix": False,
    "tree": False,
    "scales": None,
    "lse": False,
    "invariant": None,
    "layout": "one",
}


def step_of(case: Case) -> Step:
    """The case as the benchmarks describe a step."""
    sizes, options = case.sizes, asked(case)
    heads = sizes["N"], sizes["K"], sizes["H"], sizes["block_size"]
    return Step(options["context"], options["queries"], *heads, case.dtype, options["cache"])


def operands_of(inputs: dict[str, Any], case: Case) -> Operands:
    """The case's inputs without what it plants for ours: padding rows of q, table entries that name no block, NaN."""
    tables, cache = inputs["block_tables"], inputs["kv_cache"]
    tables = tables.masked_fill((tables < 0) | (tables >= len(cache)), 0)
    rest = inputs["seq_lens"], inputs["query_start_loc"]
    q = inputs["q"][: sum(case.options["queries"])]
    return Operands(step_of(case), q, cache.nan_to_num(), tables, *rest, None, None)


def _refuses(case: Case, takes: Callable[[Step], bool], what: str) -> str:
    options = asked(case)
    named = [name for name, value in _WITHOUT.items() if options[name] != value]
    if named:
        return f"it does without {', '.join(named)}"
    if options["cache"] != case.dtype or case.sizes["Hv"] != case.sizes["H"]:
        return "its keys and values have q's dtype and head size"
    return "" if takes(step_of(case)) else f"it takes {what}"


def _rival(name: str, prepare: Prepare, takes: Callable[[Step], bool], what: str, rows: Any, **more: Any) -> Rival:
    """``rows(result, call)`` is out [T, N, H] of a call's result; ``what`` says which steps it ``takes``."""

    def prepared(inputs: dict[str, Any], case: Case) -> Prepared:
        call = prepare(operands_of(inputs, case))
        spare = len(inputs["q"]) - sum(case.options["queries"])

        def outputs(result: Any) -> Outputs:
            return {"out": F.pad(rows(result, call), (0, 0, 0, 0, 0, spare))}

        return Prepared(call, outputs)

    return Rival(name, OP, prepare=prepared, refuses=lambda case: _refuses(case, takes, what), **more)


def _heads_first(result: Tensor, call: object) -> Tensor:
    return result.transpose(1, 2).flatten(0, 1)  # of [S, N, Q, H]


def _flat(result: Tensor, call: object) -> Tensor:
    return result


def _written(result: None, call: Any) -> Tensor:
    return call.keywords["out" if "out" in call.keywords else "o"]


def _any(step: Step) -> bool:
    return True


def _one_length(step: Step) -> bool:
    return len(set(step.queries)) == 1


def _sdpa(name: str, backend: SDPBackend | None, *devices: str) -> Rival:
    prepare = partial(paged_peers.sdpa, backend=backend)
    return _rival(name, prepare, paged_peers.dense, _DENSE, _heads_first, devices=devices)


_DENSE = "sequences of one length that decode one token, or have nothing in the cache"


def _vllm(operands: Operands) -> Callable[[], object]:
    """Of an installed vLLM, or of the files in ``.peers/vllm``."""
    launcher = paged_peers.load_vllm()
    if launcher is None:
        launcher = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    return paged_peers.vllm(operands, launcher)


def _no_vllm(device: torch.device) -> str:
    if paged_peers.load_vllm() is not None or importlib.util.find_spec("vllm") is not None:
        return ""
    return f"vllm is not installed, and {paged_peers.VLLM_FOLDER} has none of its kernels"


def sglang(operands: Operands) -> Callable[[], object]:
    """SGLang's kernel for queries of any number. Its cache is keys and values [slots, K, H], with an index for each."""
    function = importlib.import_module("sglang.kernels.ops.attention.extend_attention").extend_attention_fwd_unified
    step, q = operands.step, operands.q
    cache = operands.kv_cache.transpose(1, 2).flatten(0, 1)  # [blocks * B, K, 2H]
    k, v = (part.contiguous() for part in cache.split(step.head_size, dim=-1))
    slots = [
        (table[:, None] * step.page + torch.arange(step.page, device=q.device)).flatten()[:length]
        for table, length in zip(operands.block_tables, step.seq_lens)
    ]
    return partial(
        function,
        q=q,
        o=torch.empty_like(q),
        k_buffer=k,
        v_buffer=v,
        k_scale=1.0,
        v_scale=1.0,
        qo_indptr=operands.query_start_loc,
        kv_indptr=F.pad(operands.seq_lens.cumsum(0), (1, 0)).to(torch.int32),
        kv_indices=torch.cat(slots).to(torch.int64),
        prefix_lens=torch.tensor(step.context, dtype=torch.int32, device=q.device),
        max_len_extend=max(step.queries),
        sm_scale=step.head_size**-0.5,
    )


RIVALS = (
    _sdpa("sdpa", None, "cpu", "cuda"),
    _sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, "cpu", "cuda"),
    _sdpa("sdpa-math", SDPBackend.MATH, "cpu", "cuda"),
    _sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, "cuda"),
    _sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, "cuda"),
    _rival("varlen", paged_peers.varlen, _any, "any step", _flat, devices=("cuda",)),
    _rival(
        "flex",
        paged_peers.Flex(),
        _one_length,
        "sequences with equal numbers of queries",
        _heads_first,
        lacks=no_compiler,
    ),
    _rival(
        "flashinfer",
        paged_peers.flashinfer,
        _any,
        "any step",
        _flat,
        package="flashinfer",
        distribution="flashinfer-python",
        devices=("cuda",),
    ),
    _rival("vllm", _vllm, _any, "any step", _written, distribution="vllm", devices=("cuda",), lacks=_no_vllm),
    _rival("sglang", sglang, _any, "any step", _written, package="sglang", devices=("cuda",)),
)
