"""``python -m shardfuse``: the same as the console script."""

from .cli import main

main()
