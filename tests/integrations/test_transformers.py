"""transformers' continuous batching on our kernel: equal tokens, what is counted, what is refused and in what words.

Runs on whichever transformers is installed; ``lane_transformers.py`` runs more of each version that was tested.
"""

from __future__ import annotations

import importlib.util
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import batching_case
import pytest
import torch
from batching_case import Case
from foreign import foreign

from shardfuse.integrations import UnsupportedHost, hosts, pages, reset_stats, stats
from shardfuse.integrations.conformance import models
from shardfuse.integrations.contract import differences, read

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from shardfuse.integrations import transformers as plugin
from shardfuse.integrations.transformers import __main__ as command
from shardfuse.integrations.transformers import attention, step

FAST = ("llama", "mistral-window", "gemma2", "gpt_oss")
UNTIL_5_17 = plugin.HOST.version().startswith("5.17.")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture
def enabled() -> Any:
    """``enabled(kind, **changes)``: a small model, enabled."""
    return lambda kind, **changes: plugin.enable(foreign(kind, **changes))


# --------------------------------------------------------------------------------------------------------- equal tokens
@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(Case(kind), id=kind, marks=[] if kind in FAST else pytest.mark.nightly)
            for kind in models.ARCHITECTURES
            if kind not in batching_case.REFUSED
        ),
        pytest.param(Case("llama", page=4), id="llama-pages-of-4"),
        pytest.param(Case("llama", twice=True), id="llama-shared-prefixes"),
        pytest.param(Case("mistral-window", page=4, budget=5), id="window-5-tokens-a-step"),
        pytest.param(Case("gemma2", fused=True), id="gemma2-fused", marks=pytest.mark.nightly),
    ],
)
def test_tokens_equal_those_of_generate(case: Case, folders: Path):
    folder = folders / case.architecture
    expected = models.write(case.architecture, folder)
    assert expected.distinct > 0.3  # a model that repeats itself would hide mistakes
    assert batching_case.faults(case, batching_case.run(case, folder)) == []


