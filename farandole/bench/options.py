"""Parse and check the options of commands.  This module does not import torch, so mistakes are reported at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg")
"""The supported suffixes of picture files."""

LEAST_MEMORY = 1 << 20
"""The smallest `--memory` in bytes; smaller values usually lack a unit."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(iB|B)?(?:/s)?", re.IGNORECASE)


class BenchError(ValueError):
    """Raised if benchmark options are invalid, or a benchmark cannot be run.

    For an invalid option, the message names the option and suggests a valid value.
    """


def check_choice(option: str, asked: str, known: Iterable[str]) -> None:
    """Raise BenchError if `asked`, the value of `option`, is not in `known`; the message suggests a similar value."""
    names = list(known)
    if asked not in names:
        nearest = difflib.get_close_matches(asked, names, 1)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise BenchError(f"{option} {asked} is unknown{hint} (available: {', '.join(names)})")


def check_output(option: str, name: str | None, endings: tuple[str, ...] = ()) -> None:
    """Raise BenchError if the folder of the file `name` does not exist, or the suffix of `name` is not in `endings`.

    If `endings` is empty, every suffix is allowed.  If `name` is None, nothing is checked.
    """
    if name is None:
        return
    if not (folder := Path(name).absolute().parent).is_dir():
        raise BenchError(f"{option} {name}: folder {folder} does not exist; create it")
    if endings and Path(name).suffix.lower() not in endings:
        raise BenchError(f"{option} {name}: expected a file name that ends in {', '.join(endings)}")


def parse_number(option: str, text: str, base: int) -> float:
    """Parse a number such as 16GiB, 1.5G or 50 G.

    The suffixes K, M, G, T and P are powers of `base`; suffixes such as GiB are powers of 1024.

    Raises:
        BenchError: if `text` does not have this format or is not positive; the message names `option`.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise BenchError(f"{option}: expected a number above 0 such as 512M, 16GiB or 1.5G, got {text!r}")
    power = " KMGTP".index(match[2].upper() or " ")
    return float(match[1]) * float(base if (match[3] or "").lower() != "ib" else 1024) ** power


def parse_memory(option: str, text: str) -> int:
    """Parse a number of bytes such as 16GiB; the suffixes K, M, G, T and P are powers of 1024.

    Raises:
        BenchError: if `text` does not have this format, or is less than 1 MiB, for example because its unit is missing;
            the message names `option`.
    """
    found = int(parse_number(option, text, 1024))
    if found < LEAST_MEMORY:
        digits = text.strip().rstrip("kKiIbB")
        raise BenchError(
            f"{option} {text}: expected at least 1 MiB, got {found} bytes; did you mean {digits}GiB?"
        )
    return found
