"""Memory that all ranks of a group can write, for kernels that exchange rows while they run."""
