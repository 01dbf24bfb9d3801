"""ZeRO: shard optimizer states, gradients and weights over ranks, and gather weights when they are needed."""
