"""Training: configuration, the loop, precision, checkpoints, what a run reports."""
