"""Save and measure training memory: recomputation, offloading, swapping, dry runs and trackers."""
