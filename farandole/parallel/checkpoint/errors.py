"""The errors of checkpoints; nothing here imports torch."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, or loaded; the message says which and why."""

    reason: OSError | str = ""
    """Why, without the name of the checkpoint."""
    nbytes = 0
    """The bytes of tensors that all ranks together were to write."""


class UnreadableError(CheckpointError):
    """A checkpoint is missing or damaged."""
