"""Records for fine-tuning as tokens, and which tokens the loss counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ...kernels.runtime.names import expected
from .chat import SHAREGPT, ChatRenderer, Span, messages_of, names_of, shown, tools_of, words_of
from .items import TRAIN_ON, Item, RecordError, Sample

_EXPECTED = "expected `messages`, `prompt` with `completion`, or `text`"
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Draft(NamedTuple):
    """The text of an item, before its tokens: ``answers`` is what the loss counts of it, None for all.

    ``chat`` is whether the text has its special tokens already; ``first`` and ``last`` are the item's.
    """

    text: str
    answers: list[Span] | None
    chat: bool = False
    first: bool = True
    last: bool = True


class _Encoding(NamedTuple):
    """Tokens of a text: ``ids`` [n] int64, and ``offsets`` [n, 2], each token's characters, if asked for."""

    ids: np.ndarray
    offsets: np.ndarray | None


class RecordReader:
    """What ``tokenizer``, one of transformers, makes of records.

    A record is one of these, the first that fits, and its other columns are ignored:

    - ``messages``, and ``tools`` if any: a chat, through the tokenizer's chat template.
    - ``prompt`` and ``completion``, two texts, or two lists of messages that make one chat.
    - ``text``.

    ``train_on`` "answers" counts the assistant's messages of a chat (those in ``completion`` alone), the tokens of a
    completion, and every token of ``text``; "all" counts every token. A token that covers both sides of a border is
    counted. Texts begin and end with the tokenizer's special tokens for that; chats have those of the template alone.
    Keys with the value None are absent ones.

    Raises ValueError for another ``train_on``.
    """

    def __init__(self, tokenizer: Any, *, train_on: str = "answers") -> None:
        if train_on not in TRAIN_ON:
            raise ValueError(f"train_on={train_on!r}: {expected(train_on, TRAIN_ON)}")
        self._tokenizer = tokenizer
        self._all = train_on == "all"
        self._renderer = ChatRenderer(tokenizer)
        self._before = _before(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id

    def read(self, items: Sequence[Item]) -> list[Sample | RecordError]:
        """A sample for each item, in order, or the reason why there is none."""
        found: list[Any] = [self._try_draft(item) for item in items]
        for partly in (False, True):  # only a text that is counted in part needs its tokens' offsets
            places = [
                n
                for n, draft in enumerate(found)
                if isinstance(draft, _Draft) and (draft.answers is not None) == partly
            ]
            encodings = self._encode([found[n].text for n in places], offsets=partly and self._tokenizer.is_fast)
            for n, encoding in zip(places, encodings, strict=True):
                found[n] = self._try_sample(found[n], encoding)
        return found

    def _try_draft(self, item: Item) -> _Draft | RecordError:
        try:
            return self._draft(item)
        except RecordError as error:
            return RecordError(*error.args)  # without the traceback, which would hold the batch's data

    def _try_sample(self, draft: _Draft, encoding: _Encoding | RecordError) -> Sample | RecordError:
        if isinstance(encoding, RecordError):
            return encoding
        try:
            return self._sample(draft, encoding)
        except RecordError as error:
            return RecordError(*error.args)

    def _draft(self, item: Item) -> _Draft:
        if item.value is None:
            raise RecordError(item.problem)
        if not isinstance(item.value, dict):
            raise RecordError(f"the record is {shown(item.value)}: {_EXPECTED}")
        record = {key: value for key, value in item.value.items() if value is not None}
        if "messages" in record:
            return self._chat(messages_of(record["messages"], "messages"), record)
        if "prompt" in record and "completion" in record:
            return self._completion(record)
        if "text" not in record:
            raise RecordError(f"the record has {names_of(item.value)}: {_EXPECTED}{_mapping(record)}")
        if not isinstance(record["text"], str):
            raise RecordError(f"`text` is {shown(record['text'])}: expected a string")
        return _Draft(record["text"], None, first=item.first, last=item.last)

    def _chat(self, messages: list[dict[str, Any]], record: dict[str, Any], first: int = 0) -> _Draft:
        """The chat, whose answers from message ``first`` on are counted."""
        if not messages:
            raise RecordError("the list of messages is empty: expected messages with `role` and `content`")
        tools = tools_of(record)
        if self._all:
            return _Draft(self._renderer.text(messages, tools), None, chat=True)
        return _Draft(*self._renderer.answers(messages, tools, first), chat=True)

    def _completion(self, record: dict[str, Any]) -> _Draft:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            before = messages_of(prompt, "prompt")
            return self._chat(before + messages_of(completion, "completion"), record, len(before))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise RecordError(
                f"`prompt` is {shown(prompt)} and `completion` is {shown(completion)}: expected two strings, or two "
                "lists of messages"
            )
        text = prompt + completion
        return _Draft(text, None if self._all else [Span(len(prompt), len(text), "`completion`")])

    def _encode(self, texts: list[str], *, offsets: bool) -> list[_Encoding | RecordError]:
        if not texts:
            return []
        try:
            output = self._tokenizer(
                texts,
                add_special_tokens=False,
                padding=False,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                return_offsets_mapping=offsets,
                verbose=False,  # it warns of texts beyond the model's length, which the caller cuts
            )
        except BaseException as error:
            # A panic in the tokenizer's Rust code derives from BaseException alone.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if len(texts) == 1:
                return [_unreadable(texts[0], error)]
            return [self._encode([text], offsets=offsets)[0] for text in texts]
        places = output["offset_mapping"] if offsets else [None] * len(texts)
        return [
            _Encoding(
                np.array(ids, dtype=np.int64),
                None if place is None else np.array(place, dtype=np.int64).reshape(-1, 2),
            )
            for ids, place in zip(output["input_ids"], places, strict=True)
        ]

    def _sample(self, draft: _Draft, encoding: _Encoding) -> Sample:
        ids, eos = encoding.ids, self._eos
        whole = draft.answers is None
        counted = np.ones(len(ids), bool) if whole else self._counted(draft, encoding)
        if not counted.any() or (not draft.chat and (ids[counted] == eos).all()):
            raise RecordError(
                "the text is empty: nothing to learn from" if whole else "no answer to learn from: it is empty"
            )
        if not draft.chat:
            begin = self._before if draft.first else []
            end = [eos] if draft.last and eos is not None and ids[-1] != eos else []
            ids = np.concatenate([np.array(begin, np.int64), ids, np.array(end, np.int64)])
            counted = np.concatenate([np.full(len(begin), whole), counted, np.ones(len(end), dtype=bool)])
        if not counted[1:].any():
            raise RecordError("nothing to learn from: only the first token would count, and no token comes before it")
        return Sample(ids, counted)

    def _counted(self, draft: _Draft, encoding: _Encoding) -> np.ndarray:
        """Whether each token covers characters of an answer, [n] bool."""
        text, answers = draft.text, draft.answers or []
        counted = np.zeros(len(encoding.ids), dtype=bool)
        if encoding.offsets is None:
            for span in answers:
                start, end = (self._tokens_until(text, at, encoding.ids, span.of) for at in (span.start, span.end))
                counted[start:end] = True
            return counted
        starts, ends = encoding.offsets.T
        # Offsets that leave out spaces show a token of spaces as empty, at its end.
        starts = np.where(starts == ends, np.minimum(starts, np.append(0, ends)[:-1]), starts)
        for span in answers:
            if span.start < span.end:
                counted |= (starts < span.end) & (ends > span.start)
        return counted

    def _tokens_until(self, text: str, at: int, ids: np.ndarray, of: str) -> int:
        """How many of the text's tokens ``ids`` its first ``at`` characters are, for a tokenizer without offsets."""
        if at == len(text):
            return len(ids)
        [part] = self._encode([text[:at]], offsets=False) if at else [_Encoding(ids[:0], None)]
        if isinstance(part, RecordError):
            raise part
        count = len(part.ids)
        if not np.array_equal(part.ids, ids[:count]):
            raise RecordError(
                f"{of}: a token covers its border at {shown(text[max(at - 10, 0) : at + 10])}, and the tokenizer gives "
                'no offsets: use a tokenizer with a tokenizer.json, or set data.train_on = "all"'
            )
        return count


def _before(tokenizer: Any) -> list[int]:
    """The ids that ``tokenizer`` puts before a text."""
    for probe in ("a", "0", "."):
        with suppress(Exception):  # raised for a letter that is not in the vocabulary, where that has no unknown token
            ids = tokenizer(probe)["input_ids"]
            bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
            for at in range(len(ids) - len(bare) + 1 if bare else 0):
                if ids[at : at + len(bare)] == bare:
                    return ids[:at]
    ids = tokenizer("")["input_ids"]
    return ids[:-1] if ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) else ids


def _unreadable(text: str, error: BaseException) -> RecordError:
    if surrogate := _SURROGATE.search(text):
        at = surrogate.start()
        return RecordError(
            f"the text holds half of a surrogate pair at character {at}, {shown(text[max(at - 10, 0) : at + 10])}: "
            "expected whole characters"
        )
    return RecordError(f"the tokenizer cannot read {shown(text)}: {words_of(error)}")


def _mapping(record: dict[str, Any]) -> str:
    """How the columns of two other customs map."""
    if "conversations" in record:
        return f"; {SHAREGPT}"
    if "instruction" in record and "output" in record:
        return "; make `prompt` of `instruction` (and `input`), and rename `output` to `completion`"
    return ""
