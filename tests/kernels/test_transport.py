"""How rows leave for the peers on a GPU: what the host calls, in which order and on which streams, without a GPU.

Memory of the host passes for a GPU's, and stand-ins for CUDA's streams run at once what is launched on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse.kernels.comm import transport
from shardfuse.kernels.dev import stub_cuda
from shardfuse.kernels.runtime import copies
from shardfuse.kernels.runtime.dispatch import triton_version
from shardfuse.kernels.runtime.signals import Signals, in_one_process, raise_flags, rows_of

SUPPORT = Path(__file__).parents[1] / "support"
K, EPOCH = 6, 5

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles stubs")


class OnGpu(torch.Tensor):
    """Takes itself for a tensor on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Stream:
    """Logs what the host asks of it."""

    log: list[tuple[str, Any]]
    current: Stream

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.cuda_stream = id(self)

    def record_event(self) -> str:
        Stream.log.append(("record", self))
        return "event"

    def wait_event(self, event: str) -> None:
        Stream.log.append(("wait", self))

    def wait_stream(self, other: Stream) -> None:
        other.record_event()
        self.wait_event("event")


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class Launches(TorchDispatchMode):
    """Logs torch's copies and fills."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "fill_"):
            Stream.log.append((name, Stream.current))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Every call of the host that reaches CUDA, with its stream; a batch of copies with its bytes, too."""

    def batch(targets: list[int], sources: list[int], nbytes: int, stream: int) -> bool:
        assert stream == Stream.current.cuda_stream
        assert len(targets) == len(sources)
        Stream.log.append((f"batch of {nbytes}", Stream.current))
        for target, source in zip(targets, sources):
            ctypes.memmove(target, source, nbytes)
        return True

    monkeypatch.setattr(copies, "_batch", lambda: batch)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    Stream.log, Stream.current = [], Stream()
    transport._copy_streams.cache_clear()
    yield Stream.log
    transport._copy_streams.cache_clear()


def _exchange(ranks: int, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor], list[Signals]]:
    """All rows, the ranks' slots and their signals, as if on GPUs."""
    whole = torch.randn(tokens, K)
    slots = [torch.full((tokens, K), float("nan")) for _ in range(ranks)]
    signals = in_one_process(slots, timeout_s=1.0, epoch=EPOCH)
    pads = [pad.as_subclass(OnGpu) for pad in signals[0].pads]
    return whole, [slot.as_subclass(OnGpu) for slot in slots], [each._replace(pads=pads) for each in signals]


