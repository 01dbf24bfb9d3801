"""Reduce and measure training memory: recomputation, offloading, swapping, dry runs and memory trackers."""
