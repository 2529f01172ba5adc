"""Foreign models over tensor-parallel ranks: what is split, and how."""
