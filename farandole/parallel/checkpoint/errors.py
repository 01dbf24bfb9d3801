"""Define the exceptions for checkpoints.  This module does not import torch."""

from farandole._troubleshooting import Documented


class CheckpointError(Documented, RuntimeError):
    """Raised if a checkpoint cannot be written, found or loaded; the message contains its path and the reason."""

    _section = "checkpointerror"

    reason: OSError | str = ""
    """The reason, without the name of the checkpoint."""
    nbytes = 0
    """The total size in bytes of the tensors that all ranks tried to write."""


class UnreadableError(CheckpointError):
    """Raised if a checkpoint is missing or damaged."""

    _section = "is-damaged"
