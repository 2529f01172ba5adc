"""A format in which models write calls of tools: how to read it, and how to make a model write it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from .parser import Tool, ToolParser


class ToolFormat(ABC):
    """One format. Subclasses of other packages are found by the entry-point group ``shardfuse.tool_parsers``.

    ``sample``: a call as the model's chat template writes it, for formats with several spellings; "" if unknown.
    """

    name = ""  # by which it was chosen
    marks: tuple[str, ...] = ()  # shown to the parser even where the tokenizer has them as special tokens

    def __init__(self, sample: str = "") -> None:
        self.sample = sample

    @abstractmethod
    def parser(self, tools: Iterable[Tool], thought: str = "") -> ToolParser:
        """A new parser for one answer.

        Args:
            tools: those that the model may call.
            thought: the mark of a thought that the prompt has begun, such as ``<think>``; "" for none.
        """

    def grammar(self, tools: Sequence[Tool], most: int, added: Mapping[str, int]) -> str:
        """llguidance's Lark grammar of an answer of 1 to ``most`` calls of ``tools``.

        ``added`` are the numbers of the tokenizer's added tokens. Raises NotImplementedError, as by default, for a
        format in which calls cannot be forced, and ValueError for a tool that it cannot write.
        """
        raise NotImplementedError

    def call_id(self) -> str:
        """A new call's id. Some chat templates take one form of it only."""
        return f"call_{uuid.uuid4().hex}"
