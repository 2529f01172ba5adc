"""Save a fused model as transformers saves it, and serve the folder with the engine.

python examples/export_and_serve.py FOLDER --out exported --prompt "def main"

docs/serving.md lists the architectures that the engine serves; the saved folder loads in every other server, too.
"""

import argparse

from transformers import AutoTokenizer

import shardfuse as sf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="config.json, weights and tokenizer")
    parser.add_argument("--out", required=True, help="folder for the copy")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()

    sf.save_pretrained(sf.load_pretrained(args.folder), args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out, trust_remote_code=False)
    engine = sf.Engine(sf.load_pretrained(args.out).eval(), num_blocks=256, max_num_seqs=8)
    names = {}
    for prompt in args.prompt:
        request = sf.Request(tokenizer(prompt)["input_ids"], max_new_tokens=args.max_new_tokens)
        names[engine.add(request)] = prompt
    tokens: dict[int, list[int]] = {}
    for event in engine.run():
        tokens.setdefault(event.request, []).append(event.token)
        if event.finish:
            text = tokenizer.decode(tokens[event.request], skip_special_tokens=True)
            print(f"{names[event.request]!r} -> {text!r} ({event.finish})")


if __name__ == "__main__":
    main()
