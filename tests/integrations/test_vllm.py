"""The backend of vLLM, where there is no vLLM: over stand-ins that have the shape of its contract.

``lane_vllm.py`` (``make test-vllm``) runs the real engine.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from record_contracts import recorded

from shardfuse import apply_rope, rms_norm
from shardfuse.integrations import UnsupportedHost, hosts, reset_stats, stats
from shardfuse.integrations import vllm as plugin
from shardfuse.integrations.contract import differences
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.paged_attention import paged_attention

PATH = "shardfuse.integrations.vllm.backend.ShardfuseBackend"
SLOTS, HEADS, KV_HEADS, SIZE = 16, 4, 2, 32


class _Registry:
    """vLLM's registry of backends."""

    def __init__(self) -> None:
        class Members(enum.Enum):
            CPU_ATTN = "cpu"

        self.paths: dict[str, str] = {}
        self.AttentionBackendEnum = types.SimpleNamespace(__members__=dict(Members.__members__))

    def register_backend(self, backend: Any, class_path: str) -> None:
        if isinstance(backend, str):
            if backend in self.AttentionBackendEnum.__members__:
                raise ValueError(f"{backend} already exists")
            self.AttentionBackendEnum.__members__[backend] = types.SimpleNamespace(name=backend)
        self.paths[backend if isinstance(backend, str) else backend.name] = class_path


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Registry]:
    """vLLM 0.32.0's modules, as far as the backend imports them; the plug-in's are imported anew."""
    registry = _Registry()
    base = types.ModuleType("vllm.v1.attention.backend")
    plain = ("AttentionBackend", "AttentionMetadata", "AttentionMetadataBuilder", "AttentionImpl")
    for name in plain:
        setattr(base, name, type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)}))
    base.AttentionMetadataBuilder.__init__ = lambda self, *_: None
    base.AttentionBackend.supports_kv_cache_dtype = classmethod(
        lambda cls, dtype: dtype in cls.supported_kv_cache_dtypes
    )
    base.AttentionCGSupport = enum.Enum("AttentionCGSupport", "UNIFORM_BATCH NEVER")
    base.AttentionType = types.SimpleNamespace(DECODER="decoder", ENCODER="encoder")
    base.MultipleOf = int
    platform = types.SimpleNamespace(is_cpu=lambda: True, device_type="cpu", fp8_dtype=lambda: torch.float8_e4m3fn)
    modules: dict[str, Any] = {
        "vllm": types.SimpleNamespace(envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)),
        "vllm.platforms": types.SimpleNamespace(current_platform=platform),
        "vllm.v1.attention.backend": base,
        "vllm.v1.attention.backends.registry": registry,
    }
    for name in list(sys.modules):
        if name.startswith("shardfuse.integrations.vllm.") and not name.endswith("contract"):
            monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(hosts.Host, "version", lambda self: "0.32.0")
    reset_stats()
    yield registry
    for name in ("backend", "refusal"):
        sys.modules.pop(f"shardfuse.integrations.vllm.{name}", None)


@pytest.fixture
def backend(host: _Registry) -> Any:
    return importlib.import_module("shardfuse.integrations.vllm.backend")


# ------------------------------------------------------------------------------------------------------- registration
@pytest.mark.parametrize("version", [*plugin.HOST.ran, *plugin.HOST.compared])
def test_the_contract_holds_in_the_versions_that_are_named(version: str):
    assert differences(recorded("vllm", version), plugin.CONTRACT) == []


def test_registers_as_often_as_it_is_asked(host: _Registry, monkeypatch: pytest.MonkeyPatch):
    plugin.register()
    plugin.register()
    assert host.paths == {"SHARDFUSE": PATH}
    monkeypatch.setenv(plugin.REPLACES, "CPU_ATTN")
    plugin.register()
    assert host.paths == {"SHARDFUSE": PATH, "CPU_ATTN": PATH}
    monkeypatch.setenv(plugin.REPLACES, "NONE")
    with pytest.raises(ValueError, match=r"SHARDFUSE_VLLM_REPLACES='NONE': this vLLM has CPU_ATTN, SHARDFUSE"):
        plugin.register()


