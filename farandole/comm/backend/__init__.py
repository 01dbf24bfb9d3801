"""The `torch.distributed` backends of this package."""
