"""The optimizers of an engine: what they update on a rank, and how they are driven."""
