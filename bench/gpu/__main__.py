"""``python -m shardfuse.bench.gpu``: the command behind ``make gpu``."""

import sys

from .gpu_run import main

if __name__ == "__main__":
    sys.exit(main())
