"""The settings for serving a folder of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..kernels.runtime.names import expected

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # torch's names of dtypes


@dataclass(frozen=True)
class FolderOptions:
    """The settings for serving a folder; None means a value that follows from the model and the machine.

    Args:
        folder: ``config.json``, weights in safetensors, and a tokenizer.
        dtype: of weights and computation, "fp32", "bf16" or "fp16"; None: the folder's.
        device: "cpu" or "cuda".
        cache_gib: the size of the cache of keys and values on each rank. None: on a GPU 85 % of the memory that is free
            after loading, on a CPU 1 GiB; never more than ``max_num_seqs`` answers of full length need.
        chat_template: a file with a template that replaces the tokenizer's.
        generation_config: "auto" applies the defaults of the folder's ``generation_config.json`` to requests, "vllm"
            none; any other is a folder whose ``generation_config.json`` replaces it.
        max_num_seqs, max_model_len, max_num_batched_tokens, max_queued_requests, block_size, kv_dtype: those of
            :class:`Engine`, as are num_host_blocks, enforce_eager, invariant, guide_timeout_s and guide_memory_mib.
    """

    folder: Path
    dtype: str | None = None
    device: str | None = None
    cache_gib: float | None = None
    chat_template: Path | None = None
    generation_config: str = "auto"
    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_queued_requests: int | None = 1024
    block_size: int | None = None
    kv_dtype: str | None = None
    num_host_blocks: int = 0
    enforce_eager: bool = False
    invariant: bool = False
    guide_timeout_s: float = 10.0
    guide_memory_mib: int = 1024

    @classmethod
    def of(cls, folder: str | os.PathLike[str], options: Mapping[str, Any]) -> FolderOptions:
        """Those of :meth:`Engine.from_pretrained`. Raises TypeError for an unknown one."""
        known = [each.name for each in fields(cls)][1:]
        if unknown := [name for name in options if name not in known]:
            if unknown[0] in ("num_blocks", "tokenizer", "generation", "impl"):
                raise TypeError(
                    f"from_pretrained: {unknown[0]} follows from the folder and the memory (cache_gib): to set it, "
                    "load the model with load_hf or load_pretrained and call Engine(model, ...)"
                )
            hint = expected(unknown[0], known)
            raise TypeError(f"from_pretrained() got an unexpected keyword argument {unknown[0]!r}; {hint}")
        given = dict(options)
        dtype = given.get("dtype")
        given["dtype"] = None if dtype == "auto" else _SHORT.get(str(dtype).removeprefix("torch."), dtype)
        if (device := given.get("device")) is not None:
            given["device"] = str(device)
        if given.get("chat_template") is not None:
            given["chat_template"] = Path(given["chat_template"])
        return cls(Path(folder), **given)
