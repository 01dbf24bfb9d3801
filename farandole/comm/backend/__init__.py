"""This package's `torch.distributed` backends: the process group class, and the creation of groups."""
