"""Writes into a paged KV cache, behind norm and rotation too: the reference against plain loops, kernels against it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from kv_cache_case import E4M3, INT8, bits, noise

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import judge, rounding, within
from shardfuse.kernels.dev.cases import kv_cache as cases
from shardfuse.kernels.kv_cache import copy_blocks_, gather_kv, norm_rope_write_kv_, write_kv_
from shardfuse.kernels.runtime import device, dispatch

pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]
interpret = pytest.mark.interpret
EPS = torch.finfo(torch.float32).eps
TEST_CASES = [(spec, case) for spec in cases.SPECS for case in spec.tagged("test")]


# --- write ------------------------------------------------------------------------------------------------------------


def textbook_scale(row, dtype):
    """Of one token and head [H]."""
    largest = 448.0 if dtype == E4M3 else 127.0
    if not bool(row.isfinite().all()):
        return math.inf
    amax = row.abs().max().item()
    return 1.0 if amax == 0 else max(torch.tensor(amax).div(largest).item(), 2.0**-126)


def textbook_entry(row, scale, dtype):
    """One token and head [H] as the cache holds it."""
    if dtype not in (E4M3, INT8):
        return row.to(dtype)
    over = row.float() * (1.0 / torch.tensor(scale, device=row.device))
    if dtype == E4M3:
        return over.clamp(-448, 448).to(E4M3)
    return torch.where(over.isnan(), 0.0, over).clamp(-128, 127).round().to(INT8)


def textbook_write(cache, scales, x, slots, given):
    """One token and one head at a time into cache [blocks, K, B, H]."""
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, cache.shape[2])
        for head in range(cache.shape[1]):
            row = x[t, head].float()
            scale = given
            if scales is not None:
                scale = scales[page, head, offset] = textbook_scale(row, cache.dtype)
            cache.view(torch.uint8)[page, head, offset] = textbook_entry(row, scale, cache.dtype).view(torch.uint8)


LAYOUTS = {
    "side by side": lambda b, k, s, h, v, d: (noise(b, k, s, h + v, dtype=d),),
    "pair": lambda b, k, s, h, v, d: (noise(b, k, s, h, dtype=d), noise(b, k, s, v, dtype=d)),
    "slots first": lambda b, k, s, h, v, d: (noise(b, s, k, h + v, dtype=d).transpose(1, 2),),
    "within more": lambda b, k, s, h, v, d: (noise(b, 2, k, s + 1, h + v + 3, dtype=d)[:, 1, :, 1:, 2:-1],),
    "layers inside": lambda b, k, s, h, v, d: noise(b, 2, k, s, h, dtype=d).unbind(1),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # infinity times 0
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("layout", "page", "dtype", "cache_dtype", "scales"),
    [
        ("side by side", 4, torch.float32, torch.float32, None),
        ("pair", 3, torch.bfloat16, torch.bfloat16, None),
        ("within more", 16, torch.bfloat16, torch.float16, None),
        ("slots first", 1, torch.float32, torch.bfloat16, None),
        ("slots first", 5, torch.bfloat16, E4M3, None),
        ("side by side", 3, torch.float16, E4M3, "given"),
        ("pair", 4, torch.float32, E4M3, "written"),
        ("within more", 7, torch.float16, INT8, "given"),
        ("layers inside", 2, torch.bfloat16, INT8, "written"),
    ],
)
def test_write_is_exact_and_touches_nothing_else(impl, layout, page, dtype, cache_dtype, scales):
    """Every byte of the cache and of its scales, in slots that nobody owns too."""
    T, K, H, V, blocks = 9, 3, 20, 20 if layout == "layers inside" else 12, 12
    kv = LAYOUTS[layout](blocks, K, page, H, V, cache_dtype)
    k, v = 3 * torch.randn(T, K, H), torch.randn(T, K, V)
    k[0, 0], k[1, 1, 3], v[2, 0, 0], v[3, 2, 1] = 0.0, math.inf, math.nan, -math.inf
    k[4, 0] = 1e-30 if torch.bfloat16 in (dtype, cache_dtype) else 1e-38  # the interpreter has no subnormal bf16
    k, v = k.to(dtype), v.to(dtype)
    slots = torch.randperm(blocks * page)[:T]
    slots[[5, 8]] = torch.tensor([-1, -7])
    k_scale, v_scale = {
        None: (None, None),
        "given": (torch.tensor([0.03]), torch.tensor(0.07)),
        "written": (noise(blocks, K, page, dtype=torch.float32), noise(blocks, page, K, dtype=torch.float32).mT),
    }[scales]
    expected = [part.clone() for part in (kv if len(kv) == 2 else (kv[0][..., :H], kv[0][..., H:]))]
    written = [x.clone() if scales == "written" else None for x in (k_scale, v_scale)]
    for part, own, x, given in zip(expected, written, (k, v), (0.03, 0.07) if scales else (1.0, 1.0)):
        textbook_write(part, own, x, slots, given)

    write_kv_(kv if len(kv) == 2 else kv[0], k, v, slots, k_scale=k_scale, v_scale=v_scale, impl=impl)
    for part, want in zip(kv if len(kv) == 2 else (kv[0][..., :H], kv[0][..., H:]), expected):
        if cache_dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.equal(part.isnan(), want.isnan())  # of a NaN that is cast, the rest of its bits is free
            part, want = part.nan_to_num(), want.nan_to_num()
        assert torch.equal(bits(part), bits(want))
    if scales == "written":
        assert torch.equal(bits(k_scale), bits(written[0]))
        assert torch.equal(bits(v_scale), bits(written[1]))
        assert torch.isinf(v_scale).any()


@interpret
@pytest.mark.parametrize(("spec", "case"), TEST_CASES, ids=lambda x: x.name)
def test_kernels_match_the_oracle(spec, case):
    inputs = [spec.make_inputs(case, DEVICE, seed=1) for _ in range(3)]
    ours, low = (spec.run(x, case, impl) for x, impl in zip(inputs, ("triton", "reference")))
    oracle = spec.run(registry.to_double(inputs[2]), case, "reference")
    assert ours.keys() == low.keys() == oracle.keys()
    verdicts = [judge(name, ours[name], low[name], oracle[name], terms=spec.terms(case)) for name in oracle]
    assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))


STRIDED = {
    "slice of a projection": lambda x: torch.cat((x, x), dim=1)[:, x.shape[1] :],
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "every other element": lambda x: torch.stack((x, x), dim=-1)[..., 0],
}


@interpret
@pytest.mark.parametrize("layout", STRIDED)
def test_tokens_of_any_strides(layout):
    q, k, v = torch.randn(5, 3, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    cos, sin, slots = torch.rand(5, 4), torch.rand(5, 4), torch.tensor([3, 0, -1, 9, 11])
    found = []
    for turn in (lambda x: x, STRIDED[layout]):
        cache = torch.zeros(3, 2, 4, 16)
        tables = [turn(table.unsqueeze(1)).squeeze(1) for table in (cos, sin)]
        out = norm_rope_write_kv_(
            turn(q), turn(k), turn(v), cache, turn(slots.view(5, 1, 1)).flatten(), cos=tables[0], sin=tables[1],
            impl="triton",
        )  # fmt: skip
        assert out.is_contiguous()
        found.append((out, cache))
    assert all(map(torch.equal, *found))


# --- norm, rotation, write --------------------------------------------------------------------------------------------


def textbook_norm_rope(x, cos, sin, interleaved, weight, eps, offset):
    """x [T, heads, H] in fp64; every pair a complex number, turned by multiplication."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    if cos is None:
        return x
    half, turn = cos.shape[1], torch.complex(cos.double(), sin.double())[:, None]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        turned = torch.complex(rotary[..., 0::2], rotary[..., 1::2]) * turn
        return torch.cat((torch.stack((turned.real, turned.imag), -1).flatten(-2), rest), -1)
    turned = torch.complex(rotary[..., :half], rotary[..., half:]) * turn
    return torch.cat((turned.real, turned.imag, rest), -1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary", "norm", "offset"), [(12, "both", 1.0), (8, "k", 0.0), (0, "q", 1.0), (2, None, 0)])
def test_norm_and_rotation(impl, rotary, norm, offset, interleaved):
    T, N, K, H = 6, 5, 2, 12
    q, k, v = 2 * torch.randn(T, N, H), 3 * torch.randn(T, K, H), torch.randn(T, K, 4)
    before = [x.clone() for x in (q, k, v)]
    q_norm = torch.randn(H) if norm in ("q", "both") else None
    k_norm = torch.randn(H).bfloat16() if norm in ("k", "both") else None
    angles = torch.rand(T, rotary // 2) * 1000
    cos, sin = (angles.cos(), angles.sin()) if rotary else (None, None)
    cache = torch.full((8, K, 1, H + 4), math.nan)
    slots = torch.tensor([4, 0, 6, -1, 2, 5])
    out = norm_rope_write_kv_(
        q, k, v, cache, slots, cos=cos, sin=sin, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=1e-3,
        norm_offset=offset, impl=impl,
    )  # fmt: skip
    real = slots >= 0
    held = cache[slots[real], :, 0]
    for name, ours, x, weight in (("q", out, q, q_norm), ("k", held[..., :H], k, k_norm)):
        expected = textbook_norm_rope(x, cos, sin, interleaved, weight, 1e-3, offset)
        if name == "k":
            expected = expected[real]
        assert within(name, ours, expected, 2 * rounding(torch.float32, H)).ok, name
    assert torch.equal(held[..., H:], v[real])
    assert bool(cache[[1, 3, 7]].isnan().all())
    assert all(map(torch.equal, before, (q, k, v)))
    assert out.data_ptr() != q.data_ptr()


@interpret
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3, INT8])
def test_one_rounding(cache_dtype):
    """bf16 q and k come out as the fp32 results rounded once, wherever fp32 itself is not in doubt about it."""
    q, k, v = (torch.randn(8, heads, 32).bfloat16() for heads in (4, 2, 2))
    weight, angles = torch.randn(32).bfloat16(), torch.rand(8, 16) * 100
    scale = None if cache_dtype == torch.bfloat16 else torch.tensor([1 / 16])
    cache = torch.zeros(2, 2, 4, 64, dtype=cache_dtype)
    out = norm_rope_write_kv_(
        q, k, v, cache, torch.arange(8), cos=angles.cos(), sin=angles.sin(), q_norm=weight, k_norm=weight,
        k_scale=scale, v_scale=scale, impl="triton",
    )  # fmt: skip
    held = cache.transpose(1, 2).flatten(0, 1)[..., :32]
    for ours, x, over in ((out, q, None), (held, k, scale)):
        exact = textbook_norm_rope(x, angles.cos(), angles.sin(), False, weight, 1e-6, 0.0)
        # A rotation may cancel: its roundings are relative to the pair that it turns.
        pair = torch.hypot(*exact.chunk(2, -1)).repeat(1, 1, 2)
        low, high = (
            textbook_entry((exact + side * 8 * EPS * pair).float(), 1.0 if over is None else over.item(), ours.dtype)
            for side in (-1, 1)
        )
        sure = low.float() == high.float()
        assert sure.float().mean() > 0.98
        assert torch.equal(ours.float()[sure], low.float()[sure])


