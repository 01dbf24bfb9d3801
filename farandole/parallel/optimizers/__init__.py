"""The engine's optimizers, and the tensors that they update on each rank."""
