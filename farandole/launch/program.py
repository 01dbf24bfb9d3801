"""What a job runs, and how each of its ranks is to run it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A script, or a module, with its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    pin: bool = True
    """Whether each rank keeps to cores of its own."""
    threads: int | None = None
    """Threads of each rank; None: the cores divided by the ranks."""
    output: str | None = None
    """A folder for what the ranks print, one folder in it for each; None: it passes through."""
    verbose: bool = False
    """Whether to say what is started."""
