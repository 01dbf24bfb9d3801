"""Stalled tensors: names that some ranks have asked for and others have not, for too long.

The table of the negotiation is the same on all ranks, so each can tell who is missing; the first rank of the
process set says so, and any rank may end the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from farandole.horovod.common.settings import Settings

_log = logging.getLogger("horovod")

_SHOWN = 6
"""How many names are listed for each rank."""


class StallInspector:
    """Looks at the table now and then.

    ranks: the members' numbers in the world.  limit_s: when a stall ends the run where
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS does not say it: the deadline of the process group.
    """

    def __init__(self, settings: Settings, ranks: Sequence[int], limit_s: float, speaks: bool) -> None:
        self.warn_s = settings.stall_check_s
        self._ranks, self._speaks = ranks, speaks
        self._shutdown_s = settings.stall_shutdown_s or limit_s
        if self.warn_s is not None and 0 < settings.stall_shutdown_s < self.warn_s:
            if speaks:
                _log.warning(
                    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is less than HOROVOD_STALL_CHECK_TIME_SECONDS=%g; "
                    "stalls will not shut the run down before its deadline of %g s",
                    settings.stall_shutdown_s,
                    self.warn_s,
                    limit_s,
                )
            self._shutdown_s = limit_s
        self._seen: dict[str, float] = {}
        self._next_look = self._next_warning = 0.0

    def look(self, table: Mapping[str, Collection[int]], joined: Collection[int]) -> str | None:
        """Warn of names that wait too long; returns why the run must end, if it must.

        table: for each name the members that have announced it.
        """
        now = time.monotonic()
        if self.warn_s is None or now < self._next_look:
            return None
        self._next_look = now + min(1.0, self.warn_s / 4)
        self._seen = {name: self._seen.get(name, now) for name in table}
        late = [name for name, since in self._seen.items() if now - since > self.warn_s]
        if not late:
            return None
        ends = any(now - self._seen[name] > self._shutdown_s for name in late)
        if now < self._next_warning and not ends:
            return None
        self._next_warning = now + self.warn_s
        missing = self._missing(late, table, joined)
        text = (
            f"One or more tensors were submitted by a subset of ranks and are waiting for the remaining ranks for "
            f"more than {self.warn_s:g} seconds. Ranks may be submitting different tensors, or only some of them "
            f"any at all, which never ends.\nMissing ranks:\n{missing}"
        )
        if ends:
            return f"{text}\nStalled for longer than {self._shutdown_s:g} seconds: shutting down."
        if self._speaks:
            _log.warning(text)
        return None

    def _missing(
        self, late: Sequence[str], table: Mapping[str, Collection[int]], joined: Collection[int]
    ) -> str:
        lines = []
        for member, rank in enumerate(self._ranks):
            names = [name for name in late if member not in table[name] and member not in joined]
            if names:
                more = [f"... {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
                lines.append(f"{rank}: [{', '.join(names[:_SHOWN] + more)}]")
        return "\n".join(lines)
