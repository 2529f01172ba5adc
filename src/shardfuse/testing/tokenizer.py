"""A tokenizer of bytes: a text's ids are its UTF-8 bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(
            "tiny_tokenizer: the package tokenizers is not installed: pip install 'shardfuse[hf]', which has it"
        ) from error
    tokenizer: Any = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS.values()])
    return tokenizer


def _letters() -> list[str]:
    """ByteLevel's character for each byte: printable Latin-1 characters for themselves (Radford et al., GPT-2), and
    characters from U+0100 on for the other bytes.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def save_tokenizer(folder: Path) -> None:
    """Write :func:`tiny_tokenizer` so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": SPECIAL_TOKENS[name] for name in ("bos", "eos", "pad")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
