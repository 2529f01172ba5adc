"""Makes a folder of transformers of a GGUF file: ``python tests/support/gguf_folder.py FILE.gguf FOLDER``.

The Python that runs it needs gguf and accelerate beside transformers (``make smollm2``). Weights are unpacked to fp32.
Config, tokenizer, chat template and ``generation_config.json`` are what transformers derives from the file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(file: Path, folder: Path) -> None:
    """Write ``folder``: config.json, generation_config.json, model.safetensors, and the tokenizer's files."""
    given = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    unpacked = GgufConfig(dequantize=True)  # transformers saves no model whose weights could have stayed packed
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, quantization_config=unpacked, **given
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} FILE.gguf FOLDER")
    convert(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
