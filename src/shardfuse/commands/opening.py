"""The model of a command that serves, in one process or over tensor-parallel ranks."""

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

if TYPE_CHECKING:
    from ..serving.folder import FolderOptions, Opened

GRACE_S = 3.0  # for ranks that are told to end
PATIENCE = timedelta(minutes=10)  # of a rank with the others, which read weights and compile at their own pace


@dataclass(frozen=True)
class Opening:
    """Which model is opened, and over what.

    With ``tiny`` a small random model is made, whatever folder is named. ``tp`` ranks are started, unless torchrun has
    started them.
    """

    folder: FolderOptions
    tiny: bool = False
    tp: int = 1


def check_installed(command: str, needed: tuple[str, ...]) -> None:
    """ImportError for what ``command`` needs and is not installed."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{command} needs {', '.join(missing)}: pip install 'shardfuse[serve]'")


@contextlib.contextmanager
def settled(opening: Opening) -> Iterator[Opening]:
    """``opening`` with the folder of the tiny model, which lives as long as the block, and with torchrun's ranks.

    Raises FileNotFoundError for a folder that is not there.
    """
    with contextlib.ExitStack() as stack:
        if opening.tiny:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardfuse-")))
            opening = replace(opening, folder=replace(opening.folder, folder=_tiny(folder)))
        elif not opening.folder.folder.is_dir():  # before anything is said, or a rank is started
            raise FileNotFoundError(
                f"{opening.folder.folder}: there is no such folder: expected config.json, weights and a tokenizer"
            )
        if by_torchrun():
            opening = replace(opening, tp=int(os.environ["WORLD_SIZE"]))
        yield opening


def follows() -> bool:
    """Whether torchrun has started this process as another rank than 0: its part is to :func:`follow`."""
    return by_torchrun() and os.environ["RANK"] != "0"


def lead(opening: Opening, say: Callable[[str], object]) -> Opened:
    """Rank 0: load the model, telling ``say`` about it."""
    from ..serving.folder import open_folder

    say(f"loading {opening.folder.folder}" + (f" over {opening.tp} ranks" if opening.tp > 1 else ""))
    opened = open_folder(opening.folder, _mesh(opening))
    say(opened.how)
    return opened


def follow(opening: Opening) -> None:
    """The other ranks: load the model, and compute what rank 0 sends."""
    from ..serving.folder import open_folder

    open_folder(opening.folder, _mesh(opening)).engine.follow()


def by_torchrun() -> bool:
    """Whether torchrun has started the ranks, of which this process is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _tiny(folder: Path) -> Path:
    import torch

    from ..testing import save_tiny_hf

    return save_tiny_hf(folder, dtype=torch.float32, max_positions=2048)


def _mesh(opening: Opening) -> Any:
    """All ranks' mesh."""
    if opening.tp == 1:
        return None
    from ..parallel.core.rendezvous import init_mesh

    return init_mesh(tp=opening.tp, device_type=opening.folder.device, timeout=PATIENCE)


class Ranks:
    """Processes of the ranks from 1 on."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []

    def wrong(self) -> str:
        """Which has ended; "" while all live."""
        for rank, process in enumerate(self.processes, 1):
            if not process.is_alive():
                code = process.exitcode or 0
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return f"rank {rank} has ended ({how}): start the command again"
        return ""


@contextlib.contextmanager
def started_ranks(opening: Opening) -> Iterator[Ranks]:
    """Start the ranks from 1 on, unless torchrun has, and make this process rank 0; at the end none of them lives."""
    import torch

    from ..training.launch import threads_per_process
    from ..training.worker import loopback

    ranks = Ranks()
    if opening.tp == 1 or by_torchrun():
        yield ranks
        return
    _check_gpus(opening)
    threads = threads_per_process(opening.tp)
    shared = {
        "WORLD_SIZE": str(opening.tp),
        "LOCAL_WORLD_SIZE": str(opening.tp),
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
        for rank in range(1, opening.tp):
            process = context.Process(target=_rank_main, args=(opening, rank, os.getpid()), daemon=True)
            process.start()
            ranks.processes.append(process)
        yield ranks
    finally:
        for each in ranks.processes:
            each.join(GRACE_S)
            if each.is_alive():
                each.kill()
                each.join()


def _check_gpus(opening: Opening) -> None:
    import torch

    there = torch.cuda.device_count()
    if opening.folder.device != "cpu" and 0 < there < opening.tp:
        raise ValueError(
            f"--tp {opening.tp}: this machine has {there} GPUs, and every rank needs one: lower it, or choose --device "
            "cpu, or let torchrun start the ranks on several machines"
        )


def _rank_main(opening: Opening, rank: int, parent: int) -> None:
    from ..training.worker import die_with

    die_with(parent)
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal sends it to all; rank 0 decides
        signal.signal(each, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        follow(opening)
    except Exception as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # closing a process group may wait for a dead rank


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
