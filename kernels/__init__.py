"""Floor 1: ops on one device. They know tensors, never process groups."""
