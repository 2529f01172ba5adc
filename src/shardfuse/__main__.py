"""``python -m shardfuse``: the same as the console script."""

from .cli import main

if __name__ == "__main__":  # not in worker processes that start afresh
    main()
