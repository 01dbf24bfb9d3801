"""Checkpoints of an engine."""
