"""paged_attention and write_kv_: the reference against plain attention, the kernels against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfuse.kernels import dispatch, registry
from shardfuse.kernels.accuracy import judge
from shardfuse.kernels.paged_attention import cases, paged_attention, write_kv_
from shardfuse.kernels.registry import Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = registry.op("paged_attention")
ATTENTION = ("q", "kv_cache", "block_tables", "seq_lens", "query_start_loc")
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]


def _grid() -> list[Case]:
    """Every kind of step, group size, head size, page size and dtype, each beside several of the others."""
    steps = {
        "decode": ((7, 0, 33), (1, 1, 1)),
        "prefill": ((0, 0), (19, 34)),
        "mixed": ((5, 0, 16, 2), (1, 20, 1, 6)),
    }
    groups, head_sizes, pages = (1, 2, 3, 4, 8), (32, 64, 80, 128), (1, 4, 16, 32)
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    grid = []
    for i in range(20):
        kind, (context, queries) = list(steps.items())[i % 3]
        g, h, page, dtype = groups[i % 5], head_sizes[i % 4], pages[(i // 2) % 4], dtypes[(i // 3) % 3]
        kv_heads = 1 + i % 2
        name = f"{kind}-g{g}-h{h}-p{page}-{str(dtype).removeprefix('torch.')}"
        sizes = {"N": kv_heads * g, "K": kv_heads, "H": h, "block_size": page}
        grid.append(Case(name, dtype, sizes, {"context": context, "queries": queries}))
    return grid


GRID = _grid()
CASES = SPEC.tagged("test")


def _inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    return SPEC.make_inputs(case, DEVICE, seed)


def _attention_inputs(case: Case) -> dict[str, torch.Tensor]:
    """A batch whose keys and values are written already: what paged_attention takes."""
    inputs = _inputs(case)
    write_kv_(inputs["kv_cache"], inputs["k"], inputs["v"], inputs["slot_mapping"], impl="reference")
    return {name: inputs[name] for name in ATTENTION}


def _naive(inputs: dict[str, Any], case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Attention as a textbook writes it, one query and one head at a time."""
    q, k, v, cache = (inputs[name].to("cpu", dtype) for name in ("q", "k", "v", "kv_cache"))
    tables, slots = inputs["block_tables"].tolist(), inputs["slot_mapping"].tolist()
    size, h, group = case.sizes["block_size"], case.sizes["H"], case.sizes["N"] // case.sizes["K"]
    out = torch.zeros(q.shape, dtype=dtype)
    start = 0
    for s, (context, queries) in enumerate(zip(case.options["context"], case.options["queries"])):
        if queries == 0:
            continue
        where = [tables[s][i // size] * size + i % size for i in range(context + queries)]
        assert slots[start : start + queries] == where[context:]
        old = [cache[slot // size, :, slot % size] for slot in where[:context]]
        new = range(start, start + queries)
        keys = torch.stack([entry[:, :h] for entry in old] + [k[t] for t in new])  # [L, K, H]
        values = torch.stack([entry[:, h:] for entry in old] + [v[t] for t in new])
        for i, t in enumerate(new):
            seen = context + i + 1
            for head in range(q.shape[1]):
                scores = keys[:seen, head // group] @ q[t, head] * h**-0.5
                out[t, head] = torch.softmax(scores, 0) @ values[:seen, head // group]
        start += queries
    return out


# ---------------------------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize("case", [*CASES, *GRID], ids=lambda case: case.name)
def test_reference_equals_naive_attention(case: Case) -> None:
    inputs = _inputs(case)
    oracle, low = _naive(inputs, case, torch.float64), _naive(inputs, case, case.dtype)
    verdict = judge("out", SPEC.run(inputs, case, "reference")["out"], low, oracle)
    assert verdict.ok, verdict


@pytest.mark.interpret
@pytest.mark.parametrize("case", [*CASES, *GRID], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    oracle = SPEC.run(registry.to_double(_inputs(case)), case, "reference")["out"]
    low = SPEC.run(_inputs(case), case, "reference")["out"]
    inputs = _inputs(case)
    verdict = judge("out", SPEC.run(inputs, case, "triton")["out"], low, oracle)
    assert verdict.ok, verdict


@pytest.mark.interpret
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_every_tile_that_ships(block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardfuse.kernels.paged_attention import launch

    case = next(case for case in CASES if case.name == "mixed-g3-h32-p4-fp32")
    oracle = SPEC.run(registry.to_double(_inputs(case)), case, "reference")["out"]
    low = SPEC.run(_inputs(case), case, "reference")["out"]
    config = launch.AttentionConfig(block_m, 64, 4, 1)
    monkeypatch.setattr(launch, "pick_config", lambda *_, **__: config)
    verdict = judge("out", SPEC.run(_inputs(case), case, "triton")["out"], low, oracle)
    assert verdict.ok, verdict


@pytest.mark.parametrize("impl", IMPLS)
def test_what_a_sequence_does_not_own_never_matters(impl: str) -> None:
    """Free blocks, the slots behind a sequence's end and the tail of its table may hold anything."""
    case = next(case for case in CASES if case.name == "mixed-g3-h32-p4-fp32")
    x = _attention_inputs(case)
    assert x["kv_cache"].isnan().any()
    assert (x["block_tables"] == -1).any()
    nan = paged_attention(**x, impl=impl)
    assert nan.isfinite().all()

    x["kv_cache"].nan_to_num_(nan=7.0)
    x["block_tables"][x["block_tables"] == -1] = 2**31 - 1
    assert torch.equal(paged_attention(**x, impl=impl), nan)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_tokens_give_zeros(impl: str) -> None:
    case = CASES[0]
    x = _attention_inputs(case)
    real = sum(case.options["queries"])
    assert len(x["q"]) > real
    out = paged_attention(**x, impl=impl)
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))
    assert (out[:real] != 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_sequences_without_queries_are_skipped(impl: str) -> None:
    """Idle sequences before, between and behind change nothing; their lengths and tables are not read."""
    case = next(case for case in CASES if case.name == "mixed-g3-h32-p4-fp32")
    x = _attention_inputs(case)
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
    x = _attention_inputs(CASES[0])
    nothing = {**x, "q": x["q"][:0], "query_start_loc": torch.zeros_like(x["query_start_loc"])}
    assert paged_attention(**nothing, impl=impl).shape == (0, *x["q"].shape[1:])
    nobody = {
        **x,
        "block_tables": x["block_tables"][:0],
        "seq_lens": x["seq_lens"][:0],
        "query_start_loc": x["query_start_loc"][:1],
    }
    assert torch.equal(paged_attention(**nobody, impl=impl), torch.zeros_like(x["q"]))
    cache = x["kv_cache"].clone()
    empty = x["q"].new_empty(0, cache.shape[1], x["q"].shape[2])
    write_kv_(cache, empty, empty, torch.empty(0, dtype=torch.int64, device=DEVICE), impl=impl)
    assert torch.equal(cache.nan_to_num(), x["kv_cache"].nan_to_num())


@pytest.mark.parametrize("impl", IMPLS)
def test_scale(impl: str) -> None:
    x = _attention_inputs(CASES[0])
    h = x["q"].shape[-1]
    doubled = paged_attention(**{**x, "q": 2 * x["q"]}, scale=0.5 * h**-0.5, impl=impl)
    assert torch.equal(doubled, paged_attention(**x, impl=impl))  # powers of two: exact


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs(impl: str) -> None:
    """q sliced out of a fused projection, a cache stored slots before heads, tables cut from wider ones."""
    x = _attention_inputs(CASES[0])
    expected = paged_attention(**x, impl=impl)
    fused = torch.cat([x["q"], x["q"]], dim=-1)
    strided = {
        **x,
        "q": fused[..., : x["q"].shape[-1]],
        "kv_cache": x["kv_cache"].transpose(1, 2).contiguous().transpose(1, 2),
        "block_tables": torch.stack([x["block_tables"]] * 2, dim=-1)[..., 0],
        "seq_lens": torch.stack([x["seq_lens"]] * 2, dim=-1)[..., 0],
    }
    assert all(strided[name].stride() != x[name].stride() for name in ("q", "kv_cache", "block_tables", "seq_lens"))
    assert torch.equal(paged_attention(**strided, impl=impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["dense", "fused", "reversed"])
def test_write(impl: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks, kv_heads, size, h, tokens = 5, 3, 4, 20, 9
    if layout == "fused":
        k, v = torch.randn(tokens, kv_heads, 2 * h, generator=generator).to(DEVICE).chunk(2, dim=-1)
    elif layout == "reversed":
        k, v = torch.randn(2, h, kv_heads, tokens, generator=generator).to(DEVICE).permute(0, 3, 2, 1)
    else:
        k, v = torch.randn(2, tokens, kv_heads, h, generator=generator).to(DEVICE)
    slots = torch.randperm(blocks * size, generator=generator)[:tokens]
    slots[[2, 8]] = torch.tensor([-1, -5])
    cache = torch.full((blocks, kv_heads, size, 2 * h), 0.25, device=DEVICE)
    expected = cache.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for head in range(kv_heads):
                expected[slot // size, head, slot % size, :h] = k[t, head]
                expected[slot // size, head, slot % size, h:] = v[t, head]
    write_kv_(cache, k, v, slots.to(DEVICE), impl=impl)
    assert torch.equal(cache, expected)


@pytest.mark.interpret
def test_offsets_past_two_to_the_31(tmp_path: Any) -> None:
    """Blocks 2**30 elements apart, in a sparse file that is never filled."""
    if DEVICE.type != "cpu":
        pytest.skip("the sparse file stands for memory that a GPU would have to hold")
    case = dataclasses.replace(CASES[0], dtype=torch.float16)
    x = _attention_inputs(case)
    x["block_tables"] = torch.tensor([[3], [0], [2]], dtype=torch.int32)
    x["seq_lens"] = torch.tensor([4, 2, 3], dtype=torch.int32)
    _, kv_heads, size, width = x["kv_cache"].shape
    near = torch.randn(4, kv_heads, size, width, generator=torch.Generator().manual_seed(0)).half()
    apart = 2**30
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=3 * apart + near[0].numel(), dtype=torch.float16)
    far = pool.as_strided(near.shape, (apart, *near.stride()[1:]))
    k, v = near.permute(0, 2, 1, 3).reshape(4 * size, kv_heads, width).chunk(2, dim=-1)
    write_kv_(far, k, v, torch.arange(4 * size), impl="triton")
    assert torch.equal(far, near)
    expected = paged_attention(**{**x, "kv_cache": near}, impl="triton")
    assert torch.equal(paged_attention(**{**x, "kv_cache": far}, impl="triton"), expected)


# --------------------------------------------------------------------------------------------------------- the torch op


@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck(impl: str) -> None:
    x = _attention_inputs(CASES[0])
    scale = x["q"].shape[-1] ** -0.5
    torch.library.opcheck(torch.ops.shardfuse.paged_attention.default, (*x.values(), scale, impl))
    k = x["q"].new_ones(4, x["kv_cache"].shape[1], x["q"].shape[2])
    slots = torch.tensor([3, -1, 0, 9], device=DEVICE)
    cache = x["kv_cache"].nan_to_num()
    torch.library.opcheck(torch.ops.shardfuse.write_kv_.default, (cache, k, k, slots, impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_without_graph_breaks(impl: str) -> None:
    """Write, then attend, in one graph, at two sizes: the write must not be lost or moved behind the read."""

    def step(x: dict[str, torch.Tensor]) -> torch.Tensor:
        write_kv_(x["kv_cache"], x["k"], x["v"], x["slot_mapping"], impl=impl)
        attention = {name: x[name] for name in ATTENTION}
        return 2 * paged_attention(**attention, impl=impl)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for name in ("decode-g1-h32-p4-fp32", "mixed-g3-h32-p4-fp32"):
        case = next(case for case in CASES if case.name == name)
        ours, theirs = _inputs(case), _inputs(case)
        assert torch.equal(compiled(ours), step(theirs))
        assert torch.equal(ours["kv_cache"].nan_to_num(), theirs["kv_cache"].nan_to_num())


@pytest.mark.interpret
def test_dispatch_counts_what_ran() -> None:
    case = CASES[0]
    before = dispatch.counts.copy()
    for impl in ("reference", "triton", "triton"):
        SPEC.run(_inputs(case), case, impl)
    ran = dispatch.counts - before
    assert ran == {
        (op, impl): n for op in ("paged_attention", "write_kv_") for impl, n in (("reference", 1), ("triton", 2))
    }


def test_fp64_runs_the_reference_and_the_kernel_refuses_it() -> None:
    case = CASES[0]
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in _attention_inputs(case).items()}
    assert paged_attention(**inputs).dtype == torch.float64
    with pytest.raises(RuntimeError, match="fp64"):
        paged_attention(**inputs, impl="triton")


# -------------------------------------------------------------------------------------------------------- refused input

# Message -> what is wrong with a batch of three sequences of 6, 1 and 17 tokens in blocks of 4.
BAD_BATCHES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "q has shape": lambda x: {"q": x["q"][0]},
    "kv_cache has shape": lambda x: {"kv_cache": x["kv_cache"][..., 1:]},
    "expected a power of two": lambda x: {"kv_cache": x["kv_cache"][:, :, :3]},
    "expected the same floating-point dtype": lambda x: {"kv_cache": x["kv_cache"].half()},
    "expected a multiple of the KV heads": lambda x: {"q": torch.cat([x["q"], x["q"][:, :1]], 1)},
    "seq_lens is torch.int64": lambda x: {"seq_lens": x["seq_lens"].long()},
    "block_tables is torch.int64": lambda x: {"block_tables": x["block_tables"].long()},
    r"block_tables has shape \(2, ": lambda x: {"block_tables": x["block_tables"][:2]},
    "query_start_loc has shape": lambda x: {"query_start_loc": x["query_start_loc"][1:]},
    # Contents, which are read on a CPU only.
    "query_start_loc is": lambda x: {"query_start_loc": x["query_start_loc"].flip(0)},
    "seq_lens 0: seq_lens counts": lambda x: {"seq_lens": torch.zeros_like(x["seq_lens"])},
    "with at least 5 columns": lambda x: {"block_tables": x["block_tables"][:, :4]},
    "names blocks -1 to": lambda x: {"seq_lens": x["seq_lens"] + 3},
    "names blocks .* the blocks of kv_cache": lambda x: {"kv_cache": x["kv_cache"][:2]},
}


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_attention_refuses(message: str) -> None:
    x = {name: tensor.cpu() for name, tensor in _attention_inputs(CASES[0]).items()}
    paged_attention(**x)
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**x, **BAD_BATCHES[message](x)})


def test_write_refuses() -> None:
    cache, k = torch.zeros(2, 3, 4, 16), torch.zeros(5, 3, 8)
    slots = torch.arange(5)
    for message, arguments in {
        "v is": (cache, k, k[:4], slots),
        "k has 2 heads": (cache, k[:, :2], k[:, :2], slots),
        "k has shape": (cache, k[0], k[0], slots),
        "slot_mapping is torch.int32": (cache, k, k, slots.int()),
        r"slot_mapping has shape \(4,\)": (cache, k, k, slots[:4]),
        "names slot 8: kv_cache has 8 slots": (cache, k, k, slots + 4),
    }.items():
        with pytest.raises(ValueError, match=message):
            write_kv_(*arguments)


def test_refuses_to_lose_a_gradient() -> None:
    x = _attention_inputs(CASES[0])
    x["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        paged_attention(**x)
    with torch.no_grad():
        paged_attention(**x)
    k = x["q"][:, : x["kv_cache"].shape[1]]
    slots = torch.full((len(k),), -1, device=DEVICE)
    with pytest.raises(RuntimeError, match="no gradient"):
        write_kv_(x["kv_cache"], k, k, slots)


# -------------------------------------------------------------------------------------------------------------- builds


@pytest.mark.parametrize("target", registry.TARGETS)
def test_builds_are_named_apart_and_reach_every_tile(target: str) -> None:
    builds = cases.builds(target)
    names = [build.config for build in builds]
    assert len(names) == len(set(names)) <= 14
    assert {build.args["BLOCK_M"] for build in builds if "BLOCK_M" in build.args} == {16, 32, 64, 128}
    assert not any(build.args.get("UPCAST") for build in builds)