def test_a_version_without_the_contract_starts_and_says_why_when_asked(
    host: _Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(hosts.Host, "version", lambda self: "0.99.0")
    monkeypatch.setattr(hosts.Host, "folder", lambda self: tmp_path / "vllm")
    with pytest.warns(
        UserWarning, match="SHARDFUSE is not available: vLLM 0.99.0 is not what this plug-in was written"
    ):
        plugin.register()
    assert host.paths == {"SHARDFUSE": "shardfuse.integrations.vllm.refusal.Backend"}
    says = r"backend.py has no CommonAttentionMetadata.*0\.32\.0 \(run\); 0\.33\.0 \(contract compared, not run\)"
    with pytest.raises(UnsupportedHost, match=says):
        importlib.import_module("shardfuse.integrations.vllm.refusal")


def test_without_a_registry_vllm_starts_all_the_same(host: _Registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", types.ModuleType("registry"))
    with pytest.warns(UserWarning, match=r"SHARDFUSE is not available: vLLM 0.32.0 has no registry of backends"):
        plugin.register()
    assert host.paths == {}


def test_without_vllm_the_message_names_what_to_install():
    with pytest.raises(UnsupportedHost, match=r"vLLM is not installed: pip install vllm==0\.32\.0 \(versions tested"):
        plugin.HOST.version()


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_size": 512}, "head size 512: the kernel holds head sizes up to 256"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2: auto, float16, bfloat16, fp8, fp8_e4m3 are"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt of this model"),
    ],
)
def test_what_a_layer_does_not_support_is_refused_when_it_is_built(backend: Any, changes: dict[str, Any], says: str):
    options = {"num_heads": 4, "head_size": 32, "scale": 1.0} | changes
    with pytest.raises(ValueError, match=f"the attention backend SHARDFUSE does not support {says}"):
        backend.ShardfuseImpl(**options)


