"""Notices for the user that are printed once."""

from __future__ import annotations

import sys

_printed: set[str] = set()


def print_once(text: str) -> None:
    """Print `farandole: text` to standard error, the first time."""
    if text not in _printed:
        _printed.add(text)
        print(f"farandole: {text}", file=sys.stderr, flush=True)
