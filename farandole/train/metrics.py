"""What a run measures, as JSON lines and for TensorBoard.

Each line of `metrics.jsonl` is an object with `step` and what was measured at it:

    {"step": 20, "loss": 5.1, "learning_rate": 0.002, "gradient_norm": 0.9, "tokens_per_s": 19000.0,
     "waiting_share": 0.01, "elapsed_s": 9.1}
    {"step": 100, "validation_loss": 4.2}
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TextIO

from torch.utils.tensorboard.writer import SummaryWriter

Record = dict[str, float]


class MetricsWriter:
    """Appends to the metrics of `run`; one rank has one.

    `resumed_step` drops what a run that is continued had measured after its checkpoint.
    """

    def __init__(self, run: Path, *, tensorboard: bool, resumed_step: int | None = None) -> None:
        path = run / "metrics.jsonl"
        kept = [] if resumed_step is None else [r for r in read_metrics(path) if r["step"] <= resumed_step]
        partial = path.with_name(path.name + ".tmp")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(path)
        self._lines: TextIO = path.open("a")
        purge = None if resumed_step is None else resumed_step + 1
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=purge) if tensorboard else None

    def write(self, step: int, record: Record) -> None:
        """Write what was measured at `step`."""
        self._lines.write(json.dumps({"step": step} | record) + "\n")
        self._lines.flush()
        if self._board is not None:
            for name, value in record.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`, in order; a last line that a killed run left half is dropped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
