"""Backends of symmetric memory. Each returns every rank's memory as tensors of this process.

| backend | ranks are | memory |
|---|---|---|
| ``_TorchBackend`` | processes with a GPU each, on one node | torch's symmetric memory: mapped over NVLink or PCIe |
| ``_SharedBackend`` | processes on CPUs of one machine | files without a name (memfd), mapped by all |
| ``_VirtualBackend`` | parts of one process | one tensor |

``pool.py`` builds pools and channels on them.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from ....kernels.runtime.signals import fence, reached
from ...core import collectives
from ...core.mesh import Group
from .sizes import aligned

T = TypeVar("T")

SITE = "symmetric"  # of the collectives that allocate memory

_POLL_S = 2e-5
_TOKEN_BYTES = 16
_FILE_NAME = "shardfuse"

_ELSEWHERE = (
    "the ranks have to run on one machine, in one container (PID namespace) and as one user, with /proc mounted; where "
    "they cannot, choose overlap='chunked', which needs no shared memory"
)


class MemoryUnavailable(RuntimeError):
    """Symmetric memory is unavailable. Raised on all ranks alike."""


class SymmetricBuffer:
    """One allocation: ``tensors[r]`` is rank r's memory, uint8 [bytes], as this process sees it.

    Memory of CPUs and virtual ranks lives as long as any view of it. ``close``, or the end of this object, frees a
    GPU's memory: later uses of its views are invalid.
    """

    def __init__(self, tensors: list[torch.Tensor], owner: object = None) -> None:
        self.tensors, self._owner = tensors, owner
        self.nbytes = tensors[0].numel()

    @property
    def addresses(self) -> list[int]:
        """The address of each rank's memory in this process."""
        return [tensor.data_ptr() for tensor in self.tensors]

    def close(self) -> None:
        self.tensors, self._owner = [], None


class Backend(ABC):
    """The ranks of a group, and how they allocate memory that all of them can write."""

    rank: int
    size: int
    device: torch.device
    virtual = False
    lock: AbstractContextManager[Any] = nullcontext()  # held while channels are laid out

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate ``nbytes`` of zeros on every rank. Collective; if one rank fails, all raise MemoryUnavailable."""

    @abstractmethod
    def agree(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in order of rank. Collective."""

    def resets(self, channel: Hashable) -> Sequence[int]:
        """The ranks whose flags this rank sets when it lays out ``channel``, a name and a place. Under ``lock``."""
        return [self.rank]

    def together(self, step: Callable[[], T]) -> list[T]:
        """Each rank's result of ``step``, once all ranks have run it; raises MemoryUnavailable on all if one fails."""
        value, failure = None, None
        try:
            value = step()
        except (OSError, RuntimeError, ValueError) as error:
            failure = str(error)
        answers = self.agree((value, failure))
        failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why is not None]
        if failures:
            raise MemoryUnavailable(f"symmetric memory is unavailable: {'; '.join(failures)}")
        return [value for value, _ in answers]


class _GroupBackend(Backend):
    """Ranks that are processes. The group is looked up at each use, because memory must not keep it alive."""

    def __init__(self, group: Callable[[], Group], device: torch.device) -> None:
        self._group, self.device = group, device
        self.rank, self.size = group().rank, group().size

    def agree(self, value: Any) -> list[Any]:
        return collectives.gather_objects(value, self._group(), site=SITE)


class _TorchBackend(_GroupBackend):
    """torch.distributed._symmetric_memory: a GPU's memory, mapped into its peers' address spaces."""

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        import torch.distributed._symmetric_memory as symm_mem

        made: list[torch.Tensor] = []
        self.together(lambda: made.append(symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device).zero_()))
        mapped: list[Any] = []
        self.together(lambda: mapped.append(self._rendezvous(made[0])))
        handle = mapped[0]
        tensors = [handle.get_buffer(rank, (nbytes,), torch.uint8, 0) for rank in range(self.size)]
        return SymmetricBuffer(tensors, (made[0], handle))

    def _rendezvous(self, local: torch.Tensor) -> Any:
        import torch.distributed._symmetric_memory as symm_mem

        torch.cuda.synchronize(self.device)  # zeros first: a peer may write as soon as it has the mapping
        return symm_mem.rendezvous(local, self._group().pg)


