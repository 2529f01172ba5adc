"""paged_attention: the kernel and the CPU's walk against the reference, what may not matter, and what is refused.

Every feature with every other one: test_paged_features.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_matches

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.dev.cases import paged_attention as cases
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.paged_attention import merge_attention, paged_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = registry.op("paged_attention")
CASES = {case.name: case for case in SPEC.tagged("test")}
DECODE, MIXED = CASES["decode-g1-h32-p4-fp32"], CASES["mixed-g3-h32-p4-fp32"]
IMPLS = ["reference", "auto", pytest.param("triton", marks=pytest.mark.interpret)]  # auto: cpu.py, on a CPU


def _inputs(case: Case) -> dict[str, Any]:
    return SPEC.make_inputs(case, DEVICE, 0)


def _odd(name: str, h: int, hv: int, block_size: int, dtype: torch.dtype, **options: Any) -> Case:
    sizes = {"N": 5, "K": 1, "H": h, "Hv": hv, "block_size": block_size}
    return Case(name, dtype, sizes, {"context": (11, 0, 6), "queries": (1, 20, 3), **options})


# Sizes that no model has, and every one that the kernel must still get right.
ODD = (
    _odd("h1-p3", 1, 1, 3, torch.float32),
    _odd("h17-v200-p7", 17, 200, 7, torch.float16),
    _odd("h33-v5-p11", 33, 5, 11, torch.float16, cache=torch.int8, scales="token"),
    _odd("h255-p5", 255, 255, 5, torch.float32, window=1, sinks=True, lse=True),
    _odd("softcap-alone", 32, 32, 4, torch.float32, softcap=0.1, lse=True),
)


# ---------------------------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize("case", [*CASES.values(), *ODD], ids=lambda case: case.name)
def test_agrees_with_the_reference(case: Case, impl: str) -> None:
    assert_matches(SPEC, case, _inputs(case), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_that_all_windows_have_left_are_free(impl: str, invariant: bool, block_size: int) -> None:
    """Their entries may name anything, and what they held may be somebody else's, or NaN."""
    window = 9
    steps = {"context": (70, 0, 39, 33), "queries": (1, 12, 6, 2)}
    sizes = {**DECODE.sizes, "block_size": block_size}
    x = _inputs(Case("windows", torch.float32, sizes, {**steps, "window": window}))
    whole = paged_attention(**x, window=window, impl="reference")
    tables = x["block_tables"]
    for s, context in enumerate(steps["context"]):
        left = max(0, context - window + 1) // block_size
        x["kv_cache"][tables[s, :left].long()] = float("nan")
        tables[s, :left] = (-1, 2**31 - 1)[s % 2]
    found = paged_attention(**x, window=window, invariant=invariant, impl=impl)
    oracle = paged_attention(**registry.to_double(x), window=window, impl="reference")
    verdict = judge("out", found, whole, oracle, terms=int(x["seq_lens"].max()))
    assert verdict.ok, verdict


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sink", [-float("inf"), 0.0])
def test_sinks_that_are_off_and_scores_that_are_small(impl: str, sink: float) -> None:
    """A soft-cap far above the scores bends nothing: its tanh must keep their digits."""
    x = _inputs(MIXED)
    options: dict[str, Any] = {"softcap": 1000.0, "sinks": torch.full((x["q"].shape[1],), sink, device=DEVICE)}
    found = paged_attention(**x, **options, impl=impl)
    low = paged_attention(**x, **options, impl="reference")
    oracle = paged_attention(**registry.to_double({**x, **options}), impl="reference")
    verdict = judge("out", found, low, oracle, terms=SPEC.terms(MIXED))
    assert verdict.ok, verdict


