"""Save and measure the memory of training: recomputation, offloading, swapping, dry runs and trackers."""
