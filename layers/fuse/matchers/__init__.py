"""What recognises a module, and what it becomes."""
