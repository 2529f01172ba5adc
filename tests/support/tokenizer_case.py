"""Small tokenizers of each kind, and a model for their vocabulary."""

from __future__ import annotations

import dataclasses
import functools

import torch
from serving_case import config_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardfuse.layers.transformer import ParallelTransformer

LINES = (
    "Grüße aus Köln: schöne Grüße, naïve Cafés!\n\nStop.",
    "日本語のテキスト、日本の本。 語を読む",
    "🙂🙃 a family 👩‍👩‍👧 of emoji 🙂",
    '{"name": "the cat", "size": 12, "ok": true}',
)
END, UNKNOWN = "<eos>", "<unk>"
VOCABULARY = 320  # of the model; some of its tokens are no tokenizer's, as where a head is padded


@functools.cache
def byte_level() -> Tokenizer:
    """BPE over bytes: most of the characters that are not ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=[END], show_progress=False)
    )
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=200, special_tokens=[UNKNOWN, END], show_progress=False)
    )
    return tokenizer


@functools.cache
def sentence_piece() -> Tokenizer:
    """As sentencepiece's: spaces are characters, and the first one of a text is left out."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=200, special_tokens=[UNKNOWN, END], show_progress=False)
    )
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's: what has no token of its own is spelt in bytes."""
    bytes_ = {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    pieces = {UNKNOWN: 0, END: 1, **bytes_, **{piece: 258 + i for i, piece in enumerate("▁abcdeé日")}}
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token=UNKNOWN, byte_fallback=True))
    tokenizer.add_special_tokens([END])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@functools.cache
def model() -> ParallelTransformer:
    """Fresh weights in fp64."""
    torch.manual_seed(0)
    config = dataclasses.replace(config_of("gated"), vocab_size=VOCABULARY, max_positions=256)
    return ParallelTransformer(config, dtype=torch.float64).eval()
