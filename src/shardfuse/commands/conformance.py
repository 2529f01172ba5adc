"""``shardfuse conformance``: check any server's tokens, and any attention function's numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Judge a server's tokens, or an attention function's numbers, against known results.",
    no_args_is_help=True,
)


@app.command()
def models(
    folder: Annotated[Path, typer.Argument(help="Where to write the models, a folder for each architecture.")],
    architecture: Annotated[
        list[str] | None, typer.Option(help="An architecture; may be repeated. Default: all.")
    ] = None,
) -> None:
    """Write small seeded models with prompts and the tokens that transformers' generate gives (a few MB each)."""
    from ..integrations.conformance import models as kit

    kit.be_quiet()
    for kind in architecture or kit.ARCHITECTURES:
        expected = kit.write(kind, folder / kind)
        print(f"{kind:16} {len(expected.prompts)} prompts, best two logits at least {expected.margin:.2g} apart")


@app.command()
def server(
    url: Annotated[str, typer.Argument(help="The server's OpenAI API, e.g. http://127.0.0.1:8000/v1.")],
    folder: Annotated[Path, typer.Argument(help="The folder that the server serves; `conformance models` writes it.")],
    model: Annotated[
        str | None, typer.Option(help="The model's name at the server. Default: the first that it lists.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /chat/completions instead of /completions.")] = False,
    at_once: Annotated[
        int, typer.Option(min=1, help="Requests in flight at once, in the rounds that send prompts together.")
    ] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 60.0,
) -> None:
    """Compare a server's greedy tokens with the expected ones: each prompt alone, all together, and again."""
    from ..integrations.conformance import server as kit

    wrong = asked = 0
    for result in kit.check(url, folder, model=model, api=kit.APIS[chat], at_once=at_once, timeout_s=timeout):
        asked += 1
        wrong += bool(result.wrong)
        print(f"{result.round:18} prompt of {result.prompt:3} tokens  {result.wrong or 'ok'}", flush=True)
    print(f"{asked - wrong} of {asked} answers are equal, token by token")
    if wrong:
        raise typer.Exit(1)


@app.command()
def attention(
    function: Annotated[str, typer.Argument(help="module:function, with the arguments of shardfuse.paged_attention.")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")] = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
) -> None:
    """Judge an attention function over every pair of features. Refused cases are listed and do not count as wrong."""
    import torch

    from ..integrations.conformance import attention as kit

    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found: Counter[str] = Counter()
    for result in kit.check(kit.load(function), on, only):
        found[result.verdict] += 1
        print(f"{result.verdict:8} {result.case}  {result.why}".rstrip(), flush=True)
    print(f"{found['ok']} ok, {found['refused']} refused, {found['wrong']} wrong")
    if found["wrong"] or not found["ok"]:
        raise typer.Exit(1)
