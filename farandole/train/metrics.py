"""What a run measures, as JSON lines and for TensorBoard.

Each line of `metrics.jsonl` is an object with `step` and what was measured at it:

    {"step": 20, "loss": 5.1, "learning_rate": 0.002, "gradient_norm": 0.9, "tokens_per_s": 19000.0,
     "waiting_share": 0.01, "elapsed_s": 9.1}
    {"step": 100, "validation_loss": 4.2}

In fp16 there is `loss_scale` too, and where a step was skipped `overflow`, a text that says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.comm.notices import print_once
from farandole.train.board import Board
from farandole.train.disk import DiskError, reason

Record = dict[str, float]


class MetricsWriter:
    """Appends to the metrics of `run`; one rank has one.

    `resumed_step` drops what a run that is continued had measured after its checkpoint.  Files are open only
    while they are written, so there is nothing to close.

    Both calls raise `DiskError` where `metrics.jsonl` cannot be written.  TensorBoard's files hold the same
    once more: without them training goes on, after a remark.
    """

    def __init__(self, run: Path, *, tensorboard: bool, resumed_step: int | None = None) -> None:
        self._path = run / "metrics.jsonl"
        self._board: Board | None = None
        kept = (
            [] if resumed_step is None else [r for r in read_metrics(self._path) if r["step"] <= resumed_step]
        )
        partial = self._path.with_name(self._path.name + ".tmp")
        try:
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            partial.replace(self._path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._refusal(error) from error
        if tensorboard:
            try:
                self._board = Board(run / "tensorboard", resumed_step)
            except OSError as error:
                self._do_without_board(error)

    def write(self, step: int, record: Record, remarks: Mapping[str, str] | None = None) -> None:
        """Write what was measured at `step`, and `remarks` in words, which TensorBoard does not get."""
        try:
            with self._path.open("a") as lines:
                lines.write(json.dumps({"step": step, **record, **(remarks or {})}) + "\n")
        except OSError as error:
            raise self._refusal(error) from error
        if self._board is not None:
            try:
                self._board.write(step, record)
            except OSError as error:
                self._do_without_board(error)

    def _refusal(self, error: OSError) -> DiskError:
        return DiskError(f"cannot write {self._path}: {reason(error, self._path.parent)}")

    def _do_without_board(self, error: OSError) -> None:
        self._board = None
        why = reason(error, self._path.parent)
        print_once(
            f"TensorBoard's files cannot be written: {why}; training goes on, its numbers are in {self._path}"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
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
