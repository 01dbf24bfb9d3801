"""Show the log messages of the library on stderr while a command runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import typer


class _Echo(logging.Handler):
    """Prints messages to stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


@contextlib.contextmanager
def shown_notices(name: str) -> Iterator[None]:
    """Return a context manager that prints messages of the logger `name` at level INFO or above."""
    logger, handler = logging.getLogger(name), _Echo()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
