"""Write small seeded models as folders that any server loads, each with prompts and the tokens of greedy decoding.

A folder holds the configuration, weights in safetensors, a tokenizer whose token i is the word ``t<i>``, so that text
identifies tokens exactly, and ``conformance.json``: prompts and expected tokens, from transformers' ``generate`` in
fp32 with eager attention. Prompts differ in length and some share a prefix. A model whose best two logits are closer
than :data:`MARGIN` anywhere is drawn again, because rounding must not decide between tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

EXPECTED = "conformance.json"
VOCABULARY = 384
NEW_TOKENS = 20
SHARED = 130  # tokens shared by the longer prompts: more than a block of any usual size
LENGTHS = (133, 141, 160, 3, 17, 34, 97, 1)
MARGIN = 2e-3
_DRAWS = 40
_UNKNOWN = "t0"

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 160),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout"), 0.0),
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "num_local_experts": 4, "expansion_ratio": 2,
    "rotary_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip

# The distinctive settings of each architecture that its defaults would not show at this size.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 24, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 24}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "starcoder2": ("starcoder2", {}),
    "granite": ("granite", {"attention_multiplier": 0.2}),
    "stablelm": ("stablelm", {}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "llama-head80": ("llama", {"head_dim": 80}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
}


class Expected(NamedTuple):
    """The expected tokens of a folder's prompts."""

    prompts: list[list[int]]
    tokens: list[list[int]]  # NEW_TOKENS tokens for each prompt
    margin: float  # the smallest distance between the best two logits
    distinct: float  # the mean share of distinct tokens in an answer


def write(kind: str, folder: Path) -> Expected:
    """Write the folder of an architecture, one of :data:`ARCHITECTURES`, if it is missing; return its expected tokens.

    Raises ValueError for an unknown architecture, and ImportError without transformers.
    """
    if kind not in ARCHITECTURES:
        raise ValueError(f"no architecture {kind!r}: there are {', '.join(ARCHITECTURES)}")
    if (folder / EXPECTED).is_file():
        return read(folder)
    prompts = _prompts()
    for seed in range(_DRAWS):
        model = _model(kind, seed)
        expected = _expect(model, prompts)
        if expected.margin > MARGIN and expected.distinct > 0.3:
            break
    else:
        raise RuntimeError(f"{kind}: none of {_DRAWS} random models decides for its tokens; please report this")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / EXPECTED).write_text(json.dumps(expected._asdict()))  # written last: it marks the folder as complete
    return expected


def read(folder: Path) -> Expected:
    """The expected tokens that :func:`write` recorded. ValueError for a folder that it did not write."""
    path = folder / EXPECTED
    if not path.is_file():
        raise ValueError(f"{folder} has no {EXPECTED}: `shardfuse conformance models` writes such folders")
    return Expected(**json.loads(path.read_text()))


def be_quiet() -> None:
    """Silence transformers' progress bars and warnings in this process, for programs with their own reports."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return " ".join(f"t{token}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """The tokens of a text from such a model. ValueError for any other text."""
    words = text.split()
    if not all(word[:1] == "t" and word[1:].isdigit() for word in words):
        raise ValueError(f"expected words like t12 and got {text[:80]!r}: is this model's own tokenizer in use?")
    return [int(word[1:]) for word in words]


def _prompts() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    shared = torch.randint(1, VOCABULARY, (SHARED,), generator=drawn).tolist()
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=drawn).tolist() for length in LENGTHS]
    return [shared + prompt[SHARED:] if len(prompt) > SHARED else prompt for prompt in prompts]


def _model(kind: str, seed: int) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, own = ARCHITECTURES[kind]
    default = CONFIG_MAPPING[family]()
    sizes = {name: size for name, size in _SIZES.items() if hasattr(default, name)} | own
    options = {"attn_implementation": "eager"}  # eager: SDPA has no soft-cap and would omit Gemma 2's
    options |= {"experts_implementation": "eager"} if family == "gpt_oss" else {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**sizes), dtype=torch.float32, trust_remote_code=False, **options
    )
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():  # norms and biases start constant, which would hide errors
            param.add_(torch.randn(param.shape, generator=drawn) * 0.1)
        if sizes["tie_word_embeddings"]:  # else tied embeddings would repeat the last token
            norms = ("norm.weight", "ln_f.weight")
            last = [param for name, param in model.named_parameters() if name.endswith(norms)][-1]
            last.add_(torch.randn(last.shape, generator=drawn) - 1.0)
    return model.eval()


@torch.no_grad()
def _expect(model: Any, prompts: list[list[int]]) -> Expected:
    tokens, margin, distinct = [], float("inf"), 0.0
    for prompt in prompts:
        made = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.cat(made.logits).float().topk(2).values
        margin = min(margin, (best[:, 0] - best[:, 1]).min().item())
        tokens.append(made.sequences[0, len(prompt) :].tolist())
        distinct += len(set(tokens[-1])) / NEW_TOKENS / len(prompts)
    return Expected(prompts, tokens, margin, distinct)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token=_UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # A chat is the text of its messages: so that both kinds of requests ask for the same tokens.
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    # A chat is the text of its messages: so that both kinds of requests ask for the same tokens.
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=_UNKNOWN, chat_template=template)
