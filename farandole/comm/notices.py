"""Notices for the user, through the logger `farandole`: warnings that appear once, and stall warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable

STALL_WARNING_S = 5.0
"""Seconds after which a waiting rank logs a stall warning; the interval doubles each time."""

_log = logging.getLogger("farandole")
_logged: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged the same text before."""
    if text not in _logged:
        _logged.add(text)
        warn(text)


def warn(text: str) -> None:
    """Log the warning `farandole: text`; without a handler, `logging` writes it to standard error."""
    _log.warning("farandole: %s", text)


class StallWarning:
    """A warning that names the ranks for which this rank waits.

    Args:
        describe: Returns the text, or "" if another rank logs it.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._next_s = STALL_WARNING_S

    def after(self, waited_s: float) -> None:
        """Log the warning if it is due; called repeatedly while the rank waits."""
        if waited_s >= self._next_s:
            self._next_s *= 2
            if text := self._describe():
                warn(text)
