"""What goes wrong with the state of an engine; nothing here imports torch."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, or continued from; the message says which and why."""
