"""Folders that transformers reads and writes: ``config.json`` beside ``model.safetensors``.

Our parameters have transformers' own names and layouts, so a folder needs no conversion: gelu style is a Starcoder2,
gated style a Llama.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..parallel.checkpoint import full_state_dict
from ..parallel.mesh import MeshLike, tp_group
from ..parallel.sharding import local_tensor, spec_of
from ..parallel.storage import agree
from .config import TransformerConfig, rope_type
from .transformer import ParallelTransformer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Style -> what config.json calls it.
_MODEL_TYPES = {"gelu": "starcoder2", "gated": "llama"}
_ARCHITECTURES = {"gelu": "Starcoder2ForCausalLM", "gated": "LlamaForCausalLM"}
_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "gated": "silu"}
_NORM_EPS = {"gelu": "norm_epsilon", "gated": "rms_norm_eps"}
_BIASES = {"gelu": ("use_bias",), "gated": ("attention_bias", "mlp_bias")}
# Our name -> config.json's.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
# What transformers assumes where a config.json leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gelu": {
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "tie_word_embeddings": True,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
    },
    "gated": {
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
}


def export_hf(model: ParallelTransformer, directory: str | os.PathLike[str]) -> None:
    """Write ``model`` so that ``AutoModelForCausalLM.from_pretrained(directory)`` gives equal logits.

    Every rank of the model's group calls it; its first rank writes, in the model's own dtype. Both files are complete
    beside their final names before either takes its place, and other files of the folder stay.

    Raises RuntimeError, on every rank, when the folder cannot be written.
    """
    state = full_state_dict(model, first_rank_only=True)
    agree(model.group, lambda: _write(model, state, Path(directory)) if state else None)


def _write(model: ParallelTransformer, state: dict[str, torch.Tensor], directory: Path) -> None:
    if model.config.tie_embeddings:
        state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    text = json.dumps(config_to_hf(model.config, dtype), indent=2) + "\n"
    mark = uuid.uuid4().hex[:8]
    weights, config = (directory / f".{name}.{mark}.tmp" for name in (WEIGHTS, CONFIG))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights, metadata={"format": "pt"})
        config.write_text(text, encoding="utf-8")
        for path in (weights, config):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        weights.replace(directory / WEIGHTS)
        config.replace(directory / CONFIG)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(f"could not export to {directory}: {error}") from error
    finally:
        for path in (weights, config):
            with suppress(OSError):
                path.unlink()


def config_to_hf(config: TransformerConfig, dtype: str = "float32") -> dict[str, Any]:
    """The ``config.json`` of ``config``, as transformers 5 writes it; ValueError where it has no such model."""
    style = config.style
    gated_only = ("attention_window", "residual_dropout", "embedding_dropout") if config.gated else ()
    for name in ("attention_softcap", "attention_sinks", "norm_offset", *gated_only):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)}: transformers' {_MODEL_TYPES[style]} has no such thing; a model that "
                "differs cannot be exported as one"
            )
    out: dict[str, Any] = {"architectures": [_ARCHITECTURES[style]], "model_type": _MODEL_TYPES[style], "dtype": dtype}
    out |= {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    out |= dict.fromkeys(_BIASES[style], config.bias)
    out[_NORM_EPS[style]] = config.norm_eps
    out["hidden_act"] = _ACTIVATIONS[style]
    out["rope_parameters"] = _rope_parameters(config)
    out["rope_theta"] = config.rope_theta  # where transformers 4 looks
    out |= {
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    if style == "gelu":
        out |= {"embedding_dropout": config.embedding_dropout, "residual_dropout": config.residual_dropout}
        out["sliding_window"] = config.attention_window
    return out


def config_from_hf(raw: dict[str, Any]) -> TransformerConfig:
    """Our config of a ``config.json``; ValueError where it asks for something that the layers do not do."""
    styles = {model_type: style for style, model_type in _MODEL_TYPES.items()}
    if raw.get("model_type") not in styles:
        raise ValueError(f"model_type={raw.get('model_type')!r}: expected one of {', '.join(styles)}")
    style = styles[raw["model_type"]]
    raw = _DEFAULTS[style] | {key: value for key, value in raw.items() if value is not None}

    if raw["hidden_act"] not in (_ACTIVATIONS[style], "swish" if style == "gated" else None):
        raise ValueError(f"hidden_act={raw['hidden_act']!r}: {raw['model_type']} here means {_ACTIVATIONS[style]}")
    biases = {raw[key] for key in _BIASES[style]}
    if len(biases) > 1:
        raise ValueError(f"{' and '.join(_BIASES[style])} differ: here all linear layers have a bias or none has")
    fields = {ours: raw[theirs] for ours, theirs in _FIELDS.items() if theirs in raw or theirs not in _OPTIONAL}
    fields |= _rope_fields(raw)
    fields |= {name: raw[name] for name in ("attention_dropout", *_OF_GELU) if raw.get(name) and _has(style, name)}
    window = raw.get("sliding_window")
    if window is not None and window < raw["max_position_embeddings"]:
        if style == "gated":
            raise ValueError(f"sliding_window={window}: transformers' {raw['model_type']} has none; which is meant?")
        fields["attention_window"] = window
    try:
        return TransformerConfig(style=style, norm_eps=raw[_NORM_EPS[style]], bias=biases.pop(), **fields)
    except TypeError as error:
        raise ValueError(f"a value has the wrong type: {error}") from error


_OF_GELU = ("embedding_dropout", "residual_dropout")


def _has(style: str, name: str) -> bool:
    return style == "gelu" or name not in _OF_GELU


def _rope_parameters(config: TransformerConfig) -> dict[str, Any]:
    if config.partial_rotary_factor != 1.0 or config.rope_interleaved:
        raise ValueError(
            f"partial_rotary_factor={config.partial_rotary_factor}, rope_interleaved={config.rope_interleaved}: "
            f"transformers' {_MODEL_TYPES[config.style]} rotates whole heads, element i with i + head_dim / 2; a model "
            "that differs cannot be exported as one"
        )
    scaling = {name: value for name, value in (config.rope_scaling or {}).items() if name != "type"}
    return {**scaling, "rope_type": rope_type(config.rope_scaling), "rope_theta": config.rope_theta}


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``; transformers 4 kept the first beside the second."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0))
    partial = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    kind = rope_type(rope)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial}: transformers' {raw['model_type']} rotates whole heads all the same, and "
            "others do not; which is meant cannot be told"
        )
    rope.pop("type", None)
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else rope | {"rope_type": kind}}


def load_hf(
    directory: str | os.PathLike[str],
    *,
    mesh: MeshLike = None,
    sequence_parallel: bool = False,
    recompute: bool = False,
    mlp_recompute: int = 0,
    fuse_wgrad_accumulation: bool = False,
    overlap: str = "auto",
    strict: bool = False,
    params: str = "dtensor",
    impl: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> ParallelTransformer:
    """The model in ``directory``, sharded over ``mesh``; each rank reads its own slices only.

    Options are those of :class:`ParallelTransformer`. ``dtype=None`` keeps the folder's. Reads one
    ``model.safetensors`` or an index of several files.

    Raises FileNotFoundError for a missing folder or file, ValueError for one that is cut short, corrupt, or of
    another model.
    """
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel,
        "recompute": recompute,
        "mlp_recompute": mlp_recompute,
        "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        "overlap": overlap,
        "strict": strict,
        "params": params,
        "impl": impl,
    }
    group = tp_group(mesh)
    return agree(group, lambda: _load(Path(directory), dtype, device, mesh=group, **options))


def _load(
    directory: Path, dtype: torch.dtype | None, device: torch.device | str | None, **options: Any
) -> ParallelTransformer:
    raw = _read_json(directory / CONFIG)
    with _explained(directory / CONFIG):
        config, dtype = config_from_hf(raw), dtype or _dtype(raw)
    files = _weight_files(directory)
    model = ParallelTransformer(config, dtype=dtype, device="meta", **options)
    with _explained(directory):
        _check_names(model, {name for names in files.values() for name in names})
    model.to_empty(device=device or torch.get_default_device())
    wanted = dict(model.named_parameters())
    for path, names in files.items():
        with _explained(path), safe_open(path, framework="pt") as file:
            for name in names:
                if name in wanted:
                    _read_shard(file.get_slice(name), name, wanted[name])
    return model.eval()


@torch.no_grad()
def _read_shard(source: Any, name: str, param: torch.Tensor) -> None:
    """Copy this rank's slice of ``source``, a tensor in a file, into ``param``."""
    spec = spec_of(param)
    if tuple(source.get_shape()) != tuple(spec.logical_shape):
        raise ValueError(f"{name} is {list(source.get_shape())}, expected {list(spec.logical_shape)}")
    local_tensor(param).copy_(source[spec.index])


