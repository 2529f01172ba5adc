"""The work of ``shardfuse``'s commands, and the arguments of those that ``cli.py`` does not parse itself."""
