"""The tokenizer in a folder of transformers, and one of bytes for a model that has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import COMPANIONS, CONFIG, GENERATION, MODEL_TYPES
from .plain import check_there, json_object
from .refusals import refusals_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SAVE = "tokenizer.save_pretrained(folder) of transformers writes one"


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of ``folder``, without running code from there.

    transformers reads the folder's config.json as well, as long as that says: of a model that is to be loaded, call
    ``check_claims`` first.

    Raises FileNotFoundError for a missing folder, ValueError where it holds no tokenizer that can be loaded,
    ImportError without transformers.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ImportError(
            "a tokenizer needs transformers, which is not installed: pip install 'shardfuse[hf]'"
        ) from None
    check_there(folder, "a tokenizer's files")
    try:
        with refusals_of(folder):
            tokenizer = _class(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({_SAVE}): {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without the files
        raise ValueError(f"{folder}: a tokenizer's files are missing there: {_SAVE}")
    return tokenizer


def _class(folder: Path) -> Any:
    """transformers' class for the tokenizer in ``folder``.

    AutoTokenizer imports what its models need, a config's checks and torch's compiler among it, which takes longer than
    torch itself. For the models of our own layers this function finds the class that AutoTokenizer would.
    """
    import transformers

    settings, file = json_object(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    name, config = settings.get("tokenizer_class"), json_object(folder / CONFIG)
    if isinstance(name, str) and config.get("model_type") in MODEL_TYPES.values() and file.is_file():
        name, general = name.removesuffix("Fast"), transformers.PreTrainedTokenizerFast
        own = "auto_map" in settings or "auto_map" in config
        if own or not name.endswith(("Tokenizer", "TokenizersBackend")):
            return transformers.AutoTokenizer
        if name in ("PreTrainedTokenizer", "TokenizersBackend"):
            return general
        if name == "LlamaTokenizer" and b'"ByteLevel"' in file.read_bytes():  # as that of Llama 3, which has no class
            return general
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, general):
            return found
    return transformers.AutoTokenizer


def holds_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has any of a tokenizer's files."""
    return any(next(folder.glob(pattern), None) for pattern in COMPANIONS if pattern != GENERATION)


def byte_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """A ``tokenizers.Tokenizer`` for which a text's ids are its UTF-8 bytes; the ids of ``special`` begin at 256.

    ``encode(text).ids == list(text.encode())`` for a text without special tokens, and ``decode`` is its inverse.
    Raises ImportError without the package tokenizers.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(
            "a tokenizer of bytes: the package tokenizers is not installed: pip install 'shardfuse[hf]', which has it"
        ) from error
    tokenizer: Any = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def save_byte_tokenizer(folder: Path, special: Sequence[str] = (), **settings: str) -> None:
    """Write :func:`byte_tokenizer` and its ``settings`` so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
    byte_tokenizer(special).save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def _letters() -> list[str]:
    """ByteLevel's character for each byte: printable Latin-1 characters for themselves (Radford et al., GPT-2), and
    characters from U+0100 on for the other bytes.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
