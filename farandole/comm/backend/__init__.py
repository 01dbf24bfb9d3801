"""The backends of this package for `torch.distributed`: the process group class, and the creation of groups."""
