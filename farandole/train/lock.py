"""One job trains in the folder of a run at a time: two would delete each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import IO

from farandole.comm.communicator import Communicator
from farandole.train.checkpoint_folder import CheckpointError

LOCK = ".lock"


class RunLock:
    """Held by rank 0 while its job trains; the system releases it when the process ends, however it ends.

    Raises:
        CheckpointError: on all ranks, if another job holds it.
    """

    def __init__(self, run: Path, comm: Communicator) -> None:
        self._run, self._comm = run, comm
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        """Acquire it; a collective call."""
        refusal = self._comm.broadcast_object(self._acquire() if self._comm.rank == 0 else "")
        if refusal:
            raise CheckpointError(refusal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        if self._file is not None:
            self._file.close()

    def _acquire(self) -> str:
        """Why it cannot be had, or ""."""
        try:
            file = (self._run / LOCK).open("a+")
        except OSError as error:
            return f"cannot write to {self._run}: {error.strerror}"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            return f"{self._run} is in use: {holder} trains in it; wait for its end, or stop it, and continue with --resume then"
        file.truncate(0)
        file.write(f"process {os.getpid()} on {gethostname()}")
        file.flush()
        self._file = file
        return ""
