"""Make an engine from a folder of transformers: model, tokenizer, settings for generation, and cache."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.runtime.checks import whole_number
from ..kernels.runtime.names import expected
from ..layers.attention.paged import default_block_size
from ..layers.hf.chat_template import ChatTemplate
from ..layers.hf.config import GENERATION
from ..layers.hf.folders import check_claims, load_hf, read_hf_config
from ..layers.hf.plain import check_there
from ..layers.hf.tokenizers import load_tokenizer
from ..parallel.core.agreement import together
from ..parallel.core.mesh import MeshLike, tp_group
from .engine import KV_DTYPES, Engine
from .folder_options import FolderOptions
from .generation import GenerationDefaults, eos_token_ids
from .models import ServableModel, as_servable, bare
from .printable import printable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_CACHE_GIB = 1.0
_SMALLER = "--kv-dtype fp8 or int8, and more ranks"
_TOLD = 20  # of the tokens that end answers, at start-up
_GPU_SHARE = 0.85  # the cache's share of the memory left beside the model: steps need some as well


@dataclass(frozen=True)
class Opened:
    """A loaded folder: an open engine, the tokenizer of transformers, and the tokens that end an answer.

    ``how`` describes the model, the size of its cache, and the defaults of requests.
    """

    engine: Engine
    tokenizer: Any
    stop_ids: frozenset[int]
    how: str

    @property
    def defaults(self) -> GenerationDefaults:
        """Those of requests."""
        return self.engine.generation


def open_folder(options: FolderOptions, mesh: MeshLike = None) -> Opened:
    """Load the folder, over the tensor-parallel ranks of ``mesh``; all of them call this.

    The model becomes a :class:`ParallelTransformer` where possible; any other model is transformers' own, fused.

    Raises ImportError without transformers; FileNotFoundError for a missing folder or file; ValueError for a folder
    that cannot be read, a model that cannot be served, or sizes that cannot work.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ImportError("transformers is not installed: pip install 'shardfuse[serve]'") from None
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r}: {expected(options.dtype, DTYPES)}")
    gib = options.cache_gib
    if gib is not None and not (isinstance(gib, int | float) and 0 < gib < math.inf):
        raise ValueError(f"a cache of {gib!r} GiB: expected a positive number")
    whole_number("max_num_seqs", options.max_num_seqs)
    _check_device(options.device)
    tokenizer = _tokenizer(options)
    model, kind = _model(options, mesh)
    config = model.config
    device = next(model.parameters()).device
    length = config.max_positions if options.max_model_len is None else options.max_model_len
    generation = _generation(options, model, tokenizer)
    block_size = default_block_size(device) if options.block_size is None else options.block_size
    blocks = _blocks(options, model, block_size, length, mesh)
    engine = Engine(
        model,
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=length,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        max_queued_requests=options.max_queued_requests,
        kv_dtype=options.kv_dtype,
        num_host_blocks=options.num_host_blocks,
        enforce_eager=options.enforce_eager,
        invariant=options.invariant,
        guide_timeout_s=options.guide_timeout_s,
        guide_memory_mib=options.guide_memory_mib,
        # A copy, because the engine's thread decodes while another thread encodes.
        tokenizer=copy.deepcopy(tokenizer),
        generation=generation,
    )
    size = sum(each.numel() for each in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    how = (
        f"{kind}, {_short(size)} parameters{' on each rank' if tp_group(mesh).size > 1 else ''} in {dtype} "
        f"on {device.type}; a cache of {blocks * block_size:,} tokens, prompt and answer up to "
        f"{engine.max_model_len:,} tokens together, {options.max_num_seqs} at once"
    )
    if engine.max_model_len < length:
        needed = _gib(length, block_size, _block_bytes(options, model, block_size, mesh))
        how += (
            f"\nthe model itself takes {length:,} tokens, for which the cache would need {needed:.3g} GiB on each rank "
            f"(--cache-gib; {_SMALLER} make it smaller)"
        )
    how += f"\n{_generation_words(options, generation, tokenizer)}"
    return Opened(engine, tokenizer, generation.eos_token_ids, how)


def _check_device(device: str | None) -> None:
    """ValueError for a device that is none, or that this machine lacks."""
    try:
        if device is not None:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r}: expected cpu or cuda, and one that is there: {error}") from None


def _generation(options: FolderOptions, model: ServableModel, tokenizer: Any) -> GenerationDefaults:
    """The settings in force. Where neither they nor the config name an end of answers, the tokenizer's is taken."""
    if options.generation_config == "vllm":
        found = GenerationDefaults(eos_token_ids(bare(model)))
    elif options.generation_config == "auto":
        found = GenerationDefaults.of_model(bare(model))
    else:
        found = GenerationDefaults.of_folder(Path(options.generation_config), bare(model))
    ends = {each for each in found.eos_token_ids if each < model.config.vocab_size}  # others never come
    if not ends and tokenizer.eos_token_id is not None:
        ends = {tokenizer.eos_token_id}
    return replace(found, eos_token_ids=frozenset(ends))


