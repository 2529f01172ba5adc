"""The table of ``docs/models.md``: what ``fuse`` replaces in each architecture, from small random models.

``python tests/support/fused_models.py --write`` writes it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from foreign import ARCHITECTURES, foreign
from model_scan import RECORD
from torch import nn

from shardfuse.layers.fuse import Fused, fuse
from shardfuse.layers.fuse.report import stayed

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
_PACKED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj")
_PARTS = ("feed-forward", "norms", "q, k, v", "rotary positions", "attention", "head and loss")


def table() -> str:
    """The table in Markdown, one row for each architecture."""
    rows = [_row(kind) for kind in ARCHITECTURES]
    head = ("architecture", *_PARTS, "stays stock, and could be fused")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _row(kind: str) -> list[str]:
    model = fuse(foreign(kind, device="meta"))
    ops: dict[str, list[str]] = {part: [] for part in _PARTS}
    for module in model.modules():
        for op in module._match.ops if isinstance(module, Fused) else ():
            ops[_part(module, op)].append(op.partition("(")[0])
    cells = {part: ", ".join(f"`{op}`" for op in sorted(set(found))) or "stock" for part, found in ops.items()}
    kinds = {type(module).__name__ for module in model.modules()}
    if cells["q, k, v"] == "stock" and any(name in path for path, _ in model.named_modules() for name in _PACKED):
        cells["q, k, v"] = "packed"
    if cells["rotary positions"] == "stock" and not any("Rotary" in name for name in kinds):
        cells["rotary positions"] = "none"
    if ops["attention"]:
        cells["attention"] = "SDPA"
    else:
        called = {name for module in model.modules() for name in _names(module)}
        words = {"ALL_ATTENTION_FUNCTIONS": "interface", "scaled_dot_product_attention": "its own SDPA"}
        cells["attention"] = next((word for name, word in words.items() if name in called), "stock")
    left = sorted({each.kind for each in stayed(model) if not each.nothing_to_fuse})
    return [kind, *cells.values(), ", ".join(left)]


def _names(module: nn.Module) -> tuple[str, ...]:
    """The names in the stock forward."""
    forward = getattr(type(module), "_stock", type(module)).forward
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def _part(module: nn.Module, op: str) -> str:
    if op.endswith("_norm"):
        return "norms"
    if op.startswith("linear_cross_entropy"):
        return "head and loss"
    if op == "attention":
        return "attention"
    if op == "apply_rope":
        return "rotary positions"
    return "q, k, v" if "Attention" in type(module).__name__ else "feed-forward"


def page() -> str:
    """The page with the table as it is now."""
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n\n{counts()}\n{END}{after}"


def counts() -> str:
    """What ``model_scan.py`` found, in a sentence."""
    record = json.loads(RECORD.read_text())
    whole, partly, refused, late = (len(record[name]) for name in ("fused", "partly", "refused", "timed out"))
    total = sum(len(names) for names in record.values() if isinstance(names, dict))
    return textwrap.fill(
        f"Of the {total} classes of causal language models in transformers {record['transformers']}, shrunken and "
        f"random, {whole} are fused completely and {partly} in part; {refused} could not be shrunk so that the stock "
        f"model runs, {late} took too long, and {len(record['wrong'])} came to other numbers "
        "(`tests/layers/model_scan.json`, written by `tests/support/model_scan.py`).",
        width=120,
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(table())
