"""Small random models under the names that vLLM's tests ask for, in a cache of the model hub's layout.

Each has the architecture of the model that it is named after, and a tokenizer that is trained on the tests' own texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REVISION = "0" * 40
VOCABULARY = 8192  # tests name tokens up to 5000
END = "<|im_end|>"
BEGIN = "<|endoftext|>"
BEGUN = ("mistral", "opt")  # whose tokenizers put BEGIN before a text
SPECIAL = (BEGIN, "<|im_start|>", END)
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # shown in texts, as those of Qwen
MOST_NEW = 200  # of an answer whose request names no limit: a random model hardly ever ends one
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>\n"
    """{"name": {{ call['function']['name'] | tojson }}, "arguments": {{ call['function']['arguments'] | tojson }}}"""
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "tie_word_embeddings": False}
OPT = {
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
# By name: the type of transformers' configuration, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "HuggingFaceH4/zephyr-7b-beta": ("mistral", {**LLAMA, "sliding_window": 4096}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", LLAMA),
    "HuggingFaceTB/SmolVLM-256M-Instruct": ("llama", LLAMA),  # the part that reads text
    "NousResearch/Hermes-3-Llama-3.1-8B": ("llama", LLAMA),
    "Qwen/Qwen2-1.5B-Instruct": ("qwen2", LLAMA),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", LLAMA),
    "Qwen/Qwen3-0.6B": ("qwen3", LLAMA),
    "Team-ACE/ToolACE-8B": ("llama", LLAMA),
    "facebook/opt-125m": ("opt", OPT),
    "ibm-granite/granite-3.0-8b-instruct": ("granite", LLAMA),
    "ibm-granite/granite-3.1-8b-instruct": ("granite", LLAMA),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", LLAMA),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", LLAMA),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama", LLAMA),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", LLAMA),
    "openai-community/gpt2": ("gpt2", GPT2),
}
# What tests download, and no server here loads: empty folders.
EMPTY = (
    "Jackmin108/Qwen3-0.6B-Meow-LoRA",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA",
    "charent/self_cognition_Alice",
    "ibm-granite/granite-4.0-h-tiny",
    "internlm/internlm2_5-7b-chat",
    "typeof/zephyr-7b-beta-lora",
)


def folder_of(cache: Path, name: str) -> Path:
    """Where the model ``name`` lies in a cache of the hub."""
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / REVISION


def write_cache(cache: Path, texts: Iterable[str]) -> None:
    """Write every model into ``cache``, with a tokenizer that is trained on ``texts``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(texts)
    for name in (*MODELS, *EMPTY):
        folder = folder_of(cache, name)
        folder.mkdir(parents=True)
        (refs := folder.parents[1] / "refs").mkdir()
        (refs / "main").write_text(REVISION)
    for name, (kind, sizes) in MODELS.items():
        _write(folder_of(cache, name), kind, sizes, tokenizer)


def _tokenizer(texts: Iterable[str]) -> Any:
    """BPE over bytes of VOCABULARY tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    size = VOCABULARY - len(SPECIAL) - len(ADDED)
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False))
    if made.get_vocab_size() != size:
        raise ValueError(f"the texts give {made.get_vocab_size()} tokens: expected enough of them for {size}")
    made.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    made.add_tokens([AddedToken(each, special=False) for each in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BEGIN, eos_token=END, pad_token=BEGIN)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _write(folder: Path, kind: str, sizes: dict[str, Any], tokenizer: Any) -> None:
    import torch
    from tokenizers.processors import ByteLevel, TemplateProcessing
    from transformers import AutoConfig, AutoModelForCausalLM

    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = (
        TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
        if kind in BEGUN
        else ByteLevel(trim_offsets=False)
    )
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": begin}
    config = AutoConfig.for_model(kind, **sizes, vocab_size=VOCABULARY, **ids)
    # Large: with small weights a model repeats its last token.
    setattr(config, "init_std" if kind == "opt" else "initializer_range", 0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Greedy where a request is silent, so that each run has the same outcome.
    defaults = {"eos_token_id": end, "max_new_tokens": MOST_NEW, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(defaults) + "\n")
