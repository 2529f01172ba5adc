"""``load_tokenizer`` finds the class that AutoTokenizer takes, without what AutoTokenizer imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from shardfuse.layers.hf import tokenizers
from shardfuse.layers.hf.tokenizers import load_tokenizer, save_byte_tokenizer

TEXTS = ["Once upon a time", " two  spaces ", "Köln\n\n1234 + 5", "<|eos|>x<|bos|>"]
CLASSES = [
    *("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer"),
    *("GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "CodeGenTokenizer"),
    *("CodeLlamaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizer"),
]


def _folder(folder: Path, kind: str | None, model_type: str, *, pieces: bool = False, **settings: Any) -> Path:
    """A folder with a tokenizer that says to be of class ``kind``, of bytes or of sentencepiece's ``pieces``."""
    special = ("<|bos|>", "<|eos|>")
    save_byte_tokenizer(folder, special, **dict(zip(("bos_token", "eos_token"), special)))
    if pieces:
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
        vocab |= {"▁": 259, "a": 260, "b": 261, "▁a": 262}
        unknown = {"unk_token": "<unk>"}
        made: Any = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, **unknown))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        made.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    del named["tokenizer_class"]
    named |= settings | ({} if kind is None else {"tokenizer_class": kind})
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def _is_auto(folder: Path) -> bool:
    return tokenizers._class(folder) is AutoTokenizer


@pytest.mark.parametrize("pieces", [False, True], ids=["bytes", "pieces"])
@pytest.mark.parametrize("model_type", ["llama", "starcoder2"])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_class_is_the_one_of_auto(tmp_path: Path, kind: str, model_type: str, pieces: bool):
    if kind in ("GemmaTokenizer", "CodeLlamaTokenizer") and not pieces:
        pytest.skip("this class is always of pieces")
    folder = _folder(tmp_path, kind, model_type, pieces=pieces, chat_template="{{ messages }}", add_bos_token=True)
    ours, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(auto)
    assert ours.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()
    assert ours.special_tokens_map == auto.special_tokens_map
    assert ours.chat_template == auto.chat_template == "{{ messages }}"
    assert [ours.encode(text) for text in TEXTS] == [auto.encode(text) for text in TEXTS]


def test_known_classes_need_no_auto(tmp_path: Path):
    for number, kind in enumerate(CLASSES):
        (tmp_path / str(number)).mkdir()
        assert not _is_auto(_folder(tmp_path / str(number), kind, "llama")), kind


@pytest.mark.parametrize(
    ("kind", "model_type", "settings"),
    [
        (None, "llama", {}),
        ("LlamaTokenizer", "mistral", {}),  # of which AutoTokenizer knows exceptions
        ("LlamaTokenizer", "llama", {"auto_map": {"AutoTokenizer": ["other.Tokenizer", None]}}),
        ("NobodysTokenizer", "llama", {}),
        ("GPTNeoXForCausalLM", "llama", {}),  # a name in a file imports no model
        ("AutoTokenizer", "llama", {}),
    ],
)
def test_all_others_are_left_to_auto(tmp_path: Path, kind: str | None, model_type: str, settings: dict[str, Any]):
    assert _is_auto(_folder(tmp_path, kind, model_type, **settings))


def test_a_model_with_code_of_its_own_is_left_to_auto(tmp_path: Path):
    folder = _folder(tmp_path, "GPT2Tokenizer", "llama")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "a.B"}}))
    assert _is_auto(folder)


def test_a_folder_without_the_file_is_left_to_auto(tmp_path: Path):
    folder = _folder(tmp_path, "GPT2Tokenizer", "llama")
    (folder / "tokenizer.json").unlink()
    assert _is_auto(folder)
