"""Floor 4: benchmarks behind a correctness gate. Shapes come from the ops' own folders: ``cases.py``, ``shapes.py``."""
