"""Altered checkpoints and disagreeing ranks: every rank refuses with a clear message and without waiting."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_case import edit
from torch import nn

from shardfuse.parallel.checkpoint import storage
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardfuse.parallel.core import agreement
from shardfuse.parallel.core.mesh import everyone

Manifest = dict[str, Any]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    return tmp_path / "c"


# --- altered folders --------------------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[Callable[[Manifest], Any], str]] = {
    "no-extra": (lambda m: m.pop("extra"), "it has no dictionary 'extra'"),
    "no-files": (lambda m: m.pop("files"), "it has no dictionary 'files'"),
    "no-index": (lambda m: m["files"].pop("index.json"), "it does not list index.json"),
    "no-torch-index": (lambda m: m["files"].pop(".metadata"), "it does not list .metadata"),
    "no-generation": (lambda m: m.pop("generation"), "it has no 'generation'"),
    "checksum": (lambda m: m["files"].update({".metadata": ["1", 2]}), "it has no dictionary 'files' of sizes"),
    "negative-size": (lambda m: m["files"].update({".metadata": [-1, 2]}), "it has no dictionary 'files' of sizes"),
    "serial": (lambda m: m.update(serial="7"), "its 'serial' is not a number"),
    "true-serial": (lambda m: m.update(serial=True), "its 'serial' is not a number"),
    "groups": (lambda m: m.update(param_groups=[{"params": [1], "settings": {}}]), "its 'param_groups' are not"),
    "settings-params": (lambda m: m.update(param_groups=[{"params": [], "settings": {"params": []}}]), "its 'param_g"),
    "twice": (lambda m: m.update(param_groups=[{"params": ["a", "a"], "settings": {}}]), "a parameter is in its"),
    "device": (lambda m: m["files"].update({"/dev/zero": [1, 1]}), "it lists '/dev/zero', which is outside"),
    "parent": (lambda m: m["files"].update({"../x": [1, 1]}), r"it lists '\.\./x', which is outside"),
    "foreign": (lambda m: m["files"].update({"\0": [1, 1]}), r"it lists '\\x00', which no checkpoint has"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_is_not_one_is_refused(saved: Path, name: str) -> None:
    change, message = CHANGES[name]
    edit(saved, change)
    with pytest.raises(ValueError, match=rf"c/checkpoint.json: corrupt \({message}"):
        load_checkpoint(saved, nn.Linear(2, 2))


def test_a_file_that_the_manifest_does_not_list_is_not_read(saved: Path) -> None:
    edit(saved, lambda manifest: manifest["files"].pop("__0_0.distcp"))
    with pytest.raises(
        ValueError, match=r"index.json: corrupt \(model.weight is in '__0_0.distcp', which is not a file of the ch"
    ):
        load_checkpoint(saved, nn.Linear(2, 2))


@pytest.mark.parametrize("name", [storage.MANIFEST, "__0_0.distcp"])
def test_a_link_is_not_followed(saved: Path, name: str) -> None:
    """Not even to the same file in another place, whose checksum is right."""
    (saved / name).rename(saved.parent / name)
    (saved / name).symlink_to(saved.parent / name)
    with pytest.raises(ValueError, match=f"{name}: a link, or not a file"):
        load_checkpoint(saved, nn.Linear(2, 2))


def test_a_pipe_is_not_waited_for(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    os.mkfifo(saved / "__0_0.distcp")
    with pytest.raises(ValueError, match="a link, or not a file"):
        load_checkpoint(saved, nn.Linear(2, 2))


# --- errors that do not travel ----------------------------------------------------------------------------------------


class Picky(Exception):
    """Can be pickled but not unpickled: its constructor needs more arguments than it stores."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


def _disagree(rank: int, world: int) -> list[tuple[str, str]]:
    """This rank's errors when the last rank fails with an error that cannot be sent, for two reasons."""

    class Local(Exception):
        """Cannot be pickled."""

    raised = []
    for error in (Local("the disk is gone"), Picky(why="the disk is gone")):

        def work(error: Exception = error) -> None:
            if rank == world - 1:
                raise error

        try:
            agreement.agree(everyone(), work)
        except Exception as caught:
            raised.append((type(caught).__name__, str(caught)))
    return raised


@pytest.mark.ranks
def test_an_error_that_cannot_be_sent_still_reaches_every_rank(ranks: Any) -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Picky(why="")))
    others, failing = ranks(2, _disagree)
    assert others == [("RuntimeError", "Local: the disk is gone"), ("RuntimeError", "Picky: the disk is gone")]
    assert failing == [("Local", "the disk is gone"), ("Picky", "the disk is gone")]


# --- optimizers -------------------------------------------------------------------------------------------------------


class _Stage(nn.Module):
    """A rank's part of a model: a matrix with its own name and, on the last rank, also a vector."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.register_parameter(f"matrix{rank}", nn.Parameter(torch.ones(2, 2)))
        if rank == world - 1:
            self.vector = nn.Parameter(torch.ones(2))

    def groups(self, decay: float) -> list[dict[str, Any]]:
        matrices, vectors = ([p for p in self.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def _save_stages(rank: int, world: int, folder: Path) -> list[str]:
    """Save with equal groups on every rank, then without empty ones, then with settings that differ by rank."""
    model = _Stage(rank, world)
    same = model.groups(0.1)
    fewer = [group for group in same if group["params"]]
    said = []
    for name, groups in {"same": same, "fewer": fewer, "settings": model.groups(float(rank))}.items():
        try:
            save_checkpoint(folder / name, model, torch.optim.AdamW([dict(group) for group in groups]))
            dist.barrier()
            load_checkpoint(folder / name, model, torch.optim.AdamW([dict(group) for group in groups]))
            said.append("loaded")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks
def test_groups_that_no_optimizer_could_load_are_refused_when_saving(ranks: Any, tmp_path: Path) -> None:
    for same, fewer, settings in ranks(2, _save_stages, tmp_path):
        assert same == "loaded"
        assert "1 parameter group(s) on rank 0 and 2 on rank 1" in fewer
        assert "their settings differ; give every rank the same groups" in settings
    assert os.listdir(tmp_path) == ["same"]


def test_how_an_optimizer_computes_is_not_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    before.step()
    save_checkpoint(tmp_path / "c", model, before)
    after = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    load_checkpoint(tmp_path / "c", model, after)
    settings = after.param_groups[0]
    assert (settings["lr"], settings["fused"], settings["foreach"]) == (0.5, None, True)
    after.step()
