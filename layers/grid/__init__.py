"""Layers over a grid of ranks, which splits each of their parts by two or three axes (parallel/grid/grid.py)."""
