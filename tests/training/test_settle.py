"""Under torchrun, all ranks train with the same settings, or all say why not."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from shardfuse.training.run import settle_together
from shardfuse.training.settings import RunSettings, flat

pytestmark = pytest.mark.ranks


def _settle_body(rank: int, world: int, change: dict[str, Any]) -> str:
    """What this rank is told where rank 1 has other settings, or none."""

    def settle() -> RunSettings:
        if rank == 1 and "error" in change:
            raise FileNotFoundError(2, "No such file or directory", "run.toml")
        return dataclasses.replace(RunSettings(device="cpu"), **(change if rank == 1 else {}))

    os.environ["WORLD_SIZE"] = str(world)
    try:
        return str(settle_together(settle).steps)
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ["WORLD_SIZE"]


def test_settings_that_differ(ranks: Any):
    assert ranks(2, _settle_body, {}) == ["200", "200"]
    for said in ranks(2, _settle_body, {"steps": 7}):
        assert said.startswith("ValueError: train: steps is 200 on rank 0 and 7 on rank 1; start all ranks with")


def test_a_rank_without_settings(ranks: Any):
    first, second = ranks(2, _settle_body, {"error": True})
    assert second.startswith("FileNotFoundError: ")
    assert "rank 1: " in first
    assert "run.toml" in first


def test_settings_by_their_dotted_names():
    settings = RunSettings(device="cpu")
    found = flat(settings)
    assert found["steps"] == "200"
    assert found["model.num_layers"] == repr(settings.model.num_layers)
    assert found["parallel.tp"] == "1"
