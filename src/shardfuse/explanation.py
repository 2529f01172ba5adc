"""``explain``: a table of what a model will run, and why, before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import nn

from .kernels.runtime.checks import type_name
from .kernels.runtime.device import architecture
from .kernels.runtime.onednn import packed_bytes
from .kernels.runtime.printing import Sheet, figure, prose, text_of, unbroken
from .layers import block
from .layers.fuse.finding import preview
from .layers.fuse.probing import told
from .layers.fuse.report import readers, stayed
from .layers.fuse.swap import Fused
from .layers.fuse.traffic import Traffic, traffic
from .layers.linear import RowParallelLinear
from .layers.module import CollectiveInfo, FusedGroup, ShardedModule
from .parallel.core.sharding import spec_of, unwrap
from .parallel.overlap import partial_sum
from .parallel.overlap.memory import reserve
from .parallel.overlap.plan import OverlapPlan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer, in a module's path
_PER_CALL = "it depends on the number of tokens: pass an input"


@dataclass(frozen=True)
class Row:
    """One op of one module, or of several layers that differ only in their number."""

    path: str  # "model.layers.*.mlp.c_fc": the star stands for a layer's number
    kind: str  # the module's class
    op: str
    # "triton", "reference", or "refused" if the requested implementation cannot run. For modules of other packages
    # "torch", or "with its parent" if a fused module reads their parameters.
    runs: str
    why: str
    layout: str  # "weight [1024/2, 256], bias [1024/2]"
    parameters: int  # on this rank, in one layer
    layers: int = 1
    collectives: tuple[CollectiveInfo, ...] = ()  # with their overlap with products
    shared_by: tuple[str, ...] = ()  # other layers that share the first collective: "k_proj", "v_proj"
    # The layers' numbers for each star: "0-31", "0-2, 5". () if not all combinations of them occur.
    numbers: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The path with its layers' numbers: "model.layers.0-31.mlp.c_fc"."""
        numbers = iter(self.numbers)
        return re.sub(r"\*", lambda star: next(numbers, star.group()), self.path)


