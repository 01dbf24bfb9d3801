"""Save and load checkpoints of an engine."""
