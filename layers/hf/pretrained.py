"""Any causal language model of transformers from its folder, fused and split, without any rank holding all of it.

:func:`load_pretrained` builds the model on the meta device and fuses it there, so that each parameter knows which part
this rank keeps. Then it reads the files in order, of each tensor only this rank's slice. transformers' own conversions
handle the names and layouts of older checkpoints.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import nn

from ...parallel.checkpoint import checked
from ...parallel.core.agreement import agree, together
from ...parallel.core.mesh import Group, MeshLike, everyone, tp_group
from ...parallel.core.sharding import local_tensor, logical, shard_slice
from ...parallel.materialize import allocate, device_of
from ..fuse import fuse
from . import claims
from .config import CONFIG, GENERATION
from .folders import (
    StrPath,
    _check_files,
    _check_unchanged,
    _claimed,
    _weight_files,
    read_generation_config,
)
from .notices import tell_unread, tell_untied, tell_unused, without_effect
from .plain import check_dtypes
from .refusals import refusals_of
from .tensors import Tensors, explained
from .tying import owners, ties


class Reading(NamedTuple):
    """The amount that :func:`load_pretrained` read on this rank."""

    tensors: int
    nbytes: int  # of the slices
    file_bytes: int  # of all tensors in the files


def load_pretrained(
    directory: StrPath,
    mesh: MeshLike = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **fusing: Any,
) -> nn.Module:
    """The causal language model in ``directory``, a folder of transformers, fused, in evaluation mode.

    Args:
        mesh: tensor-parallel ranks, as :func:`fuse` takes it; all of them call this, and each reads its own slices.
        dtype: of the parameters; None: the folder's.
        device: where the parameters go; None: the mesh's device, without a mesh torch's default. "meta": nowhere yet;
            ``parallelize`` then reads each rank's share, once it knows that.
        progress: a bar on standard error; None: on the first rank, if standard error is a terminal.
        model_kwargs: of transformers' ``from_config``, such as ``{"attn_implementation": "eager"}``.
        fusing: further arguments of :func:`fuse`.

    The result has the folder's config and settings for generation. Its ``loaded_from`` names the folder, from which
    :func:`save_pretrained` copies the tokenizer; its ``reading`` tells how much this rank has read.

    Raises FileNotFoundError for a missing folder or file; ValueError for a file that is cut short, missing or of
    another model, and for a config that transformers does not know; and the errors of :func:`fuse`. Every rank raises.
    """
    folder, group = Path(directory), tp_group(mesh)
    device = device or (torch.get_default_device() if group.mesh is None else device_of(group.mesh, None))
    device = torch.device(device)
    sums = _check_files(folder, group)
    there = torch.device("cpu") if device.type == "meta" else device
    share = group.rank, group.size
    model, targets, differing = agree(group, lambda: _on_meta(folder, sums, dtype, there, model_kwargs or {}, share))
    _untie(model, folder, set().union(*together(group, lambda: differing)))
    fuse(model, mesh, **fusing)
    model.loaded_from = folder.absolute()

    def read_weights(ranks: Group) -> None:
        """Fill the parameters, which must have memory, from the folder."""
        model.__dict__.pop("read_weights", None)
        held = set().union(*together(ranks, lambda: set(model.state_dict())))

        def read() -> Reading:
            reading = _read(model, held, _weight_files(folder, sums), targets, progress)
            _check_unchanged(folder, sums)
            return reading

        model.reading = agree(ranks, read)

    if device.type == "meta":
        model.read_weights = read_weights
    else:
        allocate(model, device)
        read_weights(group)
    return model.eval()


def _on_meta(
    folder: Path,
    sums: checked.Sums | None,
    dtype: torch.dtype | None,
    device: torch.device,
    options: Mapping[str, Any],
    share: tuple[int, int],
) -> tuple[Any, list[_Target], set[str]]:
    """The stock model of ``folder`` with its settings for generation, parameters on meta and buffers on ``device``, the
    sources of its parameters, and the names of those tied ones that the files untie, as far as this rank's ``share`` of
    their rows shows it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    raw, files = _claimed(folder, sums)
    tensors = Tensors(files)
    with explained(folder / CONFIG):
        with refusals_of(folder, raw):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tell_unread(folder, raw)
        _drop_kernels(config)
        dtype = dtype or _dtype_of(config)
        with refusals_of(folder, raw), claims.few_modules(len(tensors.where), raw), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **options)
        claims.check_buffers(model, tensors.total, raw)
        targets = _fitting(model, tensors, raw, folder)
        differing = _differing(model, targets, tensors, share)
    if (generation := read_generation_config(folder)) is not None:
        with explained(folder / GENERATION):
            if (folder / GENERATION).exists():
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
            else:  # the entries of an older folder's config
                model.generation_config.update(**generation)
    _place_buffers(model, device)
    return model, targets, differing


