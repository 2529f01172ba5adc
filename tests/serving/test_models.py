"""Which models the engine serves: transformers' own tokens from each, an untouched model, and what is refused.

``served_case.py`` draws models whose tokens vary and are no matter of rounding, so tokens must be equal.
"""

from __future__ import annotations

import re
import sys
import textwrap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfuse import fuse, init_mesh
from shardfuse.layers.attention.paged import PagedBatch
from shardfuse.layers.fuse import Fused
from shardfuse.serving import Engine, Request
from shardfuse.serving.models import ServableModel, as_servable

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
import served_case
import served_scan
from foreign import ARCHITECTURES
from served_case import NEW_TOKENS, VOCABULARY, Expected, build, expected

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-alibi": (
        "falcon",
        {"attn_implementation": "sdpa", "alibi": True, "num_attention_heads": 6, "hidden_size": 48},
    ),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-every-head": ("falcon", {"multi_query": False}),
    "bloom-6-heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt-6-heads": ("mpt", {"n_heads": 6, "d_model": 48, "attn_config": {"clip_qkv": 0.5, "alibi_bias_max": 4}}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "deepseek_v3": (  # whose keys and values differ in size
        "deepseek_v3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "opt-projected": ("opt", {"word_embed_proj_dim": 16}),
}


def _case(name: str) -> tuple[str, dict[str, Any], Expected]:
    kind, changes = VARIANTS.get(name, (name, {}))
    return kind, changes, expected(kind, **changes)


def _model(name: str, fused: bool = False) -> tuple[Any, Expected]:
    kind, changes, want = _case(name)
    model = build(kind, want.seed, **changes)
    return (fuse(model) if fused else model), want


def _requests(want: Expected, ignore_eos: bool = True) -> list[Request]:
    return [Request(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=ignore_eos) for prompt in want.prompts]


def _engine(model: Any, **options: Any) -> Engine:
    """Small blocks, and steps that cut the prompts and mix chunks with decodes."""
    sizes = {"num_blocks": 48, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    return Engine(model, **{**sizes, **options})


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """Every call that reaches the engine's attention: the layer and what it asks for."""
    calls: list[tuple[int, dict[str, Any]]] = []
    attend = PagedBatch.attend

    def watched(self: Any, layer_index: int, *args: Any, **options: Any) -> Any:
        calls.append((layer_index, options))
        return attend(self, layer_index, *args, **options)

    monkeypatch.setattr(PagedBatch, "attend", watched)
    return calls


def _insides(model: nn.Module) -> dict[str, Any]:
    """Everything that a pass could leave behind: classes, attributes, what configurations ask for."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = type(module), {name: id(value) for name, value in vars(module).items()}
        config = vars(module).get("config")
        if config is not None:
            found[f"{path}.config"] = {name: repr(value) for name, value in vars(config).items()}
    return found


# --- equal tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        *(pytest.param(name, False, id=f"{name}-stock") for name in (*ARCHITECTURES, *served_scan.OWN, *VARIANTS)),
        *(pytest.param(name, True, id=f"{name}-fused") for name in (*ARCHITECTURES, *served_scan.OWN)),
        *(pytest.param(name, True, id=f"{name}-fused", marks=pytest.mark.nightly) for name in VARIANTS),
    ],
)
def test_tokens_equal_those_of_generate(name: str, fused: bool, attended: list[tuple[int, dict[str, Any]]]) -> None:
    model, want = _model(name, fused)
    assert any(isinstance(module, Fused) for module in model.modules()) == fused
    ends = {want.tokens[0][2], want.tokens[3][4]}
    model.generation_config.eos_token_id = sorted(ends)
    inside = _insides(model)
    engine = _engine(model)
    attended.clear()  # the engine's first look
    assert engine.generate(_requests(want)) == want.tokens
    assert engine.stats.peak_seqs == 3
    assert engine.stats.steps > max(map(len, want.prompts)) / 8 + NEW_TOKENS  # prompts in chunks, beside decodes
    before = engine.stats.shared_tokens
    ended = [
        each[: 1 + min((i for i, token in enumerate(each) if token in ends), default=len(each))] for each in want.tokens
    ]
    assert engine.generate(_requests(want, ignore_eos=False)) == ended != want.tokens
    assert engine.stats.shared_tokens > before + 12  # of what the first time left in the cache
    assert [layer for layer, _ in attended] == [0, 1] * engine.stats.steps
    assert _insides(model) == inside


def test_windows_soft_caps_sinks_and_slopes_reach_the_kernel(attended: list[tuple[int, dict[str, Any]]]) -> None:
    def asked(name: str) -> list[dict[str, Any]]:
        model, want = _model(name)
        engine = _engine(model)
        attended.clear()
        engine.generate(_requests(want)[:1])
        return [options for _, options in attended[:2]]

    assert [each["window"] for each in asked("gpt_neo")] == [None, 4]
    assert {each["softcap"] for each in asked("gemma2")} == {1.0}
    assert {each["window"] for each in asked("gemma2")} == {4, None}
    assert {each["window"] for each in asked("mistral")} == {4}
    assert {each["window"] for each in asked("llama")} == {None}
    assert all(each["sinks"].shape == (4,) for each in asked("gpt_oss"))
    slopes = asked("bloom")[0]["alibi_slopes"]
    torch.testing.assert_close(slopes, torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))


def test_keys_and_values_of_two_sizes() -> None:
    config = as_servable(_model("deepseek_v3")[0]).config
    assert (config.num_kv_heads, config.head_dim, config.v_head_dim) == (4, 12, 6)


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon"])
def test_models_that_attend_with_sdpa(name: str) -> None:
    kind, changes, want = _case(name)
    model = build(kind, want.seed, **changes)
    model.set_attn_implementation("sdpa")
    inside = _insides(model)
    assert _engine(model).generate(_requests(want)) == want.tokens
    assert _insides(model) == inside


@pytest.mark.parametrize("name", ["llama", "bloom", "mixtral", "gpt_oss"])
def test_a_model_in_bf16_is_served(name: str) -> None:
    model, want = _model(name, fused=True)
    engine = _engine(model.bfloat16())
    assert engine._runner.cache is not None
    assert engine._runner.cache.data.dtype == torch.bfloat16
    assert [len(answer) for answer in engine.generate(_requests(want))] == [NEW_TOKENS] * 5


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bloom"])
def test_the_kernels_take_what_a_model_gives(name: str) -> None:
    """Views of its projections, in blocks of four: windows and soft-caps, sinks, slopes."""
    model, want = _model(name)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    engine = _engine(model, impl="triton")
    request = Request(want.prompts[4], max_new_tokens=3)
    assert engine.generate([request]) == [want.tokens[4][:3]]


def test_frequencies_that_follow_the_length_end_where_they_would_change() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 1.6}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    changes: dict[str, Any] = {"rope_parameters": rope, "original_max_position_embeddings": 40}
    want = expected("phi3", **changes)
    model = build("phi3", want.seed, **changes)
    with pytest.raises(ValueError, match="max_model_len=41: expected 2 to 40"):
        _engine(model, max_model_len=41)
    assert _engine(model).generate(_requests(want)) == want.tokens
    dynamic = build("llama", 0, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    assert as_servable(dynamic).config.max_positions == 64


def test_other_weights_in_the_same_model() -> None:
    model, want = _model("gptj")
    engine = _engine(build("gptj", want.seed + 1))
    assert engine.generate(_requests(want)) != want.tokens
    engine.update_weights(model.state_dict())
    assert engine.generate(_requests(want)) == want.tokens


# --- the model outside of the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *[("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager")],
        *[("falcon", "sdpa"), ("falcon", "eager"), ("bloom", "eager"), ("gptj", "eager"), ("mpt", "eager")],
    ],
)
def test_another_thread_runs_the_same_model_in_the_middle_of_a_step(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, want = _model(name, fused=name == "llama")
    model.set_attn_implementation(attention)
    text = torch.tensor([want.prompts[0]])
    stock, inside = _logits(model, text), _insides(model)
    engine = _engine(model)
    attend, seen = PagedBatch.attend, list[Any]()

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(_logits(model, text)))
        thread.start()
        thread.join()
        return attend(self, *args, **options)

    monkeypatch.setattr(PagedBatch, "attend", interrupted)
    assert engine.generate(_requests(want)[:1]) == want.tokens[:1]
    assert len(seen) == 2 * engine.stats.steps
    for logits in seen:
        torch.testing.assert_close(logits, stock, rtol=0, atol=0)
    assert _insides(model) == inside


@torch.no_grad()
def _logits(model: Any, text: torch.Tensor) -> torch.Tensor:
    return model(input_ids=text, use_cache=False).logits


def test_engines_over_several_models_and_twice_over_one() -> None:
    (llama, want), (bloom, other) = _model("llama"), _model("bloom", fused=True)
    engines = [_engine(llama), _engine(bloom), _engine(llama)]
    wanted = [want.tokens, other.tokens, want.tokens]
    found: list[dict[int, list[int]]] = [{}, {}, {}]
    for engine, each in zip(engines, (want, other, want)):
        for request in _requests(each):
            engine.add(request)
    while any(engine.busy for engine in engines):
        for engine, answers in zip(engines, found):
            for event in engine.step():
                answers.setdefault(event.request, []).append(event.token)
    assert [list(answers.values()) for answers in found] == wanted


@pytest.mark.parametrize("name", ["llama", "mpt"])
def test_a_step_that_fails_leaves_the_model_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, want = _model(name)
    inside, engine = _insides(model), _engine(model)

    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no attention")

    with monkeypatch.context() as patch:
        patch.setattr(PagedBatch, "attend", fails)
        with pytest.raises(RuntimeError, match="no attention"):
            engine.generate(_requests(want)[:1])
    assert _insides(model) == inside
    assert engine.generate(_requests(want)) == want.tokens


def test_layers_that_change_under_an_engine_are_noticed() -> None:
    model, want = _model("llama")
    engine = _engine(model)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(RuntimeError, match="1 of 2 layers attended in this step: make a new engine"):
        engine.generate(_requests(want)[:1])
    model, want = _model("llama")
    engine = _engine(model)
    model.model.layers = model.model.layers[::-1]
    with pytest.raises(RuntimeError, match="call 0 of this step came from a LlamaAttention where the engine saw anoth"):
        engine.generate(_requests(want)[:1])


# --- refusals ---------------------------------------------------------------------------------------------------------


def _without_attention() -> Any:
    model = build("llama", 0)

    class Skips(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states.tanh(), None

    model.model.layers[1].self_attn = Skips()
    return model


def _unequal_heads() -> Any:
    model = build("llama", 0)
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (nn.Linear(32, 32, bias=False) for _ in range(2))
    attention.num_key_value_groups = 1
    return model


def _mixing() -> Any:
    model = build("llama", 0)

    class Mixes(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.cumsum(1)

    model.model.layers[0].mlp.__class__ = Mixes
    return model


_METHODS = ("_reshape", "_merge_heads")


def _spelled_out() -> Any:
    """A forward of its own, whose class the engine does not know."""
    model = build("bloom", 0)
    for block in model.transformer.h:
        stock = vars(type(block.self_attention))
        attention = type("Attention", (nn.Module,), {name: stock[name] for name in ("forward", *_METHODS)})
        block.self_attention.__class__ = attention
    return model


def _tiny(name: str, **sizes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=32, **sizes)
    head = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    return getattr(transformers, f"{name}{head}")(config).eval()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(lambda: build("llama", 0).train(), r"in training mode.*call model.eval\(\) first", id="training"),
        pytest.param(lambda: build("llama", 0).model, "no language-model head; load it with AutoModel", id="no-head"),
        pytest.param(
            lambda: _tiny("T5", d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8), "has an encoder", id="encoder"
        ),
        pytest.param(
            lambda: _tiny("Mamba", hidden_size=16, num_hidden_layers=1, state_size=4), "cannot be served", id="state"
        ),
        pytest.param(
            lambda: _tiny("FalconH1", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                          num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
            "cannot be served", id="state-beside-attention",
        ),
        pytest.param(lambda: build("llama", 0, is_causal=False), "its attention is not causal", id="both-ways"),
        pytest.param(
            lambda: _tiny("Lfm2", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                          num_key_value_heads=2, layer_types=["conv", "full_attention"]),
            "layers of type conv: the engine's pages hold", id="convolutions",
        ),
        pytest.param(
            lambda: build("llama", 0, num_kv_shared_layers=1), "1 of its layers read the keys of", id="shared-keys"
        ),
        pytest.param(_without_attention, "1 of 2 layers reached the engine's attention; expected all", id="one-layer"),
        pytest.param(_spelled_out, r"0 of 2 layers reached.*\(it has: Attention\); use model.generate", id="unknown"),
        pytest.param(
            _unequal_heads, "layer 0 caches 2 KV heads of size 8 in torch.float32 and layer 1 4 KV heads", id="heads"
        ),
        pytest.param(
            lambda: build("falcon", 0, alibi=True), "adds ALiBi twice: load it with attn_imp", id="alibi-added-twice"
        ),
        pytest.param(
            lambda: _mixing().bfloat16(), r"comes to other logits.*is expected in torch.bfloat16", id="mixes-in-bf16"
        ),
        pytest.param(_mixing, "comes to other logits than its own forward: they differ by", id="mixes-tokens"),
        pytest.param(
            lambda: build("llama", 0).to("meta"), "on the meta device: load its weights first", id="meta"
        ),
    ],
)  # fmt: skip
def test_what_is_refused(model: Callable[[], Any], message: str) -> None:
    refused = model()
    inside = _insides(refused)
    with pytest.raises(ValueError, match=message):
        _engine(refused)
    assert _insides(refused) == inside


def test_a_mask_that_is_not_causal_is_refused() -> None:
    """Chunks look like windows near a query, and are not."""
    model = build("llama", 0)
    masks = sys.modules[type(model.model).__module__]
    from transformers.masking_utils import create_chunked_causal_mask

    model.config.attention_chunk_size = 4

    def forward(self: Any, **given: Any) -> Any:
        stock = masks.create_causal_mask  # type: ignore[attr-defined]
        masks.create_causal_mask = create_chunked_causal_mask  # type: ignore[attr-defined]
        try:
            return type(self).forward(self, **given)
        finally:
            masks.create_causal_mask = stock  # type: ignore[attr-defined]

    model.model.forward = forward.__get__(model.model)
    with pytest.raises(ValueError, match="its attention is not causal, with or without a sliding window"):
        _engine(model)


# --- a model of one's own ---------------------------------------------------------------------------------------------


def _example() -> str:
    """The code in the docstring of the protocol."""
    found = re.search(r"A complete example::\n\n(.*?)\n\s*$", ServableModel.__doc__ or "", re.DOTALL)
    assert found is not None
    return textwrap.dedent(found[1])


class _Dense:
    """A cache for one whole sequence."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.logit_indices = torch.arange(len(tokens))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@torch.no_grad()
def _alone(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        row = torch.tensor(tokens)
        logits = model(row, positions=torch.arange(len(tokens)), cache=_Dense(row))[-1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-5
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_the_example_of_the_protocol() -> None:
    torch.manual_seed(1)
    source = _example()
    given = {"nn": nn, "torch": torch, "SimpleNamespace": SimpleNamespace, "Engine": Engine, "PagedBatch": PagedBatch}
    exec(compile("from __future__ import annotations\n" + source, "docstring", "exec"), given)
    assert len([line for line in source.splitlines() if line.strip()]) <= 23
    model = given["Decoder"]().double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.5)
    prompts = [[token % 64 for token in prompt] for prompt in served_case.prompts()]
    answers = [_alone(model, prompt) for prompt in prompts]
    assert len({token for answer in answers for token in answer}) > 10
    engine = _engine(model)
    assert engine.generate([Request(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]) == answers
    assert given["engine"].generate([Request([1, 2], max_new_tokens=2)])


class _Own(nn.Module):
    """A layer or two, with what a test makes wrong."""

    def __init__(self, indices: tuple[int, ...] = (0, 1), heads: int = 2, every: bool = False, **config: Any) -> None:
        super().__init__()
        sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_positions": 64}
        self.config = SimpleNamespace(**{**sizes, **config})
        self.indices, self.heads, self.every = indices, heads, every
        self.embed = nn.Embedding(VOCABULARY, 16)

    def forward(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
        x = self.embed(tokens)
        for index in self.indices:
            each = x.unflatten(-1, (self.heads, -1))
            x = x + cache.attend(index, each, each, each).flatten(1)
        return (x if self.every else x[cache.logit_indices]) @ self.embed.weight.mT


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: _Own((0,)), r"layer_index \[0\]: expected each of 0 to 1 once, as config.num_layers says"),
        (lambda: _Own((0, 0)), r"layer_index \[0, 0\]: expected each of 0 to 1 once"),
        (lambda: _Own(heads=1), "caches 1 KV heads of sizes 16 and 16 on this rank: expected 2 of 8 and 8"),
        (lambda: _Own(v_head_dim=4), "expected 2 of 8 and 4, as its config says"),
        (lambda: _Own(every=True), r"returned logits \[3, 97\] for one wanted token.*select x\[cache.logit_indices\]"),
    ],
    ids=["a-layer-does-not-attend", "twice-the-same", "other-heads", "other-values", "every-logit"],
)
def test_a_module_that_does_not_follow_the_protocol(model: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _engine(model())


def test_a_module_of_ranks_says_both_things_or_none() -> None:
    assert as_servable(_Own()).group.size == 1
    model: Any = _Own()
    model.group = as_servable(model).group
    with pytest.raises(TypeError, match="_Own, which has no gather_logits: expected a ParallelTransformer"):
        _engine(model)


# --- over ranks -------------------------------------------------------------------------------------------------------


def _serve_on_rank(rank: int, world: int, name: str) -> tuple[list[list[list[int]]], int]:
    kind, changes = VARIANTS.get(name, (name, {}))
    want = _case(name)[2]
    model = fuse(build(kind, want.seed, **changes), init_mesh(tp=world, device_type="cpu"))
    engine = _engine(model)
    cache = engine._runner.cache
    assert cache is not None
    answers = []
    if rank == 0:
        answers = [engine.generate(_requests(want)) for _ in range(2)]
        engine.dismiss()
    else:
        engine.follow()
    return answers, cache.data.shape[2]


_OVER_RANKS = {"llama": 1, "gpt2": 2, "bloom": 2, "gptj": 2}
_OVER_RANKS_TOO = {
    **dict.fromkeys(("mistral", "qwen3", "gemma2", "phi3", "olmo2", "cohere", "stablelm", "gpt_oss", "mixtral"), 1),
    **dict.fromkeys(("gpt_neox", "opt", "mpt"), 2),
    "falcon": 1,  # whose one KV head keeps attention whole on every rank
    **{"falcon-grouped": 1, "falcon-every-head": 2, "llama-one-kv-head": 1},
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [
        *_OVER_RANKS.items(),
        *(pytest.param(name, heads, marks=pytest.mark.nightly) for name, heads in _OVER_RANKS_TOO.items()),
    ],
)
def test_a_model_that_fuse_split_is_served_over_ranks(ranks: Any, name: str, kv_heads: int) -> None:
    (answers, held), (none, held_too) = ranks(2, _serve_on_rank, name)
    assert answers == [_case(name)[2].tokens] * 2
    assert (none, held, held_too) == ([], kv_heads, kv_heads)


# --- what the documentation says --------------------------------------------------------------------------------------


def test_the_table_is_the_engines() -> None:
    assert served_scan.page() == served_scan.PAGE.read_text(), "run python tests/support/served_scan.py --page"
