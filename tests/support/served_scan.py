"""The engine over every causal language model that transformers can build, and the table of ``docs/serving.md``.

``python tests/support/served_scan.py --write`` runs ``model_scan.py``'s small random models, keeps what became of each
in ``serving/served_scan.json``, and writes the page; ``--page`` writes the page alone.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import model_scan
import served_case
import torch
from foreign import ARCHITECTURES

from shardfuse.layers.attention.paged import PagedBatch
from shardfuse.serving import Engine, Request
from shardfuse.serving.foreign import own

RECORD = Path(__file__).parents[1] / "serving" / "served_scan.json"
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
# not served: the engine refuses; refused: the stock model does not run at this size.
OUTCOMES = ("served", "not served", "wrong", "refused", "timed out")
OWN = ("codegen", "gpt_neo", "xglm")  # attention of their own, beside those of ARCHITECTURES
_LENGTHS = (13, 5, 21)
_NEW_TOKENS = 8
_CLOSE = 1e-3  # of the logits' deviation


def look(model: Any, batch: torch.Tensor, expected: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Whether every token that is served has the best logit of the stock forward, but for rounding."""
    model.eval()
    try:
        engine = Engine(model, num_blocks=64, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    except (ValueError, TypeError) as error:
        return "not served", str(error).removeprefix("Engine: ").partition("\n")[0][:160]
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (length,), generator=drawn).tolist() for length in _LENGTHS]
    answers = engine.generate([Request(prompt, max_new_tokens=_NEW_TOKENS) for prompt in prompts])
    for prompt, answer in zip(prompts, answers):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits[range(_NEW_TOKENS), answer]
        if not (behind <= _CLOSE * logits.std()).all():
            return "wrong", f"a token whose logit is {behind.max():.1e} behind the best"
    return "served", ""


def counts() -> str:
    """What the scan found, in a sentence."""
    record = json.loads(RECORD.read_text())
    served, refused, wrong, unbuilt, late = (len(record[name]) for name in OUTCOMES)
    total = sum(len(names) for names in record.values() if isinstance(names, dict))
    return textwrap.fill(
        f"Of the {total} classes of causal language models in transformers {record['transformers']}, shrunken and "
        f"random, the engine serves {served} and refuses {refused}; {unbuilt} could not be shrunk so that the stock "
        f"model runs, {late} took too long, and {wrong} came to other tokens (`tests/serving/served_scan.json`, "
        "written by `tests/support/served_scan.py`).",
        width=120,
    )


def table() -> str:
    """A row for each architecture: how its attention reaches the pages, and what it asks of it."""
    head = ("architecture", "attention reaches the pages through", "which asks for")
    rows = [_row(kind) for kind in (*ARCHITECTURES, *OWN)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _row(kind: str) -> tuple[str, str, str]:
    model, asked = served_case.build(kind, 0), set[str]()
    attend = PagedBatch.attend

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        asked.update(name for name, value in options.items() if value is not None)
        return attend(self, *args, **options)

    PagedBatch.attend = watched  # type: ignore[method-assign]
    try:
        Engine(model, num_blocks=4)
    finally:
        PagedBatch.attend = attend  # type: ignore[method-assign]
    words = {"window": "windows", "softcap": "soft-caps", "sinks": "sinks", "alibi_slopes": "ALiBi"}
    way = "a forward of ours" if any(True for _ in own.loans(model)) else "transformers' interface"
    return kind, way, ", ".join(word for name, word in words.items() if name in asked)


def page() -> str:
    """The page with the table as it is now."""
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n\n{counts()}\n{END}{after}"


def main() -> None:
    if "--write" in sys.argv[1:]:
        import transformers

        record: dict[str, dict[str, str]] = {outcome: {} for outcome in OUTCOMES}
        for name, outcome, remark in model_scan.scan(model_scan.kinds(), workers=1, look=look):
            record[outcome][name] = remark
            print(f"{name:32} {outcome:10} {remark}", flush=True)
        RECORD.write_text(json.dumps({"transformers": transformers.__version__, **record}, indent=1) + "\n")
    if sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(table())


if __name__ == "__main__":
    main()
