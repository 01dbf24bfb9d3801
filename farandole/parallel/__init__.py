"""Parallel training: shard a model and its training states, and distribute data over ranks."""