def _differing(model: Any, targets: list[_Target], tensors: Tensors, share: tuple[int, int]) -> set[str]:
    """The tied parameters that differ from what they are tied to, in the files and the model's dtype."""
    found = {name: target for target in targets for name in target.made}
    differing: set[str] = set()
    first: dict[str, str] = {}
    for name, source in model.all_tied_weights_keys.items():
        if source not in found:  # the first of its parameters that the files have stands for it
            source = first.setdefault(source, name) if name in found else source
        if name == source or name not in found or source not in found:
            continue
        if found[name].converter is not None or found[source].converter is not None:
            raise ValueError(f"{name} and {source} are tied, and both in the files in an older layout: save it again")
        names = found[name].sources[0][0], found[source].sources[0][0]
        with tensors.explained(names[0]):
            if tensors.differ(*names, model.get_parameter(name).dtype, share):
                differing.add(name)
    return differing


def _untie(model: Any, folder: Path, names: set[str]) -> None:
    """Give the parameters ``names``, on meta, a place of their own, and say so in the config."""
    for name in sorted(names):
        path, _, last = name.rpartition(".")
        tied = model.get_parameter(name)
        model.get_submodule(path)._parameters[last] = nn.Parameter(
            torch.empty_like(tied), requires_grad=tied.requires_grad
        )
        tell_untied(folder, name, model.all_tied_weights_keys.pop(name))
    for path, owner in owners(model) if names else ():
        if not names.isdisjoint(ties(owner, path)):
            owner.config.tie_word_embeddings = False  # tie_weights() would tie them again


def _fitting(model: Any, tensors: Tensors, config: Mapping[str, Any], folder: Path) -> list[_Target]:
    """The sources of ``model``'s parameters, which have no memory yet, after a comparison of names and shapes.

    Raises ValueError if the config claims other tensors than the files hold.
    """
    entries = model.state_dict(keep_vars=True)
    targets = _targets(model, list(tensors.where), set(entries))
    floating = {name for name, entry in entries.items() if entry.is_floating_point()}
    check_dtypes(
        tensors.dtypes,
        [name for target in targets if not floating.isdisjoint(target.made) for name, _ in target.sources],
    )
    tell_unused(folder, _check_names(model, targets, entries, set(entries), tensors))
    for target in targets:
        made = [entries[name] for name in target.made if name in entries]
        shapes = [tensors.shapes[name] for name, _ in target.sources]
        if target.converter is None and made:
            claims.check_shape(target.name, shapes[0], made[0].shape, config)
        claims.check_amount(target.name, sum(map(math.prod, shapes)), sum(each.numel() for each in made), config)
    return targets


def _drop_kernels(config: Any) -> None:
    """Forget implementations that the file names: transformers would fetch some from a hub, and run them."""
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = None
    config._experts_implementation = None
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            _drop_kernels(inner)


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _place_buffers(model: Any, device: torch.device) -> None:
    """Compute the values of ``model``'s buffers that no file holds, with transformers' initialisation."""
    for param in model.parameters():
        param._is_hf_initialized = True  # leave it on meta
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    model.initialize_weights()


# ------------------------------------------------------------------------------------------------------------ reading


class _Target(NamedTuple):
    """A tensor of the model and its source: names in files, with transformers' conversion if there is one."""

    name: str
    sources: list[tuple[str, str]]  # (name in the files, the conversion's pattern for it)
    converter: Any

    @property
    def made(self) -> list[str]:
        """The names of all tensors that the conversion makes."""
        patterns = [] if self.converter is None else self.converter.target_patterns
        return [self.name, *(self.name.replace(patterns[0], pattern) for pattern in patterns[1:])]


