"""The Python that the files in docs/ show runs; test_tutorials.py runs that of docs/tutorials/.

What a process alone can run, runs as it stands. What wants a mesh runs over two processes, with other degrees in the
place of its own; over as many processes as it says in ``make test-all``.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfuse as sf
from shardfuse.integrations.hub import build
from shardfuse.kernels.runtime import onednn
from shardfuse.testing import save_tiny_hf

DOCUMENTS = Path(__file__).parents[2] / "docs"
PYTHON = {
    f"{file.stem}-{index}": source
    for file in DOCUMENTS.glob("*.md")
    for index, source in enumerate(re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL))
}
CONFIG: dict[str, Any] = {
    "style": "gated",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 8,
}
# What init_mesh is given where there are two processes, and how many the snippet asks for by itself.
TRAINING = {"parallelism-0": ("pp=2", 8), "training-1": ("dp=2", 4), "grid-0": ("grid=(1, 2, 1)", 8)}
PLAIN, CHECKPOINTS, HUGGING_FACE, MEMORY = "parallelism-1", "checkpoints-0", "checkpoints-2", "overlap-0"
PRETRAINED, STATE_DICTS = "checkpoints-1", "checkpoints-3"
FUSING, FOREIGN = ("fuse-0", "fuse-2", "fuse-3"), "fuse-1"
ON_A_CPU, BATCHING, HUB, CHAT, SERVING = "cpu-0", "integrations-0", "integrations-1", "serving-0", "serving-1"
CHOICE = ("serving-2", "serving-3", "serving-4", "serving-5", "serving-6", "serving-7", "serving-9")
CLIENTS, ENGINE_OVER_RANKS, ASYNCIO, TESTING = "serving-8", "serving-10", "serving-11", "serving-12"
TOOL_FORMAT, SERVER, PLANNING, PREPARING = "server-0", "server-1", "plan-0", "training-0"
EMULATED = "gpu-0"  # by tests/kernels/test_ptx_script.py


def test_every_snippet_is_run():
    assert PYTHON.keys() == {
        *TRAINING,
        PLAIN,
        CHECKPOINTS,
        HUGGING_FACE,
        MEMORY,
        PRETRAINED,
        STATE_DICTS,
        *FUSING,
        FOREIGN,
        TOOL_FORMAT,
        SERVER,
        PLANNING,
        PREPARING,
        ON_A_CPU,
        BATCHING,
        HUB,
        CHAT,
        SERVING,
        *CHOICE,
        CLIENTS,
        ENGINE_OVER_RANKS,
        ASYNCIO,
        TESTING,
        EMULATED,
    }


def _run(source: str, **given: Any) -> dict[str, Any]:
    """The names that are there after a snippet: what was ``given`` to it, and its own."""
    exec(compile(source, "snippet", "exec"), given)
    return given


@pytest.mark.skipif(onednn.why_not(torch.float32) is not None, reason="no oneDNN")
def test_products_on_a_cpu(capsys: pytest.CaptureFixture[str]):
    mlp = _run(PYTHON[ON_A_CPU])["mlp"]
    assert mlp.c_fc.weight.grad is not None
    assert "asked for" in capsys.readouterr().out


def test_a_plan(capsys: pytest.CaptureFixture[str]):
    plan = _run(PYTHON[PLANNING])["plan"]
    printed = capsys.readouterr().out
    assert printed.startswith(plan.best.layout.described())
    assert f"\nzero = {plan.best.layout.zero}\n" in printed


def test_a_format_of_calls():
    pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    parser = _run(PYTHON[TOOL_FORMAT])["parser"]
    assert (parser.calls, parser.cut) == (1, False)


# --- over processes ---------------------------------------------------------------------------------------------------


def _training_body(rank: int, world: int, source: str) -> float:
    """The last loss of a snippet that trains; every rank gives it the same rows."""
    rows = torch.arange(8 * 9).view(8, 9) % CONFIG["vocab_size"]
    tokens, targets = rows[:, :-1], rows[:, 1:]
    config, batches = sf.TransformerConfig(**CONFIG), [(tokens, targets)] * 2
    return _run(source, torch=torch, config=config, tokens=tokens, targets=targets, batches=batches)["loss"].item()


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["two", "as-it-stands"])
def test_what_trains_over_a_mesh(ranks: Any, name: str, whole: bool):
    degrees, world = TRAINING[name]
    source, meshes = re.subn(r"(?<=init_mesh\()([^()]|\([^()]*\))+", degrees, PYTHON[name])
    assert meshes == 1
    losses = ranks(world, _training_body, PYTHON[name]) if whole else ranks(2, _training_body, source)
    assert len(set(losses)) == 1
    assert math.isfinite(losses[0])


class Attention(nn.Module):
    """Heads of 8, as many as the projections give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Gated(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Plain(nn.Module):
    """A decoder in the names of Llama's own code, of nothing but stock layers, that returns its mean loss."""

    def __init__(self, vocabulary: int = 24, width: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(x).flatten(0, 1), targets.flatten())


def _plain_body(rank: int, world: int, source: str) -> None:
    model = Plain().double()
    tokens = torch.arange(4 * 7).view(4, 7) * 5 % 24
    batch = tokens[:, :-1], tokens[:, 1:]
    expected = model(*batch).detach()
    left = _run(source, sf=sf, model=model, mesh=sf.init_mesh(dp=world // 2, tp=2))  # replicas read the same here
    assert isinstance(model.layers[0].mlp, sf.ParallelMLP)
    torch.testing.assert_close(left["model"].step(*batch), expected)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_plain_model(ranks: Any, world: int):
    ranks(world, _plain_body, PYTHON[PLAIN])


def _state_dicts_body(rank: int, world: int, source: str) -> None:
    stock = sf.ParallelMLP(64, 256)
    after = _run(source, sf=sf, stock=stock, rank=rank, mesh=sf.init_mesh(tp=world))
    for found, expected in ((after["whole"], stock), (after["whole_on_first"], nn.Module() if rank else stock)):
        state = expected.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_state_dicts(ranks: Any):
    ranks(2, _state_dicts_body, PYTHON[STATE_DICTS])


def _pretrained_body(rank: int, world: int, source: str) -> None:
    _run(source, mesh=sf.init_mesh(dp=world, device_type="cpu"))


def test_any_model_of_transformers(ranks: Any, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from foreign import foreign, tokens
    from oracle import assert_same_model

    model = foreign("gemma2")
    model.save_pretrained(tmp_path / "folder", max_shard_size="20KB")
    source = PYTHON[PRETRAINED].replace('"folder"', repr(str(tmp_path / "folder")))
    ranks(2, _pretrained_body, source.replace('"saved"', repr(str(tmp_path / "saved"))))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert_same_model(model, again, tokens())


# --- in a process alone -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    given = {"dataset": list(range(403)), "mesh": None, "model": sf.parallelize(nn.Linear(4, 4))}
    optimizer = torch.optim.AdamW(given["model"].parameters())
    given |= {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    first = _run(PYTHON[CHECKPOINTS], steps=1010, **given)
    assert first["resumed"] is None
    again = _run(PYTHON[CHECKPOINTS], steps=1010, **given)
    assert again["resumed"] == (1000, {"note": "JSON"})
    assert again["step"] == 1010
    assert again["batch"].tolist() == first["batch"].tolist()


def test_to_and_from_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    sf.export_hf(sf.ParallelTransformer(sf.TransformerConfig(**CONFIG)), "folder")
    _run(PYTHON[HUGGING_FACE], mesh=None)
    given, exported = (
        {file.name: file.read_bytes() for file in Path(name).iterdir()} for name in ("folder", "exported")
    )
    assert len(given) > 1
    assert exported == given


def test_memory_is_taken_once(capsys: pytest.CaptureFixture[str]):
    _run(PYTHON[MEMORY], sf=sf, model=sf.ParallelTransformer(sf.TransformerConfig(**CONFIG)))
    assert "no symmetric memory" in capsys.readouterr().out


def test_data_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    from shardfuse.testing.models import save_tiny_hf

    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_tiny_hf(tmp_path / "folder", max_positions=2048))
    records = [{"prompt": "b" * size, "completion": "a" * size} for size in range(100, 1000, 50)]
    model = sf.parallelize(sf.load_hf("folder"), device="cpu")
    left = _run(PYTHON[PREPARING], sf=sf, records=records, tokenizer=tokenizer, mesh=None, model=model)
    assert (left["positions"][:, 1:] == 0).any()  # several documents in a window
    assert math.isfinite(left["loss"])


@pytest.mark.parametrize("name", FUSING)
def test_what_fuses(name: str, capsys: pytest.CaptureFixture[str]):
    _run(PYTHON[name])  # each compares the fused model with the stock one, and counts the calls


def test_a_foreign_model_trains():
    pytest.importorskip("transformers")
    left = _run(PYTHON[FOREIGN])
    model, text = left["model"], left["text"]
    assert model.evaluate(text[:, :-1], text[:, 1:]) < left["loss"]


def test_batching_on_our_kernel():
    pytest.importorskip("transformers")
    before = sf.integrations.stats("transformers").get("attention", 0)
    exec(PYTHON[BATCHING], {})
    assert sf.integrations.stats("transformers")["attention"] > before


def test_a_kernel_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels = pytest.importorskip("kernels", reason="kernels is not installed: make test-hub")
    built = build.build()
    build.write(built, tmp_path / "dist" / "hub-kernel")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", f"another/kernel={tmp_path}")  # the snippet sets it
    _run(PYTHON[HUB])
    assert built.namespace in {each.metadata.id for each in kernels.get_loaded_kernels()}


@pytest.mark.parametrize("name", CHOICE)
def test_the_choice_of_tokens(name: str, capsys: pytest.CaptureFixture[str]):
    for package in ("tokenizers", "llguidance"):
        pytest.importorskip(package)
    from tokenizer_case import byte_level, model

    _run(PYTHON[name], sf=sf, model=model(), tokenizer=byte_level())
    assert capsys.readouterr().out


def test_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    monkeypatch.chdir(save_tiny_hf(tmp_path / "folder", dtype=torch.float32).parent)
    made = _run(PYTHON[CHAT], sf=sf, tools=[{"type": "function", "function": {"name": "weather"}}])
    assert made["messages"][1] == {"role": "assistant", "content": capsys.readouterr().out}
    assert made["answer"].text


def test_serving_a_foreign_model():
    pytest.importorskip("transformers")
    assert len(_run(PYTHON[SERVING])["answers"][0]) == 8  # which it compares with generate's


def test_clients_of_an_engine(capsys: pytest.CaptureFixture[str]):
    from serving_case import exact

    _run(PYTHON[CLIENTS], sf=sf, model=exact("gelu"))
    assert capsys.readouterr().out == "[0, 3, 1, 2]\n"


def test_serving_over_ranks(capsys: pytest.CaptureFixture[str]):
    _run(PYTHON[ENGINE_OVER_RANKS])
    assert len(json.loads(capsys.readouterr().out)[0]) == 8


def test_serving_on_asyncio(capsys: pytest.CaptureFixture[str]):
    _run(PYTHON[ASYNCIO])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["one", "two", "three"]
    assert all(line.endswith("length") for line in lines)


def test_testing_a_server(tmp_path: Path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["shardfuse.testing.fixtures"]\n')
    (tmp_path / "test_server.py").write_text(PYTHON[TESTING])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' plugins take a while
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_servers_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("fastapi")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert _run(PYTHON[SERVER])["answer"]["usage"]["completion_tokens"] == 8
    assert "total_tokens" in capsys.readouterr().out
