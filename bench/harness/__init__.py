"""The common parts of all benchmarks: the gate, the timing, the records and their provenance."""
