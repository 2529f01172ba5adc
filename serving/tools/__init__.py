"""Calls of tools in the text of an answer: the formats in which models write them."""

from .choice import FORMATS, format_of, tool_format
from .format import ToolFormat
from .parser import LONGEST_NAME, Call, Tool, ToolParser

__all__ = ["FORMATS", "LONGEST_NAME", "Call", "Tool", "ToolFormat", "ToolParser", "format_of", "tool_format"]
