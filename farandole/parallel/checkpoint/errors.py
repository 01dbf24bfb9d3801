"""The errors of checkpoints; this module does not import torch."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or loaded; the message names the checkpoint and the reason."""

    reason: OSError | str = ""
    """The reason, without the name of the checkpoint."""
    nbytes = 0
    """The bytes of tensors that all ranks together tried to write."""


class UnreadableError(CheckpointError):
    """A checkpoint is missing or damaged."""