@interpret
def test_one_launch(monkeypatch):
    launched = Counter()
    real = device.launch
    monkeypatch.setattr(
        device, "launch", lambda fn, *args, **kw: launched.update([fn.__name__]) or real(fn, *args, **kw)
    )
    case = cases.NORM_ROPE_WRITE_KV.tagged("test")[0]
    cases.NORM_ROPE_WRITE_KV.run(cases.NORM_ROPE_WRITE_KV.make_inputs(case, DEVICE, 0), case, "triton")
    copy_blocks_([torch.zeros(4, 3), torch.zeros(4, 2, 5)], torch.tensor([[0, 1], [2, 3]]), impl="triton")
    assert launched == {"_write_kv_kernel": 1, "_copy_blocks_kernel": 2}


@interpret
def test_offsets_past_two_to_the_31(tmp_path):
    """Blocks, and tokens, 2**30 elements apart, in sparse files that are never filled."""
    if DEVICE.type != "cpu":
        pytest.skip("the sparse files stand for memory that a GPU would have to hold")
    apart = 2**30

    def far(x, name):
        room = torch.from_file(
            str(tmp_path / name), shared=True, size=(len(x) - 1) * apart + x[0].numel(), dtype=x.dtype
        )
        return room.as_strided(x.shape, (apart, *x.stride()[1:])).copy_(x)

    q, k, v = (torch.randn(4, heads, 8).half() for heads in (3, 2, 2))
    angles = torch.rand(4, 4)
    scales = torch.zeros(4, 2, 3)
    for name, cache in (("plain", torch.zeros(4, 2, 3, 16).half()), ("bytes", torch.zeros(4, 2, 3, 16, dtype=E4M3))):
        by = [None, None] if cache.dtype != E4M3 else [scales.clone(), scales.clone()]
        far_by = [x if x is None else far(x, f"{name}{i}") for i, x in enumerate(by)]
        slots = torch.tensor([11, 0, -1, 7])
        distant = far(cache.view(torch.uint8), name).view(E4M3) if cache.dtype == E4M3 else far(cache, name)
        rotate = {"cos": angles.cos(), "sin": angles.sin(), "impl": "triton"}
        near_q = norm_rope_write_kv_(q, k, v, cache, slots, k_scale=by[0], v_scale=by[1], **rotate)
        far_q = norm_rope_write_kv_(
            *(far(x, f"{name}-{n}") for x, n in ((q, "q"), (k, "k"), (v, "v"))), distant, slots, k_scale=far_by[0],
            v_scale=far_by[1], **rotate,
        )  # fmt: skip
        assert torch.equal(far_q, near_q)
        assert torch.equal(bits(distant), bits(cache))
        assert cache.view(torch.uint8).any()
        assert all(a is None or torch.equal(a, b) for a, b in zip(by, far_by))
        pairs = torch.tensor([[3, 2]])
        copy_blocks_(distant, pairs, impl="triton")
        copy_blocks_(cache, pairs, impl="triton")
        assert torch.equal(bits(distant), bits(cache))


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_write(impl):
    cache = noise(2, 3, 4, 16, dtype=torch.float32)
    before = cache.clone()
    write_kv_(cache, torch.empty(0, 3, 8), torch.empty(0, 3, 8), torch.empty(0, dtype=torch.int64), impl=impl)
    k = torch.randn(5, 3, 8)
    write_kv_(cache, k, k, torch.full((5,), -1), impl=impl)
    q = norm_rope_write_kv_(k, k, k, cache, torch.full((5,), -1), impl=impl)
    assert torch.equal(q, k)
    copy_blocks_(cache, torch.empty(0, 2, dtype=torch.int64), impl=impl)
    copy_blocks_(cache, torch.tensor([[-1, 1], [0, -1], [-1, -1]]), impl=impl)
    assert torch.equal(bits(cache), bits(before))


