"""Floor 4: the training loop, its configuration and its data."""
