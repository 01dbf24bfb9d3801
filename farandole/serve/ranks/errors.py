"""The error of a failed rank, in a module that imports neither communicators nor tensor parallelism."""


class RanksFailed(RuntimeError):
    """Raised on the driver if the ranks can no longer compute together; the message names the failed rank if known."""
