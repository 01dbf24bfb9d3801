"""The key of a job, by which its ranks recognize each other on the network.  Imports no torch.

`farandole launch` makes a key for each job and passes it to the ranks in the variable FARANDOLE_JOB_KEY, which only
processes of the same user can read.  Under other launchers the user can set the variable.
"""

from __future__ import annotations

import hashlib
import hmac
import os

VARIABLE = "FARANDOLE_JOB_KEY"
SHORTEST = 32
"""The fewest characters of a key that a user sets: 128 bits in hexadecimal digits."""


def job_key() -> str | None:
    """Return the key in the environment, if there is one.

    Raises:
        ValueError: The key is too short to be secret.
    """
    key = os.environ.get(VARIABLE) or None
    if key is not None and len(key) < SHORTEST:
        raise ValueError(
            f"{VARIABLE}: expected at least {SHORTEST} characters, got {len(key)}; create a key with: openssl rand -hex 32"
        )
    return key


def derive(key: str, purpose: str) -> bytes:
    """Return 32 bytes that follow from a key, and from which neither the key nor other derived bytes follow."""
    return hmac.digest(key.encode(), purpose.encode(), hashlib.sha256)
