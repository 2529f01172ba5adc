"""The text of an answer as its tokens come: decoded piece by piece, and searched for stop strings.

A token may hold a part of a character, and what a tokenizer makes of a token may depend on the one before it, as the
leading space of a sentencepiece token does. So each piece is the difference between two decoded windows of tokens (the
prefix and read offsets of text-generation-inference and vLLM). ``tokenizers.decoders.DecodeStream`` is not used: it
gives nothing of an answer that ends within a character, and the cost of a run of tokens that are no characters is
quadratic in its length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ..kernels.runtime.checks import type_name

_UNDECIDED = "\ufffd"  # what decoders put in the place of bytes that are no character, or not yet
_LONG = 32  # tokens of a window, above which its beginning is dropped
_LAST = 8  # tokens that may belong to an undecided character; of four bytes, so with some to spare


class Tokenizer(Protocol):
    """What turns an answer into text: a ``tokenizers.Tokenizer``, a tokenizer of transformers, or another one."""

    def decode(self, ids: list[int], /) -> str: ...


def decoder(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """From token ids to their text, without special tokens and without cleaning up spaces afterwards.

    Raises TypeError for an object that has no ``decode``.
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
    """Decodes tokens one at a time. Each costs two windows of a few tokens, however long the answer is.

    All pieces together are ``decode(tokens)``, for any tokens of byte-level BPE, WordPiece and sentencepiece. Byte
    fallback is the exception: if bytes that are no character follow bytes that are, ``decode`` takes back the
    character, and the pieces keep it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window: the tokens of the last piece, and those after it
        self._last_piece = 0  # the window's tokens, at that piece
        self._text = ""  # of the window
        self._given = 0  # characters of it

    def push(self, token: int) -> str:
        """The text that is certain with ``token`` and was not before it; perhaps none."""
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
        """The rest at the end of an answer, where an incomplete character stays one."""
        rest = self._text[self._given :]
        self._given = len(self._text)
        return rest

    def _shortened(self, before: str) -> str:
        """Drop tokens of a window that brings no piece to its end; returns text that turned out to be certain."""
        if self._text == before and not before.endswith(_UNDECIDED):
            self._ids.pop()  # a special token, which changes nothing
            return ""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - _LAST, -1):
            head, tail = self._decode(self._ids[:cut]), self._decode(self._ids[cut:])
            if tail and head + tail == self._text:  # no character is cut
                piece = head[self._given :]
                self._ids, self._last_piece = self._ids[cut:], 0
                self._text, self._given = tail, max(0, self._given - len(head))
                return piece
        return ""


class StopStrings:
    """Finds the first of some ``strings`` in text that comes in pieces.

    The first is the one that is complete first, and of those that end together the longest, so that the result does not
    depend on the pieces. ``found`` says whether there is one. ``included`` says whether it is text, too.
    """

    def __init__(self, strings: Collection[str], included: bool = False) -> None:
        self.found = False
        self._strings = strings
        self._included = included
        self._longest = max(map(len, strings), default=0)
        self._held = ""  # the beginning of a stop string, perhaps

    def push(self, piece: str) -> str:
        """The text that is certain to come before any stop string; after the first one there is none."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(each), at) for each in self._strings if (at := text.find(each)) >= 0]
        if ends:
            self.found, self._held = True, ""
            end, start = min(ends)
            return text[: end if self._included else start]
        cut = len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(each.startswith(text[start:]) for each in self._strings):
                cut = start
                break
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer, up to its first stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Collection[str], included: bool) -> None:
        self._pieces = TokenText(decode)
        self._stops = StopStrings(stop_strings, included)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that is certain to belong to the answer with ``token``, and was not before it."""
        return self._stops.push(self._pieces.push(token))

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._stops.push(self._pieces.flush()) + self._stops.flush()
