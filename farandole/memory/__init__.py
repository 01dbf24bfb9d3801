"""What a model in training keeps, and where: in memory, or streamed from and to a disk."""
