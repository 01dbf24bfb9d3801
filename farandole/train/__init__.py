"""Training: configuration, loop, precision, checkpoints, metrics and reports."""
