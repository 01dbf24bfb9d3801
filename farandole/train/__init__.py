"""Train models: configuration, loop, precision, checkpoints, metrics and reports."""