@pytest.mark.parametrize("impl", IMPLS)
def test_windows_beyond_all_keys_and_scales_of_any_shape(impl: str) -> None:
    x = _inputs(MIXED)
    full = paged_attention(**x, causal=False, impl=impl)
    for window in (10**5, 2**31 - 1, 2**40):
        assert torch.equal(paged_attention(**x, causal=False, window=window, impl=impl), full)  # type: ignore[arg-type]
    codes = {**x, "kv_cache": x["kv_cache"].nan_to_num().mul(30).to(torch.int8)}
    one, cube = (torch.full(shape, 0.02, device=DEVICE) for shape in ((1,), (1, 1, 1)))
    flat = paged_attention(**codes, k_scale=one, v_scale=one, impl=impl)
    assert torch.equal(paged_attention(**codes, k_scale=cube, v_scale=cube, impl=impl), flat)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("invariant", [False, True])
def test_what_a_sequence_does_not_own_never_matters(impl: str, invariant: bool) -> None:
    """Free blocks, the slots behind a sequence's end, the tail of its table and padding rows may hold anything."""
    x = _inputs(MIXED)
    assert x["kv_cache"].isnan().any()
    assert x["q"].isnan().any()
    assert (x["block_tables"] == -1).any()
    oracle = paged_attention(**registry.to_double(x))
    low = paged_attention(**x, impl="reference")
    poisoned = paged_attention(**x, invariant=invariant, impl=impl)
    assert poisoned.isfinite().all()

    x["kv_cache"].nan_to_num_(nan=7.0)
    x["q"].nan_to_num_(nan=7.0)
    x["block_tables"][x["block_tables"] == -1] = -(2**31)
    found = paged_attention(**x, invariant=invariant, impl=impl)
    if impl == "auto" and DEVICE.type == "cpu":  # goes another way around NaN, with other roundings
        verdict = judge("out", found, low, oracle, terms=int(x["seq_lens"].max()))
        assert verdict.ok, verdict
    else:
        assert torch.equal(found, poisoned)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sinks", [False, True])
def test_padding_tokens_give_zeros(impl: str, sinks: bool) -> None:
    """And the logarithm of an empty sum, or of the sink alone."""
    x = _inputs(dataclasses.replace(DECODE, options={**DECODE.options, "sinks": sinks}))
    real = sum(DECODE.options["queries"])
    assert len(x["q"]) > real
    out, lse = paged_attention(**x, return_lse=True, impl=impl)
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))
    assert (out[:real] != 0).all()
    empty = x["sinks"] if sinks else torch.full_like(lse[0], float("-inf"))
    assert torch.equal(lse[real:], empty.expand_as(lse[real:]))


