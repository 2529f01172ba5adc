"""The shapes that tests, ahead-of-time builds and benchmarks share for the ops that fill and move pages.

A write is T tokens of K KV heads (and N query heads) with heads of H and Hv elements, into pages of B slots; ``cache``
is the dtype of the pages, None for that of k, and ``scales`` says how a quantised one is scaled: "given" (one number),
"written" (by token and head), None. Up to 256 tokens are decodes, each in a page of its own; more are a prefill that
fills whole pages, which lie in any order. Slots that nobody writes to hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...kv_cache import reference
from ...kv_cache.blocks import copy_blocks_
from ...kv_cache.op import norm_rope_write_kv_, write_kv_
from ...kv_cache.reference import Scale
from ...runtime import device
from ...runtime.dtypes import BF16, E4M3, FP16, FP32, INT8, NAMES
from ..registry import Build, Case, OpSpec

_DECODES = 256  # the most tokens that are taken to be of as many sequences
_SPARE_BLOCKS = 3


# ---------------------------------------------------------------------------------------------------- writes


def _case(tokens: int, heads: tuple[int, ...], page: int, dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    """``heads`` is (N, K, H), or (N, K, H, Hv) where the two differ; N = 0 where q has no part in it."""
    N, K, H, V = (*heads, heads[2])[:4]
    rotary, model = options.pop("rotary", H if N else 0), options.pop("model", "")
    fused = {"interleaved": False, "norm": True, "offset": 0.0} if N else {}
    options = {"cache": None, "scales": None, "layout": "dense"} | fused | options
    name = f"t{tokens}" + (f"-n{N}" if N else "") + f"-k{K}-h{H}" + (f"-v{V}" if V != H else "") + f"-p{page}"
    name += f"-{NAMES[dtype]}" + ("" if options["cache"] is None else f"-{NAMES[options['cache']]}")
    name += "" if options["scales"] is None else f"-{options['scales']}"
    name += "" if options["layout"] == "dense" else f"-{options['layout']}"
    if N:
        name += "" if rotary == H else f"-r{rotary}"
        name += ("-interleaved" if options["interleaved"] else "") + ("" if options["norm"] else "-nonorm")
    sizes = {"T": tokens, "N": N, "K": K, "H": H, "V": V, "B": page, "P": rotary}
    return Case(f"{model}-{name}".lstrip("-"), dtype, sizes, options, frozenset(tags))


_FP8 = {"cache": E4M3, "scales": "given"}
_FP8_ROWS = {"cache": E4M3, "scales": "written"}
_INT8_ROWS = {"cache": INT8, "scales": "written"}
_SWEEP = (1, 8, 64, 256, 1024, 4096, 8192)  # tokens of a benchmark, decode to prefill

# Small enough to interpret; a tile is 8 rows there. Odd numbers of heads, head sizes and page sizes that are no power
# of two, one token, none.
_WRITE_TEST = (
    _case(7, (0, 2, 16), 4, FP32, "test"),
    _case(9, (0, 3, 20, 12), 3, BF16, "test", layout="pair"),
    _case(5, (0, 1, 80), 16, FP16, "test", layout="slots_first"),
    _case(6, (0, 2, 16), 4, FP32, "test", cache=BF16),
    _case(6, (0, 9, 8, 24), 5, BF16, "test", **_FP8),
    _case(6, (0, 2, 16), 4, FP16, "test", cache=E4M3, layout="pair"),
    _case(9, (0, 3, 12), 1, FP32, "test", **_FP8_ROWS),
    _case(6, (0, 2, 16, 8), 4, BF16, "test", cache=INT8, scales="given", layout="slots_first"),
    _case(6, (0, 2, 16), 4, FP16, "test", layout="pair", **_INT8_ROWS),
    _case(1, (0, 1, 2, 1), 1, FP32, "test"),
    _case(0, (0, 2, 8), 4, BF16, "test"),
)
_KV8B, _LLAMA8B = (0, 8, 128), (32, 8, 128)
_WRITE_BENCH = tuple(
    _case(T, _KV8B, 16, BF16, "bench", *(["short"] if T in (64, 8192) else []), model="llama8b", **how)
    for how in ({}, _FP8, _FP8_ROWS, _INT8_ROWS)
    for T in _SWEEP
)
_WRITE_BUILDS = (
    _case(64, _KV8B, 16, BF16, "codegen"),
    _case(64, _KV8B, 16, BF16, "codegen", **_FP8),
    _case(64, _KV8B, 16, BF16, "codegen", **_FP8_ROWS),
    _case(64, _KV8B, 16, BF16, "codegen", **_INT8_ROWS),
    _case(64, _KV8B, 16, FP32, "codegen", cache=FP16),
    _case(64, (0, 4, 80, 96), 16, FP16, "codegen", layout="pair"),
    _case(64, (0, 1, 192, 128), 1, BF16, "codegen", layout="slots_first"),
)
_WRITE_CPU = (
    *(_case(T, _KV8B, 256, FP32, "bench-cpu", model="llama8b") for T in (1, 32, 512)),
    _case(32, _KV8B, 256, FP32, "bench-cpu", model="llama8b", **_FP8_ROWS),
)

_FUSED_TEST = (
    _case(7, (4, 2, 16), 4, FP32, "test"),
    _case(5, (3, 1, 20, 12), 3, BF16, "test", layout="pair"),
    _case(6, (4, 4, 16), 16, FP16, "test", rotary=8, layout="slots_first"),
    _case(6, (9, 2, 12), 4, FP32, "test", rotary=4, interleaved=True, offset=1.0),
    _case(6, (2, 1, 16), 4, BF16, "test", interleaved=True, norm=False),
    _case(6, (5, 1, 24), 4, FP16, "test", rotary=0, offset=1.0),
    _case(6, (2, 2, 8), 4, BF16, "test", rotary=0, norm=False),
    _case(6, (4, 2, 16), 5, FP32, "test", **_FP8),
    _case(6, (4, 2, 24), 4, FP32, "test", rotary=8, **_FP8_ROWS),
    _case(6, (2, 1, 16, 8), 4, BF16, "test", interleaved=True, layout="pair", **_INT8_ROWS),
    _case(1, (1, 1, 2), 1, FP32, "test"),
    _case(0, (2, 1, 8), 4, BF16, "test"),
)
_FUSED_BENCH = tuple(
    _case(T, _LLAMA8B, 16, BF16, "bench", *(["short"] if T in (64, 8192) else []), model=model, norm=norm, **how)
    for model, norm in (("llama8b", False), ("qwen3-8b", True))
    for how in ({}, _FP8, _FP8_ROWS)
    for T in _SWEEP
)
_FUSED_BUILDS = (
    _case(64, _LLAMA8B, 16, BF16, "codegen", norm=False),
    _case(64, _LLAMA8B, 16, BF16, "codegen"),
    _case(64, _LLAMA8B, 16, BF16, "codegen", **_FP8),
    _case(64, _LLAMA8B, 16, BF16, "codegen", **_FP8_ROWS),
    _case(64, _LLAMA8B, 16, FP16, "codegen", **_INT8_ROWS),
    _case(64, (8, 4, 256), 16, BF16, "codegen", offset=1.0, model="gemma3"),
    _case(64, (32, 2, 128), 16, BF16, "codegen", rotary=64, interleaved=True, norm=False, model="glm4"),
    _case(64, (16, 4, 80, 64), 1, FP32, "codegen", layout="pair"),
)
_FUSED_CPU = tuple(_case(T, _LLAMA8B, 256, FP32, "bench-cpu", model="llama8b") for T in (1, 32, 512))


def _unique(*cases: Case) -> tuple[Case, ...]:
    return tuple({case.name: case for case in cases}.values())


def _slots(case: Case, seed: int) -> tuple[torch.Tensor, int]:
    """[T] int64, the last of several tokens being padding, and the number of blocks that there are."""
    T, B = case.sizes["T"], case.sizes["B"]
    generator = torch.Generator().manual_seed(seed)
    pages = T if T <= _DECODES else -(-T // B)
    deal = torch.randperm(pages + _SPARE_BLOCKS, generator=generator, device="cpu")[:pages]
    if T <= _DECODES:
        slots = deal * B + torch.randint(B, (T,), generator=generator, device="cpu")
    else:
        slots = (deal[:, None] * B + torch.arange(B, device="cpu")).flatten()[:T]
    if T > 1:
        slots[-1] = -1
    return slots, pages + _SPARE_BLOCKS


def _pages(case: Case, blocks: int, on: torch.device) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The cache in the case's layout, or its two parts; unset."""
    K, B, H, V = (case.sizes[letter] for letter in "KBHV")
    dtype, layout = case.options["cache"] or case.dtype, case.options["layout"]
    if layout == "pair":
        return tuple(torch.empty(blocks, K, B, width, dtype=dtype, device=on) for width in (H, V))
    if layout == "slots_first":  # each slot's heads side by side
        return torch.empty(blocks, B, K, H + V, dtype=dtype, device=on).transpose(1, 2)
    return torch.empty(blocks, K, B, H + V, dtype=dtype, device=on)


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """The arguments of ``write_kv_``, or of ``norm_rope_write_kv_`` where the case has q, by name.

    ``kv_cache`` is a tuple for a pair. Scales that are written hold NaN, or 1 and 2 where one is given.
    """
    T, N, K, H, V, P, B = (case.sizes[letter] for letter in "TNKHVPB")
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=on).to(case.dtype)

    slots, blocks = _slots(case, seed)
    kv_cache = _pages(case, blocks, on)
    for cache in kv_cache if isinstance(kv_cache, tuple) else (kv_cache,):
        cache.copy_(torch.full((), 0.0 if cache.dtype == INT8 else float("nan"), device=on))
    scales: list[torch.Tensor | None] = [None, None]
    if case.options["scales"] == "given":
        scales = [torch.tensor([size], device=on) for size in (0.05, 0.0625)]
    elif case.options["scales"] == "written":
        scales = [torch.full((blocks, K, B), float("nan"), device=on) for _ in range(2)]
    inputs: dict[str, Any] = {
        "kv_cache": kv_cache,
        "k": draw(T, K, H),
        "v": draw(T, K, V),
        "slot_mapping": slots.to(on),
        "k_scale": scales[0],
        "v_scale": scales[1],
    }
    if N:
        norm = case.options["norm"]
        angles = torch.rand(T, P // 2, generator=generator, device=on) * 1000
        inputs |= {
            "q": draw(T, N, H),
            "cos": angles.cos() if P else None,
            "sin": angles.sin() if P else None,
            "q_norm": draw(H) if norm else None,
            "k_norm": draw(H) if norm else None,
        }
    return inputs


def options(case: Case) -> dict[str, Any]:
    """The remaining arguments of ``norm_rope_write_kv_``."""
    return {"interleaved": case.options["interleaved"], "norm_offset": case.options["offset"]}


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Write; the cache as what it stands for, empty slots as 0, and the new q.

    In fp64 the cache is not quantised. What is copied must arrive exactly, so that the cache comes back in fp64, too:
    there the comparison leaves no room for one slot among thousands.
    """
    inputs = dict(inputs)
    if inputs["k"].dtype == torch.float64:
        inputs |= {"kv_cache": _doubled(inputs["kv_cache"]), "k_scale": None, "v_scale": None}
    found = {}
    if case.sizes["N"]:
        found["q"] = norm_rope_write_kv_(**inputs, **options(case), impl=impl)
    else:
        write_kv_(**inputs, impl=impl)
    cache, H = inputs["kv_cache"], case.sizes["H"]
    parts = cache if isinstance(cache, tuple) else (cache[..., :H], cache[..., H:])
    out = case.dtype if case.sizes["N"] else torch.float64
    for name, part in zip("kv", parts):
        scale = inputs[f"{name}_scale"]
        if scale is not None and scale.numel() > 1:
            scale = scale.unsqueeze(-1)
        found[f"{name}_cache"] = reference.dequantise(part, scale, torch.float64).nan_to_num().to(out)
    return found


def _doubled(cache: Any) -> Any:
    if isinstance(cache, tuple):
        return tuple(map(_doubled, cache))
    return torch.full(cache.shape, float("nan"), dtype=torch.float64, device=cache.device)


def _launched(spec: OpSpec, target: str) -> Iterator[Build]:
    from ...kv_cache import launch

    for case in spec.tagged("codegen"):
        T, N, K, H, V, P, B = (case.sizes[letter] for letter in "TNKHVPB")
        on = torch.device("meta")
        pages = _pages(case, T, on)
        k_cache, v_cache = (pages[0], pages[1]) if isinstance(pages, tuple) else (pages, None)
        k, v, q = (torch.empty(T, *heads, dtype=case.dtype, device=on) for heads in ((K, H), (K, V), (N, H)))
        slots = torch.empty(T, dtype=torch.int64, device=on)
        scale = {
            None: Scale(),
            "given": Scale(given=torch.empty(1, device=on)),
            "written": Scale(written=torch.empty(T, K, B, device=on)),
        }[case.options["scales"]]
        with device.capture(target) as launches:
            if N:
                table = torch.empty(T, P // 2, device=on) if P else None
                norm = torch.empty(H, dtype=case.dtype, device=on) if case.options["norm"] else None
                launch.norm_rope_write_kv_(
                    q, k, v, k_cache, v_cache, slots, table, table, case.options["interleaved"], norm, norm, 1e-6,
                    case.options["offset"], scale, scale,
                )  # fmt: skip
            else:
                launch.write_kv_(k_cache, v_cache, k, v, slots, scale, scale)
        (item,) = launches
        yield _build(spec.name, item, target, f"{item.config}-{case.name}")


def _build(op: str, item: device.Launch, target: str, config: str) -> Build:
    return Build(
        op=op,
        config=config,
        target=target,
        fn=item.fn,
        args=item.args,
        num_warps=item.num_warps,
        num_stages=item.num_stages,
    )


# ---------------------------------------------------------------------------------------------------- copies


def _copy(shape: tuple[int, ...], dtype: torch.dtype, pairs: int, *tags: str, **options: Any) -> Case:
    options = {"block_dim": 0, "layout": "dense"} | options
    name = "x".join(map(str, shape)) + f"-{NAMES[dtype]}-n{pairs}"
    name += f"-dim{options['block_dim']}" if options["block_dim"] else ""
    name += "" if options["layout"] == "dense" else f"-{options['layout']}"
    return Case(name, dtype, {"pairs": pairs}, {"shape": shape, **options}, frozenset(tags))


_COPY_CASES = _unique(
    _copy((6, 2, 3, 10), FP32, 4, "test"),
    _copy((2, 6, 2, 4, 8), BF16, 5, "test", block_dim=1),
    _copy((6, 2, 3, 10), FP16, 3, "test", layout="half"),
    _copy((3, 6, 2, 4, 5), E4M3, 4, "test", block_dim=1, layout="turned"),
    _copy((6, 2, 3), FP32, 3, "test"),
    _copy((6, 1, 1, 1), INT8, 2, "test"),
    _copy((6, 2, 4), FP32, 0, "test"),
    *(
        _copy((32, 1024, 8, 16, 256), dtype, n, "bench", *(["short"] if n == 64 else []), block_dim=1)
        for dtype in (BF16, E4M3)
        for n in (1, 64, 512)
    ),
    *(_copy((32, 256, 8, 16, 256), dtype, 64, "codegen", block_dim=1) for dtype in (BF16, E4M3)),
    _copy((256, 8, 16, 160), FP16, 64, "codegen", layout="half"),
    _copy((256, 8, 16), FP32, 64, "codegen"),
    _copy((4, 64, 8, 16, 256), FP32, 16, "bench-cpu", block_dim=1),
)


def _laid_out(case: Case, on: torch.device) -> torch.Tensor:
    shape, layout = list(case.options["shape"]), case.options["layout"]
    if layout == "half":  # K of K and V side by side
        return torch.empty(*shape[:-1], 2 * shape[-1], dtype=case.dtype, device=on)[..., : shape[-1]]
    if layout == "turned":  # blocks innermost but one
        return torch.empty(*shape[::-1], dtype=case.dtype, device=on).permute(*range(len(shape))[::-1])
    return torch.empty(*shape, dtype=case.dtype, device=on)


def _make_copy_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """``cache`` and ``pairs``, the last of several being padding."""
    generator = torch.Generator(on).manual_seed(seed)
    cache = _laid_out(case, on)
    cache.copy_(torch.randint(-9, 9, cache.shape, generator=generator, device=on))
    n = case.sizes["pairs"]
    blocks = torch.randperm(cache.shape[case.options["block_dim"]], generator=torch.Generator().manual_seed(seed))
    targets = blocks[:n]
    sources = blocks[n:][torch.arange(n) % max(len(blocks) - n, 1)] if n else targets
    pairs = torch.stack((sources, targets), 1)
    if n > 1:
        pairs[-1] = -1
    return {"cache": cache, "pairs": pairs.to(on)}


def _run_copy(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Copy; the cache in fp64."""
    copy_blocks_(inputs["cache"], inputs["pairs"], block_dim=case.options["block_dim"], impl=impl)
    return {"cache": inputs["cache"].double()}


def _copies_launched(target: str) -> Iterator[Build]:
    from ...kv_cache import launch

    for case in COPY_BLOCKS.tagged("codegen"):
        pairs = torch.empty(case.sizes["pairs"], 2, dtype=torch.int64, device="meta")
        with device.capture(target) as launches:
            launch.copy_blocks_([_laid_out(case, torch.device("meta"))], pairs, case.options["block_dim"])
        (item,) = launches
        yield _build("copy_blocks", item, target, f"{item.config}-{case.name}")


_SOURCES = (
    *(f"kv_cache/{name}.py" for name in ("triton", "launch", "op", "blocks", "checks", "reference")),
    *("rope/config.py", "runtime/fp8_bits.py", "runtime/device.py", "runtime/dispatch.py"),
)
WRITE_KV: OpSpec = OpSpec(
    name="write_kv",
    summary="keys and values into the pages of a KV cache, quantised where it is",
    cases=_unique(*_WRITE_TEST, *_WRITE_BENCH, *_WRITE_BUILDS, *_WRITE_CPU),
    make_inputs=make_inputs,
    run=run,
    mutates=("kv_cache", "k_scale", "v_scale"),
    launched=lambda target: _launched(WRITE_KV, target),
    sources=_SOURCES,
    terms=lambda case: 1,
)
NORM_ROPE_WRITE_KV: OpSpec = OpSpec(
    name="norm_rope_write_kv",
    summary="norm and rotary embedding of q and k, quantisation and the write into pages, in one launch",
    cases=_unique(*_FUSED_TEST, *_FUSED_BENCH, *_FUSED_BUILDS, *_FUSED_CPU),
    make_inputs=make_inputs,
    run=run,
    mutates=("kv_cache", "k_scale", "v_scale"),
    launched=lambda target: _launched(NORM_ROPE_WRITE_KV, target),
    sources=(*_SOURCES, "norm/reference.py", "rope/reference.py"),
    terms=lambda case: case.sizes["H"],
)
COPY_BLOCKS = OpSpec(
    name="copy_blocks",
    summary="blocks of a KV cache copied over others (copy-on-write)",
    cases=_COPY_CASES,
    make_inputs=_make_copy_inputs,
    run=_run_copy,
    mutates=("cache",),
    launched=_copies_launched,
    sources=_SOURCES,
    terms=lambda case: 1,
)
SPECS = (WRITE_KV, NORM_ROPE_WRITE_KV, COPY_BLOCKS)
