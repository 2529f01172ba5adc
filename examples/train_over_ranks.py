"""Train a folder of transformers (a Qwen, say) over tensor-parallel ranks and ZeRO, and save it as one.

torchrun --nproc-per-node 4 examples/train_over_ranks.py FOLDER text.txt --out trained --tp 2 --zero 3

No rank ever holds the whole model. One process alone works, too.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoTokenizer

import shardfuse as sf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="config.json, weights and tokenizer")
    parser.add_argument("text", type=Path, help="what to train on")
    parser.add_argument("--out", required=True, help="folder for the result")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer; the others share the data")
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, on each data-parallel rank")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    args = parser.parse_args()

    mesh = sf.init_mesh(tp=args.tp)  # dp is what is left
    model = sf.load_pretrained(args.folder, mesh, device="meta")  # the values are read when each rank knows its share
    model = sf.parallelize(model.train(), mesh, zero=args.zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(args.folder, trust_remote_code=False)(args.text.read_text())["input_ids"]
    )
    rows = tokens.unfold(0, args.length + 1, args.length)  # [rows, length + 1]: each begins with the last one's end
    loader = sf.data_loader(rows, mesh, batch_size=args.batch)  # this rank's share of them, in an order that all share
    step, device = 0, next(model.parameters()).device
    while step < args.steps:
        for batch in loader:
            batch = batch.to(device)
            loss = model.step(batch[:, :-1], batch[:, 1:])  # the same mean on every rank
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if int(os.environ.get("RANK", 0)) == 0:
                print(f"step {step}: loss {loss:.4f}, gradients {norm:.3f}", flush=True)
            if step == args.steps:
                break
    sf.save_pretrained(model, args.out)  # with the tokenizer, for transformers and every server


if __name__ == "__main__":
    main()
