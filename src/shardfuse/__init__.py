"""Fused, sharded transformer layers in Triton: the public names.

Each name is imported from its floor at its first use, so that ``import shardfuse`` and ``shardfuse --help`` are fast
and need neither Triton nor a GPU nor any optional package.
"""

from __future__ import annotations

import atexit
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if (Path(__file__).parent / "kernels").is_symlink():  # in a checkout, tracebacks should name the files, not the links
    __path__.insert(0, str((Path(__file__).parent / "kernels").resolve().parent))

try:
    from .parallel.core import gloo_threads
except ModuleNotFoundError as error:
    if (Path(__file__).parent / "parallel").is_file():  # git wrote the links as files
        raise ImportError(
            f"{Path(__file__).parent} has files in place of its links to kernels/, parallel/, ...: this checkout was "
            "made without symbolic links; run git config core.symlinks true and git checkout -- src, or install a wheel"
        ) from error
    raise

if TYPE_CHECKING:
    from .explanation import explain
    from .kernels.dropout import dropout, new_rng_key
    from .kernels.kv_cache import copy_blocks_, gather_kv, norm_rope_write_kv_, plan_write, swap_blocks_, write_kv_
    from .kernels.linear import gated_linear, linear_act
    from .kernels.norm import layer_norm, rms_norm
    from .kernels.paged_attention import merge_attention, paged_attention, plan_attention
    from .kernels.rope import apply_rope
    from .kernels.runtime.dispatch import row_invariance
    from .kernels.scaled_linear import fp8_linear, quantize, scaled_linear
    from .layers.attention.attention import ParallelAttention
    from .layers.attention.paged import PagedAttention, PagedBatch, PagedKVCache, Span
    from .layers.block import ParallelBlock
    from .layers.config import TransformerConfig
    from .layers.embedding import VocabParallelEmbedding
    from .layers.fp8 import Fp8Linear
    from .layers.fuse import fuse, stats, unfuse
    from .layers.grid.attention import GridAttention
    from .layers.grid.linear import GridLinear
    from .layers.grid.mlp import GridMLP
    from .layers.grid.transformer import GridTransformer
    from .layers.hf.folders import export_hf, load_hf
    from .layers.hf.pretrained import load_pretrained
    from .layers.hf.saving import save_pretrained
    from .layers.linear import ColumnParallelLinear, RowParallelLinear
    from .layers.loss import vocab_parallel_cross_entropy
    from .layers.mlp import ParallelMLP
    from .layers.norm import LayerNorm, RMSNorm
    from .layers.options import LayerKwargs, LayerOptions
    from .layers.style import ColumnParallel, FusedMLP, RowParallel, SequenceParallelNorm, VocabParallel
    from .layers.transformer import ParallelTransformer
    from .parallel.audit.audit import Audit
    from .parallel.checkpoint.checkpoint import load_checkpoint, read_extra, save_checkpoint
    from .parallel.checkpoint.entries import full_state_dict
    from .parallel.checkpoint.manager import Checkpointer
    from .parallel.core.mesh import tp_group
    from .parallel.core.random import manual_seed
    from .parallel.core.rendezvous import init_mesh
    from .parallel.cross_entropy import linear_cross_entropy, linear_log_probs
    from .parallel.data import data_loader, data_sampler
    from .parallel.overlap.memory.reserve import reserve_symmetric_memory
    from .parallel.parallel_model import ParallelModel
    from .parallel.parallelize import parallelize
    from .parallel.zero.main_grad import attach_main_grads, main_grads_to_grads, zero_main_grads
    from .planning import DoesNotFit, Plan, plan
    from .serving.aio import AsyncEngine
    from .serving.engine import Engine
    from .serving.guide import Guide
    from .serving.request import QueueFull, Request, TokenEvent
    from .serving.sampling_params import SamplingParams
    from .training.data.prepare import prepare_data
    from .training.data.prepared import Prepared

__all__ = [
    "AsyncEngine",
    "Audit",
    "Checkpointer",
    "ColumnParallel",
    "ColumnParallelLinear",
    "DoesNotFit",
    "Engine",
    "Fp8Linear",
    "FusedMLP",
    "GridAttention",
    "GridLinear",
    "GridMLP",
    "GridTransformer",
    "Guide",
    "LayerKwargs",
    "LayerNorm",
    "LayerOptions",
    "PagedAttention",
    "PagedBatch",
    "PagedKVCache",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMLP",
    "ParallelModel",
    "ParallelTransformer",
    "Plan",
    "Prepared",
    "QueueFull",
    "RMSNorm",
    "Request",
    "RowParallel",
    "RowParallelLinear",
    "SamplingParams",
    "SequenceParallelNorm",
    "Span",
    "TokenEvent",
    "TransformerConfig",
    "VocabParallel",
    "VocabParallelEmbedding",
    "__version__",
    "apply_rope",
    "attach_main_grads",
    "copy_blocks_",
    "data_loader",
    "data_sampler",
    "dropout",
    "explain",
    "export_hf",
    "fp8_linear",
    "full_state_dict",
    "fuse",
    "gated_linear",
    "gather_kv",
    "init_mesh",
    "layer_norm",
    "linear_act",
    "linear_cross_entropy",
    "linear_log_probs",
    "load_checkpoint",
    "load_hf",
    "load_pretrained",
    "main_grads_to_grads",
    "manual_seed",
    "merge_attention",
    "new_rng_key",
    "norm_rope_write_kv_",
    "paged_attention",
    "parallelize",
    "plan",
    "plan_attention",
    "plan_write",
    "prepare_data",
    "quantize",
    "read_extra",
    "reserve_symmetric_memory",
    "rms_norm",
    "row_invariance",
    "save_checkpoint",
    "save_pretrained",
    "scaled_linear",
    "stats",
    "swap_blocks_",
    "tp_group",
    "unfuse",
    "vocab_parallel_cross_entropy",
    "write_kv_",
    "zero_main_grads",
]

