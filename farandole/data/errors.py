"""The error for unusable data."""

from __future__ import annotations

from farandole._troubleshooting import Documented


class DataError(Documented, ValueError):
    """Raised if the data cannot be used.  The one-line message describes the expected and the actual data."""

    _section = "dataerror"
