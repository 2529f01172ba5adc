"""Floor 4: the train loop, its configuration and its data."""
