"""Floor 2: work and state spread over processes, on torch.distributed. This package never imports ``layers``."""
