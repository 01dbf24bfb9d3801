"""Checkpoints of an engine: its state on a disk."""