# --- the torch ops ----------------------------------------------------------------------------------------------------


def _write_arguments(cache_dtype=torch.float32, split=False):
    """Arguments of the op ``write_kv_`` between the caches and impl: 4 tokens, one of them padding."""
    cache = torch.zeros(3, 2, 4, 8 if split else 16, dtype=cache_dtype)
    scales = [torch.ones(3, 2, 4) for _ in range(2)] if cache_dtype in (E4M3, INT8) else [None, None]
    slots = torch.tensor([3, -1, 0, 9])
    return cache, torch.zeros_like(cache) if split else None, torch.randn(4, 2, 8), torch.randn(4, 2, 8), slots, scales


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("cache_dtype", "split"), [(torch.float32, False), (INT8, True)])
def test_opcheck(impl, cache_dtype, split):
    cache, v_cache, k, v, slots, scales = _write_arguments(cache_dtype, split)
    check = torch.library.opcheck
    check(torch.ops.shardfuse.write_kv_.default, (cache, v_cache, k, v, slots, None, None, *scales, True, impl))
    q, table, weight = torch.randn(4, 3, 8), torch.rand(4, 2), torch.ones(8)
    for extra in ((table, table, False, weight, weight), (None, None, False, None, None)):
        arguments = (q, k, v, cache, v_cache, slots, *extra, 1e-6, 0.0, None, None, *scales, True, impl)
        check(torch.ops.shardfuse.norm_rope_write_kv_.default, arguments)
    pairs = torch.tensor([[0, 1], [-1, -1]])
    check(torch.ops.shardfuse.copy_blocks_.default, ([cache, torch.randn(3, 2)], pairs, 0, True, impl))
    if impl == "reference":
        check(torch.ops.shardfuse.swap_blocks_.default, ([cache], [cache.clone()], pairs.cpu(), 0))


