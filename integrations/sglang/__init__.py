"""SGLang: the attention backend ``shardfuse``, which the entry point ``sglang.srt.plugins`` registers.

It is chosen like SGLang's own: ``--attention-backend shardfuse``, or for one phase with ``--prefill-attention-backend``
or ``--decode-attention-backend``. What it serves is written in docs/integrations.md; the rest is refused when the
server starts.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from ..hosts import Host, UnsupportedHost
from .contract import CONTRACT

NAME = "shardfuse"
HOST = Host("SGLang", "sglang", ("sglang",), ran=(), compared=("0.5.23",))

Maker = Callable[[Any], Any]  # of a backend, from SGLang's ModelRunner


def register() -> None:
    """Register the backend, in each of SGLang's processes and as often as it likes.

    An SGLang that does not have what the backend rests on still starts, with a warning: whoever asks for ``shardfuse``
    there gets :class:`UnsupportedHost`, with the same text, when the model runner makes its backend.
    """
    make: Maker = _make
    try:
        HOST.check(CONTRACT)
    except UnsupportedHost as error:
        warnings.warn(f"the attention backend {NAME} is not available: {error}", stacklevel=2)
        make = _refuse(str(error))
    try:
        registry: Any = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
        put, names, add = (
            registry.register_attention_backend,
            choices.ATTENTION_BACKEND_CHOICES,
            choices.add_attention_backend_choices,
        )
    except (ImportError, AttributeError) as error:
        if make is not _make:
            return  # it was said above
        raise UnsupportedHost(f"SGLang {HOST.version()} has no registry of backends ({error})") from error
    put(NAME)(make)
    if NAME not in names:
        add([NAME])


def _make(runner: Any) -> Any:
    from .backend import ShardfuseBackend  # which imports SGLang's own modules: not before a server wants them

    return ShardfuseBackend(runner)


def _refuse(reason: str) -> Maker:
    def make(runner: Any) -> Any:
        raise UnsupportedHost(reason)

    return make
