"""The shapes at which each op is tested, compiled ahead of time and timed; ``registry.py`` finds them here."""
