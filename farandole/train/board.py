"""Scalars in the files that TensorBoard reads.

Records are written as they come and the file is closed after each step: torch's `SummaryWriter` hands them
to a thread, whose failures (a full disk) turn up later, as tracebacks, and end the training.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_VERSION = "brain.Event:2"  # of the format; the first record of every file


class Board:
    """A file of events in `folder`, which it makes.  Both calls raise `OSError` where it cannot be written.

    `resumed_step` has TensorBoard hide what earlier files say of later steps.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        if resumed_step is None:
            self._append(Event(file_version=_VERSION))
        else:
            again = resumed_step + 1
            restart = Event(step=again, session_log=SessionLog(status=SessionLog.START))
            self._append(Event(step=again, file_version=_VERSION), restart)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write what was measured at `step`."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(Event(step=step, summary=Summary(value=scalars)))

    def _append(self, *events: Event) -> None:
        with self._path.open("ab") as file:
            records = RecordWriter(file)
            for event in events:
                event.wall_time = time.time()
                records.write(event.SerializeToString())
