"""The work of ``shardfuse``'s commands; ``cli.py`` parses their arguments."""
