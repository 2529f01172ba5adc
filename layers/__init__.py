"""Floor 3: nn.Modules with the parameters and ``state_dict`` of the stock modules they replace."""
