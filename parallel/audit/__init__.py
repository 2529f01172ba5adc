"""What a training step sends, counted, and what it should send on paper."""
