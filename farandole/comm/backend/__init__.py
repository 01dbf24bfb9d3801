"""The `torch.distributed` backends: process groups over a `Communicator`, and their creation."""
