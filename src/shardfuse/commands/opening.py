"""Opens the model of a serving command, in one process or over tensor-parallel ranks."""

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

from ..layers.hf.plain import check_plain, check_there
from . import errors

if TYPE_CHECKING:
    from ..serving.folder import Opened
    from ..serving.folder_options import FolderOptions

GRACE_S = 3.0  # how long ranks may take to end after a signal
PATIENCE = timedelta(minutes=10)  # how long a rank waits for others, which read weights and compile at their own pace


@dataclass(frozen=True)
class Opening:
    """The model to open, and its ranks.

    ``tiny`` makes a small random model, ignoring the folder. The command starts ``tp`` ranks unless torchrun has
    started them.
    """

    folder: FolderOptions
    tiny: bool = False
    tp: int = 1


def check_installed(command: str, needed: tuple[str, ...]) -> None:
    """Raise ImportError for a package that ``command`` needs and that is not installed."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{command} needs {', '.join(missing)}: pip install 'shardfuse[serve]'")


@contextlib.contextmanager
def settled(opening: Opening) -> Iterator[Opening]:
    """``opening`` with the number of torchrun's ranks, and with the tiny model's folder, which exists during the block.

    Raises FileNotFoundError for a missing folder or file, ValueError for a path that is no plain folder of a model.
    """
    with contextlib.ExitStack() as stack:
        if opening.tiny:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardfuse-")))
            opening = replace(opening, folder=replace(opening.folder, folder=_tiny(folder)))
        else:  # before any message, and before a rank starts
            check_there(opening.folder.folder)
            check_plain(opening.folder.folder)
            _read_ahead(opening.folder.folder)
        if by_torchrun():
            opening = replace(opening, tp=int(os.environ["WORLD_SIZE"]))
        yield opening


def _read_ahead(folder: Path) -> None:
    """Ask the system for the weights, while Python imports what reads them, if they fit into half of its memory."""
    files = [file for file in folder.glob("model*.safetensors") if file.is_file()]
    with contextlib.suppress(OSError, ValueError, AttributeError):  # only some systems take such advice
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(file.stat().st_size for file in files) < free // 2:
            for file in files:
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def follows() -> bool:
    """Whether torchrun started this process as a rank other than 0, which must call :func:`follow`."""
    return by_torchrun() and os.environ["RANK"] != "0"


def lead(opening: Opening, say: Callable[[str], object]) -> Opened:
    """On rank 0: load the model, and report it to ``say``, first of all that this begins: torch takes a while."""
    say(f"loading {errors.shown(opening.folder.folder)}" + (f" over {opening.tp} ranks" if opening.tp > 1 else ""))
    from ..serving.folder import open_folder

    opened = open_folder(opening.folder, _mesh(opening))
    say(opened.how)
    return opened


def follow(opening: Opening) -> None:
    """On the other ranks: load the model, and compute the steps that rank 0 sends."""
    from ..serving.folder import open_folder

    open_folder(opening.folder, _mesh(opening)).engine.follow()


def by_torchrun() -> bool:
    """Whether torchrun has started the ranks, this process among them."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _tiny(folder: Path) -> Path:
    import torch

    from ..testing import save_tiny_hf

    return save_tiny_hf(folder, dtype=torch.float32, max_positions=2048)


def _mesh(opening: Opening) -> Any:
    """The mesh of all ranks."""
    if opening.tp == 1:
        return None
    from ..parallel.core.rendezvous import init_mesh

    return init_mesh(tp=opening.tp, device_type=opening.folder.device, timeout=PATIENCE)


class Ranks:
    """The processes of the ranks from 1 on."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []

    def wrong(self) -> str:
        """A message that names a rank that has ended; "" while all are alive."""
        for rank, process in enumerate(self.processes, 1):
            if not process.is_alive():
                code = process.exitcode or 0
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return f"rank {rank} has ended ({how}): start the command again"
        return ""


@contextlib.contextmanager
def started_ranks(opening: Opening) -> Iterator[Ranks]:
    """Make this process rank 0 and start the other ranks, unless torchrun has; the end of the block ends them."""
    ranks = Ranks()
    if opening.tp == 1 or by_torchrun():
        yield ranks
        return
    import torch

    from ..training.launch import threads_per_process
    from ..training.worker import loopback

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
            f"--tp {opening.tp}: this machine has {there} GPUs, and every rank needs one: choose a lower --tp, or "
            "--device cpu, or let torchrun start the ranks on several machines"
        )


def _rank_main(opening: Opening, rank: int, parent: int) -> None:
    from ..training.worker import die_with

    die_with(parent)
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal signals all ranks; rank 0 decides
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
