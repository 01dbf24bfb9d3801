"""Provide models as `nn.Sequential` blocks, written for one device and independent of ranks."""
