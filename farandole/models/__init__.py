"""Models as an `nn.Sequential` of blocks, written for one device, independent of ranks."""
