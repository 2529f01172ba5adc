"""Floor 4: benchmarks behind a correctness gate. Cases come from the ops' own ``cases.py``."""