__version__: str

# Hooks run in reverse order, so those that destroy process groups, which are registered later, run before this one.
atexit.register(gloo_threads.settle)

# The module of each public name. tests/face/test_import.py compares this, __all__ and the imports above.
_HOMES = {
    "AsyncEngine": "serving.aio",
    "Audit": "parallel.audit.audit",
    "Checkpointer": "parallel.checkpoint.manager",
    "ColumnParallel": "layers.style",
    "ColumnParallelLinear": "layers.linear",
    "DoesNotFit": "planning",
    "Engine": "serving.engine",
    "Fp8Linear": "layers.fp8",
    "FusedMLP": "layers.style",
    "GridAttention": "layers.grid.attention",
    "GridLinear": "layers.grid.linear",
    "GridMLP": "layers.grid.mlp",
    "GridTransformer": "layers.grid.transformer",
    "Guide": "serving.guide",
    "LayerKwargs": "layers.options",
    "LayerNorm": "layers.norm",
    "LayerOptions": "layers.options",
    "PagedAttention": "layers.attention.paged",
    "PagedBatch": "layers.attention.paged",
    "PagedKVCache": "layers.attention.paged",
    "ParallelAttention": "layers.attention.attention",
    "ParallelBlock": "layers.block",
    "ParallelMLP": "layers.mlp",
    "ParallelModel": "parallel.parallel_model",
    "ParallelTransformer": "layers.transformer",
    "Plan": "planning",
    "Prepared": "training.data.prepared",
    "QueueFull": "serving.request",
    "RMSNorm": "layers.norm",
    "Request": "serving.request",
    "RowParallel": "layers.style",
    "RowParallelLinear": "layers.linear",
    "SamplingParams": "serving.sampling_params",
    "SequenceParallelNorm": "layers.style",
    "Span": "layers.attention.paged",
    "TokenEvent": "serving.request",
    "TransformerConfig": "layers.config",
    "VocabParallel": "layers.style",
    "VocabParallelEmbedding": "layers.embedding",
    "apply_rope": "kernels.rope",
    "attach_main_grads": "parallel.zero.main_grad",
    "copy_blocks_": "kernels.kv_cache",
    "data_loader": "parallel.data",
    "data_sampler": "parallel.data",
    "dropout": "kernels.dropout",
    "explain": "explanation",
    "export_hf": "layers.hf.folders",
    "fp8_linear": "kernels.scaled_linear",
    "full_state_dict": "parallel.checkpoint.entries",
    "fuse": "layers.fuse",
    "gated_linear": "kernels.linear",
    "gather_kv": "kernels.kv_cache",
    "init_mesh": "parallel.core.rendezvous",
    "layer_norm": "kernels.norm",
    "linear_act": "kernels.linear",
    "linear_cross_entropy": "parallel.cross_entropy",
    "linear_log_probs": "parallel.cross_entropy",
    "load_checkpoint": "parallel.checkpoint.checkpoint",
    "load_hf": "layers.hf.folders",
    "load_pretrained": "layers.hf.pretrained",
    "main_grads_to_grads": "parallel.zero.main_grad",
    "manual_seed": "parallel.core.random",
    "merge_attention": "kernels.paged_attention",
    "new_rng_key": "kernels.dropout",
    "norm_rope_write_kv_": "kernels.kv_cache",
    "plan_write": "kernels.kv_cache",
    "paged_attention": "kernels.paged_attention",
    "parallelize": "parallel.parallelize",
    "plan": "planning",
    "plan_attention": "kernels.paged_attention",
    "prepare_data": "training.data.prepare",
    "quantize": "kernels.scaled_linear",
    "read_extra": "parallel.checkpoint.checkpoint",
    "reserve_symmetric_memory": "parallel.overlap.memory.reserve",
    "rms_norm": "kernels.norm",
    "row_invariance": "kernels.runtime.dispatch",
    "save_checkpoint": "parallel.checkpoint.checkpoint",
    "save_pretrained": "layers.hf.saving",
    "scaled_linear": "kernels.scaled_linear",
    "stats": "layers.fuse",
    "swap_blocks_": "kernels.kv_cache",
    "tp_group": "parallel.core.mesh",
    "unfuse": "layers.fuse",
    "vocab_parallel_cross_entropy": "layers.loss",
    "write_kv_": "kernels.kv_cache",
    "zero_main_grads": "parallel.zero.main_grad",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name == "integrations":
        value = importlib.import_module(".integrations", __name__)
    elif name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later lookups then bypass this function
    return value


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "0.0.0+not.installed"  # runs from the source tree


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
