"""Counts what a training step sends, and computes what it should send."""
