"""Define models, each an `nn.Sequential` of blocks.  The model code is written for a single device."""
