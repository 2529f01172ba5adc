"""The folder of a complete run: the model with the tokenizer that read its data, for transformers and for serving."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from ..layers.hf.config import CONFIG, GENERATION
from ..layers.hf.folders import export_hf
from ..layers.hf.tokenizers import holds_tokenizer, save_byte_tokenizer
from ..layers.transformer import ParallelTransformer
from ..parallel.core import agreement
from ..parallel.core.mesh import everyone
from .data.windows import Tokens
from .settings import RunSettings


def export(model: ParallelTransformer, settings: RunSettings, tokens: Tokens, folder: Path) -> None:
    """Write ``model`` into ``folder``, beside the tokenizer that made ``tokens`` and the settings for generation.

    These are the tokenizer's folder's, else those of the model that the run started from; a model of bytes gets a
    tokenizer of bytes, if the package tokenizers is installed. An answer ends at the token at which the answers of the
    data end, too. Collective. Raises the errors of ``export_hf``.
    """
    export_hf(model, folder, like=settings.data.tokenizer)
    agreement.on_first(everyone(), lambda: _complete(settings, tokens, folder))


def _complete(settings: RunSettings, tokens: Tokens, folder: Path) -> None:
    """Add to the exported ``folder`` what its weights and config are served with, on one rank."""
    settle_generation(settings, tokens, folder)
    if tokens.of_bytes and not holds_tokenizer(folder):
        with contextlib.suppress(ImportError):
            save_byte_tokenizer(folder)


def settle_generation(settings: RunSettings, tokens: Tokens, folder: Path) -> None:
    """Give the exported ``folder`` its settings for generation, on one rank."""
    path = folder / GENERATION
    if not path.exists() and settings.start is not None and (Path(settings.start) / GENERATION).exists():
        shutil.copyfile(Path(settings.start) / GENERATION, path)
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not given:  # transformers then reads config.json
        given = {
            name: config[name]
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
            if config.get(name) is not None
        }
    ends = given.get("eos_token_id", config.get("eos_token_id"))
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    new = [id for id in tokens.ends if id not in known]
    if new:
        beside = path.with_name(f".{path.name}.writing")
        beside.write_text(json.dumps({**given, "eos_token_id": new + known}, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