@pytest.mark.parametrize(
    ("impl", "layout"),
    [("reference", "one tensor"), pytest.param("triton", "pair of views", marks=[interpret, pytest.mark.nightly])],
)
def test_compiles_without_graph_breaks(impl, layout):
    """Write, copy, write over it, gather: in one graph, at two sizes. No write may be lost or change places."""

    def step(cache, scale, scales, q, k, v, slots, cos, tables):
        kv = cache if layout == "one tensor" else cache.unbind(0)
        write_kv_(kv, k, v, slots, k_scale=scale, v_scale=scale, impl=impl)
        copy_blocks_(cache, tables.view(-1, 2), block_dim=0 if layout == "one tensor" else 1, impl=impl)
        rotate = {"cos": cos, "sin": cos, "impl": impl}
        q = norm_rope_write_kv_(2 * q, k, v + 1, kv, slots.flip(0), k_scale=scale, v_scale=scales, **rotate)
        keys, values = gather_kv(kv, tables, tables[:, 0] + 3, max_seq_len=6, k_scale=scale, v_scale=scales)
        return q, keys, values, cache, scales

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        x = [torch.randn(tokens, heads, 8) for heads in (3, 2, 2)]
        rest = torch.arange(tokens) * 2, torch.rand(tokens, 4), torch.tensor([[0, 4], [1, 5]])
        found = []
        for run in (compiled, step):
            cache = torch.zeros((6, 2, 4, 16) if layout == "one tensor" else (2, 6, 2, 4, 8), dtype=INT8)
            found.append(run(cache, torch.tensor([0.0625]), torch.ones(6, 2, 4), *x, *rest))
        assert all(map(torch.equal, *found))
        _, keys, values, _, scales = found[0]
        assert keys.any()
        assert values.any()
        assert bool((scales != 1).any())


