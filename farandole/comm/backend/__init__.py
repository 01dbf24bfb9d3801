"""The backends of `torch.distributed`: process groups over a `Communicator`, and how they are made."""
