"""Floor 4: allocator, scheduler and engine over the paged KV cache."""
