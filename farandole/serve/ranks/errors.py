"""The error that is raised if a rank fails.

This module imports neither communicators nor tensor parallelism."""


class RanksFailed(RuntimeError):
    """Raised on the driver if the ranks can no longer compute together; the message names the failed rank if known."""
