"""``python -m shardfuse.bench.gpu``: what ``make gpu`` runs."""

import sys

from .gpu_run import main

if __name__ == "__main__":
    sys.exit(main())
