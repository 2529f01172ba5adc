"""What every op runs on: the choice of implementation, the device, launches, memory, chips, measured configurations."""