def _own(whole: torch.Tensor, signals: Signals) -> torch.Tensor:
    first, last = rows_of(signals.rank, len(signals.pads), len(whole))
    return whole[first:last].as_subclass(OnGpu)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_hosts_calls_do_not_depend_on_the_number_of_ranks(log: list[tuple[str, Any]], ranks: int):
    """For each piece one call for the rows and one for the flags, of all peers."""
    pieces, here = 8, Stream.current
    whole, slots, signals = _exchange(ranks, 16 * ranks)
    for mine in signals:
        with Launches():
            finish = transport.start_push(_own(whole, mine), slots, mine, pieces)
            assert [what for what, _ in log] == ["copy_", "fill_", "record"]  # before the product: the own rows
            finish()
        one, two = transport._copy_streams(mine.state.device, mine.state.data_ptr())
        sent = [(f"batch of {nbytes}", stream) for stream in (one, two) for nbytes in (2 * K * 4, 4)]
        assert log == [
            *[("copy_", here), ("fill_", here), ("record", here), ("wait", one), ("wait", two)],
            *sent * (pieces // 2),
            *[("record", one), ("wait", here), ("record", two), ("wait", here)],
        ]
        assert len(log) == 9 + 2 * pieces
        assert Stream.current is here
        log.clear()
    assert all(torch.equal(slot, whole) for slot in slots)
    for pad in signals[0].pads:
        assert pad[0, :, :pieces].unique().tolist() == [EPOCH]
        assert not pad[0, :, pieces:].any()
        assert not pad[1].any()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_batches_each_peer_takes_a_call(
    log: list[tuple[str, Any]], ranks: int, monkeypatch: pytest.MonkeyPatch
):
    """A driver older than CUDA 12.8: the same copies in the same order."""
    monkeypatch.setattr(copies, "_batch", lambda: None)
    pieces = 3
    whole, slots, signals = _exchange(ranks, 16 * ranks - 5)
    for mine in signals:
        log.clear()
        with Launches():
            transport.start_push(_own(whole, mine), slots, mine, pieces)()
        owned = rows_of(mine.rank, ranks, len(whole))
        assert len(log) == 9 + (ranks - 1) * (pieces + min(pieces, -(-(owned[1] - owned[0]) // 6)))
    assert all(torch.equal(slot, whole) for slot in slots)
    assert all((pad[0, :, :pieces] == EPOCH).all() for pad in signals[0].pads)


def test_a_rank_without_rows_sends_its_flags_alone(log: list[tuple[str, Any]]):
    whole, slots, signals = _exchange(4, 3)
    with Launches():
        transport.start_push(_own(whole, signals[3]), slots, signals[3], 1)()
    assert [what for what, _ in log] == ["fill_", "record", "wait", "batch of 4", "record", "wait"]
    assert all(pad[0, 3, 0] == EPOCH for pad in signals[3].pads)


def test_flags_of_all_peers_take_two_calls(log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch):
    """The own one is written by the stream, and copied to the peers behind it."""
    written: list[int] = []

    def write(pad: torch.Tensor, index: int, value: int) -> None:
        written.append(index)
        pad.view(torch.int32)[index] = value

    monkeypatch.setattr(torch.ops.symm_mem, "stream_write_value32_", write, raising=False)
    _, _, signals = _exchange(8, 8)
    raise_flags(signals[2], 1, 3, range(8))
    assert len(written) == 1
    assert [what for what, _ in log] == ["batch of 4"]
    assert all(pad[1, 2, 3] == EPOCH and pad.count_nonzero() == 1 for pad in signals[0].pads)


@pytest.mark.parametrize("stream", copies._LEGACY_STREAMS)
def test_the_default_stream_takes_no_batch(log: list[tuple[str, Any]], stream: int):
    Stream.current.cuda_stream = stream
    tensors = [torch.full((4,), value).as_subclass(OnGpu) for value in (1.0, 2.0, 3.0)]
    with Launches():
        copies.spread(tensors, 0, [1, 2], 4, 8)
    assert [what for what, _ in log] == ["copy_", "copy_"]
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 4, [2.0, 1.0, 1.0, 2.0], [3.0, 1.0, 1.0, 3.0]]


# --- the driver's function --------------------------------------------------------------------------------------------


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The stub of CUDA's driver, which makes copies."""
    library = stub_cuda.build(tmp_path)
    monkeypatch.setattr(copies, "_LIBRARY", str(library))
    copies._batch.cache_clear()
    yield ctypes.CDLL(str(library))
    copies._batch.cache_clear()


@needs_gcc
def test_a_batch_reaches_the_driver(stub: ctypes.CDLL):
    batch = copies._batch()
    assert batch is not None
    source, targets = torch.arange(5), [torch.zeros(5, dtype=torch.int64) for _ in range(3)]
    assert batch([target.data_ptr() + 8 for target in targets], [source.data_ptr() + 8] * 3, 24, 77)
    assert [target.tolist() for target in targets] == [[0, 1, 2, 3, 0]] * 3
    assert ctypes.c_int.in_dll(stub, "stub_batches").value == 1
    assert ctypes.c_void_p.in_dll(stub, "stub_stream").value == 77
    asked = copies._Attributes.in_dll(stub, "stub_attributes")
    assert (asked.source_order, asked.flags) == (copies._STREAM_ORDER, copies._BESIDE_KERNELS)


@needs_gcc
def test_a_batch_that_fails_is_an_error_and_one_that_is_not_supported_is_not(stub: ctypes.CDLL):
    refusal = ctypes.c_int.in_dll(stub, "stub_refusal")
    batch = copies._batch()
    assert batch is not None
    refusal.value = copies._NOT_SUPPORTED
    assert not batch([1], [2], 4, 77)
    refusal.value = 700
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with CUDA's error 700 for 1 copies of 4 bytes"):
        batch([1], [2], 4, 77)


def test_a_driver_without_batches(monkeypatch: pytest.MonkeyPatch):
    for library in ("libnowhere.so.1", "libc.so.6"):
        monkeypatch.setattr(copies, "_LIBRARY", library)
        copies._batch.cache_clear()
        assert copies._batch() is None
    copies._batch.cache_clear()


@needs_gcc
@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed, which brings cuda.h")
def test_what_is_passed_is_what_cudas_header_says(tmp_path: Path):
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    fields = {"source_order": "srcAccessOrder", "source_hint": "srcLocHint", "target_hint": "dstLocHint"}
    layout = "".join(
        f'_Static_assert(offsetof(CUmemcpyAttributes, {theirs}) == {getattr(copies._Attributes, ours).offset}, "");'
        for ours, theirs in (fields | {"flags": "flags"}).items()
    )
    values = {
        "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": copies._STREAM_ORDER,
        "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": copies._BESIDE_KERNELS,
        "CUDA_ERROR_NOT_SUPPORTED": copies._NOT_SUPPORTED,
        "sizeof(CUmemcpyAttributes)": ctypes.sizeof(copies._Attributes),
        "sizeof(CUdeviceptr)": 8,
    }
    layout += "".join(f'_Static_assert({theirs} == {ours}, "");' for theirs, ours in values.items())
    source = tmp_path / "header.c"
    source.write_text(
        f"""
        #define __CUDA_API_VERSION_INTERNAL
        #include <cuda.h>
        #include <stddef.h>
        {layout}
        CUresult (*batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
                          size_t *, CUstream) = cuMemcpyBatchAsync;
        """
    )
    subprocess.run(["gcc", "-Werror", f"-I{include}", "-fsyntax-only", str(source)], check=True)
