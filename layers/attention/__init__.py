"""Attention: the layer, torch's paths for training, rotary positions, and the paged cache for serving."""