def _weight_files(directory: Path) -> dict[Path, list[str]]:
    """File -> the parameters in it."""
    if (directory / WEIGHTS).exists() or not (directory / INDEX).exists():
        path = directory / WEIGHTS
        if not path.exists():
            raise FileNotFoundError(f"{directory}: neither {WEIGHTS} nor {INDEX} is there")
        with _explained(path), safe_open(path, framework="pt") as file:
            return {path: list(file.keys())}
    index = _read_json(directory / INDEX)
    with _explained(directory / INDEX):
        names = index["weight_map"]
    files: dict[Path, list[str]] = {}
    for name, file_name in names.items():
        files.setdefault(directory / file_name, []).append(name)
    return files


def _check_names(model: ParallelTransformer, found: set[str]) -> None:
    wanted = {name for name, _ in model.named_parameters()}
    # Old Llama folders hold the rotary frequencies; a tied head may be written beside the embedding that it equals.
    spare = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if model.config.tie_embeddings:
        spare.add("lm_head.weight")
    missing, foreign = sorted(wanted - found), sorted(found - wanted - spare)
    if missing:
        raise ValueError(f"{CONFIG} asks for {missing[0]} ({len(missing)} such in all), which no weights file holds")
    if foreign:
        raise ValueError(f"{foreign[0]} ({len(foreign)} such in all) has no place in the model of {CONFIG}")


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r}: expected a floating-point type such as float32 or bfloat16")
    return dtype


def _read_json(path: Path) -> dict[str, Any]:
    with _explained(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")
        return value


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors while reading ``path``, naming it and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file; a model folder holds {CONFIG} and {WEIGHTS}") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cut short or corrupt ({error}); export or copy the folder again") from error
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; export or copy the folder again") from error
    except ValueError as error:  # JSON's and Unicode's errors are ValueErrors too
        raise ValueError(f"{path}: {error}") from error
