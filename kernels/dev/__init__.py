"""Tools for those who change kernels: ahead-of-time compilation, the registry of ops, and the rule of accuracy."""
