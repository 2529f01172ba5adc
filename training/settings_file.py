"""The settings of a run as the TOML file that they are read from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .settings import RunSettings

# Written even where they are as by default: what a reader of the file looks for.
ALWAYS = {"data": ("seq", "batch"), "parallel": tuple(RunSettings().parallel.__dataclass_fields__)}
# Settings of a model that follow from others where a file leaves them out.
DERIVED = ("num_kv_heads", "head_dim", "bias")


def to_toml(settings: RunSettings, comments: Sequence[str] = ()) -> str:
    """The file of ``settings``, without what is as by default; ``comments`` are its first lines."""
    given, default = dataclasses.asdict(settings), dataclasses.asdict(RunSettings())
    top = {name: value for name, value in given.items() if not isinstance(default[name], Mapping)}
    lines = [*(f"# {comment}" for comment in comments), *_lines(_changed(top, default, ()))]
    for name, values in given.items():
        if not isinstance(default[name], Mapping) or (name == "model" and settings.start is not None):
            continue
        kept = _changed(values, default[name], DERIVED if name == "model" else ALWAYS.get(name, ()))
        lines += ["", f"[{name}]", *_lines(kept)] if kept else []
    return "\n".join(lines) + "\n"


def _changed(values: Mapping[str, Any], default: Mapping[str, Any], always: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in always or value != default[name]}


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in values.items()]


def _value(value: Any) -> str:
    """A value of TOML: its scalars and lists look as in JSON; false stands for None."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items()) + "}"
    return json.dumps(False if value is None else value, ensure_ascii=False)
