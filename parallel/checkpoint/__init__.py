"""Checkpoints that load in any layout: the calls, the folders on disk, and the series of checkpoints of a run."""
