"""Warnings through the logger `farandole`: stall warnings, and warnings that are logged only once."""

from __future__ import annotations

import logging
from collections.abc import Callable

STALL_WARNING_S = 4.0
"""Seconds after which a waiting rank logs a stall warning; the interval doubles after each warning."""

_log = logging.getLogger("farandole")
_logged: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning unless this process has already logged the same text."""
    if text not in _logged:
        _logged.add(text)
        warn(text)


def warn(text: str) -> None:
    """Log `text` as a warning with the prefix `farandole: `."""
    _log.warning("farandole: %s", text)


class StallWarning:
    """A warning that names the ranks that this rank is waiting for.

    Args:
        describe: A function that returns the text, or "" if another rank logs the warning.  Its argument is this
            rank's waiting time in seconds.
    """

    def __init__(self, describe: Callable[[float], str]) -> None:
        self._describe = describe
        self._next_s = STALL_WARNING_S

    def after(self, waited_s: float) -> None:
        """Log the warning if it is due; called repeatedly while this rank is waiting."""
        if waited_s >= self._next_s:
            self._next_s *= 2
            if text := self._describe(waited_s):
                warn(text)
