"""What a training forward of Llama 3 8B keeps, launches and moves, stock and fused: counted, not timed.

``python tests/support/counted.py --write`` writes the record, from which ``make front`` makes the README's table, and
the table of docs/fuse.md.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shardfuse as sf
from shardfuse.bench.page import front
from shardfuse.kernels.runtime import device

PAGE = Path(__file__).parents[2] / "docs" / "fuse.md"
BATCH = (1, 8192)
LLAMA_3_8B = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
}


def counted() -> tuple[dict[str, Any], list[str]]:
    """The record, and the lines of docs/fuse.md."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_3_8B), dtype=torch.bfloat16)
    found = sf.explain(sf.fuse(model), "cuda", batch=BATCH)
    moved = found.record()["moved"]
    record = {
        "versions": {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers")},
        "chip": device.architecture(torch.device("cuda")),
        "model": "Llama 3 8B",
        "dtype": "bf16",
        "batch": list(BATCH),
        "config": LLAMA_3_8B,
        "moved": {each["path"]: {side: each[side] for side in ("stock", "fused")} for each in moved},
    }
    with mock.patch.dict(os.environ, COLUMNS="110"):
        printed = str(found).splitlines()
    start = next(number for number, line in enumerate(printed) if "kept for backward" in line)
    rows = [line for line in printed[start:] if not set(line) <= {"─"}]
    return record, ["```", *(f" {line}" for line in rows), "```"]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/support/counted.py --write")
    record, lines = counted()
    front.COUNTED.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(front.renewed(PAGE.read_text(), lines))
    print(f"wrote {front.COUNTED.name} and {PAGE.name}; make front writes the README's table")
