"""Which format a model writes its calls in: by name, or as its chat template shows."""

from __future__ import annotations

import importlib.metadata

from ...kernels.runtime.names import expected
from ...layers.hf.chat_template import PROBE_TOOL, ChatTemplate
from .format import ToolFormat
from .hermes import Hermes
from .llama3 import Llama3
from .mistral import Mistral
from .parser import Call, Tool
from .pythonic import Pythonic
from .qwen_coder import QwenCoder

GROUP = "shardfuse.tool_parsers"  # of entry points
# A template's call is tried in this order: Qwen3-Coder's parser reads Hermes's calls, too, and Llama's needs no mark.
FORMATS: dict[str, type[ToolFormat]] = {
    "mistral": Mistral,
    "hermes": Hermes,
    "qwen3-coder": QwenCoder,
    "pythonic": Pythonic,
    "llama3": Llama3,
}
# Other servers' names
_ALSO = {"qwen": "hermes", "llama3-json": "llama3", "llama4-json": "llama3", "llama4-pythonic": "pythonic"}
_ALSO |= {"lfm2": "pythonic", "olmo3": "pythonic", "qwen3-xml": "qwen3-coder", "seed-oss": "qwen3-coder"}
# In templates that render no calls
_WORDS = {
    "[TOOL_CALLS]": "mistral",
    "[AVAILABLE_TOOLS]": "mistral",
    "<function=": "qwen3-coder",
    "<tool_call>": "hermes",
    "<|tool_call_start|>": "pythonic",
    "<|python_start|>": "pythonic",
    '"parameters":': "llama3",
}


def tool_format(name: str, template: ChatTemplate | None = None) -> ToolFormat:
    """The format called ``name``, in the spelling of ``template`` where it has several.

    Names are those of FORMATS and of the entry points of the group ``shardfuse.tool_parsers``. Raises ValueError for
    another name, and for an entry point that is no ToolFormat or cannot be loaded.
    """
    sample = template.sample_call() if template else ""
    wanted = name.lower().replace("_", "-")
    entries = {each.name: each for each in importlib.metadata.entry_points(group=GROUP)}
    if name in entries:
        try:
            found = entries[name].load()
        except Exception as error:
            raise ValueError(f"tool format {name!r}: its entry point {entries[name].value} fails: {error!r}") from error
        if not (isinstance(found, type) and issubclass(found, ToolFormat)):
            raise ValueError(f"tool format {name!r}: {entries[name].value} is no class derived from ToolFormat")
        kind: type[ToolFormat] = found
    else:
        name = _ALSO.get(wanted, wanted)
        if name not in FORMATS:
            known = [*FORMATS, *sorted(entries)]
            raise ValueError(f"tool format {name!r}: {expected(name, known, 'expected auto, or one of')}")
        kind = FORMATS[name]
    made = kind(sample)
    made.name = name
    return made


def format_of(template: ChatTemplate) -> str | None:
    """The name of the format in which ``template`` writes a call, or that its text mentions; None if neither tells."""
    if not template or not template.names_tools:
        return None
    sample = template.sample_call()
    for name, kind in FORMATS.items():
        if _reads(kind(sample), sample):
            return name
    return next((name for word, name in _WORDS.items() if word in template.source([{}])), None)


def _reads(found: ToolFormat, sample: str) -> bool:
    """Whether the format's parser finds the call in ``sample``."""
    parser = found.parser([Tool(PROBE_TOOL)])
    pieces = [*parser.push(sample), *parser.flush()]
    return [each.name for each in pieces if isinstance(each, Call) and each.name is not None] == [PROBE_TOOL]
