"""Decode an answer's text piece by piece as its tokens arrive, and search it for stop strings.

A token may hold a part of a character, and its text may depend on the token before it, as the leading space of a
sentencepiece token does. So each piece is the difference between two decoded windows of tokens (the prefix and read
offsets of text-generation-inference and vLLM). This module does not use ``tokenizers.decoders.DecodeStream``, which
returns nothing for an answer that ends within a character, and whose cost is quadratic in the length of a run of tokens
that form no character.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ..kernels.runtime.checks import type_name
from .prefixes import Prefixes

_UNDECIDED = "\ufffd"  # the decoders' replacement for bytes that form no character, or none yet
_LONG = 32  # tokens of a window; a longer one loses its beginning
_LONGEST = 64  # tokens of a window that is cut, even within a character
_LAST = 8  # tokens that may belong to an undecided character; four bytes are enough, the rest is margin


class Tokenizer(Protocol):
    """The interface of a tokenizer: of ``tokenizers.Tokenizer``, a tokenizer of transformers, or another object."""

    def decode(self, ids: list[int], /) -> str: ...


class Decoders:
    """Functions from token ids to their text, without clean-up of spaces, of one ``tokenizer``.

    Raises TypeError for an object without ``decode``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(
                f"Engine: tokenizer is a {type_name(tokenizer)}: expected a tokenizers.Tokenizer, a tokenizer of "
                "transformers, or an object with decode(ids) -> str"
            )
        self._tokenizer: Any = tokenizer
        decode: Any = tokenizer.decode
        transformers: Any = sys.modules.get("transformers")
        own = transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
        self._more = {"clean_up_tokenization_spaces": False} if own else {}
        self._plain = functools.partial(decode, skip_special_tokens=True, **self._more) if own else decode

    def of(self, visible: Collection[int] = ()) -> Callable[[list[int]], str]:
        """The function that leaves out special tokens, but for ``visible`` ones."""
        shown = self._special.intersection(visible) if visible else None
        if not shown:
            return self._plain
        hidden = self._special - shown
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False, **self._more)
        return lambda ids: decode([each for each in ids if each not in hidden])

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        """The tokens without text; none of a tokenizer that is neither of transformers nor of tokenizers."""
        backend = getattr(self._tokenizer, "backend_tokenizer", self._tokenizer)
        if callable(added := getattr(backend, "get_added_tokens_decoder", None)):
            return frozenset(token for token, each in added().items() if each.special)
        return frozenset(getattr(self._tokenizer, "all_special_ids", ()))


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
        if self._text == before and not (before.endswith(_UNDECIDED) and self._decode(self._ids[-1:])):
            self._ids.pop()  # special tokens change nothing
            return ""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - _LAST, -1):
            head, tail = self._decode(self._ids[:cut]), self._decode(self._ids[cut:])
            if tail and head + tail == self._text:  # this cuts no character
                break
        else:
            if len(self._ids) < _LONGEST:  # else they are bytes that form no text, or tokens without text
                return ""
        piece = head[self._given :]
        self._ids, self._last_piece = self._ids[cut:], 0
        self._text, self._given = tail, max(0, self._given - len(head))
        return piece


class StopStrings:
    """Finds the first of some ``strings`` in text that arrives in pieces.

    The first is the string that is complete first, or the longest of those that end together, so the result does not
    depend on the pieces. ``found`` is that string. ``included``: the text includes it. The time is linear in the text,
    for any number and lengths of strings.
    """

    def __init__(self, strings: Collection[str], included: bool = False) -> None:
        self.found: str | None = None
        self._strings = tuple(strings)
        self._included = included
        self._prefixes: Prefixes | None = None
        self._held = 0  # the node of the withheld text, possibly the beginning of a stop string

    def push(self, piece: str, ends: bool = True) -> str:
        """The text that certainly precedes any stop string; none after the first one.

        Without ``ends``, a string that is complete within ``piece`` is text like any other.
        """
        if self.found is not None:
            return ""
        if not (piece and self._strings):
            return piece
        if self._prefixes is None:
            self._prefixes = Prefixes.of(self._strings)
        prefixes, before = self._prefixes, self._held
        if not before and prefixes.begins.isdisjoint(piece):
            return piece
        node, length, read = before, 0, prefixes.length(before)
        for letter in piece:
            node = prefixes.step(node, letter)
            read += 1
            if ends and (length := prefixes.complete[node]):
                self.found, self._held = prefixes.text(node)[-length:], 0
                break
        else:
            self._held, length = node, prefixes.length(node)
        certain = read - (0 if self.found is not None and self._included else length)
        return prefixes.text(before, certain) + piece[: max(0, certain - prefixes.length(before))]

    def flush(self) -> str:
        """The withheld text."""
        held, self._held = self._held, 0
        return self._prefixes.text(held) if self._prefixes is not None and held else ""


class AnswerText:
    """The text of one answer, up to its first stop string after the first ``min_tokens`` tokens."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: Collection[str], included: bool, min_tokens: int = 0
    ) -> None:
        self._pieces = TokenText(decode)
        self._stops = StopStrings(stop_strings, included)
        self._wait = min_tokens  # tokens before a stop string counts

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain to belong to the answer."""
        ends = not self._wait
        self._wait = max(0, self._wait - 1)
        return self._stops.push(self._pieces.push(token), ends)

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._stops.push(self._pieces.flush(), not self._wait) + self._stops.flush()
