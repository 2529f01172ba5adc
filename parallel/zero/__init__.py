"""ZeRO on torch's FSDP2, with clipping, main gradients, loss scaling and recomputation for training under it."""
