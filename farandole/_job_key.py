"""The job key, a secret that ranks use to authenticate each other on the network.  This module does not import torch.

`farandole launch` creates a key for each job and passes it to the ranks in the environment variable FARANDOLE_JOB_KEY,
which only processes of the same user can read.  With other launchers, the user can set the variable.
"""

from __future__ import annotations

import hashlib
import hmac
import os

VARIABLE = "FARANDOLE_JOB_KEY"
SHORTEST = 32
"""The minimum length of a key in characters: 128 bits as hexadecimal digits."""


def job_key() -> str | None:
    """Return the job key from FARANDOLE_JOB_KEY, or None if the variable is unset or empty.

    Raises:
        ValueError: if the key is too short to be secure.
    """
    key = os.environ.get(VARIABLE) or None
    if key is not None and len(key) < SHORTEST:
        raise ValueError(
            f"{VARIABLE}: expected at least {SHORTEST} characters, got {len(key)}; create a key with: openssl rand -hex 32"
        )
    return key


def derive(key: str, label: str) -> bytes:
    """Derive 32 bytes from `key` for the purpose named by `label`.

    The bytes reveal neither `key` nor the bytes for other labels.
    """
    return hmac.digest(key.encode(), label.encode(), hashlib.sha256)