class _SharedBackend(_GroupBackend):
    """memfd_create(2): a file without a name, which the kernel frees with the last process that maps it.

    Peers open it through /proc/<pid>/fd/<number>. Nothing stays behind when a process dies, however it dies.
    """

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        token = os.urandom(_TOKEN_BYTES)  # a process with the same id in another container has another file
        files: list[int] = []
        tensors: list[torch.Tensor] = []
        try:
            offers = self.together(lambda: _create(files, nbytes, token))
            self.together(lambda: tensors.extend(self._map(peer, *offer, nbytes) for peer, offer in enumerate(offers)))
        finally:
            for fd in files:
                os.close(fd)  # the mappings keep the file
        return SymmetricBuffer(tensors)

    def _map(self, peer: int, pid: int, number: int, token: bytes, nbytes: int) -> torch.Tensor:
        if peer == self.rank:
            return _mapping(number, nbytes)
        path = f"/proc/{pid}/fd/{number}"
        try:
            # Check the link before opening it: a file of another container's process may block, or do worse.
            if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
                raise RuntimeError(f"{path} is not the memory of rank {peer}: {_ELSEWHERE}")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"{path}, the memory of rank {peer}: {error.strerror}: {_ELSEWHERE}") from error
        try:
            if os.pread(fd, _TOKEN_BYTES, nbytes) != token:
                raise RuntimeError(f"{path} is not the memory of rank {peer}: {_ELSEWHERE}")
            return _mapping(fd, nbytes)
        finally:
            os.close(fd)


def _create(files: list[int], nbytes: int, token: bytes) -> tuple[int, int, bytes]:
    """Create this rank's file, with ``token`` after its memory; returns (process, file descriptor, token)."""
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("shared memory between CPU ranks needs Linux (memfd_create); choose overlap='chunked'")
    fd = os.memfd_create(_FILE_NAME)
    files.append(fd)
    # Reserve memory now: a later shortage would kill the process that touches it.
    os.posix_fallocate(fd, 0, nbytes + len(token))
    os.pwrite(fd, token, nbytes)
    return os.getpid(), fd, token


def _mapping(fd: int, nbytes: int) -> torch.Tensor:
    """The file's memory as a tensor, which keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class _VirtualBackend(Backend):
    """Ranks of one process that share one tensor: for tests, and for measurements on one GPU."""

    virtual = True

    def __init__(self, rank: int, memory: torch.Tensor, laid_out: set[Hashable], lock: threading.Lock) -> None:
        self.rank, self.size, self.device = rank, memory.shape[0], memory.device
        self._memory, self._laid_out, self.lock = memory, laid_out, lock

    @classmethod
    def team(cls, world: int, nbytes: int, device: torch.device) -> list[_VirtualBackend]:
        memory = torch.zeros(world, aligned(nbytes), dtype=torch.uint8, device=device)[:, :nbytes]
        shared = memory, set[Hashable](), threading.Lock()
        return [cls(rank, *shared) for rank in range(world)]

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        assert nbytes == self._memory.shape[1], "virtual ranks get all they will have at once"
        return SymmetricBuffer(list(self._memory.unbind()))

    def agree(self, value: Any) -> list[Any]:
        return [value] * self.size  # one program runs all ranks

    def resets(self, channel: Hashable) -> Sequence[int]:
        """All ranks: the first thread may raise the flags of ranks that have not run yet."""
        if channel in self._laid_out:
            return []
        self._laid_out.add(channel)
        return range(self.size)


def wait_words(words: torch.Tensor, epoch: int, timeout_s: float) -> dict[int, int]:
    """Wait on the host until the ranks' flags, int32 [R], have reached ``epoch``.

    Returns the flags that had not reached it after ``timeout_s``, by rank, as last seen.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline  # read first: a process that the system did not schedule checks once more
        missing = {rank: flag for rank, flag in enumerate(words.tolist()) if not reached(flag, epoch)}
        if late or not missing:
            if words.device.type == "cpu":
                fence()  # later reads see at least what was there when the flags were raised
            return missing
        time.sleep(_POLL_S)  # the peers may share this rank's core
