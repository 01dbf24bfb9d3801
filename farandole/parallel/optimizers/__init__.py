"""The engine's optimizers: the tensors that they update on each rank, and their steps."""
