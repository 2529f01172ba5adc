"""Floor 2: spreads work and state over processes, on torch.distributed. It never imports ``layers``."""
