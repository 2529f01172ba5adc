"""SGLang: the attention backend ``shardfuse``, which the entry point ``sglang.srt.plugins`` registers.

Select it like SGLang's own backends: ``--attention-backend shardfuse``, or for one phase with
``--prefill-attention-backend`` or ``--decode-attention-backend``. docs/integrations.md lists what it serves; the server
refuses everything else at its start.
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

Maker = Callable[[Any], Any]  # makes a backend from SGLang's ModelRunner


def register() -> None:
    """Register the backend; SGLang calls this in each of its processes, possibly several times.

    An SGLang that lacks something that the backend relies on still starts, with a warning. Selecting ``shardfuse``
    there raises :class:`UnsupportedHost`, with the same text, when the model runner makes its backend.
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
            return  # warned above
        raise UnsupportedHost(f"SGLang {HOST.version()} has no registry of backends ({error})") from error
    put(NAME)(make)
    if NAME not in names:
        add([NAME])


def _make(runner: Any) -> Any:
    from .backend import ShardfuseBackend  # imports SGLang's own modules, so not before a server needs them

    return ShardfuseBackend(runner)


def _refuse(reason: str) -> Maker:
    def make(runner: Any) -> Any:
        raise UnsupportedHost(reason)

    return make
