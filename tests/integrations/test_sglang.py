"""SGLang's plug-in over fakes of SGLang's pools, and over what SGLang's sources were found to have.

It has not run inside SGLang, which has no build for a CPU.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import fake_sglang as fake
import pytest
import torch
from fake_sglang import CONTEXT, DEVICE, HEAD_SIZE, HEADS, KV_HEADS, Case
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfuse.integrations import UnsupportedHost, contract, hosts, reset_stats, stats
from shardfuse.integrations import sglang as plugin
from shardfuse.integrations.sglang.contract import CONTRACT
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.runtime import dispatch

VERSION = plugin.HOST.compared[0]
RECORDED = Path(__file__).with_name("contracts.json")

interpreted = pytest.param("triton", marks=pytest.mark.interpret)


def _facts() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))["sglang"][VERSION]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake.Server]:
    """A process in which SGLang, in the version that was compared, seems to be installed."""
    _install_version(monkeypatch, VERSION)
    yield fake.install(monkeypatch, str(tmp_path / "sglang" / "__init__.py"))
    fake.remove(monkeypatch)


def _install_version(patch: pytest.MonkeyPatch, version: str | None) -> None:
    asked = metadata.version

    def answer(name: str) -> str:
        if name == "sglang" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == "sglang" and version else asked(name)

    patch.setattr(metadata, "version", answer)


# --------------------------------------------------------------------------------------------------------- the contract


def test_the_compared_version_has_what_the_plug_in_rests_on() -> None:
    assert contract.differences(_facts(), CONTRACT) == []


def test_an_installed_version_has_what_was_recorded() -> None:
    try:
        version, folder = plugin.HOST.version(), plugin.HOST.folder()
    except UnsupportedHost as error:
        pytest.skip(str(error))
    found = contract.read(folder.parent, CONTRACT)
    assert contract.differences(found, CONTRACT) == []
    assert version != VERSION or found == _facts()


def test_the_fakes_have_nothing_that_the_contract_does_not_name(server: fake.Server) -> None:
    """So a backend that reads more than the contract names fails in the tests below."""
    case = Case([(3, 2)])
    windowed, linear = Case([(3, 2)], hybrid=True), Case([(3, 2)], linear=True)
    held: dict[str, Any] = {
        "ForwardBatch": case.step([2]),
        "RadixAttention": case.layers[0],
        "ModelRunner": case.runner,
        "ModelConfig": case.runner.model_config,
        "KVIndexTranslator": case.runner.kv_index_translator,
        "ReqToTokenPool": case.requests,
        "MHATokenToKVPool": case.pool,
        "SWAKVPool": windowed.pool,
        "HybridLinearKVPool": linear.pool,
    }
    named = {name: set(names) for name, names in _named().items()}
    named["MHATokenToKVPool"] |= named["KVCache"]
    named["ForwardMode"] |= {"TARGET_VERIFY"}  # which is refused
    for name, thing in held.items():
        public = {each for each in vars(thing) if not each.startswith("_") and each != "training"}
        assert public <= named[name], name
    for each in (fake.AttentionBackend, fake.ForwardMode, fake.KVWriteLoc, fake.MHATokenToKVPool, fake.SWAKVPool):
        public = {name for name in vars(each) if not name.startswith("_")} - {"loc", "swa_loc"}
        assert public <= named[each.__name__], each


def _named() -> dict[str, list[str]]:
    """Class -> the members that the contract names."""
    found: dict[str, list[str]] = {}
    for each in CONTRACT:
        holder, _, method = each.name.partition(".")
        found.setdefault(holder, []).extend(each.members if isinstance(each, contract.Has) else [method])
    return found


# ----------------------------------------------------------------------------------------------------- the registration


def test_registers_as_often_as_it_likes(server: fake.Server) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
        plugin.register()
    assert server.choices == ["triton", "shardfuse"]
    backend = server.backends["shardfuse"](Case([(3, 2)]).runner)
    assert isinstance(backend, fake.AttentionBackend)
    assert backend.needs_cpu_seq_lens is False


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."sglang.srt.plugins"]\nshardfuse = "shardfuse.integrations.sglang:register"' in text


def test_a_newer_version_with_the_same_contract_works_and_says_so(
    server: fake.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_version(monkeypatch, "0.9.1+cu130")
    monkeypatch.setattr(hosts, "read", lambda root, expected: _facts())
    with pytest.warns(UserWarning, match=r"SGLang 0.9.1 was not tested.*0.5.23 \(contract compared, not run\)"):
        plugin.register()
    assert isinstance(server.backends["shardfuse"](Case([(3, 2)]).runner), fake.AttentionBackend)


def test_a_broken_contract_is_a_warning_and_asking_for_the_backend_is_refused(
    server: fake.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_version(monkeypatch, "0.9.1")
    facts = copy.deepcopy(_facts())
    name = next(each for each in facts if each.endswith("AttentionBackend.forward_decode"))
    facts[name][facts[name].index("forward_batch")] = "batch"
    monkeypatch.setattr(hosts, "read", lambda root, expected: facts)
    said = (
        r"SGLang 0.9.1 is not what this plug-in was written for: AttentionBackend.forward_decode takes \(q, k, v, "
        r"layer, batch, save_kv_cache, \*\*kwargs\), expected .*Versions tested: 0.5.23"
    )
    with pytest.warns(UserWarning, match=said):
        plugin.register()
    assert server.choices == ["triton", "shardfuse"]
    with pytest.raises(UnsupportedHost, match=said):
        server.backends["shardfuse"](Case([(3, 2)]).runner)


def test_sources_that_are_gone_are_named(server: fake.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the fake package points at is empty."""
    _install_version(monkeypatch, "0.9.1")
    with pytest.warns(UserWarning, match=r"attention_registry.py has no register_attention_backend"):
        plugin.register()


