"""Shared by tests of tuned configurations: a GEMM with its table entry, and a folder for test tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.linear.tuned import OP, SOURCES
from shardfuse.kernels.runtime import tuning

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
CONFIG = GemmConfig(128, 256, 64, 8, 3, use_tma=True, group_m=4)
GEMM = Gemm("nt", 4096, 14336, 4096, BF16, BF16, epilogue=("bias", "gelu_tanh", "preact"), writes=2)
KEY = "nt-t4096-n14336-k4096-bf16-bias-gelu_tanh-preact"


def entry_of(**changes: Any) -> dict[str, Any]:
    entry = {
        "op": OP,
        "bucket": KEY,
        "config": dataclasses.asdict(CONFIG),
        "measured": {"us": 1.0},
        "source": "a measurement",
        "source_hash": tuning.source_hash(SOURCES),
    }
    return {name: value for name, value in (entry | changes).items() if value is not None}


def table_of(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    table = {
        "format": 2,
        "arch": "sm_90",
        "dry": False,
        "origin": {},
        "sources": {OP: list(SOURCES)},
        "entries": entries,
    }
    return table | changes


@contextmanager
def shipped_tables(folder: Path) -> Iterator[Callable[..., Path]]:
    """Replace the package's tables with those in ``folder``; yields ``write(content, name)``, which adds one."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SHIPPED", folder)
        patch.delenv(tuning.VARIABLE, raising=False)
        tuning.forget()

        def write(content: Any, name: str = "sm_90.json") -> Path:
            path = folder / name
            path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
            tuning.forget()
            return path

        yield write
    tuning.forget()


def look_up(key: str | None = KEY, arch: str = "sm_90") -> GemmConfig | None:
    return tuning.lookup(arch, OP, key, GemmConfig)
