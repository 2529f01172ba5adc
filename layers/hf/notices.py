"""What a user is told of a folder that loads, but not as its config.json says."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...parallel.core.mesh import everyone
from .config import CONFIG

# Entries that change the numbers of models that have them, by the values that change nothing beside null, 0 and false.
_CHANGING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "attention_multiplier", "clip_qkv"), ()),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("scale_emb", "scale_depth", "lm_head_multiplier", "key_multiplier", "rotary_pct"), (1,)),
    **dict.fromkeys(("partial_rotary_factor", "rope_percent"), (1,)),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "qk_norm", "scale_embedding", "attn_temperature_tuning"), ()),
    **dict.fromkeys(("alibi", "use_alibi", "parallel_attn", "use_parallel_residual", "add_cross_attention"), ()),
    **dict.fromkeys(("rope_interleaved", "rope_interleave", "use_bidirectional_attention"), ()),
    **dict.fromkeys(("sliding_window", "use_sliding_window", "attention_chunk_size", "rope_local_base_freq"), ()),
    "layer_types": ("full_attention",),  # lists: of these values only
    "no_rope_layers": (1,),
    "query_pre_attn_scalar": (),  # and the size of a head, as for the next two
    "rotary_dim": (),
    "dim_model_base": (),
}
_SIZES = {
    "query_pre_attn_scalar": "head_dim",
    "rotary_dim": "head_dim",
    "dim_model_base": "hidden_size",
    "sliding_window": "max_position_embeddings",
    "attention_chunk_size": "max_position_embeddings",
}
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_ROPE_OF = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "truncate"),
    },
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}


# Of tensors without a place in the model: masks that older versions stored, and heads for other tasks.
_MASK = re.compile(r"(^|\.)(masked_bias|bias|causal_mask)$")
_OTHER_TASK = re.compile(
    r"(^|\.)(pooler|seq_relationship|discriminator_predictions|classifier|score|v_head|qa_outputs|multiple_choice_head)\."
)


def without_effect(name: str, shape: Sequence[int], dtype: str) -> bool:
    """Whether no logit depends on a tensor that has no place in the model; ``dtype`` is safetensors' name."""
    square = len(shape) == 4 and list(shape[:2]) == [1, 1] and shape[2] == shape[3]
    mask = dtype == "BOOL" or (_MASK.search(name) is not None and (square or not shape))
    return mask or _OTHER_TASK.search(name) is not None


def tell_unused(folder: Path, names: Sequence[str]) -> None:
    """Tell which tensors of ``folder`` are left out."""
    if names:
        _tell(
            f"{folder} holds {names[0]} ({len(names)} such in all), which has no place in the model of {CONFIG}: left "
            "out, as in transformers; no logit depends on it"
        )


def tell_untied(folder: Path, target: str, source: str) -> None:
    """Tell that ``target`` stays beside ``source``, to which the folder's config ties it."""
    _tell(
        f"{folder / CONFIG} ties {target} to {source}, and the files hold other values for it, which are kept: the two "
        "are not tied here, as in transformers; set tie_word_embeddings to false there, or save the model again"
    )


def tell_unread(folder: Path, raw: Mapping[str, Any]) -> None:
    """Tell which entries ``raw`` of a config.json would change numbers if our layers, or transformers' for the same
    model, read them.
    """
    known = {"starcoder2": ("sliding_window",), "llama": ()}.get(str(raw.get("model_type")))
    if known is None:  # the model is transformers' own, which reads what it reads
        return
    if unread := [f"{name}={value!r}" for name, value in _unread(raw, known)]:
        _tell(
            f"{folder / CONFIG} has {', '.join(unread)}, which transformers' {raw.get('model_type')} does not read "
            "either: the numbers are those without; if the model needs it, its model_type is another"
        )


def _unread(raw: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, Any]]:
    for name, neutral in _CHANGING.items():
        value = raw.get(name)
        if not value or name in known:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(each in neutral for each in values) and not _of_size(raw, name, value):
            yield name, value
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name)
        if isinstance(rope, Mapping):
            of_kind = _ROPE_OF.get(str(rope.get("rope_type", rope.get("type"))), set())
            yield from ((f"{name}.{key}", rope[key]) for key in rope if key not in _ROPE | of_kind and rope[key])


def _of_size(raw: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether an entry has the size that a model without it would use: it then changes nothing."""
    size = raw.get(_SIZES.get(name, ""))
    if size is None and _SIZES.get(name) == "head_dim":
        heads = raw.get("num_attention_heads")
        size = raw["hidden_size"] // heads if heads and "hidden_size" in raw else None
    if size is None or not isinstance(value, int | float):
        return False
    return bool(value >= size if _SIZES[name] == "max_position_embeddings" else value == size)


def _tell(message: str) -> None:
    """Warn the caller of the package, on the first rank alone."""
    if everyone().rank == 0:
        package, depth, frame = __name__.partition(".")[0], 1, sys._getframe()
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            frame, depth = frame.f_back, depth + 1
        warnings.warn(message, stacklevel=depth)
