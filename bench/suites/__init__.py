"""The benchmarks, one file each; shapes come from the ops' cases."""