def test_an_unsupported_dtype_is_refused_when_a_layer_is_built(backend: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    with pytest.raises(
        ValueError, match=r"torch.float64: the kernel takes torch.float16, torch.bfloat16, torch.float32"
    ):
        backend.ShardfuseImpl(4, 32, 1.0)


def test_masks_for_each_request_are_refused(backend: Any):
    builder = backend.ShardfuseBuilder(None, [], None, None)
    common = types.SimpleNamespace(causal=torch.ones(2, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="one mask for a whole batch"):
        builder.build(0, common)


def test_what_vllm_asks_before_it_takes_a_backend(backend: Any, monkeypatch: pytest.MonkeyPatch):
    ours = backend.ShardfuseBackend
    assert [ours.supports_head_size(size) for size in (80, 256, 320)] == [True, True, False]
    assert ours.supports_kv_cache_dtype("auto")
    assert ours.supports_kv_cache_dtype("fp8")
    assert not ours.supports_kv_cache_dtype("fp8_e5m2")
    monkeypatch.setattr(backend.current_platform, "fp8_dtype", lambda: torch.float8_e4m3fnuz)
    assert not ours.supports_kv_cache_dtype("fp8")
    assert ours.supports_compute_capability(types.SimpleNamespace(major=8))
    assert not ours.supports_compute_capability(types.SimpleNamespace(major=7))
    assert ours.get_builder_cls()._cudagraph_support.name == "UNIFORM_BATCH"


# ---------------------------------------------------------------------------------------------------------- the numbers
def _pool(dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A cache of 12 blocks as vLLM allocates it, [blocks, K, slots, 2 H], full of NaN."""
    sizes = {"LBHNC": (12, KV_HEADS, SLOTS, 2 * SIZE), "LBNHC": (12, SLOTS, KV_HEADS, 2 * SIZE)}[layout]
    pool = torch.full(sizes, float("nan")).to(dtype)
    return pool if layout == "LBHNC" else pool.transpose(1, 2)


def _common(lengths: list[tuple[int, int]], padded: int = 0) -> tuple[Any, torch.Tensor]:
    """vLLM's metadata of sequences with (context, queries), and the slots of the queries."""
    drawn = torch.Generator().manual_seed(0)
    blocks = torch.randperm(12, generator=drawn).to(torch.int32)
    tables = torch.full((len(lengths), 4), 10**6, dtype=torch.int32)
    slots, at = [], 0
    for row, (context, queries) in enumerate(lengths):
        needed = -(-(context + queries) // SLOTS)
        tables[row, :needed] = blocks[at : at + needed]
        at += needed
        slots += [int(tables[row, p // SLOTS]) * SLOTS + p % SLOTS for p in range(context, context + queries)]
    counts = torch.tensor([queries for _, queries in lengths], dtype=torch.int32)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    seq_lens = torch.tensor([context + queries for context, queries in lengths], dtype=torch.int32)
    common = types.SimpleNamespace(
        causal=True, block_table_tensor=tables, seq_lens=seq_lens, query_start_loc=starts,
        max_query_len=int(counts.max()), max_seq_len=int(seq_lens.max()), num_actual_tokens=len(slots),
        slot_mapping=torch.tensor(slots),
    )  # fmt: skip
    return common, torch.tensor(slots)


def _layer(scale: float = 1.0) -> Any:
    return types.SimpleNamespace(_k_scale=torch.tensor([scale]), _v_scale=torch.tensor([scale]))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, [(0, 21), (0, 5)]),
        ({}, [(17, 1), (30, 1), (3, 1)]),
        ({"sliding_window": 7, "logits_soft_cap": 5.0}, [(20, 1), (0, 9), (8, 4)]),
        ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, [(20, 1), (0, 9)]),
        ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, [(20, 1), (0, 9)]),
    ],
    ids=["prefill", "decode", "window", "alibi", "sinks"],
)
def test_steps_over_its_cache(backend: Any, layout: str, options: dict[str, Any], lengths: list[tuple[int, int]]):
    common, _ = _common(lengths)
    pool, x = _pool(torch.float32, layout), torch.randn(200, HEADS + 2 * KV_HEADS, SIZE)
    impl = backend.ShardfuseImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **options)
    metadata = backend.ShardfuseBuilder(None, [], None, None).build(0, common)
    # The contexts first, then the step, with two rows of padding that no slot belongs to.
    at = 0
    for row, (context, _) in enumerate(lengths):
        slots = [int(common.block_table_tensor[row, p // SLOTS]) * SLOTS + p % SLOTS for p in range(context)]
        k, v = x[at : at + context].split([HEADS, KV_HEADS, KV_HEADS], 1)[1:]
        impl.do_kv_cache_update(_layer(), k, v, pool, torch.tensor(slots, dtype=torch.int64))
        at += context
    tokens = common.num_actual_tokens
    q, k, v = x[at : at + tokens + 2].split([HEADS, KV_HEADS, KV_HEADS], 1)
    impl.do_kv_cache_update(_layer(), k, v, pool, common.slot_mapping)
    output = torch.full((tokens + 2, HEADS, SIZE), 7.0)
    assert impl.forward(_layer(), q, k, v, pool, metadata, output) is output
    call = {
        "window": options.get("sliding_window"), "softcap": options.get("logits_soft_cap"),
        "sinks": options.get("sinks"), "scale": SIZE**-0.5, "impl": "reference",
    }  # fmt: skip
    slopes = options.get("alibi_slopes")
    call["alibi_slopes"] = None if slopes is None else torch.tensor(slopes)
    where = (common.block_table_tensor, common.seq_lens, common.query_start_loc)
    low = paged_attention(q[:tokens], pool, *where, **call)
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    oracle = paged_attention(q[:tokens].double(), pool.double(), *where, **wide)
    verdict = judge("output", output[:tokens], low, oracle, terms=64)
    assert verdict.ok, verdict
    assert (output[tokens:] == 7.0).all()
    assert pool[1:].data_ptr() == pool.data_ptr() + pool.stride(0) * 4  # nobody laid it out anew
    ran = stats("vllm")
    assert (ran["attention"], ran["attention.reference"], ran["queries"]) == (1, 1, tokens)
    assert ran["writes"] == len(lengths) + 1


def test_nothing_is_read_while_memory_is_measured(backend: Any):
    impl = backend.ShardfuseImpl(HEADS, SIZE, 1.0, KV_HEADS)
    output = torch.full((3, HEADS, SIZE), 7.0)
    assert (impl.forward(_layer(), output, output, output, torch.empty(0), None, output) == 0).all()
    assert stats("vllm") == {}


def test_an_fp8_cache_is_written_and_read_with_its_scales(backend: Any):
    common, slots = _common([(0, 13), (0, 4)])
    q, k, v = torch.randn(17, HEADS + 2 * KV_HEADS, SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)
    pool = torch.zeros(12, KV_HEADS, SLOTS, 2 * SIZE, dtype=torch.uint8)  # vLLM's dtype for it
    impl = backend.ShardfuseImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, kv_cache_dtype="fp8")
    impl.do_kv_cache_update(_layer(0.02), k, v, pool, slots)
    stored = pool.view(torch.float8_e4m3fn)[slots // SLOTS, :, slots % SLOTS].float() * 0.02
    expected = (torch.cat([k, v], -1) / 0.02).to(torch.float8_e4m3fn).float() * 0.02
    assert torch.equal(stored, expected)
    output = torch.empty(17, HEADS, SIZE)
    metadata = backend.ShardfuseBuilder(None, [], None, None).build(0, common)
    impl.forward(_layer(0.02), q, k, v, pool, metadata, output)
    where = (common.block_table_tensor, common.seq_lens, common.query_start_loc)
    cache = pool.view(torch.float8_e4m3fn).double() * float(torch.tensor(0.02))
    oracle = paged_attention(q.double(), cache, *where, scale=SIZE**-0.5)
    low = paged_attention(q, cache.float(), *where, scale=SIZE**-0.5, impl="reference")
    verdict = judge("output", output, low, oracle, terms=32)
    assert verdict.ok, verdict


def test_a_captured_step_is_bounded_by_its_queries_alone(backend: Any):
    common, _ = _common([(17, 1), (30, 1)])
    builder = backend.ShardfuseBuilder(None, [], None, None)
    captured, built = builder.build_for_cudagraph_capture(common).batch, builder.build(0, common).batch
    assert (captured.max_query_len, captured.max_seq_len) == (1, None)
    assert (built.max_query_len, built.max_seq_len) == (1, 31)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_the_fused_hooks_do_what_the_separate_steps_do(backend: Any, is_neox: bool, normed: bool):
    tokens, slots = 9, torch.tensor([5, 6, 7, 40, 41, 100, 101, -1])  # one token of padding, and one behind the slots
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE)
    heads = qkv.view(tokens, -1, SIZE)
    q, k, v = (part.clone() for part in heads.split([HEADS, KV_HEADS, KV_HEADS], 1))
    positions = torch.randint(0, 50, (tokens,))
    angles = torch.rand(50, SIZE // 4)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    q_norm, k_norm = torch.rand(SIZE) + 0.5, torch.rand(SIZE) + 0.5
    impl = backend.ShardfuseImpl(HEADS, SIZE, 1.0, KV_HEADS)
    fused, apart = _pool(torch.float32, "LBHNC"), _pool(torch.float32, "LBHNC")

    expected_q, expected_k = q, k
    if normed:
        expected_q, expected_k = (rms_norm(each, norm, eps=1e-5) for each, norm in ((q, q_norm), (k, k_norm)))
    cos, sin = angles[positions].cos(), angles[positions].sin()
    expected_q, expected_k = apply_rope(expected_q, expected_k, cos, sin, interleaved=not is_neox)
    assert expected_k is not None
    impl.do_kv_cache_update(_layer(), expected_k, v, apart, slots)
    if normed:
        q_out, k_out = torch.empty(tokens, HEADS * SIZE), torch.empty(tokens, KV_HEADS * SIZE)
        assert impl.fused_qk_norm_rope_kvcache_supported()
        impl.do_qk_norm_rope_kvcache_update(
            _layer(), qkv, q_out, k_out, positions, q_norm, k_norm, 1e-5, table, is_neox, fused, slots
        )
    else:
        q_out, k_out = q.clone(), k.clone()
        assert impl.fused_rope_kvcache_supported()
        impl.do_rope_and_kv_cache_update(_layer(), q_out, k_out, v, positions, table, is_neox, fused, slots)
    torch.testing.assert_close(q_out.view_as(expected_q), expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k_out.view_as(expected_k), expected_k, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused, apart, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert (~fused.isnan()).sum() == 7 * KV_HEADS * 2 * SIZE
    assert stats("vllm")["rotated_writes"] == 2


def test_no_warning_for_a_tested_version(host: _Registry):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
    assert "SHARDFUSE" in host.paths
