"""The tensors of a checkpoint: torch.distributed.checkpoint plans and writes them, and they are read as bytes.

torch writes each as an archive of its own (torch.save), in which the elements lie in one piece; ``index.json`` says
where. So torch's own functions read the files too, and this module needs no pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from ..core.mesh import Group
from . import checked, index

# --- writing ----------------------------------------------------------------------------------------------------------


def save(tensors: dict[str, torch.Tensor], folder: Path, ranks: Group) -> None:
    """Write this rank's parts of ``tensors`` to ``folder``, and the index. Every rank enters."""
    writer = Writer(folder)
    if ranks.size > 1:
        with _connected(folder, "writing"):
            dcp.save(tensors, storage_writer=writer, planner=Planner(), process_group=ranks.pg)
        return
    # dcp.save would warn that the process is alone, which is intended, and a thread cannot suppress its own warnings.
    planner = Planner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    written = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)
    writer.finish(metadata, [written.wait()])


class _Stream:
    """A file to which several tensors are written one after another; a tensor's writer must not close it."""

    def __init__(self, raw: Any) -> None:
        self.write, self.flush, self.close = raw.write, raw.flush, raw.flush


class _Transforms(_StorageWriterTransforms):
    """An identity transform, whose stream has no finaliser: torch's own stream flushes the file again when collected.

    By then the file is closed, which Python 3.13 reports on stderr.
    """

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> tuple[Any, list[str]]:
        return _Stream(raw_stream), []


class Planner(dcp.DefaultSavePlanner):
    """torch's planner, which writes every tensor's elements row by row."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        transformed = super().transform_object(write_item, object)
        if isinstance(transformed, torch.Tensor):
            return transformed.resolve_conj().resolve_neg().contiguous()
        return transformed


class Writer(dcp.FileSystemWriter):
    """torch's writer, which also writes ``index.json``.

    It raises the OSError, such as a full disk, that a failure of its clean-up would hide.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.transforms = _Transforms()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).value()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None
        placed: Future[list[WriteResult]] = Future()
        placed.set_result(
            [
                dataclasses.replace(each, storage_data=(each.storage_data, self._start(each.storage_data)))
                for each in written
            ]
        )
        return placed

    def _start(self, where: Any) -> int:
        """The offset in its file at which a tensor's elements begin; torch wrote the tensor's archive to ``where``."""
        with open(Path(self.path) / where.relative_path, "rb") as file:
            archive = torch._C.PyTorchFileReader(_create_file_view(file, where.offset, where.length))  # type: ignore[call-overload]
            return where.offset + archive.get_record_offset("data/0")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        placed = [each for part in results for each in part]
        places = {each.index: (each.storage_data[0].relative_path, each.storage_data[1]) for each in placed}
        checked.write_text(Path(self.path) / index.FILE, json.dumps(index.describe(metadata, places)))
        super().finish(metadata, [[dataclasses.replace(each, storage_data=each.storage_data[0]) for each in placed]])


# --- reading ----------------------------------------------------------------------------------------------------------


def load(wanted: dict[str, torch.Tensor], reader: Reader, ranks: Group) -> None:
    """Fill the tensors in ``wanted``. Every rank enters."""
    if ranks.size > 1:
        with _connected(Path(reader.path), "reading"):
            dcp.load(wanted, storage_reader=reader, process_group=ranks.pg)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=reader, no_dist=True)


class Reader(dcp.FileSystemReader):
    """Gives torch's planner the index, and its tensors the bytes of the files that ``manifest`` lists.

    :func:`checked.check_files` has checked those. torch's own reader would unpickle the index and each tensor.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        super().__init__(folder)
        self._sums = manifest["files"]
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = index.read(Path(self.path) / index.FILE, self._sums)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        entries: Any = self.read_metadata().state_dict_metadata
        with contextlib.ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for item in plan.items:
                name, start, sizes = self.storage_data[item.storage_index]
                if name not in files:
                    files[name] = stack.enter_context(open(Path(self.path) / name, "rb"))
                dtype = entries[item.storage_index.fqn].properties.dtype
                first, count = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
                piece = _read_rows(files[name], start, sizes, dtype, first, count)
                for dim in range(1, len(sizes)):
                    piece = piece.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_rows(
    file: BinaryIO, start: int, sizes: Sequence[int], dtype: torch.dtype, first: int, count: int
) -> torch.Tensor:
    """``count`` rows, from the row ``first`` on, of a tensor whose elements begin at ``start``."""
    row = math.prod(sizes[1:]) * dtype.itemsize
    elements = torch.empty(count * row, dtype=torch.uint8)
    file.seek(start + first * row)
    if file.readinto(elements.numpy()) != len(elements):  # type: ignore[attr-defined]
        raise ValueError(f"{file.name}: cut short while it was being read")
    return elements.view(dtype).view(count, *sizes[1:]) if sizes else elements.view(dtype).view(())


@contextlib.contextmanager
def _connected(folder: Path, doing: str) -> Iterator[None]:
    """Report a RuntimeError as a failed collective: torch.distributed.checkpoint wraps all other errors."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{folder}: {doing} failed: has another rank of the group ended, or not reached this call? ({error})"
        ) from error
