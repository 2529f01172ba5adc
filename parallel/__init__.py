"""Floor 2: how work and state spread over processes, on torch.distributed. It never imports ``layers``."""
