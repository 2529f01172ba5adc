"""Checkpoints that any layout loads: the calls, the folders on disk, and a run's series of them."""
