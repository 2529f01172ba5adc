"""A model's settings for generation: the tokens that end an answer, and the defaults of requests to a server.

``generation_config.json`` of transformers holds them beside a model's weights. A model of transformers carries them as
``model.generation_config``, a model from ``load_hf`` as the file's dictionary.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layers.hf.config import GENERATION
from ..layers.hf.folders import read_generation_config
from .sampling_params import SamplingParams

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_WHOLE = ("top_k", "max_new_tokens", "max_length")
_APPLIED = {*_SAMPLING, "do_sample", "eos_token_id", "max_new_tokens", "max_length", "stop_strings"}
# Entries that change no token of an engine's answer: other ids, memory, the form of what transformers returns, helpers
# that draft tokens. Those whose names begin with the words below belong here, too.
_WITHOUT_EFFECT = {
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_dict_in_generate", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "is_assistant"),
    *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "use_mtp"),  # of beams, or of drafts
    *("max_matching_ngram_size", "target_lookbehind", "speculation_type", "prompt_lookup_num_tokens"),
    *("renormalize_logits", "remove_invalid_values"),  # which change no choice among finite logits
    *("_commit_hash", "_name_or_path", "chat_format", "max_window_size", "trust_remote_code", "user_token_id"),
}
_WITHOUT_EFFECT_BEGIN = ("output_", "assistant_", "num_assistant_")
_ONE_IS_NEUTRAL = ("num_beams", "num_return_sequences", "typical_p", "encoder_repetition_penalty", "guidance_scale")


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's settings for generation say.

    Args:
        eos_token_ids: the tokens that end an answer.
        do_sample: whether transformers would sample; None: not said.
        sampling: fields of :class:`SamplingParams` by name, as far as they are given.
        max_new_tokens: the most tokens of an answer; None: not said.
        max_length: the most tokens of a prompt and its answer; None: not said.
        stop_strings: texts that end an answer.
        ignored: entries that would change answers, and that the engine does not have.
    """

    eos_token_ids: frozenset[int] = frozenset()
    do_sample: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop_strings: tuple[str, ...] = ()
    ignored: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: Any) -> GenerationDefaults:
        """Those that ``model`` carries. Raises ValueError for values of the wrong type or out of range."""
        return cls.parse(_carried(model), _eos_of_config(getattr(model, "config", None)))

    @classmethod
    def of_folder(cls, folder: Path, model: Any) -> GenerationDefaults:
        """Those of ``folder``, or of its file, for ``model``, whose end-of-sequence tokens hold where that names none.

        Raises FileNotFoundError if there is no such file, ValueError as above.
        """
        folder = folder.parent if folder.name == GENERATION else folder
        if not (folder / GENERATION).exists():
            raise FileNotFoundError(
                f"{folder}: there is no {GENERATION}: expected auto (that of the model's folder), vllm (none), or a "
                "folder that has one"
            )
        return cls.parse(read_generation_config(folder) or {}, sorted(eos_token_ids(model)))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], eos: Any = None) -> GenerationDefaults:
        """Those of ``raw``, the file as a dictionary; ``eos`` is the config's ``eos_token_id``, used if ``raw`` has
        none. Raises ValueError for values of the wrong type or out of range.
        """
        given = {name: value for name, value in raw.items() if value is not None}
        given |= {
            name: int(given[name]) for name in _WHOLE if isinstance(given.get(name), float) and given[name] % 1 == 0
        }
        sampling = {name: given[name] for name in _SAMPLING if name in given}
        if isinstance(sampling.get("top_k"), int):
            sampling["top_k"] = max(0, sampling["top_k"])  # vLLM's -1 means all
        try:
            SamplingParams(**sampling).check(1)
        except ValueError as error:
            raise ValueError(f"{GENERATION}: {error}") from None
        do_sample = given.get("do_sample")
        if do_sample not in (None, False, True):
            raise ValueError(f"{GENERATION}: do_sample={do_sample!r}: expected true or false")
        do_sample = None if do_sample is None else bool(do_sample)
        if do_sample is False:
            sampling["temperature"] = 0.0
        texts = given.get("stop_strings", ())
        texts = (texts,) if isinstance(texts, str) else tuple(texts) if isinstance(texts, list | tuple) else (texts,)
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{GENERATION}: stop_strings={given['stop_strings']!r}: expected texts")
        return cls(
            frozenset(_ids(given.get("eos_token_id", eos))),
            do_sample,
            sampling,
            _count(given, "max_new_tokens"),
            _count(given, "max_length"),
            texts,
            dict(_ignored(given)),
        )

    def length(self, usual: int, prompt: int) -> int:
        """The most tokens of an answer to a request that does not say, where ``usual`` is the interface's default."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None or self.max_length <= prompt:  # it leaves no room: it was meant for other prompts
            return usual
        return min(usual, self.max_length - prompt)

    def usual_sampling(self) -> dict[str, Any]:
        """Fields of :class:`SamplingParams` for a caller who says nothing, as transformers' ``generate`` has them:
        greedy unless ``do_sample`` is set. The seed is a new one.
        """
        usual = {"temperature": 1.0, **self.sampling} if self.do_sample else {**self.sampling, "temperature": 0.0}
        return {"seed": secrets.randbits(63), **usual}

    def words(self) -> list[str]:
        """The defaults in force, each with its value."""
        named = {"do_sample": self.do_sample, **self.sampling}
        named |= {"max_new_tokens": self.max_new_tokens, "max_length": self.max_length}
        named |= {"stop_strings": list(self.stop_strings) or None}
        return [f"{name}={value}" for name, value in named.items() if value is not None]


def eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens that end an answer of ``model``: those of its settings, else those of its config.

    Raises ValueError for what is no token id.
    """
    given = _carried(model).get("eos_token_id")
    return frozenset(_ids(_eos_of_config(getattr(model, "config", None)) if given is None else given))


def _carried(model: Any) -> Mapping[str, Any]:
    given: Any = getattr(model, "generation_config", None)
    return given.to_diff_dict() if hasattr(given, "to_diff_dict") else given or {}


def _eos_of_config(config: Any) -> Any:
    """``eos_token_id`` of a model's config, or of the text model's in it."""
    found = getattr(config, "eos_token_id", None)
    if found is None and hasattr(config, "get_text_config"):
        found = getattr(config.get_text_config(), "eos_token_id", None)
    return found


def _ids(value: Any) -> Iterator[int]:
    """The token ids in ``eos_token_id``, one or several; some files say -1 for none."""
    given = value.tolist() if hasattr(value, "tolist") else value  # of a tensor
    several = isinstance(given, Collection) and not isinstance(given, str)
    for each in given if several else [] if given is None else [given]:
        if not hasattr(each, "__index__") or isinstance(each, bool):
            raise ValueError(f"{GENERATION}: eos_token_id={value!r}: expected token ids")
        if operator.index(each) >= 0:
            yield operator.index(each)


def _count(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{GENERATION}: {name}={value!r}: expected a number of tokens, at least 1")
    return value


def _ignored(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if name in _APPLIED or name in _WITHOUT_EFFECT or name.startswith(_WITHOUT_EFFECT_BEGIN):
            continue
        if value not in (False, 1 if name in _ONE_IS_NEUTRAL else 0, "", [], {}):
            yield name, value
