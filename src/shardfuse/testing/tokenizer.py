"""A tokenizer of bytes: a text's ids are its UTF-8 bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..layers.hf.tokenizers import byte_tokenizer, save_byte_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = {"bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>", "turn": "<|turn|>"}  # the ids from 256 on
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
# The chat template: tools, calls and their results in the format of Hermes and Qwen; otherwise role and text alone.
_CHAT = (
    "{% if tools %}<|turn|>tools:{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n' }}<tool_call>\n"
    """{"name": {{ call['function']['name'] | tojson }}, "arguments": {{ call['function']['arguments'] | tojson }}}"""
    "\n</tool_call>{% endfor %}{% endfor %}<|turn|>"
)


def tiny_tokenizer() -> Tokenizer:
    """A ``tokenizers.Tokenizer`` of VOCAB_SIZE tokens: the id of a byte is its value, SPECIAL_TOKENS follow.

    ``encode(text).ids == list(text.encode())`` for a text without special tokens, and ``decode`` is its inverse.
    Raises ImportError without the package tokenizers.
    """
    return byte_tokenizer(tuple(SPECIAL_TOKENS.values()))


def save_tokenizer(folder: Path) -> None:
    """Write :func:`tiny_tokenizer` so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
    named = {f"{name}_token": SPECIAL_TOKENS[name] for name in ("bos", "eos", "pad")}
    save_byte_tokenizer(folder, tuple(SPECIAL_TOKENS.values()), chat_template=_CHAT, **named)
