"""Parallel training: shard a model and its training state, and distribute data over ranks."""
