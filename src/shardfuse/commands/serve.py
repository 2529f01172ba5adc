"""``shardfuse serve``: a server over one model, in one process or over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console

from . import opening
from .opening import Opening

if TYPE_CHECKING:
    from ..serving.server import ServerOptions

_SAID = 4000  # the most characters of a line at start-up
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "transformers")


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``shardfuse serve``: the ``model`` to serve, and the settings of the ``server``."""

    model: Opening
    server: ServerOptions
    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 60.0
    warm_up: bool = True
    log: str = "text"
    log_level: str = "info"


def run_serve(options: ServeOptions) -> int:
    """Serve until a signal; return 0 if all open requests were answered, 1 if some were ended."""
    from ..serving.server.logs import log_to_stderr
    from ..serving.server.run import listen

    console = Console(highlight=False, stderr=True, soft_wrap=True, emoji=False)
    log_to_stderr(options.log, options.log_level)
    with opening.settled(options.model) as model:
        if opening.follows():
            opening.follow(model)
            return 0
        with listen(options.host, options.port) as listener, opening.started_ranks(model) as ranks:
            return _lead(options, model, console, listener, ranks.wrong)


def _lead(options: ServeOptions, model: Opening, console: Console, listener: Any, wrong: Callable[[], str]) -> int:
    """On rank 0: load the model and serve."""
    from ..serving.printable import printable
    from ..serving.server import Served
    from ..serving.server.hosts import is_loopback
    from ..serving.server.run import run

    def say(text: str) -> None:
        console.print("\n".join(printable(line, _SAID) for line in text.split("\n")), markup=False)

    opened = opening.lead(model, say)
    with opened.engine as engine:
        if options.warm_up:
            with console.status("warming up") as status:
                engine.warmup(lambda what: status.update(f"warming up: {what}"))
        engine.limit_waits(timedelta(seconds=options.server.health_timeout_s))
        served = Served(engine, opened.tokenizer, sorted(opened.stop_ids), options.server, wrong)

        if words := served.chat.words():
            say(words)

        def started(address: str, limits: str) -> None:
            name = printable(options.server.name)
            say(f"serving {name!r} at {address} (a live page there, OpenAI's API below {address}/v1)")
            say(limits)
            if is_loopback(options.host):
                say("only this machine can reach it; --host 0.0.0.0 lets others in")
            elif not options.server.api_keys:
                say("warning: other machines can reach it, and it asks for no key; set one with --api-key KEY")

        return run(served, listener, drain_s=options.drain_s, started=started)