@dataclass(frozen=True)
class Moved:
    """A fused module's traffic in a training forward before and after ``fuse``, summed over its layers."""

    path: str
    layers: int
    stock: Traffic
    fused: Traffic


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`: print it, read its ``rows``, or take its ``record()``."""

    device: torch.device
    ranks: int
    parameters: int  # of the whole model
    parameters_per_rank: int
    rows: tuple[Row, ...]
    packed: int = 0  # bytes of weights packed for inference on a CPU, beside the parameters
    memory: str = ""  # a table of the symmetric memory, if an input was given and the ranks could use such memory
    batch: tuple[int, ...] = ()  # shape of the input whose training forward was counted
    moved: tuple[Moved, ...] = ()  # the last one is the whole model
    not_counted: str = ""  # the reason if counting failed
    preview: bool = False  # whether the model is stock, and this says what it would be after fuse
    no_preview: str = ""  # the error that kept a stock model from being looked at

    def record(self) -> dict[str, Any]:
        """The explanation as values that JSON can hold."""
        return {**asdict(self), "device": str(self.device)}

    def __rich__(self) -> Group:
        reasons = _Reasons()
        head = (
            f"{_as_on(self.device)}, {self.ranks} tensor-parallel rank{'s' if self.ranks > 1 else ''}, "
            f"{self.parameters:,} parameters, {self.parameters_per_rank:,} per rank"
            + (f", {self.packed / 1e6:,.1f} MB of weights packed for inference beside them" if self.packed else "")
        )
        if self.preview:
            head += "; not fused yet: this is what it would be after fuse(model)"
        elif self.no_preview:
            head += f"; what fuse(model) would do is not known: {self.no_preview}"
        shown: list[RenderableType] = [Text(head), "", self._modules(reasons)]
        if any(row.collectives for row in self.rows):
            shown += ["", self._across(reasons)]
        shown += ["", reasons]
        if self.memory:
            shown += ["", Text(self.memory)]
        if self.batch:
            shown += ["", *self._moved()]
        return Group(*shown)

    def _modules(self, reasons: _Reasons) -> Sheet:
        """The table of modules: what runs in each, its parameters' layout and their number."""
        table = Sheet(prose("module"), prose("layout", least=20), figure("per rank"))
        for (where, kind), ops in groupby(self.rows, key=lambda row: (row.where, row.kind)):
            first, *others = ops
            runs = [f"{f'{row.op}: ' if row.op else ''}{row.runs}{reasons.mark(row.why)}" for row in (first, *others)]
            module = Group(Text(where), Padding(Text(f"{kind}, {runs[0]}"), (0, 0, 0, 2)), *_indented(runs[1:]))
            count = f"{first.layers} x {first.parameters:,}" if first.layers > 1 else f"{first.parameters:,}"
            table.add(module, first.layout, count if first.parameters else "")
        return table

    def _moved(self) -> list[RenderableType]:
        """The table of memory."""
        title = f"a training forward of {list(self.batch)} as on {_as_on(self.device)}, before and after fuse"
        if self.not_counted:
            return [Text(f"{title}: {self.not_counted}")]
        columns = [figure(heading) for heading in ("layers", "kept for backward", "ops", "bytes moved")]
        table = Sheet(unbroken("module"), *columns, title=f"{title} (counted on fake tensors, not timed)")
        for each in self.moved:
            kept, ops, moved = ((getattr(each.stock, of), getattr(each.fused, of)) for of in ("kept", "ops", "moved"))
            layers = "" if each is self.moved[-1] else str(each.layers)
            table.add(each.path, layers, _sizes(*kept), f"{ops[0]:,} -> {ops[1]:,}", _sizes(*moved))
        return [table]

    def _across(self, reasons: _Reasons) -> Sheet:
        """The table of collectives."""
        columns = [unbroken(heading) for heading in ("module", "in", "across ranks", "plan")]
        table = Sheet(*columns, figure("exposed us"))
        for row in self.rows:
            for position, collective in enumerate(row.collectives):
                others = row.shared_by if position == 0 else ()
                module = Group(Text(row.where), *_indented(f"with {', '.join(others)}" for _ in others[:1]))
                when, op, plan, exposed, why = _told(collective)
                table.add(module, when, op, plan + reasons.mark(why), exposed)
        return table

    def __str__(self) -> str:
        return text_of(self)


def _as_on(device: torch.device) -> str:
    """The device for people, with the chip that stands for a GPU where there is none."""
    absent = device.type == "cuda" and not torch.cuda.is_available()
    return f"{device} ({architecture(device)}: there is no GPU here)" if absent else str(device)


class _Reasons:
    """The reasons of one explanation, each numbered when it is first marked, and listed once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, why: str) -> str:
        """The mark that stands for ``why`` in a table, such as " [3]"; "" without a reason."""
        return f" [{self._numbers.setdefault(why, len(self._numbers) + 1)}]" if why else ""

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for why, number in self._numbers.items():
            table.add_row(Text(f"[{number}]"), Text(why))
        return table


def _indented(lines: Iterable[str]) -> list[Padding]:
    return [Padding(Text(line), (0, 0, 0, 2)) for line in lines]


def explain(
    model: nn.Module,
    x: torch.Tensor | torch.device | str | None = None,
    *,
    batch: tuple[int, ...] | None = None,
) -> Explanation:
    """Tell for each module of ``model`` which implementation runs and why, how it is sharded, and what a rank holds.

    ``x`` is an input or a device; None means the device of the parameters. ``explain`` runs nothing and asks no other
    rank. The overlap of collectives with products, and the symmetric memory for it, depend on the number of tokens:
    pass an input to see them. If the model runs under autocast, call ``explain`` under autocast, which decides the
    dtype. A collective that several layers share is listed at the first of them. Modules of other packages are listed
    if they own parameters. In a fused model the table also says why they stayed stock. A stock model in which ``fuse``
    would find something is explained as it would be after ``fuse(model)``, and stays as it is.

    For such a model, pass an input or ``batch``, the shape of its token ids, such as (4, 2048). A second table then
    shows for each fused module, before and after ``fuse``, the bytes that it keeps for backward, the number of its ops
    and the bytes that these move. They are counted on fake tensors, for the ops of the requested device, which this
    machine need not have: without a GPU, "cuda" is Hopper's (sm_90), whose measurements decide then.

    Raises TypeError for a ``model`` that is no module. Raises ValueError for an ``x`` that is neither an input nor a
    device, and for a ``batch`` that is no shape or is given beside an input.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain: model is a {type_name(model)}: expected an nn.Module, such as load_hf(folder)")
    given = _given(x, batch)
    ours = any(isinstance(module, (Fused, ShardedModule)) for module in model.modules())
    fused, failed = (None, "") if ours else _previewed(model)
    model = model if fused is None else fused
    device, tokens = _device(model, x), _tokens(model, x)
    alike: dict[Row, list[tuple[int, ...]]] = {}
    for row, numbers in _rows(model, device, tokens):
        alike.setdefault(row, []).append(numbers)
    rows = [replace(row, layers=len(found), numbers=_ranges(found)) for row, found in alike.items()]
    specs = [spec_of(param) for param in model.parameters()]  # tied parameters once
    return Explanation(
        device=device,
        ranks=max((spec.group.size for spec in specs), default=1),
        parameters=sum(spec.logical_shape.numel() for spec in specs),
        parameters_per_rank=sum(spec.local_shape.numel() for spec in specs),
        rows=tuple(rows),
        packed=sum(packed_bytes(unwrap([param])[0][0]) for param in model.parameters()),
        memory="\n".join(reserve.budgets(model, tokens, device)) if tokens else "",
        preview=fused is not None,
        no_preview=failed,
        **({} if given is None else _counted(model, device, given)),
    )


def _previewed(model: nn.Module) -> tuple[nn.Module | None, str]:
    """A fused twin of a stock model, or None; and the error if making it failed."""
    try:
        return preview(model), ""
    except Exception as error:  # of a foreign class that cannot be copied, or of a matcher
        return None, told(error)


def _given(x: Any, batch: Any) -> torch.Tensor | None:
    """The input to count with: ``x``, or an empty tensor of the shape ``batch``; None without either."""
    if batch is None:
        return x if isinstance(x, torch.Tensor) else None
    if isinstance(x, torch.Tensor):
        raise ValueError(f"explain: batch={batch!r} beside an input of {list(x.shape)}: pass one of them")
    if not isinstance(batch, (tuple, list)) or not all(type(size) is int and size > 0 for size in batch):
        raise ValueError(f"explain: batch={batch!r}: expected the shape of token ids, such as (4, 2048)")
    return torch.empty(tuple(batch), dtype=torch.long, device="meta")


def _counted(model: nn.Module, device: torch.device, given: torch.Tensor) -> dict[str, Any]:
    """What a training forward keeps and moves: fields of :class:`Explanation`."""
    if not any(isinstance(module, Fused) for module in model.modules()):
        return {}
    found: dict[str, Any] = {"batch": tuple(given.shape)}
    try:
        modules = traffic(model, device, given)
    except Exception as error:  # whatever a foreign forward raises
        return {**found, "not_counted": f"cannot be counted on fake tensors: {type(error).__name__}: {error}"}
    moved: dict[str, Moved] = {}
    whole = Moved("together", 1, Traffic(), Traffic())
    for path, each in modules.items():
        name = _starred(path) or "(elsewhere, head and loss)"
        before = moved.get(name, Moved(name, 0, Traffic(), Traffic()))
        moved[name] = Moved(name, before.layers + 1, before.stock + each.stock, before.fused + each.fused)
        whole = replace(whole, stock=whole.stock + each.stock, fused=whole.fused + each.fused)
    return {**found, "moved": (*moved.values(), whole)}


def _device(model: nn.Module, x: torch.Tensor | torch.device | str | None) -> torch.device:
    if isinstance(x, torch.Tensor):
        return x.device
    if x is not None:
        try:
            return torch.device(x)
        except (RuntimeError, TypeError):
            raise ValueError(f"explain: x={x!r}: expected an input, or a device such as 'cpu' or 'cuda'") from None
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _tokens(model: nn.Module, x: Any) -> int | None:
    """The number of tokens of ``x`` on all ranks together: ids [B, S] or [T], or activations [..., D]."""
    if not isinstance(x, torch.Tensor):
        return None
    if not x.is_floating_point():
        return x.numel()
    tokens = x.shape[:-1].numel()
    # With sequence parallelism all layers but the row-parallel one take this rank's share of the tokens.
    split = getattr(model, "sequence_parallel", False) and not isinstance(model, RowParallelLinear)
    group: Any = getattr(model, "group", None)
    return tokens * group.size if split else tokens


def _rows(model: nn.Module, device: torch.device, tokens: int | None) -> Iterator[tuple[Row, tuple[int, ...]]]:
    """Each op of each module, with the layers' numbers in the module's path."""
    taken, fused_groups, stock = _taken(model), _fused_groups(model), _stock(model)
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    for path, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        ops = _ops(module, device)
        if not own and not ops:
            continue
        fused_group = fused_groups.get(module)
        for position, (op, runs, why) in enumerate(ops or [("", *stock.get(path, _FOREIGN))]):
            first = position == 0  # the first op's row lists the parameters
            collectives = _collectives(module, device, tokens, taken.get(module), fused_group) if first else ()
            others = fused_group.layers[1:] if fused_group and collectives else ()
            row = Row(
                path=_starred(path) or "(model)",
                kind=type(module).__name__,
                op=op,
                runs=runs,
                why=why,
                layout=", ".join(_layout(name, param) for name, param in own) if first else "",
                parameters=sum(spec_of(param).local_shape.numel() for _, param in own) if first else 0,
                collectives=collectives,
                shared_by=tuple(names[layer] for layer in others),
            )
            yield row, tuple(int(number) for number in _NUMBER.findall(path))


_FOREIGN = ("torch", "not a layer of this package")


def _starred(path: str) -> str:
    """The path without layers' numbers."""
    return _NUMBER.sub("*", path)


def _ranges(found: list[tuple[int, ...]]) -> tuple[str, ...]:
    """The numbers at each place of a path: "0-31"; () if ``found`` does not have every combination of them."""
    places = [sorted(set(numbers)) for numbers in zip(*found)]
    if math.prod(map(len, places)) != len(found):
        return ()
    return tuple(", ".join(_runs_of(numbers)) for numbers in places)


def _runs_of(numbers: list[int]) -> Iterator[str]:
    """Ascending numbers as ranges: "0-2", "5"."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *others = [number for _, number in run]
        yield f"{first}-{others[-1]}" if others else f"{first}"


def _stock(model: nn.Module) -> dict[str, tuple[str, str]]:
    """By path: what runs each module of a fused model that is not fused itself, and why."""
    if not any(isinstance(module, Fused) for module in model.modules()):
        return {}
    paths = {module: path for path, module in model.named_modules()}
    read = {paths[module]: ("with its parent", _starred(by) or "the model") for module, by in readers(model).items()}
    return read | {each.path: ("torch", each.why) for each in stayed(model)}


def _ops(module: nn.Module, device: torch.device) -> list[tuple[str, str, str]]:
    """(op, implementation, reason) of every op that the module itself runs."""
    runs: Any = getattr(module, "runs", None)
    if runs is None:
        return []
    try:
        return [(op, choice.impl, choice.reason) for op, choice in runs(device)]
    except (RuntimeError, ValueError) as error:  # impl="triton" where it cannot run: forward will raise the same
        return [("", "refused", str(error))]


def _taken(model: nn.Module) -> dict[nn.Module, RowParallelLinear]:
    """By norm: the layer whose all-reduce may be deferred to it."""
    found: dict[nn.Module, RowParallelLinear] = {}
    for module in model.modules():
        deferred_sums: Any = getattr(module, "deferred_sums", None)
        found.update(deferred_sums() if callable(deferred_sums) else {})
    return found


def _fused_groups(model: nn.Module) -> dict[nn.Module, FusedGroup]:
    """By layer: the group of layers that run as one with it."""
    found: dict[nn.Module, FusedGroup] = {}
    for module in model.modules():
        groups: Any = getattr(module, "fused_groups", None)
        for group in groups() if callable(groups) else []:
            found.update(dict.fromkeys(group.layers, group))
    return found


def _collectives(
    module: nn.Module,
    device: torch.device,
    tokens: int | None,
    takes: RowParallelLinear | None,
    fused_group: FusedGroup | None,
) -> tuple[CollectiveInfo, ...]:
    if not isinstance(module, ShardedModule) or module.group.size == 1:
        return ()
    if fused_group is not None and module is not fused_group.layers[0]:  # the first one lists it
        return ()
    try:
        plan = None if takes is None else block.preview_deferred(takes, module, device, tokens)
        deferred = [] if plan is None else [CollectiveInfo("decoding", partial_sum.OP, plan)]
        return (*module.collectives(device, tokens, fused_group), *deferred)
    except (RuntimeError, ValueError) as error:  # forward will raise the same
        return (CollectiveInfo("", "", OverlapPlan("refused", reason=str(error))),)


def _told(collective: CollectiveInfo) -> tuple[str, ...]:
    """When the collective runs, its op, how it overlaps, its exposed microseconds, and the reason."""
    if collective.plan is None:
        return collective.when, collective.op, "per call", "", _PER_CALL
    kind, pieces, reason, exposed_s = collective.plan
    how = f"{kind} in {pieces}" if kind == "chunked" else kind
    return collective.when, collective.op, how, "" if exposed_s is None else f"{exposed_s * 1e6:,.0f}", reason


def _layout(name: str, param: torch.Tensor) -> str:
    spec = spec_of(param)
    sizes = [
        f"{size}/{size // here}" if here < size else str(size)
        for size, here in zip(spec.logical_shape, spec.local_shape)
    ]
    return f"{name} [{', '.join(sizes)}]"


def _sizes(before: int, after: int) -> str:
    """Two sizes in bytes as one text, such as "12.3 -> 4.1 MB"."""
    power = next((power for power in (3, 2, 1) if max(before, after) >= 1000**power), 0)
    figures = [f"{size / 1000**power:,.{1 if power else 0}f}" for size in (before, after)]
    return f"{' -> '.join(figures)} {('B', 'kB', 'MB', 'GB')[power]}"
