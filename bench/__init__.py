"""Floor 4: benchmarks behind a correctness gate. Shapes come from ``kernels/dev``: its cases and shapes."""