def _generation_words(options: FolderOptions, found: GenerationDefaults, tokenizer: Any) -> str:
    ends = ", ".join(
        f"{printable(tokenizer.convert_ids_to_tokens(each))} ({each})" for each in sorted(found.eos_token_ids)[:_TOLD]
    )
    if (more := len(found.eos_token_ids) - _TOLD) > 0:
        ends += f" and {more:,} more"
    said = f"answers end at {ends}" if ends else "no token ends an answer"
    if (own := tokenizer.eos_token_id) is not None and own not in found.eos_token_ids:
        text = printable(tokenizer.eos_token)
        said += f", and not at the tokenizer's {text} ({own}), which the model's files do not name"
    if words := found.words():
        source = "" if options.generation_config == "auto" else f"{printable(options.generation_config)}/"
        told = ", ".join(printable(each) for each in words)
        said += f"; defaults of requests, by {source}{GENERATION}: {told} (--generation-config vllm: none)"
    if found.ignored:
        ignored = ", ".join(f"{printable(name)}={printable(value)}" for name, value in found.ignored.items())
        said += f"\nwarning: {GENERATION} has {ignored}, which this engine does not have: its answers differ"
    return said


def _short(count: float) -> str:
    for unit in ("", " thousand", " million"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.4g} billion"


def _tokenizer(options: FolderOptions) -> Any:
    check_there(options.folder)
    check_claims(options.folder)  # transformers' tokenizers read the config as well
    tokenizer = load_tokenizer(options.folder)
    if options.chat_template is not None:
        if not options.chat_template.is_file():
            raise FileNotFoundError(f"chat_template={str(options.chat_template)!r}: expected a file of a template")
        ChatTemplate(tokenizer).replace(options.chat_template)
    return tokenizer


def _model(options: FolderOptions, mesh: MeshLike) -> tuple[ServableModel, str]:
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    try:
        read_hf_config(options.folder)
    except ValueError:  # a feature that our own layers lack
        from ..layers.hf.pretrained import load_pretrained

        model = load_pretrained(options.folder, mesh, dtype=dtype, device=options.device)
        kind = f"transformers' {type(model).__name__}, fused"
    else:
        model = load_hf(options.folder, mesh=mesh, dtype=dtype, device=options.device)
        kind = type(model).__name__
    return as_servable(model.eval()), kind


def _blocks(options: FolderOptions, model: ServableModel, block_size: int, length: int, mesh: MeshLike) -> int:
    """The number of blocks that fit on every rank."""
    weight, block_bytes = next(model.parameters()), _block_bytes(options, model, block_size, mesh)
    if options.cache_gib is not None:
        room = options.cache_gib * 2**30
    elif weight.is_cuda:
        room = _GPU_SHARE * torch.cuda.mem_get_info(weight.device)[0]
    else:
        room = _CPU_CACHE_GIB * 2**30
    found = min(together(tp_group(mesh), lambda: int(room // block_bytes)))
    most = options.max_num_seqs * -(-length // block_size)
    if not found:
        raise ValueError(
            f"a cache of {room / 2**30:.3g} GiB has no room for one block of {block_size} tokens, "
            f"{block_bytes / 2**30:.3g} GiB: give it more, or make block_size smaller"
        )
    if options.max_model_len is not None and found * block_size + 1 < length:
        raise ValueError(
            f"max_model_len={length:,} needs a cache of {_gib(length, block_size, block_bytes):.3g} GiB, "
            f"and {room / 2**30:.3g} GiB hold {found * block_size:,} tokens: lower it, give the cache more memory "
            f"(--cache-gib), or make it smaller ({_SMALLER})"
        )
    return min(found, most)


def _gib(tokens: int, block_size: int, block_bytes: int) -> float:
    return math.ceil(tokens / block_size) * block_bytes / 2**30


def _block_bytes(options: FolderOptions, model: ServableModel, block_size: int, mesh: MeshLike) -> int:
    """The bytes of one block on each rank."""
    config, weight = model.config, next(model.parameters())
    dtype = weight.dtype if options.kv_dtype is None else KV_DTYPES.get(options.kv_dtype, weight.dtype)
    heads = -(-config.num_kv_heads // tp_group(mesh).size)
    size = config.head_dim + (getattr(config, "v_head_dim", None) or config.head_dim)
    return int(config.num_layers * heads * size * block_size * dtype.itemsize)
