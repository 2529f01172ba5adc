"""The division of foreign models over tensor-parallel ranks."""
