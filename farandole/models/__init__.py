"""Models: `nn.Sequential`s of blocks, written for one device, that know nothing of ranks."""
