"""Fused models in other people's engines: transformers' Trainer and peft's adapters, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import foreign, tokens, without_dropout
from torch.distributed.tensor import DTensor

from shardfuse import init_mesh, parallelize
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.fuse import fuse, stats

transformers = pytest.importorskip("transformers")


class _Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = torch.randint(3, 64, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": text, "labels": text, "unused": 1}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_trainer(tmp_path: Path, bf16: bool):
    """Accumulated steps and evaluations: the columns that it drops, the labels that it finds, what it divides by."""
    pytest.importorskip("accelerate")
    losses = []
    for fused in (False, True):
        model = foreign("llama")
        options = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, seed=1,
            learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=3, save_strategy="no",
            report_to=[], use_cpu=True, bf16=bf16, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            fuse(model) if fused else model, options, train_dataset=_Texts(), eval_dataset=_Texts()
        )
        with stats(model) as ran:
            trainer.train()
        assert ran.total_of("linear_cross_entropy") == (12 if fused else 0)
        log = trainer.state.log_history
        losses.append(torch.tensor([each[name] for name in ("loss", "eval_loss") for each in log if name in each]))
    assert len(losses[0]) == 8
    torch.testing.assert_close(*losses, rtol=1e-2 if bf16 else 1e-4, atol=0)


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_of_peft(order: str):
    peft = pytest.importorskip("peft")
    found = []
    for when in ("never", order):
        torch.manual_seed(3)
        model = foreign("llama", torch.float64)
        model = fuse(model) if when == "before" else model
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(1))
        model = fuse(model) if when == "after" else model
        model.train()
        with stats(model) as ran:
            loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()
        if when != "never":
            assert ran.total_of("linear_cross_entropy") == 1
            assert ran.total_of("rms_norm") == 5
        found.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    stock, ours = found
    assert stock.keys() == ours.keys()
    assert max(accuracy.relative_error(ours[name], stock[name]) for name in stock) < 1e-5


def _with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    torch.manual_seed(5)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ).double()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def _adapters_under_zero(rank: int, world: int, zero: int) -> list[float]:
    batch = torch.randint(1, 64, (4, 9), generator=torch.Generator().manual_seed(0))
    stock = _with_adapters(without_dropout(foreign("llama", torch.float64))).train()
    logits = stock(input_ids=batch[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    want = {name: param.grad for name, param in stock.named_parameters() if param.grad is not None}
    fused = _with_adapters(fuse(without_dropout(foreign("llama", torch.float64))))
    model = parallelize(fused, init_mesh(dp=world, device_type="cpu"), zero=zero)
    mine = batch.chunk(world)[rank]
    model.step(mine[:, :-1], mine[:, 1:])
    named = model.module.named_parameters()
    grads = {name: param.grad for name, param in named if param.grad is not None}
    assert grads.keys() == want.keys()
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return [accuracy.relative_error(whole[name], want[name]) for name in want]


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_adapters_under_zero(ranks: Any, zero: int):
    pytest.importorskip("peft")
    for errors in ranks(2, _adapters_under_zero, zero):
        assert max(errors) < 1e-5


def _adapters_in_a_split_model(rank: int, world: int, folder: str) -> tuple[list[float], float]:
    """Errors of the gradients and of the clipped norm; rank 0 writes the adapters, which both ranks read."""
    import peft
    from safetensors.torch import load_file

    mesh, batch = init_mesh(tp=world, device_type="cpu"), tokens()
    stock = _with_adapters(without_dropout(foreign("llama", torch.float64)))
    model = fuse(_with_adapters(without_dropout(foreign("llama", torch.float64))), mesh)
    assert {type(param) for param in model.parameters()} == {DTensor}
    for each in (stock, model):
        each(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    want = {name: param.grad for name, param in stock.named_parameters() if param.grad is not None}
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert grads.keys() == want.keys()
    errors = [accuracy.relative_error(grads[name].full_tensor(), want[name]) for name in want]  # type: ignore[attr-defined]
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (stock, model)]
    model.save_pretrained(folder)
    saved = load_file(f"{folder}/adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(stock)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    return errors, float(norms[1].full_tensor() / norms[0]) - 1.0  # type: ignore[attr-defined]


@pytest.mark.ranks
def test_adapters_in_a_split_model(ranks: Any, tmp_path: Path):
    pytest.importorskip("peft")
    for errors, norm in ranks(2, _adapters_in_a_split_model, str(tmp_path)):
        assert max(errors) < 1e-5
        assert abs(norm) < 1e-6
