"""Small models of transformers with tokens that vary, and what greedy decoding makes of a few prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from foreign import OWN, sizes_of

NEW_TOKENS = 8
VOCABULARY = 97
MARGIN = 1e-3  # between the best two logits, as a share of their deviation: rounding must not decide
_DRAWS = 60
_LENGTHS = (26, 3, 21, 1, 12)  # over blocks of 4 and steps of 8: chunks beside decodes; the long ones begin alike
_SHARED = 13

_PLAIN = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
# What the architecture's own defaults would not show at this size.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 5},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neo": {"window_size": 4},
    "phi3": {"sliding_window": 5},
    "codegen": {"n_ctx": 64},
}

_EXPERTS = ("gpt_oss", "mixtral", "deepseek_v3")


class Expected(NamedTuple):
    """What a model makes of the prompts, each by itself."""

    seed: int
    prompts: list[list[int]]
    tokens: list[list[int]]


def build(kind: str, seed: int, **changes: Any) -> Any:
    """A small causal language model of ``kind`` in fp32, whose every parameter is drawn from ``seed``."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    own = {**OWN.get(kind, {}), **_PLAIN, **CHANGES.get(kind, {}), **changes}
    options: dict[str, Any] = {"attn_implementation": own.pop("attn_implementation", "eager")}
    options |= {"experts_implementation": "eager"} if kind in _EXPERTS else {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(sizes_of(CONFIG_MAPPING[kind], **own), dtype=torch.float32, **options)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():  # norms and biases start as constants, which would hide mistakes
            param.add_(torch.randn(param.shape, generator=drawn) * 0.3)
    model.generation_config.eos_token_id = None  # answers have one length
    return model.eval()


def prompts() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCABULARY, (_SHARED,), generator=drawn).tolist()
    own = [torch.randint(3, VOCABULARY, (length,), generator=drawn).tolist() for length in _LENGTHS]
    return [shared + each[_SHARED:] if len(each) > _SHARED else each for each in own]


_EXPECTED: dict[str, Expected] = {}


def expected(kind: str, **changes: Any) -> Expected:
    """Of the first draw whose tokens vary and are no matter of rounding."""
    key = f"{kind} {changes}"
    if key not in _EXPECTED:
        _EXPECTED[key] = _draw(kind, changes)
    return _EXPECTED[key]


def _draw(kind: str, changes: dict[str, Any]) -> Expected:
    for seed in range(_DRAWS):
        model = build(kind, seed, **changes)
        answers = [_answer(model, prompt) for prompt in prompts()]
        if None not in answers and sum(len(set(a)) for a in answers if a) > 0.5 * NEW_TOKENS * len(answers):
            return Expected(seed, prompts(), answers)  # type: ignore[arg-type]
    raise RuntimeError(f"{kind}: none of {_DRAWS} random models decides for varied tokens")


@torch.no_grad()
def _answer(model: Any, prompt: list[int]) -> list[int] | None:
    """Greedily, by transformers' own ``generate``; None where two logits come close."""
    made = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.cat(made.logits).double()
    best = logits.topk(2).values
    if ((best[:, 0] - best[:, 1]) < MARGIN * logits.std()).any():
        return None
    answer: list[int] = made.sequences[0, len(prompt) :].tolist()
    return answer
