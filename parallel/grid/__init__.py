"""Layers split over a grid of ranks: 2D, 2.5D and 3D tensor parallelism as cases of one product (grid.py)."""
