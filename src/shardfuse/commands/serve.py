"""``shardfuse serve``: a server over one model, in one process or over tensor-parallel ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from ..serving.folder import FolderOptions
    from ..serving.server import ServerOptions

GRACE_S = 3.0  # for ranks that are told to end
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "transformers")


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``shardfuse serve``.

    ``model`` and ``server`` say what is served and how; without a folder in ``tiny`` runs a small random model is made.
    ``tp`` ranks are started, unless torchrun has started them.
    """

    model: FolderOptions
    server: ServerOptions
    tiny: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    tp: int = 1
    drain_s: float = 60.0
    warm_up: bool = True
    log: str = "text"
    log_level: str = "info"


def check_installed() -> None:
    """ImportError for what the server needs and is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"serve needs {', '.join(missing)}: pip install 'shardfuse[serve]'")


def run_serve(options: ServeOptions) -> int:
    """Serve until a signal; the exit code: 0 after all open requests were answered, 1 where some were ended."""
    from ..serving.server.run import listen, log_to_stderr

    console = Console(highlight=False, stderr=True, soft_wrap=True)
    log_to_stderr(options.log, options.log_level)
    with contextlib.ExitStack() as stack:
        if options.tiny:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardfuse-")))
            options = replace(options, model=replace(options.model, folder=_tiny(folder)))
        if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:  # torchrun's
            return _take_part(options, world, console)
        listener = stack.enter_context(listen(options.host, options.port))
        ranks = stack.enter_context(_ranks(options))
        return _lead(options, console, listener, ranks.wrong)


def _take_part(options: ServeOptions, world: int, console: Console) -> int:
    from ..serving.server.run import listen

    options = replace(options, tp=world)
    if os.environ["RANK"] != "0":
        _follow(options)
        return 0
    with listen(options.host, options.port) as listener:
        return _lead(options, console, listener, lambda: "")


def _tiny(folder: Path) -> Path:
    import torch

    from ..testing import save_tiny_hf

    return save_tiny_hf(folder, dtype=torch.float32, max_positions=2048)


def _mesh(options: ServeOptions) -> Any:
    """All ranks' mesh, whose collectives are given up after the health check's deadline."""
    if options.tp == 1:
        return None
    from ..parallel.core.rendezvous import init_mesh

    timeout = timedelta(seconds=options.server.health_timeout_s)
    return init_mesh(tp=options.tp, device_type=options.model.device, timeout=timeout)


def _lead(options: ServeOptions, console: Console, listener: Any, wrong: Callable[[], str]) -> int:
    """Rank 0: load the model, and serve."""
    from ..serving.folder import open_folder
    from ..serving.server import Served
    from ..serving.server.run import run

    def say(text: str) -> None:
        console.print(text, markup=False)

    say(f"loading {options.model.folder}" + (f" over {options.tp} ranks" if options.tp > 1 else ""))
    opened = open_folder(options.model, _mesh(options))
    say(opened.how)
    with opened.engine as engine:
        if options.warm_up:
            with console.status("warming up") as status:
                engine.warmup(lambda what: status.update(f"warming up: {what}"))
        served = Served(engine, opened.tokenizer, sorted(opened.stop_ids), options.server, wrong)

        def started(address: str) -> None:
            say(f"serving {options.server.name!r} at {address} (a live page there, OpenAI's API below {address}/v1)")
            if options.host in ("127.0.0.1", "localhost", "::1"):
                say("only this machine reaches it; --host 0.0.0.0 lets others in")
            elif not options.server.api_keys:
                say("warning: other machines reach it, and it asks for no key: --api-key KEY")

        return run(served, listener, drain_s=options.drain_s, started=started)


def _follow(options: ServeOptions) -> None:
    """The other ranks: load the model, and compute what rank 0 sends."""
    from ..serving.folder import open_folder

    open_folder(options.model, _mesh(options)).engine.follow()


class _Ranks:
    """Processes of the ranks from 1 on."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []

    def wrong(self) -> str:
        """Which has ended; "" while all live."""
        for rank, process in enumerate(self.processes, 1):
            if not process.is_alive():
                code = process.exitcode or 0
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return f"rank {rank} has ended ({how}): start the server again"
        return ""


@contextlib.contextmanager
def _ranks(options: ServeOptions) -> Iterator[_Ranks]:
    """Start the ranks from 1 on, and make this process rank 0; at the end none of them lives."""
    import torch

    from ..training.launch import threads_per_process
    from ..training.worker import loopback

    ranks = _Ranks()
    if options.tp == 1:
        yield ranks
        return
    _check_gpus(options)
    threads = threads_per_process(options.tp)
    shared = {
        "WORLD_SIZE": str(options.tp),
        "LOCAL_WORLD_SIZE": str(options.tp),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": loopback(),
    }
    os.environ.update(shared, RANK="0", LOCAL_RANK="0")
    torch.set_num_threads(threads)
    context = multiprocessing.get_context("spawn")
    try:
        for rank in range(1, options.tp):
            process = context.Process(target=_rank_main, args=(options, rank, os.getpid()), daemon=True)
            process.start()
            ranks.processes.append(process)
        yield ranks
    finally:
        for each in ranks.processes:
            each.join(GRACE_S)
            if each.is_alive():
                each.kill()
                each.join()


def _check_gpus(options: ServeOptions) -> None:
    import torch

    there = torch.cuda.device_count()
    if options.model.device != "cpu" and 0 < there < options.tp:
        raise ValueError(
            f"--tp {options.tp}: this machine has {there} GPUs, and every rank needs one: lower it, or choose --device "
            "cpu, or let torchrun start the ranks on several machines"
        )


def _rank_main(options: ServeOptions, rank: int, parent: int) -> None:
    from ..training.worker import die_with

    die_with(parent)
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal sends it to all; rank 0 decides
        signal.signal(each, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        _follow(options)
    except Exception as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # closing a process group may wait for a dead rank


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
