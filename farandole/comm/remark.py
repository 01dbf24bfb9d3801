"""Remarks to the user that are worth one line, once."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say_once(text: str) -> None:
    """Print `farandole: text` on the standard error, the first time."""
    if text not in _said:
        _said.add(text)
        print(f"farandole: {text}", file=sys.stderr, flush=True)
