"""What the commands of ``shardfuse`` do; ``cli.py`` parses for them."""
