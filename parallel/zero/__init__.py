"""ZeRO on torch's FSDP2, and what training under it needs: clipping, main gradients, loss scaling, recomputation."""
