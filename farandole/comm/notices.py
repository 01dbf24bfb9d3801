"""Notices for the user on standard error: those that are printed once, and stall warnings."""

from __future__ import annotations

import sys
from collections.abc import Callable

STALL_WARNING_S = 5.0
"""Seconds after which a waiting rank prints a stall warning; the interval doubles each time."""

_printed: set[str] = set()


def print_once(text: str) -> None:
    """Print `farandole: text`, the first time."""
    if text not in _printed:
        _printed.add(text)
        print_notice(text)


def print_notice(text: str) -> None:
    """Print `farandole: text`."""
    print(f"farandole: {text}", file=sys.stderr, flush=True)


class StallWarning:
    """Says for what a rank waits; `describe()` returns the text, or "" if another rank says it."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._next_s = STALL_WARNING_S

    def after(self, waited_s: float) -> None:
        """Print the warning if it is due: to be called while the rank waits."""
        if waited_s >= self._next_s:
            self._next_s *= 2
            if text := self._describe():
                print_notice(text)