@pytest.mark.parametrize("impl", IMPLS)
def test_sequences_without_queries_are_skipped(impl: str) -> None:
    """Idle sequences before, between and behind change nothing; their lengths and tables are not read."""
    x = _inputs(MIXED)
    idle = torch.full_like(x["block_tables"][:1], -1)
    starts, lens, tables = x["query_start_loc"], x["seq_lens"], x["block_tables"]
    busy = {
        **x,
        "query_start_loc": torch.cat([starts[:1], starts[:1], starts[:3], starts[2:], starts[-1:]]),
        "seq_lens": torch.cat(
            [lens.new_tensor([0, 99]), lens[:2], lens.new_tensor([5]), lens[2:], lens.new_tensor([0])]
        ),
        "block_tables": torch.cat([idle, idle, tables[:2], idle, tables[2:], idle]),
    }
    assert torch.equal(paged_attention(**busy, impl=impl), paged_attention(**x, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_and_no_sequences(impl: str) -> None:
    x = _inputs(DECODE)
    nothing = {**x, "q": x["q"][:0], "query_start_loc": torch.zeros_like(x["query_start_loc"])}
    assert paged_attention(**nothing, impl=impl).shape == (0, *x["q"].shape[1:])
    nobody = {
        **x,
        "block_tables": x["block_tables"][:0],
        "seq_lens": x["seq_lens"][:0],
        "query_start_loc": x["query_start_loc"][:1],
    }
    assert torch.equal(paged_attention(**nobody, impl=impl), torch.zeros_like(x["q"]))


@pytest.mark.parametrize("impl", IMPLS)
def test_scale(impl: str) -> None:
    x = _inputs(DECODE)
    h = x["q"].shape[-1]
    doubled = paged_attention(**{**x, "q": 2 * x["q"]}, scale=0.5 * h**-0.5, impl=impl)
    assert torch.equal(doubled, paged_attention(**x, impl=impl))  # powers of two: exact


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs(impl: str) -> None:
    """q sliced out of a fused projection, a cache stored slots before heads, tables cut from wider ones."""
    x = _inputs(DECODE)
    expected = paged_attention(**x, impl=impl)
    fused = torch.cat([x["q"], x["q"]], dim=-1)
    strided = {
        **x,
        "q": fused[..., : x["q"].shape[-1]],
        "kv_cache": x["kv_cache"].transpose(1, 2).contiguous().transpose(1, 2),
        "block_tables": torch.stack([x["block_tables"]] * 2, dim=-1)[..., 0],
        "seq_lens": torch.stack([x["seq_lens"]] * 2, dim=-1)[..., 0],
        "query_start_loc": torch.stack([x["query_start_loc"]] * 2, dim=-1)[..., 0],
    }
    assert all(x[name].stride() != strided[name].stride() for name in x)
    found = paged_attention(**strided, impl=impl)
    if impl == "triton":
        assert torch.equal(found, expected)
    else:  # a BLAS may sum in another order over other strides
        oracle = paged_attention(**registry.to_double(x), impl="reference")
        assert judge("out", found, expected, oracle, terms=SPEC.terms(DECODE)).ok


@pytest.mark.parametrize("impl", ["auto", pytest.param("triton", marks=pytest.mark.interpret)])
def test_parts_merge_into_the_whole(impl: str) -> None:
    """The first keys of each sequence and the others, the sink counted with these: two calls and a merge."""
    sizes = {"N": 4, "K": 2, "H": 32, "Hv": 32, "block_size": 4}
    options = {"context": (16, 29, 8), "queries": (1, 3, 9), "sinks": True, "lse": True}
    case = Case("merge", torch.float32, sizes, options)
    x = _inputs(case)
    oracle, low = SPEC.run(registry.to_double(x), case, "reference"), SPEC.run(x, case, "reference")
    first = 8  # keys of the first part, whole blocks
    sinks, queries = x.pop("sinks"), x["query_start_loc"].diff()
    others = {
        **x,
        "block_tables": x["block_tables"][:, first // 4 :],
        "seq_lens": x["seq_lens"] - first,
        "sinks": sinks,
    }
    # A tree that sees none of its own tokens sees the context alone.
    tree = torch.zeros(len(x["q"]), max(options["queries"]), dtype=torch.bool, device=DEVICE)
    context = {**x, "seq_lens": queries + first, "tree_mask": tree}
    parts = [paged_attention(**part, return_lse=True, impl=impl) for part in (context, others)]
    real = sum(options["queries"])
    for name, merged in zip(("out", "lse"), merge_attention(*zip(*parts))):
        verdict = SPEC.judge(case, name, merged[:real], low[name][:real], oracle[name][:real])
        assert verdict.ok, verdict


@pytest.mark.interpret
def test_offsets_past_two_to_the_31(tmp_path: Path) -> None:
    """Blocks 2**30 elements apart, in a sparse file that is never filled."""
    if DEVICE.type != "cpu":
        pytest.skip("the sparse file stands for memory that a GPU would have to hold")
    x = _inputs(dataclasses.replace(DECODE, dtype=torch.float16))
    x["block_tables"] = torch.tensor([[3], [0], [2]], dtype=torch.int32)
    x["seq_lens"] = torch.tensor([4, 2, 3], dtype=torch.int32)
    _, kv_heads, size, width = x["kv_cache"].shape
    near = torch.randn(4, kv_heads, size, width, generator=torch.Generator().manual_seed(0)).half()
    apart = 2**30
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=3 * apart + near[0].numel(), dtype=torch.float16)
    far = pool.as_strided(near.shape, (apart, *near.stride()[1:]))
    far.copy_(near)
    expected = paged_attention(**{**x, "kv_cache": near}, impl="triton")
    assert torch.equal(paged_attention(**{**x, "kv_cache": far}, impl="triton"), expected)


# --------------------------------------------------------------------------------------------------------- the torch op

EVERYTHING = Case(
    "everything",
    torch.float32,
    {"N": 6, "K": 2, "H": 32, "Hv": 48, "block_size": 4},
    {
        **{"context": (5, 0, 16), "queries": (1, 4, 2), "window": 9, "softcap": 2.0, "layout": "pair"},
        **{"sinks": True, "alibi": True, "prefix": True, "cache": torch.int8, "scales": "token", "host": "bounds"},
    },
)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", [DECODE, EVERYTHING], ids=lambda case: case.name)
def test_opcheck(case: Case, impl: str) -> None:
    """The registered op with the arguments that the public function gives it."""
    seen: list[tuple[Any, ...]] = []
    call = cases.arguments(_inputs(case), case)
    with _recorded(seen):
        expected = paged_attention(**call, impl=impl)
        paged_attention(**call, out=torch.empty_like(expected), impl=impl)
    assert len(seen) == 2
    torch.library.opcheck(torch.ops.shardfuse.paged_attention.default, seen[0])
    torch.library.opcheck(torch.ops.shardfuse.paged_attention_into_.default, seen[1])


class _recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the arguments of each call of the op."""

    def __init__(self, seen: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.shardfuse.paged_attention.default, torch.ops.shardfuse.paged_attention_into_.default):
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_without_graph_breaks(impl: str) -> None:
    """Write into a block, then attend, in one graph, at two sizes: the read may not move before the write."""

    def step(x: dict[str, torch.Tensor]) -> torch.Tensor:
        x["kv_cache"].index_fill_(0, x["block_tables"][0, :1].long(), 0.5)
        out, lse = paged_attention(**x, window=7, softcap=3.0, return_lse=True, impl=impl)
        given = torch.zeros_like(out)
        paged_attention(**x, window=9, out=given, impl=impl)
        return 2 * out + given + lse[..., None].nan_to_num(neginf=0.0)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for case in (DECODE, MIXED):
        assert torch.equal(compiled(_inputs(case)), step(_inputs(case)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", [DECODE, EVERYTHING], ids=lambda case: case.name)
def test_a_result_may_be_written_where_the_caller_says(case: Case, impl: str) -> None:
    call = cases.arguments(_inputs(case), case)
    expected, expected_lse = paged_attention(**call, return_lse=True, impl=impl)
    room = expected.new_full((expected.shape[0] + 2, *expected.shape[1:]), 7.0)
    out, lse = paged_attention(**call, out=room[1:-1], return_lse=True, impl=impl)
    assert out.data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1], expected)
    assert torch.equal(lse, expected_lse)
    assert (room[:: len(room) - 1] == 7.0).all()
    assert paged_attention(**call, out=room[1:-1], impl=impl).data_ptr() == room[1:].data_ptr()


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (lambda right: right[:-1], r"out has shape .*: expected .*, that of the result"),
        (lambda right: right.half(), "out"),
        (lambda right: right.transpose(0, 1).contiguous().transpose(0, 1), "out has strides .*expected a contiguous"),
    ],
)
def test_where_a_result_does_not_fit(out: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    inputs = _inputs(DECODE)
    with pytest.raises(ValueError, match=says):
        paged_attention(**inputs, out=out(torch.empty_like(inputs["q"])))


def test_fp64_runs_the_reference_and_the_kernel_refuses_it() -> None:
    inputs = registry.to_double(_inputs(DECODE))
    assert paged_attention(**inputs).dtype == torch.float64
    with pytest.raises(RuntimeError, match="fp64"):
        paged_attention(**inputs, impl="triton")


# -------------------------------------------------------------------------------------------------------- refused input

Change = Callable[[dict[str, Any]], dict[str, Any]]

# Message -> what is wrong with a batch of three sequences of 6, 1 and 17 tokens in blocks of 4, 2 heads of 32 each.
BAD_BATCHES: dict[str, Change] = {
    r"q has shape \(2, 32\): expected \[tokens, heads, head size\]": lambda x: {"q": x["q"][0]},
    r"kv_cache \(keys\) has shape .*: expected \[blocks": lambda x: {"kv_cache": x["kv_cache"][0]},
    "values of size 0, and q has head size 32": lambda x: {"kv_cache": x["kv_cache"][..., :32]},
    "keys of size 31": lambda x: {"kv_cache": (x["kv_cache"][..., 1:32], x["kv_cache"][..., 32:])},
    "the same blocks, KV heads": lambda x: {"kv_cache": (x["kv_cache"][..., :32], x["kv_cache"][1:, ..., 32:])},
    "block size 0": lambda x: {"kv_cache": x["kv_cache"][:, :, :0]},
    "q is torch.float32 and kv_cache torch.float64": lambda x: {"kv_cache": x["kv_cache"].double()},
    "q is torch.float16 and kv_cache torch.float32: .* float16, bfloat16, float8": lambda x: {"q": x["q"].half()},
    "q is torch.int32 .* expected q in one of float16, ": lambda x: {"q": x["q"].nan_to_num().int()},
    r"float32 \(keys\) and torch.float16 \(values\)": lambda x: {
        "kv_cache": (x["kv_cache"][..., :32], x["kv_cache"][..., 32:].half())
    },
    "expected a multiple of the KV heads": lambda x: {"q": torch.cat([x["q"], x["q"][:, :1]], 1)},
    "kv_cache is on meta": lambda x: {"kv_cache": x["kv_cache"].to("meta")},
    "seq_lens is torch.int64: .*to": lambda x: {"seq_lens": x["seq_lens"].long()},
    r"seq_lens has shape \(3, 1\)": lambda x: {"seq_lens": x["seq_lens"][:, None]},
    "seq_lens is on meta": lambda x: {"seq_lens": x["seq_lens"].to("meta")},
    "block_tables is torch.int64": lambda x: {"block_tables": x["block_tables"].long()},
    r"block_tables has shape \(2, ": lambda x: {"block_tables": x["block_tables"][:2]},
    r"query_start_loc has shape \(3,\): expected \[4\]": lambda x: {"query_start_loc": x["query_start_loc"][1:]},
    "scale is 0.0": lambda x: {"scale": 0.0},
    "scale is nan": lambda x: {"scale": float("nan")},
    "window is 0": lambda x: {"window": 0},
    "softcap is -1.0": lambda x: {"softcap": -1.0},
    r"sinks has shape \(3,\): expected \[2\]": lambda x: {"sinks": torch.zeros(3)},
    "sinks is torch.int64": lambda x: {"sinks": torch.zeros(2, dtype=torch.int64)},
    r"alibi_slopes has shape \(1, 2\)": lambda x: {"alibi_slopes": torch.zeros(1, 2)},
    "alibi_slopes is torch.float16": lambda x: {"alibi_slopes": torch.zeros(2).half()},
    r"prefix_lens has shape \(2,\)": lambda x: {"prefix_lens": torch.zeros(2, dtype=torch.int32)},
    "prefix_lens is torch.int64": lambda x: {"prefix_lens": torch.zeros(3, dtype=torch.int64)},
    r"tree_mask has shape \(4, 1\): expected \[5,": lambda x: {"tree_mask": torch.ones(4, 1, dtype=torch.bool)},
    "tree_mask is torch.int32": lambda x: {"tree_mask": torch.ones(5, 1, dtype=torch.int32)},
    "tree_mask has 1 columns: expected at least max_query_len, 2": lambda x: {
        "tree_mask": torch.ones(5, 1, dtype=torch.bool),
        "max_query_len": 2,
    },
    r"k_scale has shape \(2,\): expected one element, or": lambda x: {**_int8(x), "k_scale": torch.ones(2)},
    "v_scale is torch.float16": lambda x: {**_int8(x), "v_scale": torch.ones(1).half()},
    "max_query_len is -1": lambda x: {"max_query_len": -1},
    "min_query_len is -1": lambda x: {"min_query_len": -1},
    r"min_query_len is 2: expected 0 or more, at most max_query_len \(1\)": lambda x: {
        "min_query_len": 2,
        "max_query_len": 1,
    },
    "max_seq_len is 25: expected at most 24": lambda x: {"max_seq_len": 25},
}

# What only a look into the tensors tells.
BAD_CONTENTS: dict[str, Change] = {
    "query_start_loc is": lambda x: {"query_start_loc": x["query_start_loc"].flip(0)},
    "end within q's 5 tokens": lambda x: {"query_start_loc": x["query_start_loc"] * 2},
    "seq_lens 0: seq_lens counts": lambda x: {"seq_lens": torch.zeros_like(x["seq_lens"])},
    "with at least 5 columns": lambda x: {"block_tables": x["block_tables"][:, :4]},
    r"block_tables\[0, 2\] names block -1": lambda x: {"seq_lens": x["seq_lens"] + 3},
    "expected 0 to 1, the blocks of kv_cache": lambda x: {"kv_cache": x["kv_cache"][:2]},
    "more than max_seq_len, 16": lambda x: {"max_seq_len": 16},
    "more than max_query_len, 0": lambda x: {"max_query_len": 0},
    "has 1 queries: fewer than min_query_len, 2": lambda x: {"min_query_len": 2},
    r"prefix_lens\[1\] is -1": lambda x: {"prefix_lens": torch.tensor([0, -1, 0], dtype=torch.int32)},
    "2 queries: expected tree_mask with at least as many columns, not 1": lambda x: {
        "query_start_loc": torch.tensor([0, 2, 3, 4], dtype=torch.int32),
        "tree_mask": torch.ones(5, 1, dtype=torch.bool),
    },
}


def _int8(x: dict[str, Any]) -> dict[str, Any]:
    return {"kv_cache": x["kv_cache"].nan_to_num().to(torch.int8), "k_scale": torch.ones(1), "v_scale": torch.ones(1)}


def _on_cpu() -> dict[str, Any]:
    return SPEC.make_inputs(DECODE, torch.device("cpu"), 0)


@pytest.mark.parametrize("message", [*BAD_BATCHES, *BAD_CONTENTS])
def test_refuses(message: str) -> None:
    x = _on_cpu()
    paged_attention(**x)
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**x, **{**BAD_BATCHES, **BAD_CONTENTS}[message](x)})


def test_contents_are_not_looked_at_where_that_is_switched_off() -> None:
    x = _on_cpu()
    out = paged_attention(**x)
    x["seq_lens"][0] += 100
    with pytest.raises(ValueError, match="sequence 0 has 106 tokens"):
        paged_attention(**x)
    x["seq_lens"][0] -= 100
    x["block_tables"][1, 0] = x["block_tables"][2, 0]  # which no check can know to be wrong
    assert torch.equal(paged_attention(**x, check=True)[0], out[0])
    unchecked = {**x, "query_start_loc": torch.tensor([0, 1, 2, 2], dtype=torch.int32), "max_seq_len": 6}
    assert torch.equal(paged_attention(**unchecked, check=False)[0], out[0])


def test_refuses_to_lose_a_gradient() -> None:
    x = _inputs(DECODE)
    sinks = torch.zeros(x["q"].shape[1], device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient: call it under"):
        paged_attention(**x, sinks=sinks)
    scale = torch.ones(1, device=DEVICE, requires_grad=True)
    fp8 = {**x, "kv_cache": x["kv_cache"].to(torch.float8_e4m3fn)}
    with pytest.raises(RuntimeError, match="no gradient: call it under"):
        paged_attention(**fp8, k_scale=scale, v_scale=scale)
    x["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient: call it under"):
        paged_attention(**x)
    with torch.no_grad():
        paged_attention(**x, sinks=sinks)


# -------------------------------------------------------------------------------------------------------------- builds


@pytest.mark.parametrize("target", registry.TARGETS)
def test_builds_do_not_widen(target: str) -> None:
    builds = cases.SPEC.builds(target)
    assert builds
    assert not any(build.args.get("UPCAST") for build in builds)
