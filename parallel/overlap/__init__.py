"""How the products of linear layers and the collectives beside them run: plainly, in chunks, or inside the kernel."""
