"""The error that is raised if a rank fails.

This module imports neither communicators nor tensor parallelism."""


class RanksFailed(RuntimeError):
    """Raised if the ranks can no longer run steps; the message names the failed rank if known."""
