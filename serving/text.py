"""Decode an answer's text piece by piece as its tokens arrive, and search it for stop strings.

A token may hold a part of a character, and its text may depend on the token before it, as the leading space of a
sentencepiece token does. So each piece is the difference between two decoded windows of tokens (the prefix and read
offsets of text-generation-inference and vLLM). This module does not use ``tokenizers.decoders.DecodeStream``, which
returns nothing for an answer that ends within a character, and whose cost is quadratic in the length of a run of tokens
that form no character.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ..kernels.runtime.checks import type_name

_UNDECIDED = "\ufffd"  # the decoders' replacement for bytes that form no character, or none yet
_LONG = 32  # tokens of a window; a longer one loses its beginning
_LAST = 8  # tokens that may belong to an undecided character; four bytes are enough, the rest is margin


class Tokenizer(Protocol):
    """The interface of a tokenizer: of ``tokenizers.Tokenizer``, a tokenizer of transformers, or another object."""

    def decode(self, ids: list[int], /) -> str: ...


def decoder(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """A function from token ids to their text, without special tokens and without clean-up of spaces.

    Raises TypeError for an object without ``decode``.
    """
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"Engine: tokenizer is a {type_name(tokenizer)}: expected a tokenizers.Tokenizer, a tokenizer of "
            "transformers, or an object with decode(ids) -> str"
        )
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        plain: Any = tokenizer
        return lambda ids: plain.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return tokenizer.decode


class TokenText:
    """Decodes tokens one at a time. Each costs two windows of a few tokens, for any length of the answer.

    The pieces together equal ``decode(tokens)``, for any tokens of byte-level BPE, WordPiece and sentencepiece. Byte
    fallback is the exception: if invalid bytes follow those of a character, ``decode`` drops the character, and the
    pieces keep it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window: the tokens of the last piece, and those after it
        self._last_piece = 0  # the window's tokens, at that piece
        self._text = ""  # of the window
        self._given = 0  # characters of it

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain; may be empty."""
        before = self._text
        self._ids.append(token)
        self._text = text = self._decode(self._ids)
        certain = text.rstrip(_UNDECIDED)
        piece = text[self._given : len(certain)]
        self._given = max(self._given, len(certain))
        if piece and certain == text:
            self._ids = self._ids[self._last_piece :]
            self._last_piece = len(self._ids)
            self._text = self._decode(self._ids)
            self._given = len(self._text)
        elif len(self._ids) > _LONG:
            piece += self._shortened(before)
        return piece

    def flush(self) -> str:
        """The rest at the end of an answer, with an incomplete character left incomplete."""
        rest = self._text[self._given :]
        self._given = len(self._text)
        return rest

    def _shortened(self, before: str) -> str:
        """Drop tokens of a window that completes no piece; return text that became certain by that."""
        if self._text == before and not before.endswith(_UNDECIDED):
            self._ids.pop()  # special tokens change nothing
            return ""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - _LAST, -1):
            head, tail = self._decode(self._ids[:cut]), self._decode(self._ids[cut:])
            if tail and head + tail == self._text:  # this cuts no character
                piece = head[self._given :]
                self._ids, self._last_piece = self._ids[cut:], 0
                self._text, self._given = tail, max(0, self._given - len(head))
                return piece
        return ""


class StopStrings:
    """Finds the first of some ``strings`` in text that arrives in pieces.

    The first is the string that is complete first, or the longest of those that end together, so the result does not
    depend on the pieces. ``found`` is that string. ``included``: the text includes it.
    """

    def __init__(self, strings: Collection[str], included: bool = False) -> None:
        self.found: str | None = None
        self._strings = strings
        self._included = included
        self._longest = max(map(len, strings), default=0)
        self._held = ""  # possibly the beginning of a stop string

    def push(self, piece: str) -> str:
        """The text that certainly precedes any stop string; none after the first one."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(each), at) for each in self._strings if (at := text.find(each)) >= 0]
        if ends:
            end, start = min(ends)
            self.found, self._held = text[start:end], ""
            return text[: end if self._included else start]
        cut = len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(each.startswith(text[start:]) for each in self._strings):
                cut = start
                break
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The withheld text."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer, up to its first stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Collection[str], included: bool) -> None:
        self._pieces = TokenText(decode)
        self._stops = StopStrings(stop_strings, included)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain to belong to the answer."""
        return self._stops.push(self._pieces.push(token))

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._stops.push(self._pieces.flush()) + self._stops.flush()
