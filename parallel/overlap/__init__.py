"""Run the products of linear layers and the collectives beside them: plainly, in chunks, or inside the kernel."""
