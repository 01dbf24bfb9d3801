"""The backends of `torch.distributed`: process groups over a `Communicator`, and their creation."""
