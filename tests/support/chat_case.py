"""Chat templates of the usual kinds, in the special tokens of shardfuse.testing.tokenizer, and tokenizers with them."""

from __future__ import annotations

import re
from typing import Any

from shardfuse.testing.tokenizer import SPECIAL_TOKENS, tiny_tokenizer

MARKED = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|eos|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|eos|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
CHATML = re.sub(r"{% (end)?generation %}", "", MARKED)
DEFAULT_SYSTEM = (  # as SmolLM2's
    "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}<|turn|>system: Help.{% endif %}"
    "{{ '<|turn|>' + m.role + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% set content = '<|turn|>' + m.role + '\n\n' + m.content | trim + '<|eos|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not\nsupported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<|turn|>' + role + '\n' + m.content | trim + '<|eos|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"
)
MISTRAL = (  # no prompt for an answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
REASONING = (  # as Qwen3's, without the reasoning of answers before the last question
    "{% set last = namespace(question=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < last.question %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|turn|>' + m.role + '\n' }}{{ content + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{{ '<image>' if 'image' in part else part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def wrapped(tokenizer: Any = None, template: Any = None, **named: Any) -> Any:
    """transformers' tokenizer around ``tokenizer`` (of bytes by default), with a chat template."""
    from transformers import PreTrainedTokenizerFast

    if tokenizer is None:
        tokenizer, named = tiny_tokenizer(), {f"{n}_token": SPECIAL_TOKENS[n] for n in ("bos", "eos")} | named
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    made.chat_template = template
    return made


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}