def test_a_soft_cap_that_bites(folders: Path):
    folder = folders / "gemma2"
    prompt = models.write("gemma2", folder).prompts[1]
    model = batching_case.load(folder)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.02
    model.set_attn_implementation("eager")  # SDPA leaves soft-caps out, which versions before 5.21 take for Gemma 2
    stock = model.generate(
        torch.tensor([prompt]), max_new_tokens=models.NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    best = torch.cat(stock.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3  # rounding must not decide
    expected = stock.sequences[0, len(prompt) :].tolist()
    assert expected != models.read(folder).tokens[1]
    assert batching_case.generate(plugin.enable(model), [prompt]) == [expected]


def test_pages_are_read_where_they_lie_and_tables_are_made_once_a_step(folders: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folders / "gemma2"
    expected = models.write("gemma2", folder)
    model = plugin.enable(batching_case.load(folder))
    read_in: list[int] = []
    host_memory: set[int] = set()
    made: list[step.Keys] = []
    attend, paged, make = pages.PagedLayer.attend, attention.paged, step._make

    def watched_attend(self: Any, q: Any, cache: Any, batch: Any, **options: Any) -> Any:
        read_in.append(cache[0].untyped_storage().data_ptr())
        return attend(self, q, cache, batch, **options)

    def watched_paged(*args: Any, cache: Any, **given: Any) -> Any:
        tensors = cache.key_cache if hasattr(cache, "key_cache") else [cache.cache_tensor]
        host_memory.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return paged(*args, cache=cache, **given)

    def watched_make(*args: Any) -> Any:
        tables = make(*args)
        made.append(tables.keys)
        return tables

    monkeypatch.setattr(pages.PagedLayer, "attend", watched_attend)
    monkeypatch.setattr(attention, "paged", watched_paged)
    monkeypatch.setattr(step, "_make", watched_make)
    reset_stats()
    assert batching_case.generate(model, expected.prompts) == expected.tokens
    ran = stats("transformers")
    elsewhere = sum(pointer not in host_memory for pointer in read_in)
    # gemma2 has a layer of each kind: one of them copies, in chunks; a prefill's first chunk is read as it came.
    assert 0 < elsewhere == made.count(step.Keys.COPIED) + made.count(step.Keys.FRESH)
    assert ran["copied_pages"] == made.count(step.Keys.COPIED)
    assert made.count(step.Keys.PAGES) * 2 == len(made) == ran["attention"]
    assert made.count(step.Keys.RING) > 0


@pytest.mark.interpret
def test_the_kernel_takes_the_same_views(folders: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folders / "gpt_oss"
    expected = models.write("gpt_oss", folder)
    on_gpu, init = torch.cuda.is_available(), pages.PagedLayer.__init__
    model = plugin.enable(batching_case.load(folder).to("cuda" if on_gpu else "cpu"))
    monkeypatch.setattr(
        pages.PagedLayer, "__init__", lambda self, *args, **given: init(self, *args, **given, impl="triton")
    )
    # 34 and 17 tokens over a window of 24, in steps of 32: what has a window is read in all of its three ways.
    prompts, tokens = [expected.prompts[at] for at in (5, 4)], [expected.tokens[at] for at in (5, 4)]
    reset_stats()
    assert batching_case.generate(model, prompts) == tokens
    ran = stats("transformers")
    assert ran["attention.triton"] == ran["attention"] > 0
    assert on_gpu or ran["attention"] > 2 * ran["copied_pages"] > 0  # in a captured graph every window is copied


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_steps_padded_as_for_a_graph(kind: str, folders: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    folder = folders / kind
    expected, make = models.write(kind, folder), ModelRunner.__init__

    def padding(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    model, padded = plugin.enable(batching_case.load(folder)), []
    model.register_forward_pre_hook(
        lambda _, args, given: padded.append(given["input_ids"].shape[1] - int(given["cu_seq_lens_q"][-1])),
        with_kwargs=True,
    )
    sizes = {"q_padding_interval_size": 16, "kv_padding_interval_size": 64}
    assert batching_case.generate(model, expected.prompts, changes=sizes) == expected.tokens
    assert sum(rows > 0 for rows in padded) > len(padded) / 2


def test_a_pass_over_inputs_that_were_changed_in_place_makes_its_own_tables(
    enabled: Any, monkeypatch: pytest.MonkeyPatch
):
    model = enabled("llama")
    passes: list[dict[str, Any]] = []
    tables: list[Any] = []
    make = step._make
    watch = model.register_forward_pre_hook(lambda _, args, given: passes.append(given), with_kwargs=True)
    batching_case.generate(model, [list(range(1, 12))], page=4)
    watch.remove()
    monkeypatch.setattr(step, "_make", lambda *args: tables.append(make(*args)) or tables[-1])
    given = passes[-1]  # 30 tokens in 8 pages
    with torch.no_grad():
        model(**given)
        given["read_index"][0].copy_(given["read_index"][0].roll(-4))
        model(**given)  # as a captured pass follows its warm-up
    first, second = (each.batch.block_tables[0] for each in tables)
    assert len(first) == 8
    assert torch.equal(second[:-1], first[1:])


# --------------------------------------------------------------------------------------------- outside of those batches
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
def test_forward_and_generate_do_what_they_did(kind: str):
    model, x = foreign(kind), torch.randint(1, 64, (3, 9))
    mask = torch.ones_like(x)
    mask[0, :4] = 0

    def both() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            made = model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
            return model(x, attention_mask=mask).logits[:, 4:], model(x).logits, made

    stock, before = both(), model.config._attn_implementation
    plugin.enable(model)
    assert model.config._attn_implementation != before
    reset_stats()
    assert all(torch.equal(*pair) for pair in zip(both(), stock))
    assert stats("transformers") == {}
    plugin.disable(model)
    assert model.config._attn_implementation == before
    assert all(torch.equal(*pair) for pair in zip(both(), stock))


def test_only_this_object_changes(enabled: Any):
    other = foreign("llama")
    stock = other.config._attn_implementation
    model = enabled("llama")
    assert other.config._attn_implementation == stock
    assert plugin.enable(model) is model
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert plugin.disable(model) is model
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match="disable: this LlamaForCausalLM is not enabled"):
        plugin.disable(model)


def test_what_was_set_since_stays(enabled: Any):
    model = enabled("llama")
    model.set_attn_implementation("eager")
    plugin.disable(model)
    assert model.config._attn_implementation == "eager"


def test_a_forward_beside_a_running_batch(enabled: Any):
    model, x = enabled("llama"), torch.randint(1, 64, (2, 9))
    prompts = [torch.randint(1, 64, (length,)).tolist() for length in (20, 7, 13)]
    with torch.no_grad():
        alone, expected = model(x).logits, batching_case.generate(model, prompts)
    found: list[list[list[int]]] = []
    batch = threading.Thread(target=lambda: found.append(batching_case.generate(model, prompts)))
    batch.start()
    with torch.no_grad():
        beside = [model(x).logits for _ in range(20)]
    batch.join()
    assert found == [expected]
    assert all(torch.equal(each, alone) for each in beside)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_compiles_in_one_graph(enabled: Any, kind: str):
    model, x = enabled(kind), torch.randint(1, 64, (2, 9))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x).logits, model(x).logits)


# ------------------------------------------------------------------------------------------------------------- refusals
def _refused(model: Any, says: str) -> None:
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=says):
        plugin.enable(model)
    assert model.config._attn_implementation == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("kind", ["falcon", "bloom", "mpt", "gptj", "gpt_neo", "codegen", "xglm"])
def test_a_model_that_computes_attention_by_itself(kind: str):
    _refused(foreign(kind), r"never asks transformers' AttentionInterface.*\(what it has: \w+.*without enable")


def test_a_model_that_drops_what_batching_passes():
    _refused(foreign("stablelm"), r"layers \[0, 1\] of StableLmForCausalLM do not get what continuous batching passes")


def test_a_layer_that_never_reaches_the_kernel():
    model = foreign("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    _refused(model, r"layers \[1\] of LlamaForCausalLM do not get")


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("llama", {"head_dim": 264}, r"layer 0 of LlamaForCausalLM cannot be served: head size 264: .* up to 256"),
        ("llama4_text", {}, "layers of type chunked_attention"),
        ("bert", {}, "BertSelfAttention is not causal here"),
    ],
)
def test_what_pages_or_kernel_lack(kind: str, changes: dict[str, Any], says: str):
    _refused(foreign(kind, **changes), says)


def test_a_dtype_that_the_kernel_lacks():
    _refused(foreign("llama", torch.float64), r"torch\.float64: the kernel takes torch\.float16, .*; cast the model")


def test_keys_and_values_of_different_sizes(monkeypatch: pytest.MonkeyPatch):
    model = foreign("llama")
    values = torch.nn.Linear(32, 2 * 16, bias=False)
    layer = model.model.layers[0].self_attn
    monkeypatch.setattr(layer, "v_proj", values)
    function = attention._with_cache

    def wide(module: Any, query: Any, key: Any, value: Any, **given: Any) -> Any:
        value = value.reshape(1, 1, 2, -1).transpose(1, 2) if module is layer else value
        return function(module, query, key, value, **given)

    monkeypatch.setattr(attention, "_with_cache", wide)
    _refused(model, "layer 0 of LlamaForCausalLM has keys of size 8 and values of size 16")


def test_no_model():
    with pytest.raises(ValueError, match="got a Linear: expected a transformers model that generates"):
        plugin.enable(torch.nn.Linear(2, 2))


def test_a_manager_that_is_kept(enabled: Any):
    model = enabled("llama")
    batching_case.generate(model, [[1, 2, 3]], page=4, persistent_manager=True)
    with pytest.raises(ValueError, match=r"call model\.destroy_cached_continuous_batching_manager"):
        plugin.disable(model)
    model.destroy_cached_continuous_batching_manager()
    plugin.disable(model)


# --------------------------------------------------------------------------------------------------- the host's version
def test_a_missing_host(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(hosts.metadata, "version", missing)
    with pytest.raises(UnsupportedHost, match=r"transformers is not installed: pip install transformers==5\.23\.0 \("):
        plugin.enable(foreign("llama"))


def test_a_version_that_lacks_what_this_rests_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(hosts.Host, "version", lambda self: "4.57.0")
    monkeypatch.setattr(hosts.Host, "folder", lambda self: tmp_path / "transformers")
    says = (
        r"transformers 4\.57\.0 is not what .* has no PagedAttentionCache.*tested: 5\.23\.0, 5\.22\.2, 5\.19\.0, 5\.17"
    )
    model = foreign("llama")
    with pytest.raises(UnsupportedHost, match=says):
        plugin.enable(model)
    assert model.config._attn_implementation == foreign("llama").config._attn_implementation


@pytest.mark.skipif(UNTIL_5_17, reason="5.17 is served by its name, not by the contract")
def test_a_version_that_nobody_tried(monkeypatch: pytest.MonkeyPatch):
    assert differences(read(plugin.HOST.folder().parent, plugin.CONTRACT), plugin.CONTRACT) == []
    monkeypatch.setattr(hosts.Host, "version", lambda self: "5.99.0")
    with pytest.warns(UserWarning, match=r"transformers 5\.99\.0 was not tested with shardfuse"):
        plugin.enable(foreign("llama"))


# --------------------------------------------------------------------------------------------------- transformers serve
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat"], "usage: python -m shardfuse.integrations.transformers serve"),
        (["serve", "model"], "add --continuous-batching"),
    ],
)
def test_the_command_refuses(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert command.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_the_command_without_a_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(hosts.Host, "version", lambda self: "4.57.0")
    monkeypatch.setattr(hosts.Host, "folder", lambda self: Path("nowhere"))
    assert command.main(["serve", "--continuous-batching"]) == 2
    assert "transformers 4.57.0 is not what this plug-in was written for" in capsys.readouterr().err


def test_the_command_enables_what_it_loads(monkeypatch: pytest.MonkeyPatch):
    from transformers.cli.serving import model_manager

    class Stock:
        def _load_model(self, name: str, **_: Any) -> Any:
            return foreign(name)

    monkeypatch.setattr(model_manager, "ModelManager", Stock)
    command.enable_loaded_models()
    command.enable_loaded_models()
    model = model_manager.ModelManager()._load_model("llama", tqdm_class=None)
    assert model.config._attn_implementation.removeprefix("paged|") == attention.NAMES["sdpa"]
    plugin.disable(model)
    with pytest.raises(ValueError, match="BloomForCausalLM never asks"):
        model_manager.ModelManager()._load_model("bloom")