@torch.no_grad()
def _read(
    model: Any, held: set[str], files: dict[Path, list[str]], targets: list[_Target], progress: bool | None
) -> Reading:
    """Fill ``model``, whose parameters have memory, with this rank's slices of the tensors in ``files``.

    ``held`` are the names of the tensors that the ranks hold together. Raises ValueError for tensors that are missing,
    have no place in the model, or have another shape.
    """
    entries = model.state_dict(keep_vars=True)
    tensors = Tensors(files)
    _check_names(model, targets, entries, held, tensors)
    with _bar(progress, tensors.total) as advance:
        for target in targets:
            if any(name in entries for name in target.made):
                with tensors.explained(target.sources[0][0]):
                    _fill(model, target, entries, tensors)
            advance(sum(tensors.size(name) for name, _ in target.sources))
    return Reading(len(tensors.where), tensors.read, tensors.total)


def _targets(model: Any, names: list[str], held: set[str]) -> list[_Target]:
    """The source of each tensor of the model that the files hold."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = dict.fromkeys(held, True)
    found: dict[str, _Target] = {}
    for name in sorted(names, key=dot_natural_key):  # experts in order
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        converter = None if pattern is None else by_pattern[pattern]
        found.setdefault(target, _Target(target, [], converter)).sources.append((name, pattern or name))
    for name, each in found.items():
        if each.converter is None and len(each.sources) > 1:
            both = " and ".join(source for source, _ in each.sources)
            raise ValueError(f"the files have {both}, which are both {name} of the model: delete what is not meant")
    return list(found.values())


def _fill(model: Any, target: _Target, entries: dict[str, torch.Tensor], tensors: Tensors) -> None:
    if target.converter is None:
        ((name, _),) = target.sources
        entry = entries[target.name]
        _check_shape(target.name, tensors.shapes[name], entry)
        local_tensor(entry).copy_(tensors.part(name, shard_slice(entry)))
        return
    converter = copy.deepcopy(target.converter)
    for name, pattern in target.sources:
        converter.add_tensor(target.name, name, pattern, tensors.part(name, ...))
    for name, made in converter.convert(target.name, model=model, config=model.config).items():
        if name not in entries:
            continue  # on another stage
        value = made[0] if isinstance(made, list) else made
        _check_shape(name, value.shape, entries[name])
        local_tensor(entries[name]).copy_(value[shard_slice(entries[name])])


def _check_shape(name: str, found: Any, entry: torch.Tensor) -> None:
    if tuple(found) != tuple(logical(entry).shape):
        raise ValueError(f"{name} is {list(found)}, expected {list(logical(entry).shape)}")


def _check_names(
    model: Any, targets: list[_Target], entries: dict[str, torch.Tensor], held: set[str], tensors: Tensors
) -> list[str]:
    """The tensors with no place on any rank, if no logit depends on them.

    Raises ValueError for other such tensors, and for those that this rank's part of the model misses.
    """

    def ignored(name: str, patterns: Any) -> bool:
        return any(re.search(pattern, name) for pattern in patterns or ())

    filled = {id(entries[name]) for target in targets for name in target.made if name in entries}
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = [
        name
        for name, entry in entries.items()
        if id(entry) not in filled
        # transformers computes masks and positions, and those buffers that it ignores; only training makes the others
        and (name in params or (entry.is_floating_point() and not ignored(name, model._keys_to_ignore_on_load_missing)))
    ]
    foreign = {target.name: target.sources[0][0] for target in targets if held.isdisjoint(target.made)}
    unknown = [source for name, source in foreign.items() if not ignored(name, _old(model))]
    unused = [name for name in unknown if without_effect(name, tensors.shapes[name], tensors.dtypes[name])]
    unknown = [name for name in unknown if name not in unused]
    if missing:
        raise ValueError(f"the files have no {missing[0]} ({len(missing)} such in all), which {CONFIG} asks for")
    if unknown:
        raise ValueError(f"{unknown[0]} ({len(unknown)} such in all) has no place in the model of {CONFIG}")
    return unused


def _old(model: Any) -> list[str]:
    """Patterns of the names that transformers leaves unread: what older versions stored and a model now computes."""
    return [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]


@contextmanager
def _bar(progress: bool | None, total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    shown = (console.is_terminal if progress is None else progress) and everyone().rank == 0
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)
