"""Folders that transformers reads and writes."""