@interpret
def test_dispatch_counts_what_ran():
    before = dispatch.counts.copy()
    for spec in cases.SPECS:
        case = spec.tagged("test")[0]
        for impl in ("reference", "triton", "triton"):
            spec.run(spec.make_inputs(case, DEVICE, 0), case, impl)
    ops = ("write_kv_", "norm_rope_write_kv_", "copy_blocks_")
    assert dispatch.counts - before == {(op, impl): n for op in ops for impl, n in (("reference", 1), ("triton", 2))}


def test_what_the_kernels_leave_to_the_reference():
    k = torch.randn(3, 2, 8)
    slots = torch.arange(3)
    for message, cache, x in (
        ("fp64", torch.zeros(2, 2, 4, 16).double(), k.double()),
        ("stride 1 in its last dimension, and this is 2", torch.zeros(2, 2, 4, 32)[..., ::2], k),
        ("head sizes up to 2048", torch.zeros(2, 2, 4, 5000), torch.randn(3, 2, 2500)),
    ):
        with pytest.raises(RuntimeError, match=message):
            write_kv_(cache, x, x, slots, impl="triton")
        write_kv_(cache, x, x, slots, impl="reference")
        assert torch.equal(cache[0, :, :3].transpose(0, 1), torch.cat((x, x), -1))
    wide = torch.zeros(2, 3, dtype=torch.complex128)
    with pytest.raises(RuntimeError, match="up to 8 bytes"):
        copy_blocks_(wide, torch.tensor([[0, 1]]), impl="triton")


def test_refuses_to_lose_a_gradient():
    k, cache = torch.randn(2, 3, 8, requires_grad=True), torch.zeros(2, 3, 4, 16)
    slots, scale = torch.arange(2), torch.ones(1, requires_grad=True)
    for call in (
        lambda: write_kv_(cache, k, k, slots),
        lambda: norm_rope_write_kv_(k, k.detach(), k.detach(), cache, slots),
        lambda: norm_rope_write_kv_(*[k.detach()] * 3, cache, slots, q_norm=torch.ones(8, requires_grad=True)),
        lambda: write_kv_(cache.to(INT8), k.detach(), k.detach(), slots, k_scale=scale, v_scale=scale),
        lambda: copy_blocks_(k, torch.tensor([[0, 1]])),
    ):
        with pytest.raises(RuntimeError, match="no gradient"):
            call()
        with torch.no_grad():
            call()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("spec", cases.SPECS, ids=lambda spec: spec.name)
def test_captured_without_asking_the_host(spec):
    """A second run in a CUDA graph, with other contents in the same tensors, writes what a plain run does."""
    case = spec.tagged("test")[1]
    captured, plain = spec.make_inputs(case, DEVICE, 1), spec.make_inputs(case, DEVICE, 2)
    spec.run(captured, case, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = spec.run(captured, case, "triton")
    again = spec.make_inputs(case, DEVICE, 2)
    for name, x in captured.items():
        for mine, new in zip(
            x if isinstance(x, tuple) else (x,), again[name] if isinstance(x, tuple) else (again[name],)
        ):
            if mine is not None:
                mine.copy_(new)
    graph.replay()
    expected = spec.run(plain, case, "triton")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- builds -----------------------------------------------------------------------------------------------------------


@pytest.mark.codegen
@pytest.mark.parametrize("target", registry.TARGETS)
def test_builds_are_named_apart(target):
    for spec in cases.SPECS:
        builds = spec.builds(target)
        names = [build.config for build in builds]
        assert len(names) == len(set(names)) == len(spec.tagged("codegen"))
        assert not any(build.args.get("EMULATE") for build in builds)
        native = target in ("sm_90", "sm_100", "sm_120")  # sm_89 would round twice
        assert all(build.args.get("NATIVE_FP8", native) == native for build in builds)