@pytest.mark.parametrize("version", [None, "0.9.1"], ids=["missing", "without-its-registry"])
def test_no_sglang_is_a_warning(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.remove(monkeypatch)
    _install_version(monkeypatch, version)
    said = r"SGLang is not installed: pip install sglang==0.5.23" if version is None else "has no package 'sglang' here"
    with pytest.warns(UserWarning, match=said):
        plugin.register()


# ------------------------------------------------------------------------------------------------------- what it serves


EXTENDS = [(0, 5), (37, 20), (130, 1), (0, 70), (16, 16)]
DECODES = [(0, 1), (36, 1), (255, 1), (15, 1), (16, 1)]
MIXED = [(64, 1), (0, 33), (100, 1), (63, 2)]


def _run(case: Case, *, impl: str = "auto", mode: Any = None, sinks: bool = False, padding: int = 0) -> None:
    """One step through every layer, over a cache that holds the prefixes, against fp64."""
    from shardfuse.integrations.sglang.backend import ShardfuseBackend

    backend = ShardfuseBackend(case.runner, impl=impl)
    backend.init_cuda_graph_state(16, 16)
    batch = case.step(mode=mode, padding=padding)
    backend.init_forward_metadata(batch)
    total = sum(new for _, new in case.lens)
    extra = {"sinks": torch.randn(HEADS, device=DEVICE)} if sinks else {}
    reset_stats()
    for layer in case.layers:
        q = torch.randn(total + padding, HEADS * HEAD_SIZE, device=DEVICE).to(case.dtype)
        k, v = case.rows_of(layer, total + padding)
        given = k.clone(), v.clone()
        out = backend.forward(q, k.flatten(1), v.flatten(1), layer, batch, **extra)
        assert out.shape == (total + padding, HEADS * layer.v_head_dim)
        assert out.dtype == case.dtype
        assert torch.equal(k, given[0])
        assert torch.equal(v, given[1])
        heads = q[:total].unflatten(-1, (HEADS, HEAD_SIZE))
        oracle, low = (case.expected(heads, layer, dtype, extra.get("sinks")) for dtype in (torch.float64, case.dtype))
        terms = max(prefix + new for prefix, new in case.lens)
        verdict = judge("out", out[:total].view_as(oracle), low, oracle, terms=terms)
        assert verdict.ok, verdict
    triton = impl == "triton" or DEVICE.type == "cuda"
    assert stats("sglang") == {
        "attention": 2,
        f"attention.{'triton' if triton else 'reference'}": 2,
        "queries": 2 * (total + padding),
        "writes": 2,
    }


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("lens", [EXTENDS, MIXED], ids=["extends", "mixed"])
def test_extends(server: fake.Server, page: int, lens: list[tuple[int, int]]) -> None:
    _run(Case(lens, page=page), mode=fake.ForwardMode.MIXED if lens is MIXED else fake.ForwardMode.EXTEND)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("padding", [0, 3])
def test_decodes(server: fake.Server, page: int, padding: int) -> None:
    _run(Case(DECODES, page=page), mode=fake.ForwardMode.DECODE, padding=padding)


@pytest.mark.parametrize("decode", [False, True], ids=["extends", "decodes"])
@pytest.mark.parametrize("feature", ["window", "window-of-2", "softcap", "sinks", "scale", "v-head", "bf16", "all"])
def test_features(server: fake.Server, feature: str, decode: bool) -> None:
    every = feature == "all"
    dtype = torch.bfloat16 if every or feature == "bf16" else torch.float32
    case = Case(DECODES if decode else EXTENDS, dtype=dtype, v_head_size=16 if every or feature == "v-head" else 32)
    for layer in case.layers:
        if every or feature == "window":
            layer.sliding_window_size = 19
        if feature == "window-of-2":
            layer.sliding_window_size = 1  # the query itself does not count
        if every or feature == "softcap":
            layer.logit_cap = 1.5
        if every or feature == "scale":
            layer.scaling = 0.7
    mode = fake.ForwardMode.DECODE if decode else fake.ForwardMode.EXTEND
    _run(case, mode=mode, sinks=every or feature == "sinks")


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("decode", [False, True], ids=["extends", "decodes"])
def test_hybrid_pools_keep_windowed_layers_under_other_slots(server: fake.Server, page: int, decode: bool) -> None:
    case = Case(DECODES if decode else EXTENDS, page=page, hybrid=True)
    case.layers[1].sliding_window_size = 9
    for row, (prefix, _) in zip(case.rows, case.lens):  # the window has left these
        case.mapping[case.slots(row, max(0, prefix - 9) // page * page)] = -1
    case.pool.swa_kv_pool.get_value_buffer(0).nan_to_num_()  # the oracle weighs them with zeros
    _run(case, mode=fake.ForwardMode.DECODE if decode else fake.ForwardMode.EXTEND, padding=2 * decode)


def test_models_of_which_some_layers_attend(server: fake.Server) -> None:
    _run(Case(MIXED, linear=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_caches(server: fake.Server, scaled: bool) -> None:
    """Under the checkpoint's scales, or without."""
    case = Case(MIXED, dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
    if scaled:
        for layer in case.layers:
            layer.k_scale, layer.v_scale = (torch.tensor(each, device=DEVICE) for each in (0.5, 0.25))
    _run(case)


def test_what_is_written_is_what_was_given(server: fake.Server) -> None:
    from shardfuse.integrations.sglang.backend import ShardfuseBackend

    case = Case(MIXED)
    backend, batch, layer = ShardfuseBackend(case.runner), case.step(), case.layers[0]
    backend.init_forward_metadata(batch)
    total = sum(new for _, new in MIXED)
    q = torch.randn(total, HEADS * HEAD_SIZE, device=DEVICE)
    k, v = case.rows_of(layer, total)
    before = [case.pool.get_key_buffer(0).clone(), case.pool.get_value_buffer(0).clone()]
    first = backend.forward(q, k, v, layer, batch)
    for old, new, rows in zip(before, (case.pool.get_key_buffer(0), case.pool.get_value_buffer(0)), (k, v)):
        old[batch.out_cache_loc] = rows
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))
    reset_stats()
    # Another layer wrote them, or SGLang's rotation did.
    again = [backend.forward(q, None, None, layer, batch), backend.forward(q, k * 2, v * 2, layer, batch, False)]
    assert all(torch.equal(each, first) for each in again)
    assert "writes" not in stats("sglang")


def test_idle_steps(server: fake.Server) -> None:
    from shardfuse.integrations.sglang.backend import ShardfuseBackend

    backend = ShardfuseBackend(Case([(3, 2)]).runner)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    backend.init_forward_metadata(fake.ForwardBatch(fake.ForwardMode.IDLE, 0, empty, empty, empty))
    assert backend.forward_metadata is not None
    assert backend.forward_metadata.batch.block_tables.shape == (0, CONTEXT // 16)


@pytest.mark.parametrize("impl", [interpreted])
@pytest.mark.parametrize("decode", [False, True], ids=["mixed", "decodes"])
def test_the_kernel(server: fake.Server, impl: str, decode: bool) -> None:
    if dispatch.triton_version() is None:
        pytest.skip("Triton is not installed")
    case = Case([(17, 1), (0, 1), (33, 1)] if decode else [(17, 3), (5, 1), (0, 9)])
    case.layers[0].sliding_window_size = 7
    _run(case, impl=impl, mode=fake.ForwardMode.DECODE if decode else fake.ForwardMode.MIXED, sinks=True)


# --------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_is_captured_waits_for_nothing(server: fake.Server, hybrid: bool) -> None:
    """Tensors without contents: a look at any of them raises. Tables are as wide as the longest context."""
    from shardfuse.integrations.sglang.backend import ShardfuseBackend

    case = Case(DECODES, hybrid=hybrid)
    backend = ShardfuseBackend(case.runner)
    backend.init_cuda_graph_state(64, 64)
    batch = case.step(mode=fake.ForwardMode.DECODE, padding=4)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            setattr(batch, name, mode.from_tensor(getattr(batch, name)))
        backend.init_forward_metadata_in_graph(batch)
    step = backend.forward_metadata
    assert step is not None
    for each in (step.batch, step.windowed):
        assert (each is None) == (each is step.windowed and not hybrid)
        if each is not None:
            assert each.block_tables.shape == (9, CONTEXT // 16)
            assert (each.max_query_len, each.max_seq_len) == (1, None)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_replays_follow_the_scheduler(server: fake.Server) -> None:
    """A graph of a decode, replayed after the scheduler has put other requests into its buffers."""
    from shardfuse.integrations.sglang.backend import ShardfuseBackend

    case = Case(DECODES)
    backend, batch, layer = ShardfuseBackend(case.runner), case.step(mode=fake.ForwardMode.DECODE), case.layers[0]
    real = case.step(mode=fake.ForwardMode.DECODE)
    backend.init_cuda_graph_state(8, 8)
    q = torch.randn(len(DECODES), HEADS * HEAD_SIZE, device=DEVICE)
    k, v = case.rows_of(layer, len(DECODES))
    batch.req_pool_indices.zero_()
    batch.seq_lens.fill_(1)
    batch.out_cache_loc.zero_()
    backend.init_forward_metadata(batch)
    backend.forward(q, k, v, layer, batch)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(batch)
        out = backend.forward(q, k, v, layer, batch)
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(batch, name).copy_(getattr(real, name))
    backend.init_forward_metadata_out_graph(batch)
    graph.replay()
    torch.cuda.synchronize()
    heads = q.unflatten(-1, (HEADS, HEAD_SIZE))
    oracle, low = (case.expected(heads, layer, dtype, None) for dtype in (torch.float64, torch.float32))
    verdict = judge("out", out.view_as(oracle), low, oracle, terms=CONTEXT)
    assert verdict.ok, verdict


# ------------------------------------------------------------------------------------------------------------- refusals


def _set(path: str, value: Any) -> Any:
    """A change of a runner: a dotted path to an attribute, and its value."""

    def change(case: Case, server: fake.Server) -> None:
        *holders, name = path.split(".")
        thing: Any = {"runner": case.runner, "layer": case.layers[1], "pool": case.pool, "server": server}[holders[0]]
        for holder in holders[1:]:
            thing = getattr(thing, holder)
        setattr(thing, name, value)

    return change


class _OtherPool(fake.MHATokenToKVPool):
    """As pools of other formats, which inherit from SGLang's."""


REFUSED = {
    "mla": (_set("runner.use_mla_backend", True), r"multi-head latent attention \(MLA\).*--attention-backend"),
    "encoder": (_set("runner.model_config.is_encoder_decoder", True), "an encoder and cross attention"),
    "speculative": (_set("runner.spec_algorithm.is_speculative", lambda: True), "--speculative-algorithm"),
    "draft": (_set("runner.is_draft_worker", True), "speculative decoding is on"),
    "diffusion": (_set("server.exec.dllm.dllm_algorithm", "LowConfidence"), "a diffusion model"),
    "two-batches": (_set("server.exec.overlap.enable_two_batch_overlap", True), "--enable-two-batch-overlap"),
    "context-parallel": (_set("server.parallel.attn_cp_size", 2), r"'attn_cp_size': 2.*expected 1 and 1"),
    "decode-context-parallel": (_set("server.parallel.attn_dcp_size", 4), "'attn_dcp_size': 4"),
    "unified": (_set("runner.kv_index_translator.is_translating", True), "--enable-unified-memory"),
    "layout": (_set("pool.kv_cache_layout", "hnd"), "a MHATokenToKVPool in the layout 'hnd'; expected .* 'nhd'"),
    "fp4": (_set("pool.is_quantized_kv_cache", True), "the cache is a MHATokenToKVPool"),
    "pool": (_set("pool.__class__", _OtherPool), "the cache is a _OtherPool"),
    "pages": (_set("pool.size", 100), r"100 slots in pages of 16.*--page-size"),
    "dtype": (_set("runner.dtype", torch.float64), r"computes in torch.float64: the kernel takes.*--dtype"),
    "cache-dtype": (_set("runner.kv_cache_dtype", torch.float8_e5m2), "float8_e5m2.*--kv-cache-dtype"),
    "head-size": (_set("layer.qk_head_dim", 288), "layer 1: head size 288: the kernel holds head sizes up to 256"),
    "value-head-size": (_set("layer.v_head_dim", 512), "layer 1: head size 512"),
    "cross-attention": (_set("layer.is_cross_attention", True), "layer 1: cross attention; expected"),
    "encoder-only": (_set("layer.attn_type", fake.AttentionType.ENCODER_ONLY), "layer 1: AttentionType.ENCODER_ONLY"),
    "positions": (_set("layer.pos_encoding_mode", "ALIBI"), "pos_encoding_mode 'ALIBI'"),
    "temperature": (_set("layer.xai_temperature_len", 1024), "xai_temperature_len 1024"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_when_the_server_starts(server: fake.Server, name: str) -> None:
    change, said = REFUSED[name]
    plugin.register()
    case = Case(MIXED)
    change(case, server)
    with pytest.raises(ValueError, match=f"the attention backend shardfuse does not serve this: .*{said}"):
        server.backends["shardfuse"](case.runner)


def test_refuses_wide_caches_and_other_soft_caps(server: fake.Server) -> None:
    plugin.register()
    case = Case(MIXED)
    case.runner.dtype = torch.bfloat16
    with pytest.raises(ValueError, match=r"torch.float32 for a model in torch.bfloat16; expected one of"):
        server.backends["shardfuse"](case.runner)
    case = Case(MIXED)
    case.layers[0].logit_cap, case.layers[0].logit_capping_method = 30.0, "sigmoid"
    with pytest.raises(ValueError, match="layer 0: scores are capped by 'sigmoid'; expected 'tanh'"):
        server.backends["shardfuse"](case.runner)
    case = Case(MIXED)
    case.layers[0].use_irope, case.runner.attention_chunk_size = True, 8192
    with pytest.raises(ValueError, match="layer 0: attention is cut into chunks of 8192 positions"):
        server.backends["shardfuse"](case.runner)


def test_hybrid_pools_are_looked_into(server: fake.Server) -> None:
    plugin.register()
    case = Case(MIXED, hybrid=True)
    case.pool.swa_kv_pool.__class__ = _OtherPool
    with pytest.raises(ValueError, match="the cache is a _OtherPool"):
        server.backends["shardfuse"](case.runner)
    case = Case(MIXED, linear=True)
    case.pool.full_kv_pool.kv_cache_layout = "hnd"
    with pytest.raises(ValueError, match="in the layout 'hnd'"):
        server.backends["shardfuse"](case.runner)


def test_refuses_modes_and_keywords(server: fake.Server) -> None:
    plugin.register()
    case = Case(MIXED)
    backend = server.backends["shardfuse"](case.runner)
    with pytest.raises(ValueError, match=r"shardfuse does not serve .*TARGET_VERIFY"):
        backend.init_forward_metadata(case.step(mode=fake.ForwardMode.TARGET_VERIFY))
    with pytest.raises(ValueError, match=r"--cuda-graph-backend-prefill to breakable or disabled"):
        backend.init_forward_metadata_out_graph(case.step(), in_capture=True)
    backend.init_forward_metadata(case.step())
    q, layer = torch.randn(37, HEADS * HEAD_SIZE, device=DEVICE), case.layers[0]
    k, v = case.rows_of(layer, 37)
    with pytest.raises(ValueError, match="does not serve return_lse, score_mod, which layer 0 asks for"):
        backend.forward(q, k, v, layer, case.step(), rel_bias=None, return_lse=True, score_mod=object())
    other = fake.RadixAttention(HEADS, 512, KV_HEADS, 0)  # of no module of the model
    with pytest.raises(ValueError, match="layer 0: head size 512"):
        backend.forward(q, k, v, other, case.step(), False)
