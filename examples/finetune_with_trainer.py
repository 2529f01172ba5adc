"""Fine-tune a folder of transformers with its Trainer, all of it or a LoRA, on the kernels.

python examples/finetune_with_trainer.py FOLDER text.txt --out tuned [--lora]

It wants transformers, accelerate, and for --lora peft.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import shardfuse as sf


def rows_of(text: str, tokenizer, length: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="config.json, weights and tokenizer")
    parser.add_argument("text", type=Path, help="what to train on")
    parser.add_argument("--out", required=True, help="folder for the result")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.folder, trust_remote_code=False)
    model = sf.fuse(
        AutoModelForCausalLM.from_pretrained(args.folder, trust_remote_code=False)
    )  # the one line that differs
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))  # layers with an adapter run as it says
    settings = TrainingArguments(
        args.out, max_steps=args.steps, per_device_train_batch_size=4, learning_rate=1e-4, report_to="none"
    )
    Trainer(model, settings, train_dataset=rows_of(args.text.read_text(), tokenizer, args.length)).train()
    print(sf.explain(model))  # what ran, and what stayed stock
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
