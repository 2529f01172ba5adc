"""The run on a GPU machine: tests and benchmarks in one call, which can be resumed."""
