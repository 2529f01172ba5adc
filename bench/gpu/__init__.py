"""The run on a GPU machine: tests and benchmarks in one call, resumed where it stopped."""
